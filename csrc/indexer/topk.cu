// Top-k columns of every score row (model spec 5.4) and the best candidate blocks (5.5), each alone or both from one
// reading of the row. One thread block a row.
//
//   topk              the k largest scores, ties to the LOWER column; -inf and NaN are never taken; ids ascending, -1 behind
//   candidate_blocks  the same over the maxima of blocks of columns; the newest visible block counts as +inf
//
// Fast path (bf16 rows on 16 bytes, at most kMaxVectors vectors of 8 columns):
//   1. The row is read once and the maximum of every vector stays in shared memory, 2 bytes for 16. At least k columns
//      reach the k-th largest maximum, and only vectors whose maximum reaches it can hold a pick. The same holds for the
//      maxima of 4 neighbouring vectors, where the k-th largest is found from a quarter of the values and lies little lower.
//   2. Vectors that reach this bound (about 1.1 k) are listed in order, read again, and kept in registers: the
//      exact k-th largest score T and the picks, in order, come from there. The rows in work are more than L2 holds, so that
//      these reads cost 64 bytes each, about 33 KiB a row at k = 512.
//   3. A candidate block is a vector, so blocks are chosen among the maxima: every one above the num_blocks-th largest,
//      and the first ones equal to it.
// search() finds a k-th largest value by bisection over the 16-bit keys of bf16, three counts a round.
//
// Otherwise, and for a row where too many vectors reach the bound (many equal scores): select_row.cuh, the same answer.
// Nothing depends on scheduling: atomics only count.
//
// Shared memory: 2.5 bytes a vector (40 KiB at 131,072 columns) + 1.3 KiB. Plain CUDA: also runs under
// tests/host/cuda_on_cpu.h.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "indexer/indexer.h"
#include "indexer/select_row.cuh"

namespace mdi::indexer {
namespace {

constexpr int kMaxVectors = 65528;       // counts are summed in 16 bits
constexpr int kCapacity = 1024;          // vectors kept in registers
constexpr int kWideFrom = 4096;          // vectors from which a block has kWideThreads threads
constexpr int kThreads = 128, kWideThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kResidentThreads = 896;  // wanted on a multiprocessor; with 1024 the compiler spills for sm_100a
#else
constexpr int kResidentThreads = 1024;
#endif
constexpr int kColumns = 8;              // of a vector: a candidate block of the fast path
constexpr uint32_t kLowestKey = 0x0080, kEndKey = 0xff81;  // key of -FLT_MAX; behind the key of +inf

// The two bf16 that have this 16-bit key; keys are in the order of the values (-0 just below +0, though they compare equal).
__device__ __forceinline__ uint32_t pair_of(uint32_t key) {
    return ((key & 0x8000u) != 0 ? key ^ 0x8000u : ~key & 0xffffu) * 0x10001u;
}

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

// Larger of each half; the other one where one is NaN.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t x, uint32_t y) {
#if defined(__CUDA_ARCH__)
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
#else
    const float low = fmaxf(bits_float(x << 16), bits_float(y << 16));
    const float high = fmaxf(bits_float(x & 0xffff0000u), bits_float(y & 0xffff0000u));
    return float_bits(low) >> 16 | (float_bits(high) & 0xffff0000u);
#endif
}

// Bit i: score i of the vector is at or above the threshold.
__device__ __forceinline__ uint32_t passing(const uint4& raw, uint32_t threshold) {
    const uint32_t a = at_least_bf16x2(raw.x, threshold), b = at_least_bf16x2(raw.y, threshold);
    const uint32_t c = at_least_bf16x2(raw.z, threshold), d = at_least_bf16x2(raw.w, threshold);
    const uint32_t bits = (a & 0x00020001u) | (b & 0x00080004u) | (c & 0x00200010u) | (d & 0x00800040u);
    return (bits | bits >> 16) & 0xffu;
}

struct Shared {
    uint32_t counts[3][2];  // of a round of search(): two counts of 16 bits, and the third
    uint32_t top;           // key of the row's largest score
    RadixShared radix;
};

// sums[i] -= one mask a score pair. The halves of a mask are 0 or -1, so that the sum holds two counts.
__device__ __forceinline__ void count_vector(const uint4& raw, const uint32_t (&probe)[3], uint32_t (&sums)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i)
        sums[i] -= at_least_bf16x2(raw.x, probe[i]) + at_least_bf16x2(raw.y, probe[i]) + at_least_bf16x2(raw.z, probe[i]) +
                   at_least_bf16x2(raw.w, probe[i]);
}

