// Top-k columns of every score row (model spec 5.4) and the best candidate blocks (5.5). One block per row.
//
//   topk              the k largest scores, ties to the LOWER column; -inf and NaN are never taken; ids ascending, -1 behind
//   candidate_blocks  the same over block maxima; the newest visible block counts as +inf
//
// Scores are compared as 32-bit keys in the order of the floats (-0 = +0; -inf and NaN are key 0 = "not there"). The answer
// is defined by a key T and a number: every item above T, and the first `need` items equal to T in index order. It is exact
// and does not depend on scheduling: atomics only count, or fill a buffer whose order is never used.
//
// Fast path, one read of the row: a strided sample of 4,096 items gives a threshold that clearly more than k items pass
// (about k + 8 sqrt + 16 in sample units; found among the threads' maxima by counting, without atomics). One pass collects (key, index) of the items at or above it in shared memory;
// one histogram over the collected keys (radix passes where their range is wide) finds T; two bit maps over the row (above T, equal to T), filled from the buffer,
// put the ids in ascending order with one prefix sum. A row of at most kCapacity items is collected whole.
// Exact path: when the sample misjudged (fewer than k or more than kCapacity collected: many equal scores), or the row is
// too long for the bit maps: a radix select that reads the row once per 8 key bits, then an ordered pass. Same answer.
//
// Shared memory: 32 KiB of collected items + 2 bits an item (48 KiB at 65,536 columns) + 1.3 KiB.
// Limits: none on columns; any k >= 1 (k > kCapacity takes the exact path). Plain CUDA: also runs under tests/host/cuda_on_cpu.h.
#include <type_traits>

#include "common/launch.h"
#include "common/number_formats.cuh"
#include "indexer/indexer.h"

namespace mdi::indexer {
namespace {

constexpr int kThreads = 512;
constexpr int kNumWarps = kThreads / 32;
constexpr int kCapacity = 4096;          // collected items
constexpr int kSample = 4096;            // sampled items, kSample / kThreads a thread
constexpr int kMaxMapped = 262144;       // longest row with bit maps
constexpr uint32_t kNoKey = 0;

// Keys keep the order of the scores; 0 for NaN and -inf.
__device__ __forceinline__ uint32_t key_of(float x) {
    if (!(x > bits_float(0xff800000u))) return kNoKey;  // NaN, -inf
    const uint32_t bits = float_bits(x + 0.0f);         // -0 -> +0
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Smallest score that has at least this key (key >= 1); below every score for the keys under -FLT_MAX.
__device__ __forceinline__ float score_of(uint32_t key) {
    if (key < 0x00800000u) return bits_float(0xff7fffffu);  // -FLT_MAX
    return bits_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(uint16_t x) { return bf16_bits_to_float(x); }

// Items of a row: its columns. A vector is 16 bytes of scores; fetch() starts the load, unpack() gives the scores as fp32,
// -inf at or past num_items.
template <class Score>
struct ColumnSource {
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Score));
    static constexpr int kInFlight = 4;  // vectors a thread has in flight in the collecting pass
    static constexpr int kKeyBytes = static_cast<int>(sizeof(Score));  // a bf16 score's key has 16 constant low bits
    using Raw = uint4;
    const Score* row;
    int num_items;
    bool aligned;

    __device__ __forceinline__ Raw fetch(int vector) const {
        const int first = vector * kVector;
        if (aligned && first + kVector <= num_items) return reinterpret_cast<const uint4*>(row)[vector];
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (sizeof(Score) == 4) {
                words[w] = first + w < num_items ? float_bits(row[first + w]) : 0xff800000u;
            } else {
                const uint32_t low = first + 2 * w < num_items ? row[first + 2 * w] : 0xff80u;
                const uint32_t high = first + 2 * w + 1 < num_items ? row[first + 2 * w + 1] : 0xff80u;
                words[w] = low | high << 16;
            }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ float item(int i) const { return widen(row[i]); }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&x)[kVector]) {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (sizeof(Score) == 4) {
                x[w] = bits_float(words[w]);
            } else {
                x[2 * w] = bits_float(words[w] << 16);
                x[2 * w + 1] = bits_float(words[w] & 0xffff0000u);
            }
        }
    }
};

