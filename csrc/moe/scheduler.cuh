// Tiles of a grouped product, found on the device from the expert offsets: no host sync, no padding rows.
//
// Every block builds the prefix sum of ceil(rows / kBlockM) over the experts in shared memory (build), then maps tile
// numbers 0 .. num_tiles - 1 to (expert, row tile, column tile) by a binary search (find). Tiles of one expert are
// neighbours; inside an expert the row tile moves fastest within bands of kBand row tiles, so that blocks which run
// at the same time share the expert's weight tile and a bounded set of rows in L2. An expert without rows has no tile:
// its weights are never touched.
//
// kSorted: experts come in the order of their average rows per row tile, rounded up, most first (ties: the lower id), and
// dealt() deals the tiles to the blocks back and forth, so that every block gets about the same work without a shared counter.
#pragma once
#include <cstdint>

#include "common/math.h"
#include "common/reduce.cuh"
#include "moe/moe.h"

namespace mdi::moe {

struct Tile {
    int expert;
    int expert_begin, expert_rows;  // rows of out
    int row_tile, num_row_tiles;
    int first_column;
};

template <int kBlockM, int kBlockN, int kThreads, bool kSorted = false>
struct TileScheduler {
    static constexpr int kBand = 16;
    static constexpr int kWarps = kThreads / 32;

    struct Storage {
        int starts[kMaxExperts + 1];   // row tiles before expert e (kSorted: before the e-th in order)
        int offsets[kMaxExperts + 1];  // a copy: find must not wait for global memory
        int warp_sums[kWarps];
        uint16_t order[kSorted ? kMaxExperts : 1];
    };

    static __device__ int num_row_tiles(const int* __restrict__ offsets, int e) {
        return ceil_div(max(offsets[e + 1] - offsets[e], 0), kBlockM);
    }
    static __device__ int average_rows(const int* __restrict__ offsets, int e) {
        const int tiles = num_row_tiles(offsets, e);
        return tiles ? ceil_div(offsets[e + 1] - offsets[e], tiles) : 0;
    }
    static __device__ int expert(const Storage& storage, int place) { return kSorted ? storage.order[place] : place; }

    // The tile that block `block` of `num_blocks` does in round `round`
    static __device__ int dealt(int round, int block, int num_blocks) {
        return round * num_blocks + (round % 2 ? num_blocks - 1 - block : block);
    }

    // All kThreads threads call it; ends with a barrier. Thread t owns a run of experts.
    static __device__ void build(Storage& storage, const int32_t* __restrict__ offsets, int num_experts) {
        const int thread = static_cast<int>(threadIdx.x);
        const int share = ceil_div(num_experts, kThreads);
        const int begin = min(thread * share, num_experts), end = min(begin + share, num_experts);
        for (int e = thread; e <= num_experts; e += kThreads) storage.offsets[e] = offsets[e];
        if (kSorted) {
            __syncthreads();
            for (int e = thread; e < num_experts; e += kThreads) storage.starts[e] = average_rows(storage.offsets, e);
            __syncthreads();
            for (int e = thread; e < num_experts; e += kThreads) {
                const int own = storage.starts[e];
                int place = 0;  // how many experts come before
                for (int other = 0; other < num_experts; ++other)
                    place += storage.starts[other] > own || (storage.starts[other] == own && other < e);
                storage.order[place] = static_cast<uint16_t>(e);
            }
            __syncthreads();
        }
        int sum = 0;
        for (int e = begin; e < end; ++e) sum += num_row_tiles(offsets, expert(storage, e));
        int inclusive = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(kFullWarp, inclusive, step);
            if (thread % 32 >= step) inclusive += below;
        }
        if (thread % 32 == 31) storage.warp_sums[thread / 32] = inclusive;
        __syncthreads();
        int running = inclusive - sum;
        for (int warp = 0; warp < thread / 32; ++warp) running += storage.warp_sums[warp];
        for (int e = begin; e < end; ++e) {
            storage.starts[e] = running;
            running += num_row_tiles(offsets, expert(storage, e));
        }
        if (thread == kThreads - 1) storage.starts[num_experts] = running;
        __syncthreads();
    }

    static __device__ int num_tiles(const Storage& storage, int num_experts, int num_out) {
        return storage.starts[num_experts] * ceil_div(num_out, kBlockN);
    }

    static __device__ Tile find(const Storage& storage, int num_experts, int num_out, int tile) {
        const int columns = ceil_div(num_out, kBlockN);
        const int wanted = tile / columns;
        int low = 0, high = num_experts - 1;  // first expert whose last row tile is past `wanted`
        while (low < high) {
            const int middle = (low + high) / 2;
            if (storage.starts[middle + 1] > wanted) high = middle;
            else low = middle + 1;
        }
        const int start = storage.starts[low];
        const int row_tiles = storage.starts[low + 1] - start;
        const int local = tile - start * columns;
        const int band = local / (kBand * columns);
        const int inside = local - band * kBand * columns;
        const int height = min(kBand, row_tiles - band * kBand);
        const int row_tile = band * kBand + inside % height;
        const int e = expert(storage, low), begin = storage.offsets[e];
        return {e, begin, storage.offsets[e + 1] - begin, row_tile, row_tiles, (inside / height) * kBlockN};
    }
};

}  // namespace mdi::moe
