// The shared memory of grouped_gemm_sm90.cu, the ways to cut its ring, and the warps around the consumers: the one that fills the
// ring, the one that finds the tiles and those that carry finished rows out. Roles, barriers and reasons are described there.
#pragma once
#include "common/math.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/reduce.cuh"
#include "moe/moe.h"
#include "moe/scheduler.cuh"

namespace mdi::moe::sm90 {

constexpr int kCluster = 2;
constexpr int kColumns = 128;                       // output columns of a block
constexpr int kMaxRows = 288;                       // rows of a tile
constexpr int kPieceRows = 32;                      // of a tile, on their way out at a time
constexpr int kPieces = 3;                          // buffers of a warpgroup
constexpr int kBlockK = 128;
constexpr int kConsumers = 2;                       // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowStep = 8;                         // the width of a tile is a multiple of it
constexpr int kNumBoxes = kMaxRows / kCluster / kRowStep;
constexpr int kCodeBytes = kColumns * kBlockK / 2;  // FP4 weights of a stage
constexpr int kEmptyArrivals = kCluster * kConsumers * 4;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kConsumerRegisters * 256 + kProducerRegisters * 128 <= 168 * kThreads, "setmaxnreg: what the launch took");
constexpr int kCuts = 6;                            // ways to cut the ring into stages

using Scheduler = TileScheduler<kMaxRows, kCluster * kColumns, kThreads, true>;

// What a tile means for this block.
struct Work {
    int64_t first_row;  // of out and of folded
    int expert;
    int num_rows;       // 1 .. 288
    int width;          // width_of(num_rows), but not below least_width(cut): the rows that are multiplied
    int first_column;   // of this block
    int cut;            // of the ring
    int has_next;       // the cluster has a tile in the next round
};

// The cluster's tile of one round, laid out ahead by describe. Finding a tile takes longer than a step, for which the ring is
// not deep enough: while the producer did it, the product took 6 to 10 % longer.
struct alignas(16) TileInfo {
    Work work;
    uint16_t rows[kMaxRows];     // scales of the rows, bf16
    uint16_t columns[kColumns];  // scales of the columns, 2^(largest byte - 127 - 6), bf16
    uint64_t ready, free;        // barriers
};
constexpr int kInfos = 4;
constexpr int kAhead = 2;  // stages that the consumers wait for past the last step of all; nothing is in them

// A stage is this and the rows behind it, [rows][128] with 128-byte swizzle: as many as the widest tile of the cut has. Everything
// at one distance from stage 0: the loop needs a single address for all of it.
struct Stage {
    alignas(1024) uint8_t codes[kCodeBytes];  // [column][64 bytes of FP4]
    uint32_t shifts[kColumns];  // byte g: 8 times the binades of group g below the column's largest, modulo 16
    uint64_t full, empty;
};

// A tile's rows are multiplied in this many chains of wgmma, one after the other: the fewest that leave enough registers.
constexpr int chains_of(int width) { return width <= 176 ? 1 : width <= 240 ? 2 : width <= 272 ? 3 : 4; }
constexpr int chain_rows(int width) { return align_up(ceil_div(width, chains_of(width)), 8); }  // in the last chain maybe fewer

// The widths of tiles: multiples of 16 up to 80, of 8 up to 288
constexpr int width_of(int rows) { return align_up(rows, rows > 80 ? 8 : 16); }
constexpr int width_below(int width) { return width - (width > 80 ? 8 : 16); }

// Tiles of this many rows and fewer, down to the next cut, have the ring cut this way.
constexpr int most_rows(int cut) {
    return cut == 0 ? 32 : cut == 1 ? 80 : cut == 2 ? 144 : cut == 3 ? 176 : cut == 4 ? 224 : kMaxRows;
}
constexpr int least_width(int cut) { return cut == 0 ? width_of(1) : width_of(most_rows(cut - 1) + 1); }
constexpr uint32_t stage_bytes(int cut) { return static_cast<uint32_t>(sizeof(Stage)) + most_rows(cut) * kBlockK; }
constexpr uint32_t kRingBytes = 7 * stage_bytes(2);
constexpr uint32_t ring_end(int cut) { return kRingBytes / stage_bytes(cut) * stage_bytes(cut); }
static_assert(most_rows(kCuts - 1) == kMaxRows && ring_end(0) / stage_bytes(0) <= 32, "lay_out: one lane a stage");