// Items of a row: the maxima of its blocks of `block_size` columns; the newest visible block is +inf. NaN columns are
// dropped from a maximum.
template <class Score>
struct BlockSource {
    static constexpr int kVector = 1;
    static constexpr int kInFlight = 2;
    static constexpr int kKeyBytes = static_cast<int>(sizeof(Score));
    using Raw = float;
    const Score* row;
    int num_items;
    bool aligned;    // the row's address and the bytes of a block are multiples of 16
    int num_cols;    // columns that count
    int block_size;
    int newest;      // block of the last visible column

    __device__ __forceinline__ Raw fetch(int block) const {
        if (block >= num_items) return bits_float(0xff800000u);
        if (block == newest) return bits_float(0x7f800000u);
        float best = bits_float(0xff800000u);
        const int64_t first = static_cast<int64_t>(block) * block_size;
        if (aligned && first + block_size <= num_cols) {
            constexpr int kPerVector = 16 / static_cast<int>(sizeof(Score));
            for (int i = 0; i < block_size; i += kPerVector) {
                float x[kPerVector];
                ColumnSource<Score>::unpack(*reinterpret_cast<const uint4*>(row + first + i), x);
#pragma unroll
                for (int j = 0; j < kPerVector; ++j) best = fmaxf(best, x[j]);
            }
        } else {
            for (int i = 0; i < block_size && first + i < num_cols; ++i) best = fmaxf(best, widen(row[first + i]));
        }
        return best;
    }
    __device__ __forceinline__ float item(int i) const { return fetch(i); }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&x)[kVector]) { x[0] = raw; }
};

// The same for bf16 blocks of 8 columns, rows on 16 bytes: a block is one load, and many are in flight.
struct EightSource {
    static constexpr int kVector = 1;
    static constexpr int kInFlight = 8;
    static constexpr int kKeyBytes = 2;
    using Raw = uint4;
    ColumnSource<uint16_t> columns;
    int num_items;
    int newest;

    __device__ __forceinline__ Raw fetch(int block) const {
        if (block == newest) return make_uint4(0x7f807f80u, 0x7f807f80u, 0x7f807f80u, 0x7f807f80u);
        return columns.fetch(block);
    }
    __device__ __forceinline__ float item(int i) const {
        float x[1];
        unpack(fetch(i), x);
        return x[0];
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&x)[kVector]) {
        float column[8];
        ColumnSource<uint16_t>::unpack(raw, column);
        x[0] = column[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) x[0] = fmaxf(x[0], column[i]);
    }
};

// ffff in the halves of x (bf16 pair) that are at or above the half of `threshold`; 0 for NaN
__device__ __forceinline__ uint32_t at_least_bf16x2(uint32_t x, uint32_t threshold) {
#if defined(__CUDA_ARCH__)
    uint32_t mask;
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(threshold));
    return mask;
#else
    const bool low = bits_float(x << 16) >= bits_float(threshold << 16);
    const bool high = bits_float(x & 0xffff0000u) >= bits_float(threshold & 0xffff0000u);
    return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
#endif
}

// Bit i: item i of the vector is at or above the threshold (at least -FLT_MAX); false for NaN and -inf.
template <class Source>
__device__ __forceinline__ uint32_t passing(const typename Source::Raw& raw, float threshold) {
    uint32_t bits = 0;
    if constexpr (std::is_same_v<Source, ColumnSource<uint16_t>> || std::is_same_v<Source, EightSource>) {
        // the low half of a threshold does not decide: no bf16 score lies between
        const uint32_t pair = (float_bits(threshold) >> 16) * 0x10001u;
        const uint32_t a = at_least_bf16x2(raw.x, pair), b = at_least_bf16x2(raw.y, pair);
        const uint32_t c = at_least_bf16x2(raw.z, pair), d = at_least_bf16x2(raw.w, pair);
        if constexpr (Source::kVector == 1) return (a | b | c | d) != 0 ? 1u : 0u;
        bits = (a & 0x00020001u) | (b & 0x00080004u) | (c & 0x00200010u) | (d & 0x00800040u);
        bits = (bits | bits >> 16) & 0xffu;
    } else {
        float x[Source::kVector];
        Source::unpack(raw, x);
#pragma unroll
        for (int i = 0; i < Source::kVector; ++i) bits |= x[i] >= threshold ? 1u << i : 0u;
    }
    return bits;
}