// a + b from a + 2^16 (b - a) mod 2^32
__device__ __forceinline__ uint32_t count_of(uint32_t sum) {
    return 2 * (sum & 0xffffu) + static_cast<uint32_t>(static_cast<int32_t>(sum) >> 16);
}

// The lowest n set bits.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int n) {
    if (n <= 0) return 0;
    while (__popc(bits) > n) bits &= ~(0x80000000u >> __clz(static_cast<int>(bits)));
    return bits;
}

// A key from [low, high) that at least k values reach: the largest one, or one that at most k + slack reach; `low` where
// fewer than k reach a higher one. Fewer than k values reach `high`. add(probes, sums) is count_vector over the thread's
// values. first: keys of the first round, ascending; the others divide what is left by four. slot: the counter of the next
// round, which is zero.
template <class Add>
__device__ __forceinline__ uint32_t search(uint32_t low, uint32_t high, const int (&first)[3], int k, int slack, const Add& add,
                                           int& slot, Shared& shared) {
    uint32_t key[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) key[i] = min_of(max_of(first[i], static_cast<int>(low) + 1), static_cast<int>(high));
    while (high - low > 1) {
        uint32_t probe[3], sums[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < 3; ++i) probe[i] = pair_of(key[i]);
        add(probe, sums);
        const uint32_t two = __reduce_add_sync(kFullWarp, count_of(sums[0]) | count_of(sums[1]) << 16);
        const uint32_t third = __reduce_add_sync(kFullWarp, count_of(sums[2]));
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&shared.counts[slot][0], two);
            atomicAdd(&shared.counts[slot][1], third);
        }
        const int next = slot == 2 ? 0 : slot + 1;  // read before the last barrier, added to behind the coming one
        if (threadIdx.x == 0) shared.counts[next][0] = shared.counts[next][1] = 0;
        __syncthreads();
        const int count[3] = {static_cast<int>(shared.counts[slot][0] & 0xffffu), static_cast<int>(shared.counts[slot][0] >> 16),
                              static_cast<int>(shared.counts[slot][1])};
        slot = next;
        int reached = kMaxVectors + 1;  // values that reach `low`, as far as this round knows
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (count[i] >= k) low = key[i], reached = count[i];
            if (count[2 - i] < k) high = key[2 - i];
        }
        if (reached <= k + slack) break;
#pragma unroll
        for (int i = 0; i < 3; ++i) key[i] = low + ((high - low) * (i + 1) + 3) / 4;
    }
    return low;
}

// The answer is expected just above `low`.
template <class Add>
__device__ __forceinline__ uint32_t search_up(uint32_t low, uint32_t high, int k, int slack, const Add& add, int& slot,
                                              Shared& shared) {
    const int from = static_cast<int>(low);
    return search(low, high, {from + 4, from + 16, from + 64}, k, slack, add, slot, shared);
}

// The answer is expected within a factor of four below the largest value.
template <class Add>
__device__ __forceinline__ uint32_t search_down(uint32_t high, int k, int slack, const Add& add, int& slot, Shared& shared) {
    const int to = static_cast<int>(high);
    return search(kLowestKey, high, {to - 256, to - 128, to - 64}, k, slack, add, slot, shared);
}

