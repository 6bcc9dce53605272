// Dense product of row-scaled FP8 operands with FP8 wgmma (sm_90a):
//     out[t, o] = bf16( sum over k of codes[t, g, k] * weight[o, k] * row_scale[t, g] ) * weight_scale[o],   g = o / (O / groups)
// The tensor core's own sums have about 14 bits: after every 128 of K they are multiplied by the row's scale and added to fp32
// sums. Weight scales are powers of two and are applied after the rounding. An output's bits depend on its row of codes and
// its row of weights only, not on T or its place in a tile.
//
// A cluster of two blocks computes 256 rows x 256 columns, each block 128 of the rows. Both blocks need the same weights: each
// fetches half of them by TMA and multicasts. Block roles (384 threads):
//   warp 0     TMA into a ring of four stages of 128 of K: 128 rows of codes and 256 of weights (128-byte swizzle)
//   warp 1     the scales and the place of the next tile
//   warpgroups 1, 2 (64 rows each)    per stage, for each half of the columns: wait for the chain of four wgmma m64n128k32
//     that is under way, add what it brought to the half's sums, issue the next chain. The other warpgroup's chain runs meanwhile.
// A chain is always under way: those of the next tile's first stage are issued before the halves of a tile are stored, each
// half just before the chain whose result takes its place. After the last tile one chain more runs over whatever is there.
//
// What limits it, measured on an H200: a stage takes 1.06 of its tensor cycles, and the clock is what the power limit leaves (1.5 GHz).
// Storing a tile takes the time of about two stages more, latencies of shared memory and TMA mostly, whatever K is; and the last
// round of tiles may not fill the GPU. If it leaves half of the clusters without a tile, its tiles are cut in two (128 columns each):
// a half takes 0.7 of the time of a whole one. Otherwise narrower tiles are slower: 192 columns (of one chain or two) take 1.31 of
// their tensor cycles a stage, 224 columns 1.1. No difference: multicast or not; prefetching into L2 makes it slower.
//
// Epilogue, per warp and half: sums -> bf16 -> weight scales -> stmatrix -> two boxes of 16 rows x 64 columns -> TMA store,
// which leaves out what lies outside the result.
// Tiles: rows fastest, so that weights are read from memory once and codes stay in L2.
//
// Barriers: full[s] counts the block's own producer, with all bytes of both halves; empty[s] one arrival per consumer warp of
// both blocks, because a stage is overwritten in both at once: lane r of a warp arrives in block r; info_full[i] the lanes of
// warp 1, info_empty[i] the consumer warps.
// Shared memory 226 KiB: ring 4 x 48, staging 32, infos 2. Registers 232 x 256 + 40 x 128: 128 fp32 sums, 64 of the tensor core.
// SASS: QGMMA
// Limits: K a multiple of 16, O of 8; of several groups O / groups a multiple of 64. Rows and columns past the end are read as
// zeros and not written.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/tma_sm90.h"
#include "common/wgmma_sm90.cuh"
#include "linear/linear.h"