template <class Source>
__device__ __forceinline__ void load(const Source& source, int vector, float (&x)[Source::kVector]) {
    Source::unpack(source.fetch(vector), x);
}

struct Shared {
    int histogram[256];
    uint32_t warp_total[kNumWarps];
    uint32_t digit;
    int rank, above;
    int num_collected;
};

// Exclusive prefix sum over the block; `total` is the sum. Both barriers are inside.
__device__ __forceinline__ uint32_t block_prefix(uint32_t value, Shared& shared, uint32_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t inclusive = value;
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    __syncthreads();  // warp_total may still be read from the last call
    if (lane == 31) shared.warp_total[warp] = inclusive;
    __syncthreads();
    uint32_t before = 0;
    total = 0;
    for (int w = 0; w < kNumWarps; ++w) {
        if (w < warp) before += shared.warp_total[w];
        total += shared.warp_total[w];
    }
    return before + inclusive - value;
}

// Counts keys by digit; neighbouring equal digits of a thread cost one atomic.
struct DigitCounter {
    int* histogram;
    int digit = -1, count = 0;
    __device__ __forceinline__ void add(int next) {
        if (next == digit) {
            ++count;
            return;
        }
        flush();
        digit = next;
        count = 1;
    }
    __device__ __forceinline__ void flush() {
        if (count > 0) atomicAdd(&histogram[digit], count);
        count = 0;
    }
};

// The digit that holds the rank-th largest key of the histogram -> shared.digit; its rank inside the digit and the number of
// keys in higher digits -> shared.rank, shared.above. Needs at least `rank` keys. Barriers before and behind are inside.
__device__ __forceinline__ void find_digit(int rank, Shared& shared) {
    __syncthreads();
    if (threadIdx.x < 32) {  // lane l owns digits 255-8l .. 248-8l, from the top
        const int lane = threadIdx.x;
        int sum = 0;
        for (int i = 0; i < 8; ++i) sum += shared.histogram[255 - 8 * lane - i];
        int inclusive = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        int before = inclusive - sum;
        if (before < rank && rank <= inclusive) {  // exactly one lane
            for (int i = 0; i < 8; ++i) {
                const int digit = 255 - 8 * lane - i, here = shared.histogram[digit];
                if (before < rank && rank <= before + here) {
                    shared.digit = static_cast<uint32_t>(digit);
                    shared.rank = rank - before;
                    shared.above = before;
                }
                before += here;
            }
        }
    }
    __syncthreads();
}

// The rank-th largest of the keys that `for_each` hands to its callable, rank >= 1, and how many keys are above it. At least
// `rank` keys must be handed out. All threads call it and all get the result. kKeyBytes: leading key bytes that can differ.
template <int kKeyBytes, class ForEach>
__device__ __forceinline__ uint32_t select_key(const ForEach& for_each, int rank, Shared& shared, int& num_above) {
    uint32_t prefix = 0;
    num_above = 0;
    for (int byte = 3; byte >= 4 - kKeyBytes; --byte) {
        const int shift = 8 * byte;
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += kThreads) shared.histogram[i] = 0;
        __syncthreads();
        DigitCounter counter{shared.histogram};
        for_each([&](uint32_t key) {
            // the bytes above this one must match; a shift by 32 is not defined, so the first pass is its own case
            if (byte == 3 || (key >> (shift + 8)) == (prefix >> (shift + 8))) counter.add(static_cast<int>(key >> shift & 0xffu));
        });
        counter.flush();
        find_digit(rank, shared);
        prefix |= shared.digit << shift;
        rank = shared.rank;
        num_above += shared.above;
    }
    return prefix;  // a bf16 key's low half is 0, see narrow_key
}

