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
//      exact k-th largest score T and the picks, in order, come from there.
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
constexpr int kBlockColumns = 8;         // columns of a vector: a candidate block of the fast path
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

// A key that at least k values reach, or `low` where fewer than k reach a higher one: the largest one, or one that at most
// k + slack reach. add(probes, sums) is count_vector over the thread's values. `near`: the answer is expected just above
// `low`. `slot`: the counter of the next round, which is zero.
template <int kNumThreads, class Add>
__device__ __forceinline__ uint32_t search(uint32_t low, bool near, uint32_t k, uint32_t slack, const Add& add, int& slot, Shared& shared) {
    uint32_t high = kEndKey;  // fewer than k values reach it
    while (high - low > 1) {
        uint32_t key[3], probe[3], sums[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            key[i] = near ? min_of(low + (4u << 2 * i), high) : low + ((high - low) * (i + 1) + 3) / 4;
            probe[i] = pair_of(key[i]);
        }
        near = false;
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
        const uint32_t count[3] = {shared.counts[slot][0] & 0xffffu, shared.counts[slot][0] >> 16, shared.counts[slot][1]};
        slot = next;
        uint32_t reached = ~0u;
#pragma unroll
        for (int i = 2; i >= 0; --i) {
            if (reached != ~0u) continue;
            if (count[i] >= k) low = key[i], reached = count[i];
            else high = key[i];
        }
        if (reached <= k + slack) break;
    }
    return low;
}

// Dynamic shared memory of a row with num_vectors vectors.
struct Layout {
    uint16_t* maxima;   // [units * 8], -inf behind the last vector
    uint32_t* level;    // [level_units * 4] pairs: maxima of 4 vectors; until the bounds are known, then its place is that of
    uint32_t* above;    // [words] one bit a vector
    uint32_t* equal;    // [words]
    uint16_t* list;     // [kCapacity]
    int units, level_units, words;

    static __host__ __device__ __forceinline__ int bytes(int num_vectors) {
        const int units = ceil_div(num_vectors, 8), words = ceil_div(num_vectors, 32);
        return units * 16 + max_of(ceil_div(units, 4) * 16, align_up(words, 4) * 8 + kCapacity * 2);
    }
    __device__ __forceinline__ Layout(uint8_t* dynamic, int num_vectors) {
        units = ceil_div(num_vectors, 8);
        level_units = ceil_div(units, 4);
        words = ceil_div(num_vectors, 32);
        maxima = reinterpret_cast<uint16_t*>(dynamic);
        level = reinterpret_cast<uint32_t*>(dynamic + units * 16);
        above = level;
        equal = above + align_up(words, 4);
        list = reinterpret_cast<uint16_t*>(equal + align_up(words, 4));
    }
    __device__ __forceinline__ uint4 unit(int i) const { return reinterpret_cast<const uint4*>(maxima)[i]; }
    __device__ __forceinline__ uint4 level_unit(int i) const { return reinterpret_cast<const uint4*>(level)[i]; }
};

using Columns = ColumnSource<uint16_t>;

// Reads the row once: the maximum of every vector.
template <int kNumThreads>
__device__ __forceinline__ void read_maxima(const Columns& row, const Layout& at) {
    constexpr int kInFlight = 8;
    const int thread = static_cast<int>(threadIdx.x), whole = row.num_items / 8;
    const auto keep = [&](int vector, const uint4& raw) {
        const uint32_t pair = max_bf16x2(max_bf16x2(raw.x, raw.y), max_bf16x2(raw.z, raw.w));
        at.maxima[vector] = static_cast<uint16_t>(max_bf16x2(pair, pair >> 16 | pair << 16));
    };
    const uint4* vectors = reinterpret_cast<const uint4*>(row.row);
    int base = 0;
    for (; base + kInFlight * kNumThreads <= whole; base += kInFlight * kNumThreads) {
        uint4 raw[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) raw[i] = ptx::load_streaming(vectors + base + i * kNumThreads + thread);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) keep(base + i * kNumThreads + thread, raw[i]);
    }
#pragma unroll 4
    for (int vector = base + thread; vector < at.units * 8; vector += kNumThreads) keep(vector, row.fetch(vector));
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