namespace mdi::linear {
namespace {

constexpr int kCluster = 2;
constexpr int kRows = 128;                    // of a block
constexpr int kHalves = 2, kHalf = 128;       // of a tile's columns
constexpr int kColumns = kHalves * kHalf;
constexpr int kBlockK = 128;
constexpr int kStages = 4;
constexpr int kConsumerWarps = 8, kWarpRows = 16;
constexpr int kThreads = 128 + 32 * kConsumerWarps;
constexpr int kBox = 64;                      // columns of a store
constexpr int kBoxBytes = kWarpRows * kBox * 2;
constexpr int kInfos = 2;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// What the consumers want to know about a tile
struct alignas(16) Info {
    // Lane l multiplies the pairs 8 n + 2 (l % 4) of a row of sums: those of one l % 4 lie together, padded against bank conflicts
    static constexpr int kPitch = kColumns / 8 + 4;
    float rows[kRows];
    uint32_t columns[4 * kPitch];  // pairs of bf16
    int first_row, first_column, last_column;
};

struct SharedStorage {
    alignas(1024) uint8_t rows[kStages][kRows * kBlockK];        // 128-byte swizzle
    alignas(1024) uint8_t columns[kStages][kColumns * kBlockK];  // the same
    alignas(1024) uint8_t staged[kConsumerWarps][kHalf / kBox * kBoxBytes];  // the same
    Info info[kInfos];
    alignas(8) uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t info_full[kInfos];
    uint64_t info_empty[kInfos];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

struct Maps {
    CUtensorMap rows;     // boxes of 128 rows x 128 bytes
    CUtensorMap columns[kHalves];  // [halves of a tile - 1]: boxes of half of those weight rows x 128 bytes
    CUtensorMap out;      // boxes of 16 rows x 64 columns
};

__host__ __device__ __forceinline__ int tiles_of(const Fp8Params& p) {  // of clusters
    return ceil_div(p.num_rows, kCluster * kRows) * ceil_div(p.num_columns / p.groups, kColumns) * p.groups;
}

__device__ __forceinline__ int num_clusters() { return static_cast<int>(gridDim.x) / kCluster; }

// How many tiles are worked on whole: if the last round's leave half of the clusters without one, they are cut in two.
__device__ __forceinline__ int whole_tiles(const Fp8Params& p) {
    const int tiles = tiles_of(p), last = tiles % num_clusters();
    return kHalves * last <= num_clusters() ? tiles - last : tiles;
}

// This block's tile of a round: `halves` times 128 columns from first_column of `group`, up to last_column
struct Tile {
    int first_row, first_column, last_column, group, halves;
    bool exists;
};

__device__ __forceinline__ Tile find_tile(const Fp8Params& p, int round) {
    const int row_tiles = ceil_div(p.num_rows, kCluster * kRows), group_columns = p.num_columns / p.groups;
    const int column_tiles = ceil_div(group_columns, kColumns);  // of a group
    const int dealt = static_cast<int>(blockIdx.x) / kCluster + round * num_clusters(), whole = whole_tiles(p);
    const int cut = dealt < whole ? 0 : dealt - whole;  // number of this half
    const int tile = dealt < whole ? dealt : whole + cut / kHalves;
    const int column_tile = tile / row_tiles, group = column_tile / column_tiles;
    return {((tile - column_tile * row_tiles) * kCluster + static_cast<int>(ptx::cluster_rank())) * kRows,
            group * group_columns + (column_tile - group * column_tiles) * kColumns + cut % kHalves * kHalf,
            (group + 1) * group_columns, group, dealt < whole ? kHalves : 1, group < p.groups};
}

// One thread fills the ring: this block's rows, and its half of the weights for both blocks.
__device__ void produce(SharedStorage& shared, const Fp8Params& p, const Maps& maps) {
    const int rank = static_cast<int>(ptx::cluster_rank()), num_steps = ceil_div(p.k, kBlockK);
    int stage = 0;
    uint32_t phase = 0;
    const auto wait_empty = [&] { ptx::mbarrier_wait(ptx::smem_address(&shared.empty[stage]), phase ^ 1); };
    for (int round = 0;; ++round) {
        const Tile tile = find_tile(p, round);
        if (!tile.exists) break;
        const CUtensorMap* map = &maps.columns[tile.halves - 1];
        const int columns = tile.halves * kHalf, share = rank * columns / kCluster;
        for (int step = 0; step < num_steps; ++step) {
            wait_empty();
            const uint32_t full = ptx::smem_address(&shared.full[stage]);
            ptx::mbarrier_arrive_expect_tx(full, (kRows + columns) * kBlockK);
            ptx::tma_load_2d(ptx::smem_address(shared.rows[stage]), &maps.rows, full, tile.group * p.k + step * kBlockK,
                             tile.first_row);
            ptx::tma_load_2d_multicast(ptx::smem_address(shared.columns[stage]) + share * kBlockK, map, full, step * kBlockK,
                                       tile.first_column + share, 0x3);
            if (++stage == kStages) stage = 0, phase ^= 1;
        }
    }
    wait_empty();
    ptx::mbarrier_arrive(ptx::smem_address(&shared.full[stage]));  // the chain after the last tile waits for it
}

// One warp: scales and place of each tile
__device__ void inform(SharedStorage& shared, const Fp8Params& p) {
    constexpr int kRowTimes = kRows / 32, kPairTimes = kColumns / 2 / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int round = 0;; ++round) {
        const Tile tile = find_tile(p, round);
        if (!tile.exists) break;
        float rows[kRowTimes];
        uint32_t pairs[kPairTimes];
#pragma unroll
        for (int i = 0; i < kRowTimes; ++i) {
            const int row = tile.first_row + lane + 32 * i;
            rows[i] = row < p.num_rows ? p.row_scale[static_cast<int64_t>(row) * p.groups + tile.group] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kPairTimes; ++i) {
            const int column = tile.first_column + 2 * (lane + 32 * i);
            const float2 v = column < tile.last_column ? *reinterpret_cast<const float2*>(p.weight_scale + column) : float2{};
            pairs[i] = ptx::pack_bf16x2(v.x, v.y);
        }
        const int slot = round % kInfos;
        Info& info = shared.info[slot];
        ptx::mbarrier_wait(ptx::smem_address(&shared.info_empty[slot]), (round / kInfos % 2) ^ 1);
#pragma unroll
        for (int i = 0; i < kRowTimes; ++i) info.rows[lane + 32 * i] = rows[i];
#pragma unroll
        for (int i = 0; i < kPairTimes; ++i) {
            const int pair = lane + 32 * i;
            info.columns[pair % 4 * Info::kPitch + pair / 4] = pairs[i];
        }
        if (lane == 0) info.first_row = tile.first_row, info.first_column = tile.first_column, info.last_column = tile.last_column;
        ptx::mbarrier_arrive(ptx::smem_address(&shared.info_full[slot]));
    }
}

// Read anew: what depends on it is computed again instead of kept in registers or spilled.
__device__ __forceinline__ int lane_number() {
    uint32_t number;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(number));
    return static_cast<int>(number);
}

// K-major descriptor with 128-byte swizzle from its low word, in which alone the operands of a block differ (smem_descriptor_k128)
__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return uint64_t{0x40000040} << 32 | low; }
__device__ __forceinline__ uint32_t descriptor_low(uint32_t smem) { return smem >> 4 | 1u << 16; }

