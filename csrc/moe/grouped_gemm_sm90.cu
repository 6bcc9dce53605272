// Grouped product over experts with FP8 wgmma (sm_90a), MXFP4 weights in the packed layout of ops/packed_weight.py:
//     out[i, o] = bf16( sum_k A'[i, k] * B'[e(i), o, k] ) * 2^S_a(i) * 2^S_b(e, o)
// A' are the rows of fold_rows (one scale per row, columns reordered inside every 128), B' = E2M1 * 2^(byte - row's
// largest byte + 6), exact in E4M3 (docs/numerics.md). Both row scales are powers of two: applied after the rounding.
//
// Operands are swapped: the tensor core's M is output columns (weights, from registers), its N is rows (activations,
// from shared memory). So FP4 is expanded straight into the fragment and never written anywhere, and ragged experts
// cost rows in steps of 16: an expert's R rows are cut into ceil(R / 224) equal tiles, rounded up to 16.
//
// A cluster of two blocks computes 256 columns x up to 224 rows; both need the same rows, each fetches half of them
// by TMA and multicasts. Block roles (384 threads):
//   warp 0       into a ring of five stages of 128 columns of K: rows (128-byte swizzle) and FP4 words by TMA, and by a plain
//                copy the shifts: how far the scale of each group of 32 columns is below the largest of its row of weights
//   warp 1       the tiles of the next rounds, with their scales: searching is done by nobody who is waited for
//   warps 2, 3   finished rows of a warpgroup each, from shared memory to global, beside the next tile's products
//   warpgroups 1, 2 (64 columns each)   per stage, for each half of a tile wider than 176 rows (else once):
//     issue four wgmma m64nNk32 on the fragments of this stage; while they run, expand the next stage's weights into the
//     other set of fragments (during a tile's last stage those of the next tile's first) and read what the ones after that
//     are expanded from; then add the tensor core's sums, which have about 14 bits, to fp32 sums (promotion every 128).
//     The other warpgroup's wgmma run meanwhile.
//
// What limits it: a rule that fits the runs made on an H200, no more than a fit. A sub-partition of the SM takes as many
// cycles as it issues instructions, of any kind, plus three quarters of the wgmma's own; so the promotion hides in the
// fourth quarter and every other instruction adds a cycle. Why three quarters is a guess: a wgmma that reads its
// accumulators may keep other instructions from the register file, and the first of a chain of four reads none.
// The design follows the rule: wide tiles and long N (expansion and loop cost the same for any number of rows), two steps
// for each turn of the loop, everything of a stage at one address, no turns and no barriers between the warpgroups,
// and what can be computed once at the load is not computed here (seven instructions expand eight weights; with the signs
// where the checkpoint has them it takes nine, and the shifts took three warps). Registers set the limit of the width: 224
// rows are 112 fp32 sums, 56 of the tensor core and 32 of fragments; one chain of 176 rows 88, 88 and 32.
//
// Lane t of a quad owns scale group t of the 128 columns, 16 bytes per weight row: word j of them is its part of the
// j-th wgmma. Expansion is a byte look-up (prmt) in the eight magnitudes of the group's scale, then the signs.
// Epilogue in pieces of 32 rows: sums -> bf16 -> scales -> stmatrix transposed to [row][column] in one of three buffers, and
// from there the copying warp makes 16-byte stores of the rows that exist. Tiles of more than 96 rows wait for it, so it is
// written for 40 registers: four loads at a time before their stores.
//
// Tiles are dealt by descending width, back and forth (scheduler.cuh): all clusters get about the same work.
//
// Barriers: full[s] counts the producer, with all bytes of both halves; empty[s] counts one arrival per consumer warp
// of both blocks, because a stage is overwritten in both at once: lane r of a warp arrives in block r, after the wgmma
// that used what all lanes had read. Consumers wait two stages ahead, also past the last tile: there the producer arrives
// without having brought anything. ready and free of a TileInfo: warp 1 has written it, everybody else has read it.
// full and empty of a Piece: between a warpgroup and its copying warp.
// compute-sanitizer's racecheck does not follow __syncwarp to the arrival of another lane and reports the reads of the
// shifts (write after read, by the producer's next copy). With every lane arriving in its own block, which is 0.6 % slower,
// it reports nothing.
// Shared memory 223 KiB: ring 5 x 37, output 2 x 3 x 4, tiles 10, infos 3. Registers 232 x 256 + 40 x 128.
// SASS: QGMMA
// Limits: E <= 1024, K and O multiples of 32. Rows at or past offsets[E] are never written.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm90.cuh"
#include "common/tma_sm90.h"
#include "common/wgmma_sm90.cuh"
#include "moe/moe.h"
#include "moe/scheduler.cuh"

