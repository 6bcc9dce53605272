// Product of row-scaled FP8 rows and weights on Hopper (performance.md 5):
//     out[t, o] = bf16( sum_k A[t, k] * W[o, k] ) * row_scale[t] * weight_scale[o],   then, if asked, rotated heads (4.2)
// Both scales are powers of two and are applied after the rounding. The tensor core's sums have about 14 bits: they are
// added to fp32 sums every 128 of K (promotion).
//
// A cluster of two blocks computes 256 rows x 192 columns; both need the same rows of W, each fetches half of them by TMA
// and multicasts. Block roles (384 threads):
//   warp 0             TMA into a ring of four stages of 128 columns of K: 128 rows of A, 192 of W (128-byte swizzle)
//   warps 1..3         64 columns each: bf16 results from shared memory -> scales -> rotation -> global memory, beside the
//                      next tile's products
//   warpgroups 1, 2    64 x 192 each, in turns: four wgmma m64n192k32; in the other's turn: add the tensor core's sums to the
//                      fp32 ones. One turn is 384 tensor cycles, the additions 96. At the end of a tile bf16 -> stmatrix.
// Registers set the shape: 96 fp32 sums and 96 of the tensor core a thread.
//
// With groups > 1 the columns of group g multiply columns g*K .. of A (wo_a, model spec 4.7).
// Tiles: row tiles fastest, so that W is read from memory once and A stays in L2.
// Barriers: full[s] counts the block's own producer, with all bytes; empty[s] one arrival per consumer warp of both blocks,
// because a stage is overwritten in both at once; staged_full[g] the warps of warpgroup g, staged_empty[g] the warps 1..3.
// Shared memory 209 KiB: ring 4 x (16 + 24), staging 2 x 24. Registers 216 x 256 + 72 x 128.
// SASS: QGMMA
// Limits: K a multiple of 128, O of 8 in every group. Rows past T and columns past O are read as zeros and not written.
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
constexpr int kRows = 128, kColumns = 192;  // of a block; a cluster has kCluster * kRows rows
constexpr int kBlockK = 128;
constexpr int kStages = 4;
constexpr int kConsumers = 2;               // warpgroups
constexpr int kPartRows = 64;               // of a warpgroup
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kEmptyArrivals = kCluster * kConsumers * 4;
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr int kTurnBarrier = 1;             // + group: named barriers of 256 threads