// Finished rows of a warpgroup
struct Piece {
    alignas(128) uint8_t rows[kPieceRows * 128];  // [row][64 columns bf16]; chunk c of row r at c ^ (r % 8)
};
struct PieceBarriers {  // not in the Piece: its alignment would waste 112 bytes
    uint64_t full, empty;
};

struct SharedStorage {
    alignas(1024) uint8_t ring[kRingBytes];
    Piece pieces[kConsumers][kPieces];
    PieceBarriers piece_barriers[kConsumers][kPieces];
    alignas(16) uint2 magnitudes[16];  // [d]: E4M3 bytes of 0 .5 1 1.5 2 3 4 6 times 2^(6 - d), d = 15: zeros
    Scheduler::Storage tiles;
    int num_tiles;
    TileInfo info[kInfos];  // of the cluster's tile of round r: r % kInfos
    Work first;             // that of round 0, before its scales are there
    uint64_t laid_out;      // barrier: the ring is cut anew, in both blocks
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

// One TMA map of the folded rows for each number of them: a block's share of the rows is one copy. Two of the packed weights.
struct Maps {
    CUtensorMap rows[kNumBoxes];  // [rows / 8 - 1]: boxes of so many rows
    CUtensorMap codes;            // boxes of 64 bytes x kColumns output columns
    CUtensorMap shifts;           // boxes of a step x kColumns output columns
};

// Steps of a tile, an even number. Those past K multiply zeros.
__device__ __forceinline__ int steps_of(const GroupedGemmSm90Params& p) {
    return align_up(ceil_div(p.k, kBlockK), 2);
}

// This cluster's tile of a round. The registers are read where they are wanted, not kept.
__device__ __forceinline__ int dealt(int round) {
    uint32_t block = blockIdx.x, blocks = gridDim.x;
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
#endif
    return Scheduler::dealt(round, static_cast<int>(block) / kCluster, static_cast<int>(blocks) / kCluster);
}

// This cluster's tile of a round, which exists
__device__ __forceinline__ Work find_work(const SharedStorage& shared, const GroupedGemmSm90Params& p, int round, int num_tiles, int rank) {
    const Tile t = Scheduler::find(shared.tiles, p.num_experts, p.num_out, dealt(round));
    const int share = width_of(ceil_div(t.expert_rows, t.num_row_tiles));  // <= 288, and no tile is left without rows
    const int rows = min(share, t.expert_rows - t.row_tile * share);
    int cut = 0;  // that of the expert's other tiles: the order of the tiles is that of the cuts
    while (share > most_rows(cut)) ++cut;
    return {static_cast<int64_t>(t.expert_begin) + t.row_tile * share, t.expert, rows, max(width_of(rows), least_width(cut)),
            t.first_column + rank * kColumns, cut, dealt(round + 1) < num_tiles};
}

// Rows of a tile that block 0 fetches, the first ones: as many as block 1 or 8 more.
__device__ __forceinline__ int first_half(const Work& work) { return align_up(work.width / kCluster, kRowStep); }

// The map of this block's share of a tile's rows
__device__ __forceinline__ const CUtensorMap* map_of_rows(const Maps& maps, const Work& work, int rank) {
    return &maps.rows[(rank == 0 ? first_half(work) : work.width - first_half(work)) / kRowStep - 1];
}

// -- producer ---------------------------------------------------------------------------------------------------------

// One warp: the barriers of an empty ring, cut this way. Shifts that no copy brings are read, too, as addresses.
__device__ inline void lay_out(SharedStorage& shared, int cut) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (uint32_t offset = 0; offset < ring_end(cut); offset += stage_bytes(cut))
        reinterpret_cast<uint4*>(reinterpret_cast<Stage*>(shared.ring + offset)->shifts)[lane] = make_uint4(0, 0, 0, 0);
    if (lane * stage_bytes(cut) < ring_end(cut)) {
        Stage& stage = *reinterpret_cast<Stage*>(shared.ring + lane * stage_bytes(cut));
        ptx::mbarrier_init(ptx::smem_address(&stage.full), 1);
        ptx::mbarrier_init(ptx::smem_address(&stage.empty), kEmptyArrivals);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_cluster();
    __syncwarp();
}

// One warp fills the ring: this block's share of the rows for both blocks, and this block's weights. All lanes run all of it,
// and conditions are voted on, so that the compiler has the loop's variables in uniform registers; the elected lane acts.
struct Producer {
    SharedStorage& shared;
    const GroupedGemmSm90Params& p;
    const Maps& maps;
    int num_steps, rank;
    bool elected;
    int cut = -1;
    uint32_t step = 0, end = 0;      // stage_bytes and ring_end of the cut
    uint32_t offset = 0, phase = 0;  // of the next stage