// Keys of bf16 scores differ in their upper half only; the lower half is cleared so that keys compare equal to `prefix`.
template <int kKeyBytes>
__device__ __forceinline__ uint32_t narrow_key(uint32_t key) {
    return kKeyBytes == 4 ? key : key & 0xffff0000u;
}

struct RowOutput {
    int32_t* ids;
    const int32_t* candidates;  // null: the item is the id
    int block_size;
    __device__ __forceinline__ void put(int position, int item) const {
        ids[position] = candidates == nullptr ? item : candidates[item / block_size] * block_size + item % block_size;
    }
};

// Ordered pass over the row: every item above `threshold` (there are at most max_above), and the first `need` equal to it.
// Returns how many were put.
template <class Source>
__device__ int emit_from_row(const Source& source, uint32_t threshold, int max_above, int need, const RowOutput& out,
                             Shared& shared) {
    constexpr int kVector = Source::kVector;
    int num_above = 0, num_equal = 0;  // of the vectors before this round
    const int num_vectors = ceil_div(source.num_items, kVector);
    for (int base = 0; base < num_vectors; base += kThreads) {
        const int vector = base + static_cast<int>(threadIdx.x);
        uint32_t above = 0, equal = 0;  // bit i: item i of the vector
        if (vector < num_vectors) {
            float x[kVector];
            load(source, vector, x);
            for (int i = 0; i < kVector; ++i) {
                const uint32_t key = narrow_key<Source::kKeyBytes>(key_of(x[i]));
                if (key > threshold) above |= 1u << i;
                else if (key == threshold && key != kNoKey) equal |= 1u << i;
            }
        }
        uint32_t total;  // two 16-bit counts: at most 8 * 512 items a round
        const uint32_t before = block_prefix(static_cast<uint32_t>(__popc(above)) | static_cast<uint32_t>(__popc(equal)) << 16,
                                             shared, total);
        int a = num_above + static_cast<int>(before & 0xffffu), e = num_equal + static_cast<int>(before >> 16);
        for (int i = 0; i < kVector; ++i) {
            const bool is_above = (above >> i & 1u) != 0, is_equal = (equal >> i & 1u) != 0;
            if (is_above || (is_equal && e < need)) out.put(a + min_of(e, need), vector * kVector + i);
            a += is_above;
            e += is_equal;
        }
        num_above += static_cast<int>(total & 0xffffu);
        num_equal += static_cast<int>(total >> 16);
        if (num_equal >= need && num_above >= max_above) break;  // nothing more can be taken; the same in every thread
    }
    return num_above + min_of(num_equal, need);
}

// Exact selection by reading the row again for every key byte. Returns how many ids were put.
template <class Source>
__device__ int select_from_row(const Source& source, int k, const RowOutput& out, Shared& shared) {
    constexpr int kVector = Source::kVector;
    const int num_vectors = ceil_div(source.num_items, kVector);
    int num_above = 0;
    uint32_t threshold = kNoKey;
    if (k < source.num_items) {  // otherwise everything that is there is taken
        threshold = select_key<Source::kKeyBytes>(
            [&](auto&& add) {
                for (int vector = threadIdx.x; vector < num_vectors; vector += kThreads) {
                    float x[kVector];
                    load(source, vector, x);
                    for (int i = 0; i < kVector; ++i)
                        if (vector * kVector + i < source.num_items) add(narrow_key<Source::kKeyBytes>(key_of(x[i])));
                }
            },
            k, shared, num_above);
    }
    return emit_from_row(source, threshold, threshold == kNoKey ? source.num_items : num_above, k - num_above, out, shared);
}