namespace mdi::moe {
namespace {

constexpr int kCluster = 2;
constexpr int kColumns = 128;                       // output columns of a block
constexpr int kMaxRows = 224;                       // rows of a tile
constexpr int kPieceRows = 32;                      // of a tile, on their way out at a time
constexpr int kPieces = 3;                          // buffers of a warpgroup
constexpr int kBlockK = 128;
constexpr int kStages = 5;
constexpr int kConsumers = 2;                       // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowStep = 16;                        // the width of a tile is a multiple of it
constexpr int kNumWidths = kMaxRows / kRowStep;
constexpr int kCodeBytes = kColumns * kBlockK / 2;  // FP4 weights of a stage
constexpr int kEmptyArrivals = kCluster * kConsumers * 4;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kConsumerRegisters * 256 + kProducerRegisters * 128 <= 168 * kThreads, "setmaxnreg: what the launch took");

using Scheduler = TileScheduler<kMaxRows, kCluster * kColumns, kThreads, true>;

// What a tile means for this block.
struct Work {
    int64_t first_row;  // of out and of folded
    int expert;
    int num_rows;       // 1 .. 224
    int width;          // num_rows rounded up to 16: the N of the product
    int first_column;   // of this block
};

// The cluster's tile of one round, laid out ahead by describe. Finding a tile takes longer than a step, for which the ring is
// not deep enough: while the producer did it, the product took 6 to 10 % longer.
struct alignas(16) TileInfo {
    Work work;
    int has_next;
    uint16_t rows[kMaxRows];     // scales of the rows, bf16
    uint16_t columns[kColumns];  // scales of the columns, 2^(largest byte - 127 - 6), bf16
    uint64_t ready, free;        // barriers
};
constexpr int kInfos = 4;
constexpr int kAhead = 2;  // stages that the consumers wait for past the last step of all; nothing is in them

// Everything of a stage at one distance from stage 0: the loop needs a single address for all of it.
struct Stage {
    alignas(1024) uint8_t rows[kMaxRows * kBlockK];  // [rows][128], 128-byte swizzle
    alignas(128) uint8_t codes[kCodeBytes];          // [column][64 bytes of FP4]
    uint32_t shifts[kColumns];  // byte g: 8 times the binades of group g below the column's largest, modulo 16
    uint64_t full, empty;
};

// Finished rows of a warpgroup
struct Piece {
    alignas(128) uint8_t rows[kPieceRows * 128];  // [row][64 columns bf16]; chunk c of row r at c ^ (r % 8)
    uint64_t full, empty;
};

struct SharedStorage {
    Stage stages[kStages];
    Piece pieces[kConsumers][kPieces];
    alignas(16) uint2 magnitudes[16];  // [d]: E4M3 bytes of 0 .5 1 1.5 2 3 4 6 times 2^(6 - d), d = 15: zeros
    Scheduler::Storage tiles;
    int num_tiles;
    TileInfo info[kInfos];  // of the cluster's tile of round r: r % kInfos
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

// One TMA map of the folded rows for each width: a block's share of the rows is one copy. One of the packed weights.
struct Maps {
    CUtensorMap half_of[kNumWidths];  // [width / 16 - 1]: boxes of width / 2 rows
    CUtensorMap codes;                // boxes of 64 bytes x kColumns output columns
};

__device__ __forceinline__ Work find_work(const SharedStorage& shared, const GroupedGemmSm90Params& p, int tile, int rank) {
    const Tile t = Scheduler::find(shared.tiles, p.num_experts, p.num_out, tile);
    const int share = align_up(ceil_div(t.expert_rows, t.num_row_tiles), kRowStep);  // <= 224, and no tile is left without rows
    const int rows = min(share, t.expert_rows - t.row_tile * share);
    return {static_cast<int64_t>(t.expert_begin) + t.row_tile * share, t.expert, rows, align_up(rows, kRowStep),
            t.first_column + rank * kColumns};
}

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

struct Ring {
    uint32_t offset = 0;  // of the stage, in bytes from the first
    uint32_t phase = 0;
    // At the end of the ring: offset = 0, phase ^= 1. Predicated by hand: the compiler's selects take more instructions.
    __device__ __forceinline__ void advance() {
        offset += sizeof(Stage);
        asm("{\n.reg .pred p;\nsetp.eq.u32 p, %0, %2;\n@p xor.b32 %1, %1, 1;\n@p mov.u32 %0, 0;\n}"
            : "+r"(offset), "+r"(phase)
            : "n"(kStages * sizeof(Stage)));
    }
    __device__ __forceinline__ Stage& stage(SharedStorage& shared) const {
        return *reinterpret_cast<Stage*>(reinterpret_cast<uint8_t*>(shared.stages) + offset);
    }
};

// -- producer ---------------------------------------------------------------------------------------------------------

// One thread fills the ring: this block's share of the rows for both blocks, and this block's weights.
__device__ void produce(SharedStorage& shared, const GroupedGemmSm90Params& p, const Maps& maps, int num_steps, int rank) {
    Ring ring;
    bool more = dealt(0) < shared.num_tiles;
    for (int round = 0; more; ++round) {
        TileInfo& info = shared.info[round % kInfos];
        ptx::mbarrier_wait(ptx::smem_address(&info.ready), round / kInfos & 1);
        const Work work = info.work;
        more = info.has_next;
        ptx::mbarrier_arrive(ptx::smem_address(&info.free));
        const int half = work.width / kCluster;
        const CUtensorMap* map = &maps.half_of[work.width / kRowStep - 1];
        const int y = static_cast<int>(work.first_row) + rank * half;
        const int column = work.expert * p.num_out + work.first_column;  // E * O <= 2^30
        const uint32_t shift_bytes = 4 * max(min(p.num_out - work.first_column, kColumns), 0);  // of the columns that exist
        const uint8_t* shifts =
            p.shifts + 4 * (static_cast<int64_t>(work.expert) * ceil_div(p.k, kBlockK) * p.num_out + work.first_column);
        for (int step = 0; step < num_steps; ++step, ring.advance(), shifts += 4 * p.num_out) {
            Stage& stage = ring.stage(shared);
            ptx::mbarrier_wait(ptx::smem_address(&stage.empty), ring.phase ^ 1);
            const uint32_t full = ptx::smem_address(&stage.full);
            const uint32_t here = step * kBlockK < p.k ? shift_bytes : 0;
            ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(work.width * kBlockK + kCodeBytes) + here);
            if (here > 0) ptx::bulk_load(ptx::smem_address(stage.shifts), shifts, here, full);
            ptx::tma_load_2d(ptx::smem_address(stage.codes), &maps.codes, full, step * (kBlockK / 2), column);
            const uint32_t target = ptx::smem_address(stage.rows) + rank * half * kBlockK;
            ptx::tma_load_2d_multicast(target, map, full, step * kBlockK, y, 0x3);
        }
    }
    for (int i = 0; i < kAhead; ++i, ring.advance()) {
        Stage& stage = ring.stage(shared);
        ptx::mbarrier_wait(ptx::smem_address(&stage.empty), ring.phase ^ 1);
        ptx::mbarrier_arrive(ptx::smem_address(&stage.full));
    }
}

// bf16 bits of 2^(byte - 127 - down), down = 0 or 6; byte 255 is NaN
__device__ __forceinline__ uint16_t power_of_two(uint32_t byte, uint32_t down) {
    if (byte == 255) return 0x7fc0u;
    return static_cast<uint16_t>(byte > down ? (byte - down) << 7 : 0x40u >> (down - byte));
}

// One warp: the cluster's tiles and their scales, up to kInfos tiles ahead.
__device__ void describe(SharedStorage& shared, const GroupedGemmSm90Params& p, int num_tiles, int rank) {
    constexpr int kPerLane = kColumns / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int round = 0;; ++round) {
        const int tile = dealt(round);
        if (tile >= num_tiles) break;
        const Work work = find_work(shared, p, tile, rank);
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
        if (lane == 0) {
            info.work = work;
            info.has_next = dealt(round + 1) < num_tiles;
        }
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
__device__ void copy_out(SharedStorage& shared, const GroupedGemmSm90Params& p, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t first_piece = ptx::smem_address(&shared.pieces[group][0]);
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
        more = info.has_next;
        ptx::mbarrier_arrive(ptx::smem_address(&info.free));
        uint8_t* out = reinterpret_cast<uint8_t*>(p.out + row * p.num_out + column);
        const uint32_t stride = 8 * static_cast<uint32_t>(p.num_out);  // bytes from row to row of this lane
        for (; width > 0; width -= kPieceRows, ++count) {
            const uint32_t piece = first_piece + count % kPieces * static_cast<uint32_t>(sizeof(Piece));
            ptx::mbarrier_wait(piece + static_cast<uint32_t>(offsetof(Piece, full)), count / kPieces & 1);
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
            ptx::mbarrier_arrive(piece + static_cast<uint32_t>(offsetof(Piece, empty)));
        }
    }
}

// Computed once: the compiler would do it again at every use.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// -- weights: shared memory -> fragments ---------------------------------------------------------------------------------

// prmt.b32, opaque: the compiler would otherwise mask the two halves of an index word separately
__device__ __forceinline__ uint32_t look_up(uint2 bytes, uint32_t index) {
    uint32_t d;
#if defined(__CUDA_ARCH__)
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(bytes.x), "r"(bytes.y), "r"(index));
#else
    d = __byte_perm(bytes.x, bytes.y, index);
#endif
    return d;
}