struct Consumer {
    SharedStorage& shared;
    const Maps& maps;
    int warp;                       // of the consumers
    bool releases;
    uint32_t rows, columns;       // low words of the descriptors of stage 0
    uint32_t full, empty;         // barriers of stage 0 (empty: in block lane % 2)
    uint32_t stage = 0, phase = 0;  // of the chain under way

    __device__ __forceinline__ Consumer(SharedStorage& shared, const Maps& maps) : shared(shared), maps(maps) {
        // a broadcast, so that the compiler knows these to be the same in a warp and keeps them in uniform registers
        const uint32_t base = __shfl_sync(0xffffffffu, ptx::smem_address(&shared), 0);
        warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0) - 4;
        const int lane = lane_number();
        rows = descriptor_low(base + static_cast<uint32_t>(offsetof(SharedStorage, rows)) + warp / 4 * 64 * kBlockK);
        columns = descriptor_low(base + static_cast<uint32_t>(offsetof(SharedStorage, columns)));
        full = base + static_cast<uint32_t>(offsetof(SharedStorage, full));
        releases = lane < kCluster;
        empty = ptx::map_to_rank(base + static_cast<uint32_t>(offsetof(SharedStorage, empty)), lane % kCluster);
    }

    __device__ __forceinline__ void wait_full() const { ptx::mbarrier_wait(full + stage * 8, phase); }

    // This warpgroup's 64 rows times a half of the stage's weight rows
    __device__ __forceinline__ void multiply(int half, float (&part)[kHalf / 2]) const {
        const uint64_t a = descriptor(rows + stage * (kRows * kBlockK / 16));
        const uint64_t b = descriptor(columns + stage * (kColumns * kBlockK / 16) + half * (kHalf * kBlockK / 16));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
            wgmma_e4m3_ss<kHalf>(part, advance_descriptor(a, 32 * j), advance_descriptor(b, 32 * j), j > 0);
        wgmma_commit();
    }

    // The chain of `half` ends: add(part), and the next chain begins, of the next stage if this half is the stage's last.
    template <class Add>
    __device__ __forceinline__ void turn(int half, bool last, float (&part)[kHalf / 2], const Add& add) {
        const uint32_t now = stage;
        if (last) {
            const bool wrap = stage == kStages - 1;
            stage = wrap ? 0 : stage + 1;
            phase ^= wrap;
            wait_full();
        }
        wgmma_wait<0>();
        fence_registers(part);
        if (last && releases) ptx::mbarrier_arrive_remote_read(empty + now * 8);  // done with the stage, in both blocks
        add();
        fence_registers(part);
        multiply(last ? 0 : half + 1, part);
    }

    // This warp's rows of a half: sums -> result
    __device__ __forceinline__ void store(int half, const Info& info, const float (&sums)[kHalf / 2]) const {
        constexpr int kBlocks = kBox / 8;  // of eight columns, in a box
        const int lane = lane_number();
        const uint32_t staged = ptx::smem_address(shared.staged[warp]);
        // lane l gives the address of row l % 16 in column block n + l / 16, which the swizzle has at (n + l / 16) ^ (l % 8) of a box
        const uint32_t row = staged + lane % 16 * (kBox * 2);
        const uint32_t swizzled = (lane / 16) ^ (lane % 8);
        const uint32_t* scales = info.columns + lane % 4 * Info::kPitch + half * kHalf / 8;
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < kHalf / 8; n += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(scales + n);
            const uint32_t scale[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int m = n; m < n + 4; m += 2) {
                uint32_t v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[i] = bf16x2_product(ptx::pack_bf16x2(sums[4 * m + 2 * i], sums[4 * m + 2 * i + 1]), scale[m - n + i / 2]);
                ptx::stmatrix_x4(row + m / kBlocks * kBoxBytes + ((swizzled ^ (m % kBlocks)) << 4), v[0], v[1], v[2], v[3]);
            }
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            const int first_row = info.first_row + warp * kWarpRows, first_column = info.first_column + half * kHalf;
#pragma unroll
            for (int b = 0; b < kHalf / kBox; ++b)
                if (first_column + b * kBox < info.last_column)
                    ptx::tma_store_2d(&maps.out, staged + b * kBoxBytes, first_column + b * kBox, first_row);
            ptx::bulk_commit();
        }
    }

    __device__ __forceinline__ void run(const Fp8Params& p) {
        const int cluster = static_cast<int>(blockIdx.x) / kCluster, num_steps = ceil_div(p.k, kBlockK);
        const int whole = whole_tiles(p), num_cut = kHalves * (tiles_of(p) - whole);
        if (cluster >= whole + num_cut) return;
        float sums[kHalves][kHalf / 2], part[kHalf / 2], scale[2];
        const auto read_scales = [&](int round) {
            const int slot = round % kInfos;
            ptx::mbarrier_wait(ptx::smem_address(&shared.info_full[slot]), round / kInfos % 2);
            for (int i = 0; i < 2; ++i) scale[i] = shared.info[slot].rows[warp * kWarpRows + lane_number() / 4 + 8 * i];
        };
        const auto turns = [&](int half, bool last) {
            turn(half, last, part, [&] {
#pragma unroll
                for (int i = 0; i < kHalf / 2; ++i) sums[half][i] = fmaf(part[i], scale[i / 2 % 2], sums[half][i]);
            });
        };
        const auto clear = [&](int half) {
#pragma unroll
            for (int i = 0; i < kHalf / 2; ++i) sums[half][i] = 0.0f;
        };
        wait_full();
        multiply(0, part);
        read_scales(0);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) clear(half);
        int round = 0, step = 0;
        for (int tile = cluster; tile < whole; ++round) {
#pragma unroll 1
            for (; step < num_steps; ++step)
#pragma unroll
                for (int half = 0; half < kHalves; ++half) turns(half, half == kHalves - 1);
            tile += num_clusters();
            const bool more = tile < whole;
            if (more) read_scales(round + 1);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                store(half, shared.info[round % kInfos], sums[half]);
                clear(half);
                if (more) turns(half, half == kHalves - 1);
            }
            if (lane_number() == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.info_empty[round % kInfos]));
            step = 1;
        }
        if (cluster < num_cut) {  // the last tile is half of one
            read_scales(round);
#pragma unroll 1
            for (step = 0; step < num_steps; ++step) turns(0, true);
            store(0, shared.info[round % kInfos], sums[0]);
        }
        wgmma_wait<0>();
        fence_registers(part);
        if (lane_number() == 0) ptx::bulk_wait_read<0>();
    }
};