// Items sampled at an even stride -> the score that clearly more than k of the row's items reach; -FLT_MAX for all of them.
template <class Source>
__device__ float sampled_threshold(const Source& source, int k, Shared& shared) {
    constexpr int kVector = Source::kVector;
    constexpr int kPerThread = kSample / kThreads / kVector > 0 ? kSample / kThreads / kVector : 1;  // vectors a thread
    const int num_vectors = source.num_items / kVector;  // whole ones; > kThreads * kPerThread (checked by the caller)
    const int stride = num_vectors / (kThreads * kPerThread);
    uint32_t keys[kPerThread * kVector];
#pragma unroll
    for (int v = 0; v < kPerThread; ++v) {
        float x[kVector];
        load(source, (v * kThreads + static_cast<int>(threadIdx.x)) * stride, x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) keys[v * kVector + i] = narrow_key<Source::kKeyBytes>(key_of(x[i]));
    }
    constexpr int kSampled = kThreads * kPerThread * kVector;
    const float mean = static_cast<float>(k) * kSampled / static_cast<float>(source.num_items);  // of the best k in the sample
    const int rank = static_cast<int>(mean + 8.0f * sqrtf(mean) + 16.0f);
    if (rank >= kSampled) return score_of(kNoKey);
    if (rank <= kThreads / 4) {
        // few: the rank-th largest of the threads' maxima leaves hardly more samples above it, and needs no histogram (few
        // digits hold nearly all scores, so its atomics queue up); 16 key bits are enough for a threshold
        uint32_t best = keys[0];
#pragma unroll
        for (int i = 1; i < kPerThread * kVector; ++i) best = max_of(best, keys[i]);
        uint32_t prefix = 0;
        for (int bit = 31; bit >= 16; --bit) {
            const uint32_t higher = prefix | 1u << bit;
            if (__syncthreads_count(best >= higher) >= rank) prefix = higher;
        }
        return score_of(prefix);
    }
    for (int i = threadIdx.x; i < 16; i += kThreads) shared.histogram[i] = 0;
    __syncthreads();
    uint32_t prefix = 0;
    for (int bit = 31; bit >= 16; --bit) {  // the same over all samples
        const uint32_t higher = prefix | 1u << bit;
        int count = 0;
#pragma unroll
        for (int i = 0; i < kPerThread * kVector; ++i) count += keys[i] >= higher;
        count = __reduce_add_sync(0xffffffffu, count);
        if (threadIdx.x % 32 == 0) atomicAdd(&shared.histogram[31 - bit], count);
        __syncthreads();
        if (shared.histogram[31 - bit] >= rank) prefix = higher;
    }
    return score_of(prefix);
}