// Eight E2M1 codes -> eight E4M3 codes (columns 0..3 and 4..7 of the word): the magnitude by look-up, then the signs, which
// the word's layout holds in place, four at a time.
__device__ __forceinline__ void expand_word(uint32_t word, uint2 magnitudes, uint32_t& low, uint32_t& high) {
    const uint32_t index = word & 0x77777777u;
    low = look_up(magnitudes, index) | (word << 4 & 0x80808080u);
    high = look_up(magnitudes, index >> 16) | (word & 0x80808080u);
}

// What row l / 4 + 8 r of the fragments of a step is expanded from.
struct RawWeights {
    uint4 codes;
    uint2 magnitudes;
};

// a[j][r] K bytes 4t.. of wgmma j, a[j][2 + r] K bytes 16 + 4t..
__device__ __forceinline__ void expand_row(const RawWeights& raw, int r, uint32_t (&a)[4][4]) {
    expand_word(raw.codes.x, raw.magnitudes, a[0][r], a[0][2 + r]);
    expand_word(raw.codes.y, raw.magnitudes, a[1][r], a[1][2 + r]);
    expand_word(raw.codes.z, raw.magnitudes, a[2][r], a[2][2 + r]);
    expand_word(raw.codes.w, raw.magnitudes, a[3][r], a[3][2 + r]);
}