struct SharedStorage {
    alignas(1024) uint8_t rows[kStages][kRows * kBlockK];        // 128-byte swizzle
    alignas(1024) uint8_t columns[kStages][kColumns * kBlockK];  // the same
    alignas(128) uint8_t staged[kConsumers][kPartRows * kColumns * 2];  // [row][24 chunks]; chunk c of row r at c ^ (r % 8)
    alignas(8) uint64_t full[kStages];
    alignas(8) uint64_t empty[kStages];
    alignas(8) uint64_t staged_full[kConsumers];
    alignas(8) uint64_t staged_empty[kConsumers];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

struct Maps {
    CUtensorMap rows;     // boxes of 128 rows x 128 bytes
    CUtensorMap columns;  // boxes of 96 rows of the weight
};

struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// This block's tile of a round: the columns first_column .. of `group`, up to last_column
struct Tile {
    int first_row, first_column, last_column, group;
    bool exists;
};

__device__ __forceinline__ Tile find_tile(const ScaledGemmParams& p, int round) {
    const int row_tiles = ceil_div(p.num_rows, kCluster * kRows), group_columns = p.num_columns / p.groups;
    const int column_tiles = ceil_div(group_columns, kColumns);  // of a group
    const int tile = static_cast<int>(blockIdx.x / kCluster + round * (gridDim.x / kCluster));
    const int column_tile = tile / row_tiles, group = column_tile / column_tiles;
    return {((tile - column_tile * row_tiles) * kCluster + static_cast<int>(ptx::cluster_rank())) * kRows,
            group * group_columns + (column_tile - group * column_tiles) * kColumns, (group + 1) * group_columns, group,
            group < p.groups};
}

// One thread fills the ring: this block's rows, and its half of the columns for both blocks.
__device__ void produce(SharedStorage& shared, const ScaledGemmParams& p, const Maps& maps) {
    const int share = static_cast<int>(ptx::cluster_rank()) * (kColumns / kCluster);
    const int num_steps = p.k / kBlockK;
    Ring ring;
    for (int round = 0;; ++round) {
        const Tile tile = find_tile(p, round);
        if (!tile.exists) break;
        for (int step = 0; step < num_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.empty[ring.stage]), ring.phase ^ 1);
            const uint32_t full = ptx::smem_address(&shared.full[ring.stage]);
            ptx::mbarrier_arrive_expect_tx(full, (kRows + kColumns) * kBlockK);
            ptx::tma_load_2d(ptx::smem_address(shared.rows[ring.stage]), &maps.rows, full, tile.group * p.k + step * kBlockK,
                             tile.first_row);
            ptx::tma_load_2d_multicast(ptx::smem_address(shared.columns[ring.stage]) + share * kBlockK, &maps.columns, full,
                                       step * kBlockK, tile.first_column + share, 0x3);
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

    // Adds this warpgroup's 64 rows x 192 columns of the tile's product to sums
    __device__ __forceinline__ void multiply(int group, int lane, float (&sums)[kColumns / 2]) {
        float part[kColumns / 2];
        const int num_steps = p.k / kBlockK;
#pragma unroll 1
        for (int step = 0; step < num_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.full[ring.stage]), ring.phase);
            const uint64_t rows = smem_descriptor_k128(ptx::smem_address(shared.rows[ring.stage]) + group * kPartRows * kBlockK);
            const uint64_t columns = smem_descriptor_k128(ptx::smem_address(shared.columns[ring.stage]));
            fence_registers(part);
            wgmma_fence();
            ptx::named_barrier_sync(kTurnBarrier + group, 256);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                wgmma_e4m3_ss<kColumns>(part, advance_descriptor(rows, 32 * j), advance_descriptor(columns, 32 * j), j > 0);
            wgmma_commit();
            ptx::named_barrier_arrive(kTurnBarrier + (group ^ 1), 256);
            wgmma_wait<0>();
            fence_registers(part);
            if (lane < kCluster)  // done with the stage, in both blocks
                arrive_in_block(ptx::smem_address(&shared.empty[ring.stage]), lane);
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) sums[i] += part[i];
        }
    }

    __device__ __forceinline__ void run() {
        const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = static_cast<int>(threadIdx.x) % 32;
        if (group == 1 && find_tile(p, 0).exists) ptx::named_barrier_arrive(kTurnBarrier, 256);  // warpgroup 0 begins
        int round = 0;
        for (; find_tile(p, round).exists; ++round) {
            float sums[kColumns / 2];
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0.0f;
            multiply(group, lane, sums);
            stage(round, sums);
        }
        if (group == 0 && round > 0) ptx::named_barrier_sync(kTurnBarrier, 256);  // takes the last turn that warpgroup 1 gave
    }

    // This warpgroup's rows: sums -> bf16 -> shared memory
    __device__ __forceinline__ void stage(int round, const float (&sums)[kColumns / 2]) {
        const int thread = reload_thread(), group = thread / 128 - 1, warp = thread / 32 % 4, lane = thread % 32;
        ptx::mbarrier_wait(ptx::smem_address(&shared.staged_empty[group]), (round & 1) ^ 1);
        const uint32_t target = ptx::smem_address(shared.staged[group]) + (warp * 16 + lane % 16) * (kColumns * 2);
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2)  // lane l gives the address of row l % 16 in column block n + l / 16
            ptx::stmatrix_x4(target + ((n + lane / 16) ^ (lane % 8)) * 16,
                             ptx::pack_bf16x2(sums[4 * n], sums[4 * n + 1]), ptx::pack_bf16x2(sums[4 * n + 2], sums[4 * n + 3]),
                             ptx::pack_bf16x2(sums[4 * n + 4], sums[4 * n + 5]), ptx::pack_bf16x2(sums[4 * n + 6], sums[4 * n + 7]));
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.staged_full[group]));
    }
};