__global__ void __launch_bounds__(kThreads, 1)
    fp8_sm90_kernel(const __grid_constant__ Fp8Params params, const __grid_constant__ Maps maps) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem());
    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(&maps.rows);
        for (const CUtensorMap& map : maps.columns) ptx::prefetch_tensor_map(&map);
        ptx::prefetch_tensor_map(&maps.out);
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(ptx::smem_address(&shared.full[s]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.empty[s]), kCluster * kConsumerWarps);
        }
        for (int i = 0; i < kInfos; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&shared.info_full[i]), 32);
            ptx::mbarrier_init(ptx::smem_address(&shared.info_empty[i]), kConsumerWarps);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) produce(shared, params, maps);
        if (threadIdx.x / 32 == 1) inform(shared, params);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        Consumer(shared, maps).run(params);
    }
    ptx::cluster_arrive();  // the other block may still write into this one's shared memory
    ptx::cluster_wait();
}

}  // namespace

void launch_fp8_sm90(const Fp8Params& p) {
    const char* op = "linear.fp8";
    if (p.num_rows == 0 || p.num_columns == 0) return;
    int device = 0, num_sms = 0;
    check_cuda(op, cudaGetDevice(&device));
    check_cuda(op, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto k = static_cast<uint64_t>(p.k), groups = static_cast<uint64_t>(p.groups);
    const auto num_rows = static_cast<uint64_t>(p.num_rows), num_columns = static_cast<uint64_t>(p.num_columns);
    Maps maps;
    maps.rows = make_tensor_map({"linear.fp8: codes", TmaType::kUint8, p.codes, 2, {groups * k, num_rows}, {groups * k}, {kBlockK, kRows}});
    for (uint32_t halves = 1; halves <= kHalves; ++halves)
        maps.columns[halves - 1] = make_tensor_map({"linear.fp8: weight", TmaType::kUint8, p.weight, 2, {k, num_columns}, {k},
                                                    {kBlockK, halves * kHalf / kCluster}, CU_TENSOR_MAP_SWIZZLE_128B,
                                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    maps.out = make_tensor_map({"linear.fp8: out", TmaType::kBf16, p.out, 2, {num_columns, num_rows}, {2 * num_columns}, {kBox, kWarpRows}});
    const auto clusters = static_cast<unsigned>(min_of(kHalves * tiles_of(p), num_sms / kCluster));
    launch(op, fp8_sm90_kernel, {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), p.stream, kCluster}, p, maps);
}

}  // namespace mdi::linear
