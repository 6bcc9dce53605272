// Expert-major order of the routed slots of this rank's experts: a stable counting sort on the device, no host sync.
//     offsets[e] = slots routed to local experts before e;  rows of expert e hold its slots in ascending flat order t * k + j
//     row_of_slot[s] = row or -1 (another rank's expert);   slot_of_row[r] = slot or -1 (r >= offsets[num_local])
// and on request the token and the routing weight of every row, 0 behind the last one.
//
// count: a block counts its 2,048 slots per expert (integer atomics in shared memory: the counts do not depend on the
// order) and writes counts[block, e].
// scatter: every warp owns 256 consecutive slots, read once into registers, and ranks equal experts inside each group of 32
// with match_any. The block sums counts[0 .. b-1, e] and the totals itself (the table is small and in L2) and scans the
// totals into offsets; a slot's row is the expert's offset + the counts of the blocks and warps before + its rank. Ranks
// depend on positions only, so the result is the same in every run. Each block also writes -1 behind the last row in its
// own range of slot_of_row.
//
// Shared memory: 4 bytes x experts x (warps + 2), at most 40 KiB. Limits: num_local <= 1024, M < 2^31.
#include "common/launch.h"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWarpSlots = kPermuteBlockSlots / kWarps;
static_assert(kWarpSlots % 32 == 0, "a warp takes its slots 32 at a time");

// local expert of a slot, -1 for another rank's or past the end
__device__ __forceinline__ int local_expert(const PermuteParams& p, int64_t slot) {
    if (slot >= p.num_slots) return -1;
    const int expert = p.ids[slot] - p.first_expert;
    return expert >= 0 && expert < p.num_local ? expert : -1;
}

__global__ void __launch_bounds__(kThreads) permute_count_kernel(const __grid_constant__ PermuteParams params) {
    extern __shared__ int32_t histogram[];  // [num_local]
    for (int e = threadIdx.x; e < params.num_local; e += kThreads) histogram[e] = 0;
    __syncthreads();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPermuteBlockSlots;
    for (int i = threadIdx.x; i < kPermuteBlockSlots; i += kThreads) {
        const int expert = local_expert(params, first + i);
        if (expert >= 0) atomicAdd(&histogram[expert], 1);
    }
    __syncthreads();
    int32_t* counts = params.counts + static_cast<int64_t>(blockIdx.x) * params.num_local;
    for (int e = threadIdx.x; e < params.num_local; e += kThreads) counts[e] = histogram[e];
}

// What is known about one row; slot -1: behind the last one.
__device__ __forceinline__ void write_row(const PermuteParams& p, int64_t row, int32_t slot) {
    p.slot_of_row[row] = slot;
    if (p.weights == nullptr) return;
    p.token_of_row[row] = slot < 0 ? 0 : slot / p.k;
    p.row_weight[row] = slot < 0 ? 0.0f : p.weights[slot];
}

// Exclusive scan of totals[0 .. n) over the block, in place; returns the sum.
__device__ int exclusive_scan(int32_t* totals, int n, int32_t* warp_sums) {
    const int thread = static_cast<int>(threadIdx.x);
    const int share = ceil_div(n, kThreads);
    const int begin = min(thread * share, n), end = min(begin + share, n);
    int sum = 0;
    for (int e = begin; e < end; ++e) sum += totals[e];
    int inclusive = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(kFullWarp, inclusive, step);
        if (thread % 32 >= step) inclusive += below;
    }
    if (thread % 32 == 31) warp_sums[thread / 32] = inclusive;
    __syncthreads();
    int running = inclusive - sum, all = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < thread / 32) running += warp_sums[warp];
        all += warp_sums[warp];
    }
    for (int e = begin; e < end; ++e) {
        const int count = totals[e];
        totals[e] = running;
        running += count;
    }
    __syncthreads();
    return all;
}

__global__ void __launch_bounds__(kThreads, 1) permute_scatter_kernel(const __grid_constant__ PermuteParams params) {
    extern __shared__ int32_t smem[];
    __shared__ int32_t warp_sums[kWarps];
    const int num_local = params.num_local;
    int32_t* totals = smem;                // [num_local], then the first row of each expert
    int32_t* before = totals + num_local;  // [num_local]: rows of the blocks before this one
    int32_t* count = before + num_local;   // [kWarps][num_local]: slots of (warp, expert), then those of the warps before
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t warp_first = static_cast<int64_t>(blockIdx.x) * kPermuteBlockSlots + warp * kWarpSlots;

    constexpr int kGroups = kWarpSlots / 32;  // slot 32 i + lane of the warp
    int expert[kGroups], rank[kGroups];       // rank: among the warp's slots of the expert
#pragma unroll
    for (int i = 0; i < kGroups; ++i) expert[i] = local_expert(params, warp_first + 32 * i + lane);
    for (int e = threadIdx.x; e < num_local; e += kThreads) {
        int first = 0, total = 0;
#pragma unroll 16
        for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
            const int here = params.counts[static_cast<int64_t>(b) * num_local + e];
            total += here;
            if (b < static_cast<int>(blockIdx.x)) first += here;
        }
        totals[e] = total;
        before[e] = first;
    }
    int32_t* line = count + warp * num_local;  // only this warp touches it
    for (int e = lane; e < num_local; e += 32) line[e] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        const uint32_t peers = __match_any_sync(kFullWarp, expert[i]);
        const uint32_t lower = peers & ((1u << lane) - 1u);
        rank[i] = expert[i] >= 0 ? line[expert[i]] + __popc(lower) : 0;
        __syncwarp();
        if (expert[i] >= 0 && lower == 0) line[expert[i]] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_local; e += kThreads) {
        int running = before[e];
        for (int w = 0; w < kWarps; ++w) {
            const int here = count[w * num_local + e];
            count[w * num_local + e] = running;
            running += here;
        }
    }
    const int num_rows = exclusive_scan(totals, num_local, warp_sums);  // with barriers
    if (blockIdx.x == 0) {
        for (int e = threadIdx.x; e < num_local; e += kThreads) params.offsets[e] = totals[e];
        if (threadIdx.x == 0) params.offsets[num_local] = num_rows;
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        const int64_t slot = warp_first + 32 * i + lane;
        if (slot >= params.num_slots) continue;
        const int row = expert[i] >= 0 ? totals[expert[i]] + line[expert[i]] + rank[i] : -1;
        params.row_of_slot[slot] = row;
        if (row >= 0) write_row(params, row, static_cast<int32_t>(slot));
        if (slot >= num_rows) write_row(params, slot, -1);  // here `slot` stands for a row nobody else writes
    }
}

}  // namespace

void launch_permute(const PermuteParams& params) {
    const auto blocks = static_cast<unsigned>(permute_num_blocks(params.num_slots));
    const size_t line = static_cast<size_t>(params.num_local) * sizeof(int32_t);
    launch("moe.permute", permute_count_kernel, {dim3(blocks), dim3(kThreads), line, params.stream}, params);
    launch("moe.permute", permute_scatter_kernel, {dim3(blocks), dim3(kThreads), line * (kWarps + 2), params.stream}, params);
}

}  // namespace mdi::moe