// Three warps, 64 columns each: staged rows -> scaled, rotated -> global memory
__device__ void store(SharedStorage& shared, const ScaledGemmParams& p) {
    constexpr int kBatch = 4;  // rows of a lane whose loads are under way together
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = static_cast<int>(threadIdx.x) / 32 * 8 - 8 + lane % 8;
    int round = 0;
    for (Tile tile = find_tile(p, 0); tile.exists; tile = find_tile(p, ++round)) {
        const int column = tile.first_column + chunk * 8;
        const bool inside = column < tile.last_column;
        const int rotary = p.table == nullptr ? -1 : column % p.head_dim - (p.head_dim - p.rope_dim);
        uint32_t column_bits[4] = {};
        if (inside) {
            const float4 low = reinterpret_cast<const float4*>(p.weight_scale + column)[0];
            const float4 high = reinterpret_cast<const float4*>(p.weight_scale + column)[1];
            column_bits[0] = scale_bits(low.x) | scale_bits(low.y) << 16;
            column_bits[1] = scale_bits(low.z) | scale_bits(low.w) << 16;
            column_bits[2] = scale_bits(high.x) | scale_bits(high.y) << 16;
            column_bits[3] = scale_bits(high.z) | scale_bits(high.w) << 16;
        }
#pragma unroll 1
        for (int group = 0; group < kConsumers; ++group) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.staged_full[group]), round & 1);
            const uint8_t* staged = shared.staged[group];
            const int first_row = tile.first_row + group * kPartRows;
            const int rows = inside ? p.num_rows - first_row : 0;
#pragma unroll 1
            for (int batch = lane / 8; batch < kPartRows; batch += 4 * kBatch) {
                float scale[kBatch] = {};
                uint4 v[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int row = batch + 4 * i;
                    v[i] = *reinterpret_cast<const uint4*>(staged + row * (kColumns * 2) + (chunk ^ (row % 8)) * 16);
                    if (row < rows) scale[i] = p.row_scale[static_cast<int64_t>(first_row + row) * p.groups + tile.group];
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int row = batch + 4 * i;
                    if (row >= rows) continue;
                    const uint32_t bits = scale_bits(scale[i]) * 0x10001u;
                    v[i].x = bf16x2_product(bf16x2_product(v[i].x, column_bits[0]), bits);
                    v[i].y = bf16x2_product(bf16x2_product(v[i].y, column_bits[1]), bits);
                    v[i].z = bf16x2_product(bf16x2_product(v[i].z, column_bits[2]), bits);
                    v[i].w = bf16x2_product(bf16x2_product(v[i].w, column_bits[3]), bits);
                    if (rotary >= 0)
                        v[i] = rotate_eight(v[i], p.table + static_cast<int64_t>(p.positions[first_row + row]) * p.rope_dim + rotary, false);
                    *reinterpret_cast<uint4*>(p.out + (first_row + row) * p.out_stride + column) = v[i];
                }
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.staged_empty[group]));
        }
    }
}

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
        for (int group = 0; group < kConsumers; ++group) {
            ptx::mbarrier_init(ptx::smem_address(&shared.staged_full[group]), 4);
            ptx::mbarrier_init(ptx::smem_address(&shared.staged_empty[group]), 3);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) produce(shared, params, maps);
        if (threadIdx.x >= 32) store(shared, params);
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
                                 {static_cast<uint64_t>(params.codes_stride)}, {kBlockK, kRows}});
    maps.columns = make_tensor_map({"linear.scaled_gemm: weight", TmaType::kUint8, params.weight, 2,
                                    {k, static_cast<uint64_t>(params.num_columns)}, {k}, {kBlockK, kColumns / kCluster},
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    const int tiles = ceil_div(params.num_rows, kCluster * kRows) * ceil_div(params.num_columns / params.groups, kColumns) * params.groups;
    const auto clusters = static_cast<unsigned>(min_of(tiles, num_sms / kCluster));
    launch(op, scaled_gemm_sm90_kernel,
           {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), params.stream, kCluster}, params, maps);
}

}  // namespace mdi::linear