// Key that at least k vector maxima reach, and not many more.
template <int kNumThreads>
__device__ __forceinline__ uint32_t bound_of(int k, bool levelled, const Layout& at, int& slot, Shared& shared) {
    return search<kNumThreads>(kLowestKey, false, k, k / 8, [&](const uint32_t (&probe)[3], uint32_t (&sums)[3]) {
        if (levelled) {
            for (int i = threadIdx.x; i < at.level_units; i += kNumThreads) count_vector(at.level_unit(i), probe, sums);
        } else {
            for (int i = threadIdx.x; i < at.units; i += kNumThreads) count_vector(at.unit(i), probe, sums);
        }
    }, slot, shared);
}

// A search among the vector maxima.
template <int kNumThreads>
__device__ __forceinline__ uint32_t search_maxima(uint32_t low, int k, int slack, const Layout& at, int& slot, Shared& shared) {
    return search<kNumThreads>(low, low != kLowestKey, k, slack, [&](const uint32_t (&probe)[3], uint32_t (&sums)[3]) {
        for (int i = threadIdx.x; i < at.units; i += kNumThreads) count_vector(at.unit(i), probe, sums);
    }, slot, shared);
}

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
                at.list[place++] = static_cast<uint16_t>(w * 32 + __ffs(static_cast<int>(left)) - 1);
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

    __device__ __forceinline__ void load(const Columns& row, const Layout& at, int listed) {
        each = ceil_div(listed, kNumThreads);
        first = static_cast<int>(threadIdx.x) * each;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            raw[i] = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
            if (i < each && first + i < listed) raw[i] = row.fetch(at.list[first + i]);
        }
    }
};

// The k best of the kept vectors' scores, of which at least k reach `low` or all are there. Returns how many there are.
template <int kNumThreads>
__device__ __forceinline__ int put_picks(const Kept<kNumThreads>& kept, uint32_t low, bool near, int k, const RowOutput& out,
                                         const Layout& at, int& slot, Shared& shared) {
    constexpr int kMost = Kept<kNumThreads>::kMost;
    const uint32_t best = search<kNumThreads>(low, near, k, 0, [&](const uint32_t (&probe)[3], uint32_t (&sums)[3]) {
#pragma unroll
        for (int i = 0; i < kMost; ++i)
            if (i < kept.each) count_vector(kept.raw[i], probe, sums);
    }, slot, shared);
    const uint32_t equal_from = pair_of(best), above_from = pair_of(best + 1);
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= kept.each) continue;
        const uint32_t above = passing(kept.raw[i], above_from), both = passing(kept.raw[i], equal_from);
        counts += static_cast<uint32_t>(__popc(above)) | static_cast<uint32_t>(__popc(both & ~above)) << 16;
    }
    uint32_t total;  // 16 bits each: at most 8 kCapacity
    const uint32_t before = block_prefix<kNumThreads>(counts, shared.radix.warp_total, total);
    int a = static_cast<int>(before & 0xffffu), e = static_cast<int>(before >> 16);
    const int need = k - static_cast<int>(total & 0xffffu);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= kept.each) continue;
        const uint32_t above = passing(kept.raw[i], above_from);
        uint32_t left = passing(kept.raw[i], equal_from);
        if (left == 0) continue;
        const int column = at.list[kept.first + i] * 8;
        for (; left != 0; left &= left - 1) {
            const int bit = __ffs(static_cast<int>(left)) - 1;
            const bool is_above = (above >> bit & 1u) != 0;
            if (is_above || e < need) out.put(a + min_of(e, need), column + bit);
            a += is_above;
            e += !is_above;
        }
    }
    return static_cast<int>(total & 0xffffu) + min_of(static_cast<int>(total >> 16), need);
}