// Dynamic shared memory of a row with num_vectors vectors.
struct Layout {
    uint16_t* maxima;   // [units * 8], -inf behind the last vector
    uint32_t* level;    // [level_units * 4] pairs: maxima of 4 vectors; until the bounds are known, then its place is that of
    uint32_t* above;    // [words] one bit a vector
    uint32_t* equal;    // [words]
    uint32_t* list;     // [kCapacity] vectors, then the ids of their first columns
    int units, level_units, words;

    static __host__ __device__ __forceinline__ int bytes(int num_vectors) {
        const int units = ceil_div(num_vectors, 8), words = ceil_div(num_vectors, 32);
        return units * 16 + max_of(ceil_div(units, 4) * 16, align_up(words, 4) * 8 + kCapacity * 4);
    }
    __device__ __forceinline__ Layout(uint8_t* dynamic, int num_vectors) {
        units = ceil_div(num_vectors, 8);
        level_units = ceil_div(units, 4);
        words = ceil_div(num_vectors, 32);
        maxima = reinterpret_cast<uint16_t*>(dynamic);
        level = reinterpret_cast<uint32_t*>(dynamic + units * 16);
        above = level;
        equal = above + align_up(words, 4);
        list = equal + align_up(words, 4);
    }
    __device__ __forceinline__ uint4 unit(int i) const { return reinterpret_cast<const uint4*>(maxima)[i]; }
};

using Columns = ColumnSource<uint16_t>;