    __device__ __forceinline__ void advance() {
        offset += step;
        if (offset == end) {
            offset = 0;
            phase ^= 1;
        }
    }

    // The address of the next stage, once it is empty
    __device__ __forceinline__ uint32_t wait_stage() const {
        const uint32_t stage = ptx::smem_address(shared.ring) + offset;
        ptx::mbarrier_wait(stage + static_cast<uint32_t>(offsetof(Stage, empty)), phase ^ 1);
        return stage;
    }

    // The stages of a tile
    __device__ __forceinline__ void fill(const Work& work) {
        const int first = rank * first_half(work);  // of the tile's rows
        const CUtensorMap* map = map_of_rows(maps, work, rank);
        const int y = static_cast<int>(work.first_row) + first;
        const int column = work.expert * p.num_out + work.first_column;  // E * O <= 2^30
        const int shifts = work.expert * ceil_div(p.k, kBlockK);
        const uint32_t rows = static_cast<uint32_t>(sizeof(Stage)) + first * kBlockK;  // in a stage
        const uint32_t bytes = static_cast<uint32_t>(work.width * kBlockK + kCodeBytes + sizeof(Stage::shifts));
        for (int i = 0; i < num_steps; ++i, advance()) {
            const uint32_t stage = wait_stage();
            const uint32_t full = stage + static_cast<uint32_t>(offsetof(Stage, full));
            if (elected) {
                ptx::mbarrier_arrive_expect_tx(full, bytes);
                ptx::tma_load_2d(stage, &maps.codes, full, i * (kBlockK / 2), column);
                ptx::tma_load_2d(stage + static_cast<uint32_t>(offsetof(Stage, shifts)), &maps.shifts, full, work.first_column,
                                 shifts + i);
                ptx::tma_load_2d_multicast(stage + rows, map, full, i * kBlockK, y, 0x3);
            }
        }
    }

    // Stages past the last step, which the consumers wait for
    __device__ __forceinline__ void fill_with_nothing() {
        for (int i = 0; i < kAhead; ++i, advance()) {
            const uint32_t stage = wait_stage();
            if (elected) ptx::mbarrier_arrive(stage + static_cast<uint32_t>(offsetof(Stage, full)));
        }
    }

    // The consumers of both blocks are through with what is in the ring, and its memory may be anything else.
    __device__ __forceinline__ void clear() {
        fill_with_nothing();
        for (uint32_t others = end - kAhead * step; others > 0; others -= step, advance()) wait_stage();
        const uint32_t own = threadIdx.x % 32 * step;  // a stage for each lane
        if (own < end) {
            Stage& stage = *reinterpret_cast<Stage*>(shared.ring + own);
            ptx::mbarrier_inval(ptx::smem_address(&stage.full));
            ptx::mbarrier_inval(ptx::smem_address(&stage.empty));
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        bool more = __any_sync(kFullWarp, dealt(0) < shared.num_tiles);
        uint32_t laid_out_phase = 0;
        for (int round = 0; more; ++round) {
            TileInfo& info = shared.info[round % kInfos];
            if (round > 0) ptx::mbarrier_wait(ptx::smem_address(&info.ready), round / kInfos & 1);
            const Work work = *(round > 0 ? &info.work : &shared.first);
            more = __any_sync(kFullWarp, work.has_next);
            __syncwarp();
            if (elected) ptx::mbarrier_arrive(ptx::smem_address(&info.free));
            if (__any_sync(kFullWarp, work.cut != cut)) {
                if (round > 0) {
                    clear();
                    lay_out(shared, work.cut);
                    const uint32_t lane = threadIdx.x % 32;
                    if (lane < kCluster) ptx::mbarrier_arrive_remote(ptx::map_to_rank(ptx::smem_address(&shared.laid_out), lane));
                    ptx::mbarrier_wait_cluster(ptx::smem_address(&shared.laid_out), laid_out_phase);
                    laid_out_phase ^= 1;
                }
                cut = work.cut;
                step = stage_bytes(cut);
                end = ring_end(cut);
                offset = phase = 0;
            }
            fill(work);
        }
        if (cut >= 0) fill_with_nothing();
    }
};

// bf16 bits of 2^(byte - 127 - down), down = 0 or 6; byte 255 is NaN
__device__ __forceinline__ uint16_t power_of_two(uint32_t byte, uint32_t down) {
    if (byte == 255) return 0x7fc0u;
    return static_cast<uint16_t>(byte > down ? (byte - down) << 7 : 0x40u >> (down - byte));
}

// One warp: the cluster's tiles and their scales, up to kInfos tiles ahead.
__device__ inline void describe(SharedStorage& shared, const GroupedGemmSm90Params& p, const Maps& maps, int num_tiles, int rank) {
    constexpr int kPerLane = kColumns / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int round = 0;; ++round) {
        if (dealt(round) >= num_tiles) break;
        const Work work = find_work(shared, p, round, num_tiles, rank);
        if (lane == 0) ptx::prefetch_tensor_map(map_of_rows(maps, work, rank));
        uint32_t exponents[kMaxRows / 32] = {}, largest[kPerLane] = {};
#pragma unroll
        for (int i = 0; i < kMaxRows / 32; ++i)
            if (lane + 32 * i < work.num_rows) exponents[i] = float_bits(p.row_scale[work.first_row + lane + 32 * i]);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (work.first_column + lane + 32 * i < p.num_out)
                largest[i] = p.largest[work.expert * p.num_out + work.first_column + lane + 32 * i];  // E * O <= 2^30
        TileInfo& info = shared.info[round % kInfos];
        ptx::mbarrier_wait(ptx::smem_address(&info.free), round / kInfos & 1 ^ 1);
        if (lane == 0) info.work = work;
#pragma unroll
        for (int i = 0; i < kMaxRows / 32; ++i) info.rows[lane + 32 * i] = power_of_two(exponents[i] >> 23, 0);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) info.columns[lane + 32 * i] = power_of_two(largest[i], 6);
        ptx::mbarrier_arrive(ptx::smem_address(&info.ready));
    }
}

