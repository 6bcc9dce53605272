// Expert-major order of the routed slots of this rank's experts: a stable counting sort on the device, no host sync.
//     offsets[e] = slots routed to local experts before e;  rows of expert e hold its slots in ascending flat order t * k + j
//     row_of_slot[s] = row or -1 (another rank's expert);   slot_of_row[r] = slot or -1 (r >= offsets[num_local])
// and on request the token and the routing weight of every row, 0 behind the last one.
//
// count: a block counts its 2,048 slots per expert (integer atomics in shared memory: the counts do not depend on the
// order) and writes counts[block, e].
// scatter: block b sums counts[0 .. b-1, e] and the totals itself (the table is small and in L2), scans the totals into
// offsets, then hands out rows: every warp owns 256 consecutive slots, starts at block base + the counts of the warps
// before it, and ranks equal experts inside each group of 32 slots with match_any. Ranks depend on positions only, so
// the result is the same in every run. Each block also writes -1 behind the last row in its own range of slot_of_row.
//
// Shared memory: 4 bytes x experts x (warps + 1), at most 36 KiB. Limits: num_local <= 1024, M < 2^31.
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

__global__ void __launch_bounds__(kThreads) permute_scatter_kernel(const __grid_constant__ PermuteParams params) {
    extern __shared__ int32_t smem[];
    __shared__ int32_t warp_sums[kWarps];
    const int num_local = params.num_local;
    int32_t* totals = smem;                // [num_local], then the first row of each expert
    int32_t* next = smem + num_local;      // [kWarps][num_local]: the next row of (warp, expert)
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPermuteBlockSlots;

    for (int i = threadIdx.x; i < kWarps * num_local; i += kThreads) next[i] = 0;
    __syncthreads();
    // counts of the warps of this block
    const int64_t warp_first = first + warp * kWarpSlots;
    for (int i = lane; i < kWarpSlots; i += 32) {
        const int expert = local_expert(params, warp_first + i);
        if (expert >= 0) atomicAdd(&next[warp * num_local + expert], 1);
    }
    __syncthreads();
    // rows of the blocks before this one, and totals; `next` becomes the offset inside the expert
    for (int e = threadIdx.x; e < num_local; e += kThreads) {
        int before = 0, total = 0;
#pragma unroll 8
        for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
            const int count = params.counts[static_cast<int64_t>(b) * num_local + e];
            total += count;
            if (b < static_cast<int>(blockIdx.x)) before += count;
        }
        totals[e] = total;
        for (int w = 0; w < kWarps; ++w) {
            const int count = next[w * num_local + e];
            next[w * num_local + e] = before;
            before += count;
        }
    }
    __syncthreads();
    const int num_rows = exclusive_scan(totals, num_local, warp_sums);
    if (blockIdx.x == 0) {
        for (int e = threadIdx.x; e < num_local; e += kThreads) params.offsets[e] = totals[e];
        if (threadIdx.x == 0) params.offsets[num_local] = num_rows;
    }
    // hand out rows: only this warp touches its line of `next`
    for (int i = 0; i < kWarpSlots; i += 32) {
        const int64_t slot = warp_first + i + lane;
        const int expert = local_expert(params, slot);
        const uint32_t peers = __match_any_sync(kFullWarp, expert);
        const uint32_t lower = peers & ((1u << lane) - 1u);
        int row = -1;
        if (expert >= 0) row = totals[expert] + next[warp * num_local + expert] + __popc(lower);
        __syncwarp();
        if (expert >= 0 && lower == 0) next[warp * num_local + expert] += __popc(peers);
        __syncwarp();
        if (slot < params.num_slots) {
            params.row_of_slot[slot] = row;
            if (row >= 0) write_row(params, row, static_cast<int32_t>(slot));
            if (slot >= num_rows) write_row(params, slot, -1);  // here `slot` stands for a row nobody else writes
        }
    }
}

}  // namespace

void launch_permute(const PermuteParams& params) {
    const auto blocks = static_cast<unsigned>(permute_num_blocks(params.num_slots));
    const size_t line = static_cast<size_t>(params.num_local) * sizeof(int32_t);
    launch("moe.permute", permute_count_kernel, {dim3(blocks), dim3(kThreads), line, params.stream}, params);
    launch("moe.permute", permute_scatter_kernel, {dim3(blocks), dim3(kThreads), line * (kWarps + 1), params.stream}, params);
}

}  // namespace mdi::moe