// Reads the row once: the maximum of every vector, and the key of the largest -> shared.top (kLowestKey before).
template <int kNumThreads>
__device__ __forceinline__ void read_maxima(const Columns& row, const Layout& at, Shared& shared) {
    constexpr int kInFlight = 8;
    const int thread = static_cast<int>(threadIdx.x), whole = row.num_items / 8;
    uint32_t top = 0xff80ff80u;
    const auto keep = [&](int vector, const uint4& raw) {
        const uint32_t pair = max_bf16x2(max_bf16x2(raw.x, raw.y), max_bf16x2(raw.z, raw.w));
        top = max_bf16x2(top, pair);
        at.maxima[vector] = static_cast<uint16_t>(max_bf16x2(pair, pair >> 16 | pair << 16));
    };
    const uint4* vectors = reinterpret_cast<const uint4*>(row.row);
    const auto read = [&](int base, bool all) {  // all: none of the vectors lies behind the last whole one
        uint4 raw[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (all || base + i * kNumThreads < whole) raw[i] = ptx::load_streaming(vectors + base + i * kNumThreads);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (all || base + i * kNumThreads < whole) keep(base + i * kNumThreads, raw[i]);
    };
    int base = 0;
    for (; base + kInFlight * kNumThreads <= whole; base += kInFlight * kNumThreads) read(base + thread, true);
    read(base + thread, false);
    if (whole + thread < at.units * 8) keep(whole + thread, row.fetch(whole + thread));  // the last, and -inf behind it
    top = max_bf16x2(top, top >> 16 | top << 16) & 0xffffu;
    const uint32_t key = __reduce_max_sync(kFullWarp, (top & 0x8000u) != 0 ? ~top & 0xffffu : top | 0x8000u);
    if (thread % 32 == 0) atomicMax(&shared.top, key);
}

// Maxima of 4 vectors, from those in shared memory.
template <int kNumThreads>
__device__ __forceinline__ void build_level(const Layout& at) {
    for (int i = threadIdx.x; i < at.level_units * 4; i += kNumThreads) {
        uint32_t pair = 0xff80ff80u;
        if (i < at.units) {
            const uint4 raw = at.unit(i);
            const uint32_t first = max_bf16x2(raw.x, raw.y), second = max_bf16x2(raw.z, raw.w);
            pair = max_bf16x2((first & 0xffffu) | second << 16, first >> 16 | (second & 0xffff0000u));
        }
        at.level[i] = pair;
    }
}

// Values of search(): the vector maxima, or the maxima of 4 vectors.
template <int kNumThreads>
struct Maxima {
    const Layout& at;
    bool levelled;

    __device__ __forceinline__ void operator()(const uint32_t (&probe)[3], uint32_t (&sums)[3]) const {
        const uint4* values = levelled ? reinterpret_cast<const uint4*>(at.level) : reinterpret_cast<const uint4*>(at.maxima);
        const int num_values = levelled ? at.level_units : at.units;
#pragma unroll 2
        for (int i = threadIdx.x; i < num_values; i += kNumThreads) count_vector(values[i], probe, sums);
    }
};

// Lists the vectors that reach `bound`, ascending; returns how many there are, listed only where they fit.
template <int kNumThreads>
__device__ __forceinline__ int list_vectors(uint32_t bound, const Layout& at, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t threshold = pair_of(bound);
    for (int i = thread; i < align_up(at.units, 4); i += kNumThreads)
        reinterpret_cast<uint8_t*>(at.above)[i] = i < at.units ? static_cast<uint8_t>(passing(at.unit(i), threshold)) : 0;
    __syncthreads();
    const int words_each = ceil_div(at.words, kNumThreads);
    const int first = min_of(at.words, thread * words_each), last = min_of(at.words, first + words_each);
    uint32_t mine = 0, total;
    for (int w = first; w < last; ++w) mine += __popc(at.above[w]);
    uint32_t place = block_prefix<kNumThreads>(mine, shared.radix.warp_total, total);
    if (total <= kCapacity) {
        for (int w = first; w < last; ++w)
            for (uint32_t left = at.above[w]; left != 0; left &= left - 1)
                at.list[place++] = static_cast<uint32_t>(w * 32 + __ffs(static_cast<int>(left)) - 1);
    }
    __syncthreads();
    return static_cast<int>(total);
}

// Listed vectors of a thread, in registers.
template <int kNumThreads>
struct Kept {
    static constexpr int kMost = kCapacity / kNumThreads;
    int first, each;  // the thread's are list[first .. first + each)
    uint4 raw[kMost];

    // candidates: of the token, or null
    __device__ __forceinline__ void load(const Columns& row, const int32_t* candidates, const Layout& at, int listed) {
        each = ceil_div(listed, kNumThreads);
        first = static_cast<int>(threadIdx.x) * each;
        uint32_t block[kMost];
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            raw[i] = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
            if (i >= each || first + i >= listed) continue;
            block[i] = at.list[first + i];
            raw[i] = row.fetch(static_cast<int>(block[i]));
            if (candidates != nullptr) block[i] = static_cast<uint32_t>(candidates[block[i]]);
        }
#pragma unroll
        for (int i = 0; i < kMost; ++i)
            if (i < each && first + i < listed) at.list[first + i] = block[i] * kColumns;  // read by this thread only
    }
};

// The k best of the kept vectors' scores, of which at least k reach `low` or all are there; near: the k-th is not far above.
// Returns how many there are.
template <int kNumThreads>
__device__ __forceinline__ int put_picks(const Kept<kNumThreads>& kept, uint32_t low, bool near, int k, int32_t* ids,
                                         const Layout& at, int& slot, Shared& shared) {
    constexpr int kMost = Kept<kNumThreads>::kMost;
    static_assert(kMost % 4 == 0, "the bits of 4 vectors are a word");
    const auto add = [&](const uint32_t (&probe)[3], uint32_t (&sums)[3]) {
#pragma unroll
        for (int i = 0; i < kMost; ++i)
            if (i < kept.each) count_vector(kept.raw[i], probe, sums);
    };
    const uint32_t best = near ? search_up(low, shared.top + 1, k, 0, add, slot, shared)
                               : search_down(shared.top + 1, k, 0, add, slot, shared);
    const uint32_t equal_from = pair_of(best), above_from = pair_of(best + 1);
    uint32_t above[kMost / 4] = {}, equal[kMost / 4] = {}, counts = 0;  // bit 8 (i % 4) + c of word i / 4: column c of vector i
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= kept.each) continue;
        const uint32_t over = passing(kept.raw[i], above_from), both = passing(kept.raw[i], equal_from);
        above[i / 4] |= over << i % 4 * 8;
        equal[i / 4] |= (both & ~over) << i % 4 * 8;
    }