// st.global.v4: the compiler would split it
__device__ __forceinline__ void store_global(void* address, const uint4& v) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
    *static_cast<uint4*>(address) = v;
#endif
}

// One warp for each warpgroup: finished rows, shared memory -> global.
__device__ inline void copy_out(SharedStorage& shared, const GroupedGemmSm90Params& p, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t first_piece = ptx::smem_address(&shared.pieces[group][0]);
    const uint32_t first_barriers = ptx::smem_address(&shared.piece_barriers[group][0]);
    const uint32_t place = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;  // of this lane's 16 bytes in rows 0..3; in rows 4..7: ^ 64
    int count = 0;  // of pieces
    bool more = dealt(0) < shared.num_tiles;
    for (int round = 0; more; ++round) {
        TileInfo& info = shared.info[round % kInfos];
        ptx::mbarrier_wait(ptx::smem_address(&info.ready), round / kInfos & 1);
        const int column = info.work.first_column + group * 64 + lane % 8 * 8;
        const int64_t row = info.work.first_row + lane / 8;
        int rows = column < p.num_out ? info.work.num_rows - lane / 8 : 0;  // left of the tile, from this lane's next one
        int width = info.work.width;
        more = info.work.has_next;
        ptx::mbarrier_arrive(ptx::smem_address(&info.free));
        uint8_t* out = reinterpret_cast<uint8_t*>(p.out + row * p.num_out + column);
        const uint32_t stride = 8 * static_cast<uint32_t>(p.num_out);  // bytes from row to row of this lane
        for (; width > 0; width -= kPieceRows, ++count) {
            const uint32_t piece = first_piece + count % kPieces * static_cast<uint32_t>(sizeof(Piece));
            const uint32_t barriers = first_barriers + count % kPieces * static_cast<uint32_t>(sizeof(PieceBarriers));
            ptx::mbarrier_wait(barriers + static_cast<uint32_t>(offsetof(PieceBarriers, full)), count / kPieces & 1);
#pragma unroll 1
            for (int i = 0; i < kPieceRows / 4; i += 4, rows -= 4 * 4) {
                const uint32_t from = piece + place + i * 4 * 128;
                uint4 values[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) values[j] = ptx::load_shared_v4((from ^ 64 * (j % 2)) + j * 4 * 128);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (4 * j < rows) store_global(out, values[j]);
                    out += stride;
                }
            }
            ptx::mbarrier_arrive(barriers + static_cast<uint32_t>(offsetof(PieceBarriers, empty)));
        }
    }
}

}  // namespace mdi::moe::sm90
