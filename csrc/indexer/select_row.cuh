// Exact selection from one score row by reading it once per key byte: any type, length, alignment and number of picks.
// The kernels of topk.cu use it where their fast path does not apply. One thread block a row; the order of the picks is
// that of the row, so neither depends on scheduling.
//
// Scores are compared as 32-bit keys in the order of the floats (-0 = +0; -inf and NaN are key 0 = "not there"). The answer
// is defined by a key T and a number: every item above T, and the first `need` items equal to T in index order.
#pragma once
#include "common/math.h"
#include "common/number_formats.cuh"

namespace mdi::indexer {

constexpr uint32_t kNoKey = 0;

// Keys keep the order of the scores; 0 for NaN and -inf.
MDI_DEVICE uint32_t key_of(float x) {
    if (!(x > bits_float(0xff800000u))) return kNoKey;  // NaN, -inf
    const uint32_t bits = float_bits(x + 0.0f);         // -0 -> +0
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

MDI_DEVICE float widen(float x) { return x; }
MDI_DEVICE float widen(uint16_t x) { return bf16_bits_to_float(x); }

// Items of a row: its columns. A vector is 16 bytes of scores; fetch() starts the load, unpack() gives the scores as fp32,
// -inf at or past num_items.
template <class Score>
struct ColumnSource {
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Score));
    static constexpr int kKeyBytes = static_cast<int>(sizeof(Score));  // a bf16 score's key has 16 constant low bits
    using Raw = uint4;
    const Score* row;
    int num_items;
    bool aligned;

    MDI_DEVICE Raw fetch(int vector) const {
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
    static MDI_DEVICE void unpack(const Raw& raw, float (&x)[kVector]) {
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
    static constexpr int kKeyBytes = static_cast<int>(sizeof(Score));
    using Raw = float;
    const Score* row;
    int num_items;
    bool aligned;    // the row's address and the bytes of a block are multiples of 16
    int num_cols;    // columns that count
    int block_size;
    int newest;      // block of the last visible column

    MDI_DEVICE Raw fetch(int block) const {
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
    static MDI_DEVICE void unpack(const Raw& raw, float (&x)[kVector]) { x[0] = raw; }
};

template <class Source>
MDI_DEVICE void load(const Source& source, int vector, float (&x)[Source::kVector]) {
    Source::unpack(source.fetch(vector), x);
}

struct RowOutput {
    int32_t* ids;
    const int32_t* candidates;  // null: the item is the id
    int block_size;
    MDI_DEVICE void put(int position, int item) const {
        ids[position] = candidates == nullptr ? item : candidates[item / block_size] * block_size + item % block_size;
    }
};

// Exclusive prefix sum over a block of kThreads; `total` is the sum. `warp_total`: a word a warp. Both barriers are inside.
template <int kThreads>
MDI_DEVICE uint32_t block_prefix(uint32_t value, uint32_t* warp_total, uint32_t& total) {
    constexpr int kNumWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    __syncthreads();  // warp_total may still be read from the last call
    if (lane == 31) warp_total[warp] = inclusive;
    __syncthreads();
    uint32_t before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
        const uint32_t count = warp_total[w];
        if (w < warp) before += count;
        total += count;
    }
    return before + inclusive - value;
}

struct RadixShared {
    int histogram[256];
    uint32_t warp_total[32];
    uint32_t digit;
    int rank, above;
};

// Counts keys by digit; neighbouring equal digits of a thread cost one atomic.
struct DigitCounter {
    int* histogram;
    int digit = -1, count = 0;
    MDI_DEVICE void add(int next) {
        if (next == digit) {
            ++count;
            return;
        }
        flush();
        digit = next;
        count = 1;
    }
    MDI_DEVICE void flush() {
        if (count > 0) atomicAdd(&histogram[digit], count);
        count = 0;
    }
};

// The digit that holds the rank-th largest key of the histogram -> shared.digit; its rank inside the digit and the number of
// keys in higher digits -> shared.rank, shared.above. Needs at least `rank` keys. Barriers before and behind are inside.
MDI_DEVICE void find_digit(int rank, RadixShared& shared) {
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
template <int kThreads, int kKeyBytes, class ForEach>
MDI_DEVICE uint32_t select_key(const ForEach& for_each, int rank, RadixShared& shared, int& num_above) {
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
MDI_DEVICE uint32_t narrow_key(uint32_t key) {
    return kKeyBytes == 4 ? key : key & 0xffff0000u;
}

// Ordered pass over the row: every item above `threshold` (there are at most max_above), and the first `need` equal to it.
// Returns how many were put.
template <int kThreads, class Source>
__device__ int emit_from_row(const Source& source, uint32_t threshold, int max_above, int need, const RowOutput& out,
                             RadixShared& shared) {
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
        uint32_t total;  // two 16-bit counts: at most 8 * kThreads items a round
        const uint32_t before = block_prefix<kThreads>(
            static_cast<uint32_t>(__popc(above)) | static_cast<uint32_t>(__popc(equal)) << 16, shared.warp_total, total);
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
template <int kThreads, class Source>
__device__ int select_from_row(const Source& source, int k, const RowOutput& out, RadixShared& shared) {
    constexpr int kVector = Source::kVector;
    const int num_vectors = ceil_div(source.num_items, kVector);
    int num_above = 0;
    uint32_t threshold = kNoKey;
    if (k < source.num_items) {  // otherwise everything that is there is taken
        threshold = select_key<kThreads, Source::kKeyBytes>(
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
    const int max_above = threshold == kNoKey ? source.num_items : num_above;
    return emit_from_row<kThreads>(source, threshold, max_above, k - num_above, out, shared);
}

}  // namespace mdi::indexer