#pragma unroll
    for (int w = 0; w < kMost / 4; ++w)
        counts += static_cast<uint32_t>(__popc(above[w])) | static_cast<uint32_t>(__popc(equal[w])) << 16;
    uint32_t total;  // 16 bits each: at most 8 kCapacity
    const uint32_t before = block_prefix<kNumThreads>(counts, shared.radix.warp_total, total);
    const int need = k - static_cast<int>(total & 0xffffu);  // of the equal ones
    int e = static_cast<int>(before >> 16), place = static_cast<int>(before & 0xffffu) + min_of(e, need);
#pragma unroll
    for (int w = 0; w < kMost / 4; ++w) {
        for (uint32_t left = above[w] | lowest_bits(equal[w], need - e); left != 0; left &= left - 1) {
            const int bit = __ffs(static_cast<int>(left)) - 1;
            ids[place++] = static_cast<int32_t>(at.list[kept.first + 4 * w + bit / 8]) + bit % 8;
        }
        e += __popc(equal[w]);
    }
    return k - need + min_of(static_cast<int>(total >> 16), need);
}

// The k best vectors by their maxima; low: a key that at least k of them reach, or the lowest. Returns how many there are.
template <int kNumThreads>
__device__ __forceinline__ int put_blocks(uint32_t low, int k, int32_t* ids, const Layout& at, int& slot, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    const Maxima<kNumThreads> maxima{at, false};
    uint32_t best = kLowestKey;  // takes all that are there
    if (low != kLowestKey) best = search_up(low, kEndKey, k, 0, maxima, slot, shared);
    else if (k < at.units * 8) best = search_down(kEndKey, k, 0, maxima, slot, shared);
    const uint32_t equal_from = pair_of(best), above_from = pair_of(best + 1);
    for (int i = thread; i < align_up(at.units, 4); i += kNumThreads) {
        const uint4 raw = at.unit(min_of(i, at.units - 1));
        const uint32_t above = i < at.units ? passing(raw, above_from) : 0, both = i < at.units ? passing(raw, equal_from) : 0;
        reinterpret_cast<uint8_t*>(at.above)[i] = static_cast<uint8_t>(above);
        reinterpret_cast<uint8_t*>(at.equal)[i] = static_cast<uint8_t>(both & ~above);
    }
    __syncthreads();
    const int words_each = ceil_div(at.words, kNumThreads);
    const int first = min_of(at.words, thread * words_each), last = min_of(at.words, first + words_each);
    uint32_t num_above = 0, num_equal = 0, total;
    for (int w = first; w < last; ++w) {
        num_above += __popc(at.above[w]);
        num_equal += __popc(at.equal[w]);
    }
    // 16 bits each: at most kMaxVectors
    const uint32_t before = block_prefix<kNumThreads>(num_above | num_equal << 16, shared.radix.warp_total, total);
    const int need = k - static_cast<int>(total & 0xffffu);  // of the equal ones
    int e = static_cast<int>(before >> 16), place = static_cast<int>(before & 0xffffu) + min_of(e, need);
    for (int w = first; w < last; ++w) {
        const uint32_t equal = at.equal[w];
        for (uint32_t left = at.above[w] | lowest_bits(equal, need - e); left != 0; left &= left - 1)
            ids[place++] = w * 32 + __ffs(static_cast<int>(left)) - 1;
        e += __popc(equal);
    }
    return k - need + min_of(static_cast<int>(total >> 16), need);
}

