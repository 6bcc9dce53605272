// Product of row-scaled FP8 rows and weights on Hopper (performance.md 5):
//     out[t, o] = bf16( sum_k A[t, k] * W[o, k] ) * row_scale[t] * weight_scale[o]
// Both scales are powers of two and are applied after the rounding. The tensor core's sums have about 14 bits: they are
// added to fp32 sums every 128 of K (promotion).
//
// A cluster of two blocks computes 256 rows x 256 columns; both need the same rows of A, each fetches half of them by TMA
// and multicasts. Block roles (384 threads):
//   warp 0             TMA into a ring of four stages of 128 columns of K: 256 rows of A, 128 of W (128-byte swizzle)
//   warpgroups 1, 2    128 x 128 each, in two halves of 64 rows. In turns: four wgmma m64n128k32; in the other's turn: add
//                      the tensor core's sums to the fp32 ones. One turn is 256 tensor cycles, the additions 64.
// Registers set the shape: 128 fp32 sums and 64 of the tensor core a thread.
// Epilogue by halves, each warp alone: bf16 -> stmatrix to its 16 x 128 staging tile -> 16-byte rows -> scales ->
// rotation (rotary.cuh; a chunk of eight columns holds whole pairs) -> global memory.
//
// With groups > 1 the columns of group g multiply columns g*K .. of A (wo_a, model spec 4.7).
// Tiles: row tiles fastest, so that W is read from memory once and A stays in L2.
// Barriers: full[s] counts the block's own producer, with all bytes of both halves; empty[s] one arrival per consumer warp
// of both blocks, because a stage is overwritten in both at once.
// Shared memory 225 KiB: ring 4 x (32 + 16), staging 8 x 4. Registers 232 x 256 + 40 x 128.
// SASS: QGMMA
// Limits: K a multiple of 128, O of 8. Rows past T and columns past O are read as zeros and not written.
#include <string>

#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/rotary.cuh"
#include "common/tma_sm90.h"
#include "common/wgmma_sm90.cuh"
#include "linear/linear.h"

namespace mdi::linear {
namespace {

constexpr int kCluster = 2;
constexpr int kRows = 256, kColumns = 128;  // of a block; a cluster has kCluster * kColumns columns
constexpr int kBlockK = 128;
constexpr int kStages = 4;
constexpr int kConsumers = 2;               // warpgroups
constexpr int kHalves = 2, kHalfRows = 64;  // of a warpgroup
constexpr int kStores = 8;                  // 16-byte stores of a lane for a half
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kEmptyArrivals = kCluster * kConsumers * 4;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
#ifndef PASS_AFTER
#define PASS_AFTER 3
#endif
constexpr int kPassAfter = PASS_AFTER;
constexpr int kTurnBarrier = 1;             // + group: named barriers of 256 threads

struct SharedStorage {
    alignas(1024) uint8_t rows[kStages][kRows * kBlockK];        // 128-byte swizzle
    alignas(1024) uint8_t columns[kStages][kColumns * kBlockK];  // the same
    alignas(128) uint8_t staged[kConsumers * 4][16 * kColumns * 2];  // a warp's [row][16 chunks]; chunk c of row r at c ^ (r % 8)
    alignas(8) uint64_t full[kStages];
    alignas(8) uint64_t empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

struct Maps {
    CUtensorMap rows;     // boxes of 128 rows x 128 bytes
    CUtensorMap columns;  // the same of the weight
};

struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// The cluster's tile of a round
struct Tile {
    int first_row, first_column;  // first_column of this block
    bool exists;
};

__device__ __forceinline__ Tile find_tile(const ScaledGemmParams& p, int round) {
    const int row_tiles = ceil_div(p.num_rows, kRows), column_tiles = ceil_div(p.num_columns, kCluster * kColumns);
    const int tile = static_cast<int>(blockIdx.x / kCluster + round * (gridDim.x / kCluster));
    const int column_tile = tile / row_tiles;
    return {(tile - column_tile * row_tiles) * kRows,
            (column_tile * kCluster + static_cast<int>(ptx::cluster_rank())) * kColumns, column_tile < column_tiles};
}

// One thread fills the ring: its half of the rows for both blocks, and this block's part of the weight.
__device__ void produce(SharedStorage& shared, const ScaledGemmParams& p, const Maps& maps) {
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int num_steps = p.k / kBlockK;
    Ring ring;
    for (int round = 0;; ++round) {
        const Tile tile = find_tile(p, round);
        if (!tile.exists) break;
        const int first_k = p.groups == 1 ? 0 : tile.first_column / (p.num_columns / p.groups) * p.k;
        for (int step = 0; step < num_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.empty[ring.stage]), ring.phase ^ 1);
            const uint32_t full = ptx::smem_address(&shared.full[ring.stage]);
            ptx::mbarrier_arrive_expect_tx(full, (kRows + kColumns) * kBlockK);
            ptx::tma_load_2d(ptx::smem_address(shared.columns[ring.stage]), &maps.columns, full, step * kBlockK,
                             tile.first_column);
            const int half = rank * (kRows / kCluster);
            ptx::tma_load_2d_multicast(ptx::smem_address(shared.rows[ring.stage]) + half * kBlockK, &maps.rows, full,
                                       first_k + step * kBlockK, tile.first_row + half, 0x3);
        }
    }
}

// mbarrier.arrive.shared::cluster on block `rank`: releases a stage that was only read, by wgmma that have completed.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx::map_to_rank(barrier, rank)) : "memory");
}