// The k best vectors by their maxima; `bound`: a key that at least k of them reach, or the lowest.
template <int kNumThreads>
__device__ __forceinline__ int put_blocks(uint32_t bound, int k, int32_t* ids, const Layout& at, int& slot, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t best = k < at.units * 8 ? search_maxima<kNumThreads>(bound, k, 0, at, slot, shared) : kLowestKey;
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
    uint32_t counts_above = 0, counts_equal = 0, total;
    for (int w = first; w < last; ++w) {
        counts_above += __popc(at.above[w]);
        counts_equal += __popc(at.equal[w]);
    }
    // 16 bits each: at most kMaxVectors
    const uint32_t before = block_prefix<kNumThreads>(counts_above | counts_equal << 16, shared.radix.warp_total, total);
    int a = static_cast<int>(before & 0xffffu), e = static_cast<int>(before >> 16);
    const int need = k - static_cast<int>(total & 0xffffu);
    for (int w = first; w < last; ++w) {
        const uint32_t above = at.above[w];
        for (uint32_t left = above | at.equal[w]; left != 0; left &= left - 1) {
            const int bit = __ffs(static_cast<int>(left)) - 1;
            const bool is_above = (above >> bit & 1u) != 0;
            if (is_above || e < need) ids[a + min_of(e, need)] = w * 32 + bit;
            a += is_above;
            e += !is_above;
        }
    }
    return static_cast<int>(total & 0xffffu) + min_of(static_cast<int>(total >> 16), need);
}

template <int kNumThreads>
__device__ __forceinline__ void finish_row(int32_t* ids, int found, int k, int32_t* count) {
    for (int i = found + static_cast<int>(threadIdx.x); i < k; i += kNumThreads) ids[i] = -1;
    if (threadIdx.x == 0 && count != nullptr) *count = found;
}

// The fast path. kPicks: ids and count are wanted; kBlocks: blocks are.
template <int kNumThreads, bool kPicks, bool kBlocks>
__global__ void __launch_bounds__(kNumThreads, 1024 / kNumThreads) select_kernel(const __grid_constant__ TopkParams p) {
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
    read_maxima<kNumThreads>(row, at);
    __syncthreads();

    const bool pick_level = kPicks && num_vectors >= 12 * p.k, block_level = kBlocks && num_vectors >= 6 * p.num_blocks;
    if (pick_level || block_level) {
        build_level<kNumThreads>(at);
        __syncthreads();
    }
    uint32_t pick_bound = kLowestKey, block_bound = kLowestKey;
    if (kPicks && num_vectors > kCapacity) pick_bound = bound_of<kNumThreads>(p.k, pick_level, at, slot, shared);
    if (block_level) block_bound = bound_of<kNumThreads>(p.num_blocks, true, at, slot, shared);

    Kept<kNumThreads> kept;
    int listed = 0;
    if constexpr (kPicks) {
        listed = list_vectors<kNumThreads>(pick_bound, at, shared);
        if (listed > kCapacity && p.k < kCapacity) {  // neighbours are alike
            pick_bound = search_maxima<kNumThreads>(pick_bound, p.k, (kCapacity - p.k) / 2, at, slot, shared);
            listed = list_vectors<kNumThreads>(pick_bound, at, shared);
        }
        kept.load(row, at, listed <= kCapacity ? listed : 0);
    }
    if constexpr (kBlocks) {
        const int newest = (p.visible[token] - 1) / kBlockColumns;
        if (threadIdx.x == 0 && p.visible[token] > 0 && newest < num_vectors) at.maxima[newest] = 0x7f80;
        __syncthreads();
        int32_t* blocks = p.blocks + token * p.num_blocks;
        finish_row<kNumThreads>(blocks, put_blocks<kNumThreads>(block_bound, p.num_blocks, blocks, at, slot, shared), p.num_blocks, nullptr);
    }
    if constexpr (kPicks) {
        const RowOutput out{p.ids + token * p.k, p.candidates == nullptr ? nullptr : p.candidates + token * p.num_candidates,
                            p.block_size};
        const int found = listed <= kCapacity
                              ? put_picks<kNumThreads>(kept, pick_bound, num_vectors > kCapacity, p.k, out, at, slot, shared)
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
    const RowOutput out{p.ids + token * p.k, p.candidates == nullptr ? nullptr : p.candidates + token * p.num_candidates,
                        p.block_size};
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
           ceil_div(p.num_cols, 8) <= kMaxVectors;
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
    if (fast(params) && params.block_size == kBlockColumns) launch_fast<false, true>(op, params);
    else if (params.is_float) launch_exact(op, candidate_blocks_kernel<float>, params);
    else launch_exact(op, candidate_blocks_kernel<uint16_t>, params);
}

void launch_topk_blocks(const TopkParams& params) {
    if (fast(params) && params.block_size == kBlockColumns) return launch_fast<true, true>("indexer.topk_blocks", params);
    launch_topk(params);
    launch_candidate_blocks(params);
}

}  // namespace mdi::indexer