// Fast path. Returns how many ids were put, or -1 when the collected set does not decide the row (nothing was put).
template <class Source>
__device__ int select_collected(const Source& source, int k, const RowOutput& out, Shared& shared, uint32_t* keys, int* items,
                                uint32_t* maps) {
    constexpr int kVector = Source::kVector, kInFlight = Source::kInFlight;
    const int num_vectors = ceil_div(source.num_items, kVector), num_words = ceil_div(source.num_items, 32);
    uint32_t* above_map = maps;
    uint32_t* equal_map = maps + num_words;
    const float all = score_of(kNoKey);
    const float threshold = source.num_items <= kCapacity ? all : sampled_threshold(source, k, shared);

    if (threadIdx.x == 0) shared.num_collected = 0;
    for (int i = threadIdx.x; i < 2 * num_words; i += kThreads) maps[i] = 0;
    __syncthreads();
    static_assert(kInFlight * kVector <= 32, "one bit an item");
    const int lane = threadIdx.x % 32;
    for (int base = threadIdx.x - lane; base < num_vectors; base += kInFlight * kThreads) {  // the same in a warp
        const int vector = base + lane;
        typename Source::Raw raw[kInFlight];
#pragma unroll
        for (int v = 0; v < kInFlight; ++v) raw[v] = source.fetch(vector + v * kThreads);  // -inf behind the end
        uint32_t bits = 0;
#pragma unroll
        for (int v = 0; v < kInFlight; ++v) bits |= passing<Source>(raw[v], threshold) << (v * kVector);
        // places of a warp's items: one atomic a warp
        const int mine = __popc(bits);
        int inclusive = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        int place = 0;
        if (lane == 31 && inclusive > 0) place = atomicAdd(&shared.num_collected, inclusive);
        place = __shfl_sync(0xffffffffu, place, 31) + inclusive - mine;
        for (; bits != 0 && place < kCapacity; bits &= bits - 1, ++place) {
            const int bit = __ffs(static_cast<int>(bits)) - 1;
            items[place] = (vector + bit / kVector * kThreads) * kVector + bit % kVector;
        }
    }
    __syncthreads();
    const int collected = shared.num_collected;
    // undecided: too many for the buffer, or too few although the threshold left items out
    if (collected > kCapacity || (collected < k && threshold != all)) return -1;
    for (int i = threadIdx.x; i < collected; i += kThreads) keys[i] = narrow_key<Source::kKeyBytes>(key_of(source.item(items[i])));
    __syncthreads();

    int num_above = 0;
    uint32_t best = kNoKey;
    bool found = collected <= k;  // everything is taken
    if (!found && Source::kKeyBytes == 2 && threshold != all) {
        // bf16: one pass with a digit per score value from the threshold up; the last one holds everything above
        const uint32_t base = key_of(threshold) >> 16;
        for (int i = threadIdx.x; i < 256; i += kThreads) shared.histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < collected; i += kThreads) atomicAdd(&shared.histogram[min_of((keys[i] >> 16) - base, 255u)], 1);
        find_digit(k, shared);
        found = shared.digit != 255;
        best = (base + shared.digit) << 16;
        num_above = shared.above;
    }
    if (!found) {
        best = select_key<Source::kKeyBytes>(
            [&](auto&& add) {
                for (int i = threadIdx.x; i < collected; i += kThreads) add(keys[i]);
            },
            k, shared, num_above);
    }
    const int need = k - num_above;
    for (int i = threadIdx.x; i < collected; i += kThreads) {
        const uint32_t key = keys[i];
        const int item = items[i];
        if (key > best) atomicOr(&above_map[item / 32], 1u << (item % 32));
        else if (key == best) atomicOr(&equal_map[item / 32], 1u << (item % 32));
    }
    __syncthreads();

    // thread i owns a run of words: one prefix sum orders the ids
    const int words_each = ceil_div(num_words, kThreads);
    const int first = min_of(num_words, static_cast<int>(threadIdx.x) * words_each), last = min_of(num_words, first + words_each);
    uint32_t counts = 0;
    for (int w = first; w < last; ++w)
        counts += static_cast<uint32_t>(__popc(above_map[w])) | static_cast<uint32_t>(__popc(equal_map[w])) << 16;
    uint32_t total;  // 16 bits each: at most kCapacity
    const uint32_t before = block_prefix(counts, shared, total);
    int a = static_cast<int>(before & 0xffffu), e = static_cast<int>(before >> 16);
    for (int w = first; w < last; ++w) {
        const uint32_t above = above_map[w], equal = equal_map[w];
        for (uint32_t left = above | equal; left != 0; left &= left - 1) {
            const int bit = __ffs(static_cast<int>(left)) - 1;
            const bool is_above = (above >> bit & 1u) != 0;
            if (is_above || e < need) out.put(a + min_of(e, need), w * 32 + bit);
            a += is_above;
            e += !is_above;
        }
    }
    return static_cast<int>(total & 0xffffu) + min_of(static_cast<int>(total >> 16), need);
}

template <class Source>
__device__ void select_row(const Source& source, int k, const RowOutput& out, int32_t* count, bool mapped, uint8_t* dynamic) {
    __shared__ Shared shared;
    uint32_t* keys = reinterpret_cast<uint32_t*>(dynamic);
    int* items = reinterpret_cast<int*>(keys + kCapacity);
    uint32_t* maps = reinterpret_cast<uint32_t*>(items + kCapacity);
    int found = -1;
    if (mapped && k <= kCapacity) found = select_collected(source, k, out, shared, keys, items, maps);
    if (found < 0) found = select_from_row(source, k, out, shared);
    for (int i = found + static_cast<int>(threadIdx.x); i < k; i += kThreads) out.ids[i] = -1;
    if (threadIdx.x == 0 && count != nullptr) *count = found;
}