// bf16 bits of a power of two or NaN
__device__ __forceinline__ uint32_t scale_bits(float scale) { return float_bits(scale) >> 16; }

// Reads the thread number anew: what depends on it is computed again instead of kept in registers or spilled.
__device__ __forceinline__ int reload_thread() {
    uint32_t number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return static_cast<int>(number);
}

struct Consumer {
    SharedStorage& shared;
    const ScaledGemmParams& p;
    Ring ring;

    // sums[half] of this warpgroup's 128 rows x 128 columns
    __device__ __forceinline__ void multiply(int group, int lane, float (&sums)[kHalves][kColumns / 2]) {
        float part[kColumns / 2];
        const int num_steps = p.k / kBlockK;
#pragma unroll 1
        for (int step = 0; step < num_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.full[ring.stage]), ring.phase);
            const uint64_t rows = smem_descriptor_k128(ptx::smem_address(shared.rows[ring.stage]) + group * kHalves * kHalfRows * kBlockK);
            const uint64_t columns = smem_descriptor_k128(ptx::smem_address(shared.columns[ring.stage]));
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                fence_registers(part);
                wgmma_fence();
                if (kPassAfter < 4) ptx::named_barrier_sync(kTurnBarrier + group, 256);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    wgmma_e4m3_ss<kColumns>(part, advance_descriptor(rows, half * kHalfRows * kBlockK + 32 * j),
                                            advance_descriptor(columns, 32 * j), j > 0);
                    if (j == 3) wgmma_commit();
                    if (j == kPassAfter) ptx::named_barrier_arrive(kTurnBarrier + (group ^ 1), 256);
                }
                wgmma_wait<0>();
                fence_registers(part);
                if (half == kHalves - 1 && lane < kCluster)  // done with the stage, in both blocks
                    arrive_in_block(ptx::smem_address(&shared.empty[ring.stage]), lane);