template <int kNumThreads>
__device__ __forceinline__ void finish_row(int32_t* ids, int found, int k, int32_t* count) {
    for (int i = found + static_cast<int>(threadIdx.x); i < k; i += kNumThreads) ids[i] = -1;
    if (threadIdx.x == 0 && count != nullptr) *count = found;
}

__device__ __forceinline__ RowOutput picks_of(const TopkParams& p, int64_t token) {
    return {p.ids + token * p.k, p.candidates == nullptr ? nullptr : p.candidates + token * p.num_candidates, p.block_size};
}

// The fast path. kPicks: ids and count are wanted; kBlocks: blocks are.
template <int kNumThreads, bool kPicks, bool kBlocks>
__global__ void __launch_bounds__(kNumThreads, kResidentThreads / kNumThreads) select_kernel(const __grid_constant__ TopkParams p) {
    using Values = Maxima<kNumThreads>;
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ Shared shared;
    const int64_t token = blockIdx.x;
    Columns row;
    row.row = static_cast<const uint16_t*>(p.scores) + token * p.stride;
    row.num_items = p.visible == nullptr ? p.num_cols : max_of(0, min_of(p.num_cols, p.visible[token]));
    row.aligned = true;
    const int num_vectors = ceil_div(row.num_items, 8);
    const Layout at(dynamic, num_vectors);
    int slot = 0;
    if (threadIdx.x < 2) shared.counts[0][threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.top = kLowestKey;
    __syncthreads();
    read_maxima<kNumThreads>(row, at, shared);
    __syncthreads();

    const bool pick_level = kPicks && num_vectors >= 12 * p.k, block_level = kBlocks && num_vectors >= 6 * p.num_blocks;
    if (pick_level || block_level) {
        build_level<kNumThreads>(at);
        __syncthreads();
    }
    // a little lower than the bounds of the vectors' maxima, and quicker found
    uint32_t pick_bound = kLowestKey, block_bound = kLowestKey;
    if (kPicks && num_vectors > kCapacity)
        pick_bound = search_down(shared.top + 1, p.k, p.k / 8, Values{at, pick_level}, slot, shared);
    if (block_level)
        block_bound = search_down(shared.top + 1, p.num_blocks, p.num_blocks / 8, Values{at, true}, slot, shared);

    Kept<kNumThreads> kept;
    int listed = 0;
    if constexpr (kPicks) {
        listed = list_vectors<kNumThreads>(pick_bound, at, shared);
        if (listed > kCapacity && p.k < kCapacity) {  // neighbours are alike
            pick_bound = search_up(pick_bound, shared.top + 1, p.k, (kCapacity - p.k) / 2, Values{at, false}, slot,
                                                shared);
            listed = list_vectors<kNumThreads>(pick_bound, at, shared);
        }
        kept.load(row, p.candidates == nullptr ? nullptr : p.candidates + token * p.num_candidates, at,
                  listed <= kCapacity ? listed : 0);
    }
    if constexpr (kBlocks) {
        const int newest = (p.visible[token] - 1) / kColumns;
        if (threadIdx.x == 0 && p.visible[token] > 0 && newest < num_vectors) at.maxima[newest] = 0x7f80;
        __syncthreads();
        int32_t* blocks = p.blocks + token * p.num_blocks;
        const int found = put_blocks<kNumThreads>(block_bound, p.num_blocks, blocks, at, slot, shared);
        finish_row<kNumThreads>(blocks, found, p.num_blocks, nullptr);
    }
    if constexpr (kPicks) {
        const RowOutput out = picks_of(p, token);
        const int found = listed <= kCapacity
                              ? put_picks(kept, pick_bound, num_vectors > kCapacity, p.k, out.ids, at, slot, shared)
                              : select_from_row<kNumThreads>(row, p.k, out, shared.radix);
        finish_row<kNumThreads>(out.ids, found, p.k, p.count == nullptr ? nullptr : p.count + token);
    }
}

template <class Score>
__global__ void __launch_bounds__(kWideThreads) topk_kernel(const __grid_constant__ TopkParams p) {
    __shared__ RadixShared shared;
    const int64_t token = blockIdx.x;
    ColumnSource<Score> row;
    row.row = static_cast<const Score*>(p.scores) + token * p.stride;
    row.num_items = p.visible == nullptr ? p.num_cols : max_of(0, min_of(p.num_cols, p.visible[token]));
    row.aligned = (reinterpret_cast<uintptr_t>(row.row) & 15) == 0;
    const RowOutput out = picks_of(p, token);
    const int found = select_from_row<kWideThreads>(row, p.k, out, shared);
    finish_row<kWideThreads>(out.ids, found, p.k, p.count == nullptr ? nullptr : p.count + token);
}

template <class Score>
__global__ void __launch_bounds__(kWideThreads) candidate_blocks_kernel(const __grid_constant__ TopkParams p) {
    __shared__ RadixShared shared;
    const int64_t token = blockIdx.x;
    BlockSource<Score> row;
    row.row = static_cast<const Score*>(p.scores) + token * p.stride;
    row.num_cols = max_of(0, min_of(p.num_cols, p.visible[token]));
    row.block_size = p.block_size;
    row.num_items = ceil_div(row.num_cols, p.block_size);
    row.newest = p.visible[token] > 0 ? (p.visible[token] - 1) / p.block_size : -1;
    row.aligned = (reinterpret_cast<uintptr_t>(row.row) & 15) == 0 && p.block_size * sizeof(Score) % 16 == 0;
    const RowOutput out{p.blocks + token * p.num_blocks, nullptr, 0};
    finish_row<kWideThreads>(out.ids, select_from_row<kWideThreads>(row, p.num_blocks, out, shared), p.num_blocks, nullptr);
}

bool fast(const TopkParams& p) {
    return !p.is_float && p.stride % 8 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0 &&
           ceil_div(p.num_cols, kColumns) <= kMaxVectors && (p.candidates == nullptr || p.block_size == kColumns);
}

template <bool kPicks, bool kBlocks>
void launch_fast(const char* op, const TopkParams& p) {
    const int num_vectors = ceil_div(p.num_cols, 8);
    const dim3 grid(static_cast<unsigned>(p.num_tokens));
    const size_t smem = static_cast<size_t>(Layout::bytes(num_vectors));
    if (num_vectors < kWideFrom) launch(op, select_kernel<kThreads, kPicks, kBlocks>, {grid, dim3(kThreads), smem, p.stream}, p);
    else launch(op, select_kernel<kWideThreads, kPicks, kBlocks>, {grid, dim3(kWideThreads), smem, p.stream}, p);
}

template <class Kernel>
void launch_exact(const char* op, Kernel kernel, const TopkParams& p) {
    launch(op, kernel, {dim3(static_cast<unsigned>(p.num_tokens)), dim3(kWideThreads), 0, p.stream}, p);
}

}  // namespace

void launch_topk(const TopkParams& params) {
    constexpr const char* op = "indexer.topk";
    if (fast(params)) launch_fast<true, false>(op, params);
    else if (params.is_float) launch_exact(op, topk_kernel<float>, params);
    else launch_exact(op, topk_kernel<uint16_t>, params);
}

void launch_candidate_blocks(const TopkParams& params) {
    constexpr const char* op = "indexer.candidate_blocks";
    if (fast(params) && params.block_size == kColumns) launch_fast<false, true>(op, params);
    else if (params.is_float) launch_exact(op, candidate_blocks_kernel<float>, params);
    else launch_exact(op, candidate_blocks_kernel<uint16_t>, params);
}

void launch_topk_blocks(const TopkParams& params) {
    if (fast(params) && params.block_size == kColumns) return launch_fast<true, true>("indexer.topk_blocks", params);
    launch_topk(params);
    launch_candidate_blocks(params);
}

}  // namespace mdi::indexer