// -- product ------------------------------------------------------------------------------------------------------------

// wgmma m64nNk32 e4m3 with A from registers, for the N that are not among the common shapes. C = N / 2 registers of D.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define MDI_TEXT_4 "%0, %1, %2, %3"
#define MDI_TEXT_8 MDI_TEXT_4 ", %4, %5, %6, %7"
#define MDI_TEXT_12 MDI_TEXT_8 ", %8, %9, %10, %11"
#define MDI_TEXT_16 MDI_TEXT_12 ", %12, %13, %14, %15"
#define MDI_TEXT_20 MDI_TEXT_16 ", %16, %17, %18, %19"
#define MDI_TEXT_24 MDI_TEXT_20 ", %20, %21, %22, %23"
#define MDI_TEXT_28 MDI_TEXT_24 ", %24, %25, %26, %27"
#define MDI_TEXT_32 MDI_TEXT_28 ", %28, %29, %30, %31"
#define MDI_TEXT_36 MDI_TEXT_32 ", %32, %33, %34, %35"
#define MDI_TEXT_40 MDI_TEXT_36 ", %36, %37, %38, %39"
#define MDI_TEXT_44 MDI_TEXT_40 ", %40, %41, %42, %43"
#define MDI_TEXT_48 MDI_TEXT_44 ", %44, %45, %46, %47"
#define MDI_TEXT_52 MDI_TEXT_48 ", %48, %49, %50, %51"
#define MDI_TEXT_56 MDI_TEXT_52 ", %52, %53, %54, %55"
#define MDI_TEXT_60 MDI_TEXT_56 ", %56, %57, %58, %59"
#define MDI_TEXT_64 MDI_TEXT_60 ", %60, %61, %62, %63"
#define MDI_TEXT_68 MDI_TEXT_64 ", %64, %65, %66, %67"
#define MDI_TEXT_72 MDI_TEXT_68 ", %68, %69, %70, %71"
#define MDI_TEXT_76 MDI_TEXT_72 ", %72, %73, %74, %75"
#define MDI_TEXT_80 MDI_TEXT_76 ", %76, %77, %78, %79"
#define MDI_TEXT_84 MDI_TEXT_80 ", %80, %81, %82, %83"
#define MDI_TEXT_88 MDI_TEXT_84 ", %84, %85, %86, %87"
#define MDI_D_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MDI_D_8 MDI_D_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MDI_D_12 MDI_D_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define MDI_D_16 MDI_D_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MDI_D_20 MDI_D_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define MDI_D_24 MDI_D_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MDI_D_28 MDI_D_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define MDI_D_32 MDI_D_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MDI_D_36 MDI_D_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define MDI_D_40 MDI_D_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MDI_D_44 MDI_D_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define MDI_D_48 MDI_D_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MDI_D_52 MDI_D_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define MDI_D_56 MDI_D_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MDI_D_60 MDI_D_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define MDI_D_64 MDI_D_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MDI_D_68 MDI_D_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define MDI_D_72 MDI_D_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MDI_D_76 MDI_D_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define MDI_D_80 MDI_D_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MDI_D_84 MDI_D_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define MDI_D_88 MDI_D_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
// clang-format on
#define MDI_MULTIPLY(N, C, A0, A1, A2, A3, B, P)                                                                         \
    if constexpr (kN == N)                                                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                     \
                 "k32.f32.e4m3.e4m3 {" MDI_TEXT_##C "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;\n}\n" \
                 : MDI_D_##C                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(static_cast<uint32_t>(accumulate)))