#pragma unroll
                for (int i = 0; i < kColumns / 2; ++i) sums[half][i] += part[i];
            }
        }
    }

    __device__ __forceinline__ void run() {
        const int group = static_cast<int>(threadIdx.x) / 128 - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int chunk = lane % 16;  // of the eight columns that this lane stores
        if (kPassAfter < 4 && group == 1 && find_tile(p, 0).exists) ptx::named_barrier_arrive(kTurnBarrier, 256);  // warpgroup 0 begins
        int round = 0;
        for (Tile tile = find_tile(p, 0); tile.exists; tile = find_tile(p, ++round)) {
            const int column = tile.first_column + chunk * 8;
            const int group_of_columns = p.groups == 1 ? 0 : tile.first_column / (p.num_columns / p.groups);
            // lane l looks after row l % 16 of half l / 16 of this warp's rows
            const int first_row = tile.first_row + group * kHalves * kHalfRows + warp * 16;
            const int own_row = first_row + lane / 16 * kHalfRows + lane % 16;
            uint32_t row_bits = 0, column_bits[4] = {};
            int position = 0;
            if (own_row < p.num_rows) {
                row_bits = scale_bits(p.row_scale[static_cast<int64_t>(own_row) * p.groups + group_of_columns]) * 0x10001u;
                if (p.table != nullptr) position = p.positions[own_row];
            }
            if (column < p.num_columns) {
                const float4 low = reinterpret_cast<const float4*>(p.weight_scale + column)[0];
                const float4 high = reinterpret_cast<const float4*>(p.weight_scale + column)[1];
                column_bits[0] = scale_bits(low.x) | scale_bits(low.y) << 16;
                column_bits[1] = scale_bits(low.z) | scale_bits(low.w) << 16;
                column_bits[2] = scale_bits(high.x) | scale_bits(high.y) << 16;
                column_bits[3] = scale_bits(high.z) | scale_bits(high.w) << 16;
            }
            float sums[kHalves][kColumns / 2];
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
#pragma unroll
                for (int i = 0; i < kColumns / 2; ++i) sums[half][i] = 0.0f;
            multiply(group, lane, sums);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) store(tile, first_row, row_bits, position, column_bits, half, sums[half]);
        }
        if (kPassAfter < 4 && group == 0 && round > 0) ptx::named_barrier_sync(kTurnBarrier, 256);  // takes the last turn that warpgroup 1 gave
    }

    // One half of a warp's rows: sums -> bf16 -> [row][16 chunks] in shared memory -> scaled, rotated -> global memory
    __device__ __forceinline__ void store(const Tile& tile, int first_row, uint32_t row_bits, int position,
                                          const uint32_t (&column_bits)[4], int half, const float (&sums)[kColumns / 2]) {
        const int thread = reload_thread(), lane = thread % 32, chunk = lane % 16;
        uint8_t* staged = shared.staged[thread / 32 - 4];
        __syncwarp();  // the previous half has been read
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2)  // lane l gives the address of row l % 16 in column block n + l / 16
            ptx::stmatrix_x4(ptx::smem_address(staged) + lane % 16 * (kColumns * 2) + ((n + lane / 16) ^ (lane % 8)) * 16,
                             ptx::pack_bf16x2(sums[4 * n], sums[4 * n + 1]), ptx::pack_bf16x2(sums[4 * n + 2], sums[4 * n + 3]),
                             ptx::pack_bf16x2(sums[4 * n + 4], sums[4 * n + 5]), ptx::pack_bf16x2(sums[4 * n + 6], sums[4 * n + 7]));
        __syncwarp();
        uint4 v[kStores];  // this lane's chunk of rows lane / 16, + 2, + 4 ..
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
            const int row = 2 * i + lane / 16;
            v[i] = *reinterpret_cast<const uint4*>(staged + row * (kColumns * 2) + (chunk ^ (row % 8)) * 16);
        }
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
            const uint32_t scale = __shfl_sync(0xffffffffu, row_bits, half * 16 + 2 * i + lane / 16);
            v[i].x = bf16x2_product(bf16x2_product(v[i].x, column_bits[0]), scale);
            v[i].y = bf16x2_product(bf16x2_product(v[i].y, column_bits[1]), scale);
            v[i].z = bf16x2_product(bf16x2_product(v[i].z, column_bits[2]), scale);
            v[i].w = bf16x2_product(bf16x2_product(v[i].w, column_bits[3]), scale);
        }
        const int column = tile.first_column + chunk * 8;
        if (p.table != nullptr) {
            const int rotary = column % p.head_dim - (p.head_dim - p.rope_dim);
            if (__any_sync(0xffffffffu, rotary >= 0)) {
#pragma unroll
                for (int i = 0; i < kStores; ++i) {
                    const int at = __shfl_sync(0xffffffffu, position, half * 16 + 2 * i + lane / 16);
                    if (rotary >= 0) v[i] = rotate_eight(v[i], p.table + static_cast<int64_t>(at) * p.rope_dim + rotary, false);
                }
            }
        }
        const int row = first_row + half * kHalfRows + lane / 16;
        bf16* out = p.out + row * p.out_stride + column;
        const int rows_left = column < p.num_columns ? p.num_rows - row : 0;
#pragma unroll
        for (int i = 0; i < kStores; ++i)
            if (2 * i < rows_left) *reinterpret_cast<uint4*>(out + 2 * i * p.out_stride) = v[i];
    }
};

__global__ void __launch_bounds__(kThreads, 1)
    scaled_gemm_sm90_kernel(const __grid_constant__ ScaledGemmParams params, const __grid_constant__ Maps maps) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem());
    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(&maps.rows);
        ptx::prefetch_tensor_map(&maps.columns);
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(ptx::smem_address(&shared.full[s]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.empty[s]), kEmptyArrivals);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) produce(shared, params, maps);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        Consumer{shared, params, {}}.run();
    }
    ptx::cluster_arrive();  // the other block may still write into this one's shared memory
    ptx::cluster_wait();
}

}  // namespace

void launch_scaled_gemm_sm90(const ScaledGemmParams& params) {
    const char* op = "linear.scaled_gemm";
    if (params.num_rows == 0 || params.num_columns == 0) return;
    int device = 0, num_sms = 0;
    check_cuda(op, cudaGetDevice(&device));
    check_cuda(op, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto k = static_cast<uint64_t>(params.k);
    Maps maps;
    maps.rows = make_tensor_map({"linear.scaled_gemm: codes", TmaType::kUint8, params.codes, 2,
                                 {k * static_cast<uint64_t>(params.groups), static_cast<uint64_t>(params.num_rows)},
                                 {static_cast<uint64_t>(params.codes_stride)}, {kBlockK, kRows / kCluster}});
    maps.columns = make_tensor_map({"linear.scaled_gemm: weight", TmaType::kUint8, params.weight, 2,
                                    {k, static_cast<uint64_t>(params.num_columns)}, {k}, {kBlockK, kColumns},
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    const int tiles = ceil_div(params.num_rows, kRows) * ceil_div(params.num_columns, kCluster * kColumns);
    const auto clusters = static_cast<unsigned>(min_of(tiles, num_sms / kCluster));
    launch(op, scaled_gemm_sm90_kernel,
           {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), params.stream, kCluster}, params, maps);
}

}  // namespace mdi::linear