template <class Score>
__global__ void __launch_bounds__(kThreads, 3) topk_kernel(TopkParams p, bool mapped) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    const int64_t token = blockIdx.x;
    ColumnSource<Score> source;
    source.row = static_cast<const Score*>(p.scores) + token * p.stride;
    source.num_items = p.visible == nullptr ? p.num_cols : max_of(0, min_of(p.num_cols, p.visible[token]));
    source.aligned = (reinterpret_cast<uintptr_t>(source.row) & 15) == 0;
    const RowOutput out{p.ids + token * p.k, p.candidates == nullptr ? nullptr : p.candidates + token * p.num_candidates,
                        p.block_size};
    select_row(source, p.k, out, p.count == nullptr ? nullptr : p.count + token, mapped, dynamic);
}

template <class Score>
__global__ void __launch_bounds__(kThreads, sizeof(Score) == 2 ? 2 : 1) candidate_blocks_kernel(TopkParams p, bool mapped) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    const int64_t token = blockIdx.x;
    BlockSource<Score> source;
    source.row = static_cast<const Score*>(p.scores) + token * p.stride;
    source.num_cols = max_of(0, min_of(p.num_cols, p.visible[token]));
    source.block_size = p.block_size;
    source.num_items = ceil_div(source.num_cols, p.block_size);
    source.newest = p.visible[token] > 0 ? (p.visible[token] - 1) / p.block_size : -1;
    source.aligned = (reinterpret_cast<uintptr_t>(source.row) & 15) == 0 && p.block_size * sizeof(Score) % 16 == 0;
    const RowOutput out{p.ids + token * p.k, nullptr, 0};
    select_row(source, p.k, out, nullptr, mapped, dynamic);
}

__global__ void __launch_bounds__(kThreads, 2) candidate_eights_kernel(TopkParams p, bool mapped) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    const int64_t token = blockIdx.x;
    EightSource source;
    source.columns.row = static_cast<const uint16_t*>(p.scores) + token * p.stride;
    source.columns.num_items = max_of(0, min_of(p.num_cols, p.visible[token]));
    source.columns.aligned = true;
    source.num_items = ceil_div(source.columns.num_items, 8);
    source.newest = p.visible[token] > 0 ? (p.visible[token] - 1) / 8 : -1;
    const RowOutput out{p.ids + token * p.k, nullptr, 0};
    select_row(source, p.k, out, nullptr, mapped, dynamic);
}

template <class Kernel>
void launch_select(const char* op, Kernel kernel, const TopkParams& p, int num_items) {
    const bool mapped = num_items <= kMaxMapped;
    // the launcher raises the kernel's limit only for more than 48 KiB of dynamic memory; the static part counts too
    const size_t needed = kCapacity * 8 + static_cast<size_t>(ceil_div(num_items, 32)) * 8;
    const size_t smem = mapped ? (needed + sizeof(Shared) > 48 * 1024 ? max_of<size_t>(needed, 48 * 1024 + 16) : needed) : 0;
    launch(op, kernel, {dim3(static_cast<unsigned>(p.num_tokens)), dim3(kThreads), smem, p.stream}, p, mapped);
}

}  // namespace

void launch_topk(const TopkParams& params) {
    if (params.is_float) launch_select("indexer.topk", topk_kernel<float>, params, params.num_cols);
    else launch_select("indexer.topk", topk_kernel<uint16_t>, params, params.num_cols);
}

void launch_candidate_blocks(const TopkParams& params) {
    const int num_items = ceil_div(params.num_cols, params.block_size);
    const bool eights = !params.is_float && params.block_size == 8 && params.stride % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(params.scores) % 16 == 0;
    if (eights) launch_select("indexer.candidate_blocks", candidate_eights_kernel, params, num_items);
    else if (params.is_float) launch_select("indexer.candidate_blocks", candidate_blocks_kernel<float>, params, num_items);
    else launch_select("indexer.candidate_blocks", candidate_blocks_kernel<uint16_t>, params, num_items);
}

}  // namespace mdi::indexer