#endif

template <int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t descriptor, bool accumulate) {
    if constexpr (kN == 32 || kN == 64 || kN == 128) wgmma_e4m3_rs<kN>(d, a, descriptor, accumulate);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    MDI_MULTIPLY(16, 8, 8, 9, 10, 11, 12, 13);
    MDI_MULTIPLY(48, 24, 24, 25, 26, 27, 28, 29);
    MDI_MULTIPLY(80, 40, 40, 41, 42, 43, 44, 45);
    MDI_MULTIPLY(96, 48, 48, 49, 50, 51, 52, 53);
    MDI_MULTIPLY(104, 52, 52, 53, 54, 55, 56, 57);
    MDI_MULTIPLY(112, 56, 56, 57, 58, 59, 60, 61);
    MDI_MULTIPLY(144, 72, 72, 73, 74, 75, 76, 77);
    MDI_MULTIPLY(160, 80, 80, 81, 82, 83, 84, 85);
    MDI_MULTIPLY(176, 88, 88, 89, 90, 91, 92, 93);
#endif
}

// ld.shared by address: of a register, a uniform register and a constant, without an instruction to add them
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Shared-memory addresses of a thread in stage 0: its first row of the weights, the barriers (empty: of block lane % 2); and the
// low word of the rows' descriptor, which holds the address
struct Lane {
    uint32_t codes, shifts, full, empty, descriptor;
    __device__ __forceinline__ Lane(const SharedStorage& shared, int consumer_thread) {
        const uint32_t base = ptx::smem_address(shared.stages);
        const int place = (consumer_thread / 32 * 16 + consumer_thread % 32 / 4) * 4 + consumer_thread % 4;
        codes = opaque(base + static_cast<uint32_t>(offsetof(Stage, codes)) + place * 16);
        shifts = opaque(base + static_cast<uint32_t>(offsetof(Stage, shifts)) + place);
        descriptor = opaque(static_cast<uint32_t>(smem_descriptor_k128(base)));
        full = opaque(base + static_cast<uint32_t>(offsetof(Stage, full)));
        empty = ptx::map_to_rank(base + static_cast<uint32_t>(offsetof(Stage, empty)), consumer_thread % kCluster);
    }

    // Descriptor of the rows of the stage at `offset`, without the carry of a 64-bit addition
    __device__ __forceinline__ uint64_t rows(uint32_t offset) const {
        const auto high = static_cast<uint32_t>(smem_descriptor_k128(0) >> 32);
        uint64_t v;
        asm("mov.b64 %0, {%1, %2};" : "=l"(v) : "r"(descriptor + (offset >> 4)), "r"(high));
        return v;
    }
};

struct Consumer {
    SharedStorage& shared;
    const GroupedGemmSm90Params& p;
    int thread;   // of the warpgroup
    int group;    // 0 or 1
    uint32_t now = 0, next = sizeof(Stage);  // offsets of this step's stage and the next's
    Ring following;                          // the stage after them
    uint32_t num_pieces = 0;                 // handed over

    // Reads the thread number anew: what depends on it is computed again instead of kept in registers or spilled.
    __device__ __forceinline__ void reload_thread() {
        uint32_t number = threadIdx.x;
#if defined(__CUDA_ARCH__)
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
#endif
        thread = static_cast<int>(number % 128);
        group = static_cast<int>(number / 128) - 1;
    }

    // Row r of the weights of the stage at `offset`
    __device__ __forceinline__ RawWeights read_row(uint32_t offset, const Lane& lane, int r) const {
        RawWeights raw;
        const uint32_t shift = load_shared_byte(lane.shifts + offset + r * 8 * 4);
        raw.codes = ptx::load_shared_v4(lane.codes + offset + r * 8 * (kBlockK / 2));
        raw.magnitudes = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(shared.magnitudes) + shift);
        return raw;
    }

    __device__ __forceinline__ void wait_following(const Lane& lane) const {
        ptx::mbarrier_wait(lane.full + following.offset, following.phase);
    }

    __device__ __forceinline__ void advance() {
        now = next;
        next = following.offset;
        following.advance();
    }

    // One step: multiply each half of the rows with the fragments `a`; while the tensor cores do it, expand the next step's
    // into `b`. `raw` holds the next step's row 0 at the beginning and the one after the next's at the end.
    template <int kN, int kHalves>
    __device__ __forceinline__ void run_step(bool never, const Lane& lane, uint32_t (&a)[4][4],
                                             uint32_t (&b)[4][4], RawWeights& raw, float (&part)[kN / 2],
                                             float (&sums)[kHalves][kN / 2]) {
        const uint64_t descriptor = lane.rows(now);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const bool last = half == kHalves - 1;
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply<kN>(part, a[j], advance_descriptor(descriptor, half * kN * kBlockK + 32 * j), j > 0 || never);
            wgmma_commit();
            if (!never) {  // always: the branch keeps ptxas from moving the expansion behind the wait
                if (kHalves == 1) {
                    const RawWeights other = read_row(next, lane, 1);
                    expand_row(raw, 0, b);
                    expand_row(other, 1, b);
                } else {
                    expand_row(raw, half, b);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) fence_registers(b[j]);
                if (last) wait_following(lane);
                raw = read_row(last ? following.offset : next, lane, last ? 0 : 1);
            }
            if (last) __syncwarp();  // all lanes have read what they want of the stage
            wgmma_wait<0>();
            fence_registers(part);
            if (last && thread % 32 < kCluster) ptx::mbarrier_arrive_remote_read(lane.empty + now);  // done with the stage, in both blocks
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) sums[half][i] += part[i];
        }
        advance();
    }

    // The fragments of the first step of all, and what row 0 of the second's are expanded from
    __device__ __forceinline__ void begin(uint32_t (&a)[4][4], RawWeights& raw) {
        const Lane lane(shared, group * 128 + thread);
        wait_following(lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) expand_row(read_row(0, lane, r), r, a);
        following.advance();
        wait_following(lane);
        raw = read_row(next, lane, 0);
        following.advance();
    }

    // Sums of a tile's kWidth rows -> bf16 -> scaled -> [row][64 columns] in shared memory, for copy_out
    template <int kWidth>
    __device__ __forceinline__ void hand_over(const TileInfo& info, const float* sums) {
        const int warp = thread / 32, lane = thread % 32;
        const uint16_t* columns = info.columns + group * 64 + warp * 16 + lane / 4;  // of this thread: this one and 8 on
        const uint32_t factors[2] = {columns[0] * 0x10001u, columns[8] * 0x10001u};
        const uint32_t first_piece = ptx::smem_address(&shared.pieces[group][0]);
        const uint32_t place = ((lane / 16) * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
        for (int first = 0; first < kWidth; first += kPieceRows, ++num_pieces) {
            const uint32_t piece = first_piece + num_pieces % kPieces * sizeof(Piece);
            uint32_t scales[kPieceRows / 8];  // of two rows each
#pragma unroll
            for (int n = 0; n < kPieceRows / 8; ++n)
                if (first + n * 8 < kWidth)
                    scales[n] = *reinterpret_cast<const uint32_t*>(info.rows + first + n * 8 + lane % 4 * 2);
            ptx::mbarrier_wait(piece + static_cast<uint32_t>(offsetof(Piece, empty)), num_pieces / kPieces & 1 ^ 1);
#pragma unroll
            for (int n = 0; n < kPieceRows / 8; n += 2)  // matrices: columns 0..7 and 8..15 of rows 8n.., then of rows 8n + 8..
                if (first + n * 8 < kWidth) {
                    uint32_t v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = sums + first / 2 + 4 * n + 2 * i;
                        v[i] = bf16x2_product(bf16x2_product(ptx::pack_bf16x2(pair[0], pair[1]), factors[i % 2]), scales[n + i / 2]);
                    }
                    ptx::stmatrix_x4_trans(piece + place + n * 8 * 128, v[0], v[1], v[2], v[3]);
                }
            ptx::mbarrier_arrive(piece + static_cast<uint32_t>(offsetof(Piece, full)));
        }
    }

    // One tile of kHalves * kN rows
    template <int kN, int kHalves>
    __device__ __forceinline__ void run_tile(const TileInfo& info, uint32_t (&a)[4][4], RawWeights& raw) {
        const int num_steps = steps_of(p);
        // the first product of a chain must not see a constant: ptxas would add a fence (wgmma_sm90.cuh)
        const bool never = p.num_out < 0;
        float sums[kHalves][kN / 2], part[kN / 2];
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            part[i] = 0.0f;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) sums[half][i] = 0.0f;
        }
        reload_thread();
        const Lane lane(shared, group * 128 + thread);
        for (int step = 0; step < num_steps; step += 2) {
            uint32_t b[4][4];
            run_step<kN, kHalves>(never, lane, a, b, raw, part, sums);
            run_step<kN, kHalves>(never, lane, b, a, raw, part, sums);
        }
        reload_thread();
        hand_over<kHalves * kN>(info, &sums[0][0]);
    }
};

__device__ __forceinline__ void consume(SharedStorage& shared, const GroupedGemmSm90Params& p) {
    Consumer consumer{shared, p, static_cast<int>(threadIdx.x) % 128, static_cast<int>(threadIdx.x) / 128 - 1};
    if (dealt(0) >= shared.num_tiles) return;
    uint32_t a[4][4];
    RawWeights raw;
    consumer.begin(a, raw);
    for (int round = 0;; ++round) {
        TileInfo& info = shared.info[round % kInfos];
        ptx::mbarrier_wait(ptx::smem_address(&info.ready), round / kInfos & 1);
        switch (info.work.width) {
            case 16: consumer.run_tile<16, 1>(info, a, raw); break;
            case 32: consumer.run_tile<32, 1>(info, a, raw); break;
            case 48: consumer.run_tile<48, 1>(info, a, raw); break;
            case 64: consumer.run_tile<64, 1>(info, a, raw); break;
            case 80: consumer.run_tile<80, 1>(info, a, raw); break;
            case 96: consumer.run_tile<96, 1>(info, a, raw); break;
            case 112: consumer.run_tile<112, 1>(info, a, raw); break;
            case 128: consumer.run_tile<128, 1>(info, a, raw); break;
            case 144: consumer.run_tile<144, 1>(info, a, raw); break;
            case 160: consumer.run_tile<160, 1>(info, a, raw); break;
            case 176: consumer.run_tile<176, 1>(info, a, raw); break;
            case 192: consumer.run_tile<96, 2>(info, a, raw); break;
            case 208: consumer.run_tile<104, 2>(info, a, raw); break;
            default: consumer.run_tile<112, 2>(info, a, raw); break;
        }
        const bool has_next = info.has_next;
        ptx::mbarrier_arrive(ptx::smem_address(&info.free));
        if (!has_next) break;
    }
}

// The eight magnitudes of E2M1 times 2^(6 - d) as E4M3 bytes; 15 and above: zeros.
__device__ uint2 magnitude_bytes(int d) {
    uint32_t words[2] = {0, 0};
    for (int i = 0; i < 8; ++i) {
        const float value = d < 15 ? e2m1_decode(static_cast<uint8_t>(i)) * bits_float((127u + 6u - d) << 23) : 0.0f;
        words[i / 4] |= static_cast<uint32_t>(e4m3_encode(value)) << (8 * (i % 4));
    }
    return make_uint2(words[0], words[1]);
}

__global__ void __launch_bounds__(kThreads, 1) grouped_gemm_sm90_kernel(const __grid_constant__ GroupedGemmSm90Params params,
                                                                        const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) uint8_t smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);
    const int thread = static_cast<int>(threadIdx.x);
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int num_steps = steps_of(params);
    if (thread == 0) {
        for (int i = 0; i < kNumWidths; ++i) ptx::prefetch_tensor_map(&maps.half_of[i]);
        ptx::prefetch_tensor_map(&maps.codes);
        for (Stage& stage : shared.stages) {
            ptx::mbarrier_init(ptx::smem_address(&stage.full), 1);
            ptx::mbarrier_init(ptx::smem_address(&stage.empty), kEmptyArrivals);
        }
        for (TileInfo& info : shared.info) {
            ptx::mbarrier_init(ptx::smem_address(&info.ready), 32);
            ptx::mbarrier_init(ptx::smem_address(&info.free), (128 + 32) * kConsumers + 1);
        }
        for (Piece& piece : reinterpret_cast<Piece(&)[kConsumers * kPieces]>(shared.pieces)) {
            ptx::mbarrier_init(ptx::smem_address(&piece.full), 128);
            ptx::mbarrier_init(ptx::smem_address(&piece.empty), 32);
        }
        ptx::fence_mbarrier_init();
    }
    if (thread >= 32 && thread < 48) shared.magnitudes[thread - 32] = magnitude_bytes(thread - 32);
    for (int i = thread; i < kStages * kColumns; i += kThreads)  // a stage that was never filled is read, as addresses
        shared.stages[i / kColumns].shifts[i % kColumns] = 0;
    Scheduler::build(shared.tiles, params.offsets, params.num_experts);
    const int num_tiles = Scheduler::num_tiles(shared.tiles, params.num_experts, params.num_out);
    if (thread == 0) shared.num_tiles = num_tiles;
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();

    if (thread < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (thread == 0) produce(shared, params, maps, num_steps, rank);
        if (thread >= 32 && thread < 64) describe(shared, params, num_tiles, rank);
        if (thread >= 64) copy_out(shared, params, thread / 32 - 2);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        consume(shared, params);
    }
    ptx::cluster_arrive();  // the other block may still write into this one's shared memory
    ptx::cluster_wait();
}

}  // namespace

void launch_grouped_gemm_sm90(const GroupedGemmSm90Params& params) {
    const char* op = "moe.grouped_gemm_sm90";
    if (params.num_rows == 0 || params.num_experts == 0 || params.num_out == 0) return;
    int device = 0, num_sms = 0;
    check_cuda(op, cudaGetDevice(&device));
    check_cuda(op, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto padded = static_cast<uint64_t>(align_up(params.k, kBlockK));
    Maps maps;
    for (int i = 0; i < kNumWidths; ++i)
        maps.half_of[i] = make_tensor_map({"moe.grouped_gemm_sm90: folded", TmaType::kUint8, params.folded, 2,
                                           {padded, static_cast<uint64_t>(params.num_rows)}, {padded},
                                           {kBlockK, static_cast<uint32_t>((i + 1) * kRowStep / kCluster)}});
    const auto row_bytes = static_cast<uint64_t>(params.k / 2);
    maps.codes = make_tensor_map({"moe.grouped_gemm_sm90: words", TmaType::kUint8, params.words, 2,
                                  {row_bytes, static_cast<uint64_t>(params.num_experts) * static_cast<uint64_t>(params.num_out)},
                                  {row_bytes}, {kBlockK / 2, kColumns}, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
    const int64_t most_tiles =
        min_of<int64_t>(params.num_rows, ceil_div<int64_t>(params.num_rows, kMaxRows) + params.num_experts) *
        ceil_div(params.num_out, kCluster * kColumns);
    const auto clusters = static_cast<unsigned>(min_of<int64_t>(most_tiles, num_sms / kCluster));
    launch(op, grouped_gemm_sm90_kernel,
           {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), params.stream, kCluster}, params, maps);
}

}  // namespace mdi::moe
