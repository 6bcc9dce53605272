// Grouped product over experts with FP8 wgmma (sm_90a), MXFP4 weights as stored:
//     out[i, o] = bf16( sum_k A'[i, k] * B'[e(i), o, k] ) * 2^S_a(i) * 2^S_b(e, o)
// A' are the rows of fold_rows (one scale per row, columns reordered inside every 128), B' = E2M1 * 2^(byte - row's
// largest byte + 6), exact in E4M3 (performance.md 5). Both row scales are powers of two: applied after the rounding.
//
// Operands are swapped: the tensor core's M is output columns (weights, from registers), its N is rows (activations,
// from shared memory). So FP4 is expanded straight into the fragment and never written anywhere, and ragged experts
// cost rows in steps of 32: an expert's R rows are cut into ceil(R / 128) equal tiles, rounded up to 32.
//
// A cluster of two blocks computes 256 columns x up to 128 rows; both need the same rows, each fetches half of them
// by TMA and multicasts. Block roles (384 threads):
//   warpgroup 0   one warp: TMA into a ring of eight stages of [rows][128 columns] (128-byte swizzle), L2 prefetch of weights
//   warpgroups 1, 2 (64 columns each)   per step of 128 columns of K:
//     four wgmma m64nNk32 on the fragments of this step
//     meanwhile: expand the next step's weights, which were loaded from global memory two steps before
//     then add the tensor core's sums, which have about 14 bits, to fp32 sums (promotion every 128)
// Lane t of a quad owns scale group t of the 128 columns, one 16-byte load per weight row: word j of it is its part of
// the j-th wgmma. Expansion is a byte look-up (prmt) in the eight magnitudes of the group's scale, then the signs.
// Epilogue: sums -> bf16 -> stmatrix transposed to [row][column] -> scales -> 16-byte stores of rows that exist.
// The next tile's first weights are requested before the epilogue.
//
// Barriers: full[s] counts the block's own producer (with all bytes of both halves); empty[s] counts one arrival per
// consumer warp of both blocks, because a stage is overwritten in both at once.
// Shared memory 169 KiB: ring 8 x 16, output tiles 2 x 16, tiles 8. Registers 232 x 256 + 40 x 128.
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
constexpr int kMaxRows = 128;                       // rows of a tile
constexpr int kBlockK = 128;
constexpr int kStages = 8;
constexpr int kConsumers = 2;                       // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowStep = 32;                        // the width of a tile is a multiple of it
constexpr int kNumWidths = kMaxRows / kRowStep;
constexpr int kStageBytes = kMaxRows * kBlockK;
constexpr int kEmptyArrivals = kCluster * kConsumers * 4;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kConsumerRegisters * 256 + kProducerRegisters * 128 <= 65536, "register file");

using Scheduler = TileScheduler<kMaxRows, kCluster * kColumns, kThreads>;

struct SharedStorage {
    alignas(1024) uint8_t ring[kStages][kStageBytes];          // [rows][128], 128-byte swizzle
    alignas(1024) uint8_t staged[kConsumers][kMaxRows * 128];  // [row][64 columns bf16]; chunk c of row r at c ^ (r % 8)
    alignas(16) uint2 magnitudes[16];  // [d]: E4M3 bytes of 0 .5 1 1.5 2 3 4 6 times 2^(6 - d), d = 15: zeros
    alignas(8) uint64_t full[kStages];
    alignas(8) uint64_t empty[kStages];
    Scheduler::Storage tiles;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "shared memory");

// One TMA map of the folded rows for each width: a block's half of the rows is one copy.
struct RowMaps {
    CUtensorMap half_of[kNumWidths];  // [width / 32 - 1]: boxes of width / 2 rows
};

// What a tile means for this block.
struct Work {
    int expert;
    int64_t first_row;  // of out and of folded
    int num_rows;       // 1 .. 128
    int width;          // num_rows rounded up to 32: the N of the product
    int first_column;   // of this block
};

__device__ __forceinline__ Work find_work(const SharedStorage& shared, const GroupedGemmSm90Params& p, int tile, int rank) {
    const Tile t = Scheduler::find(shared.tiles, p.num_experts, p.num_out, tile);
    const int share = align_up(ceil_div(t.expert_rows, t.num_row_tiles), kRowStep);  // <= 128, and no tile is left without rows
    const int rows = min(share, t.expert_rows - t.row_tile * share);
    return {t.expert, static_cast<int64_t>(t.expert_begin) + t.row_tile * share, rows, align_up(rows, kRowStep),
            t.first_column + rank * kColumns};
}

struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// -- producer ---------------------------------------------------------------------------------------------------------

// prefetch.global.L2: the line that holds `address`
__device__ __forceinline__ void prefetch_line(const uint8_t* address) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
#endif
}

// One warp: lane 0 fills the ring; every lane asks for the weights of four output columns ahead of the consumers, who
// load them two steps before use, too late for a miss to DRAM. The ring paces both.
__device__ void produce(SharedStorage& shared, const GroupedGemmSm90Params& p, const RowMaps& maps, int num_tiles,
                        int num_steps, int rank) {
    constexpr int kRowsPerLane = kColumns / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row_bytes = p.k / 2, groups = p.k / 32;
    Ring ring;
    for (int tile = static_cast<int>(blockIdx.x) / kCluster; tile < num_tiles; tile += static_cast<int>(gridDim.x) / kCluster) {
        const Work work = find_work(shared, p, tile, rank);
        const int half = work.width / kCluster;
        const CUtensorMap* map = &maps.half_of[work.width / kRowStep - 1];
        const int y = static_cast<int>(work.first_row) + rank * half;
        const int column = work.first_column + lane * kRowsPerLane;
        const int num_rows = max(0, min(kRowsPerLane, p.num_out - column));
        const int64_t weight_row = static_cast<int64_t>(work.expert) * p.num_out + column;
        const uint8_t* codes = p.weight + weight_row * row_bytes;
        const uint8_t* scales = p.weight_scale + weight_row * groups;  // of consecutive rows: one run of bytes
        for (int byte = 0; byte < num_rows * groups; byte += 64) prefetch_line(scales + byte);
        for (int step = 0; step < num_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ptx::smem_address(&shared.empty[ring.stage]), ring.phase ^ 1);
            if (lane == 0) {
                const uint32_t full = ptx::smem_address(&shared.full[ring.stage]);
                ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(work.width * kBlockK));
                const uint32_t target = ptx::smem_address(shared.ring[ring.stage]) + rank * half * kBlockK;
                ptx::tma_load_2d_multicast(target, map, full, step * kBlockK, y, 0x3);
            }
            if (step % 2 == 0)
                for (int byte = 64 * step; byte < min(64 * step + 128, row_bytes); byte += 64)
                    for (int r = 0; r < num_rows; ++r) prefetch_line(codes + r * row_bytes + byte);
            __syncwarp();
        }
    }
}

// -- weights: global memory -> registers -> fragments -------------------------------------------------------------------

struct RawWeights {
    uint4 codes[2];      // this lane's 32 columns of fragment rows l / 4 and l / 4 + 8
    uint32_t scale[2];   // their scale bytes
};

struct WeightRows {
    const uint8_t* codes;   // row l / 4 of the warp's 16 columns of out, at this lane's group of step 0
    const uint8_t* scale;
    int num_groups;         // of K, from this lane's first one on: group 4 * step is valid below it
    bool valid[2];          // the output column exists
    uint32_t largest[2];    // largest scale byte of the row
};

__device__ __forceinline__ WeightRows weight_rows(const GroupedGemmSm90Params& p, const Work& work, int thread) {
    const int warp = thread / 32, lane = thread % 32, group = lane % 4;
    const int column = work.first_column + warp * 16 + lane / 4;
    const int64_t row = static_cast<int64_t>(work.expert) * p.num_out + column;
    WeightRows rows;
    rows.codes = p.weight + row * (p.k / 2) + group * 16;
    rows.scale = p.weight_scale + row * (p.k / 32) + group;
    rows.num_groups = p.k / 32 - group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.valid[r] = column + 8 * r < p.num_out;
        rows.largest[r] = rows.valid[r] ? p.weight_row[row + 8 * r] : 0;
    }
    return rows;
}

// ld.global.nc with the whole 128-byte line brought into L2: the next step reads its other half
__device__ __forceinline__ uint4 load_codes(const uint8_t* address) {
    uint4 v;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
#else
    v = ptx::load_streaming(address);
#endif
    return v;
}

__device__ __forceinline__ void load_weights(const GroupedGemmSm90Params& p, const WeightRows& rows, int step, RawWeights& raw) {
    const bool in_k = 4 * step < rows.num_groups;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        raw.codes[r] = make_uint4(0, 0, 0, 0);
        raw.scale[r] = 0;
        if (in_k && rows.valid[r]) {
            raw.codes[r] = load_codes(rows.codes + static_cast<int64_t>(r) * 4 * p.k + step * 64);
            raw.scale[r] = rows.scale[static_cast<int64_t>(r) * 8 * (p.k / 32) + 4 * step];
        }
    }
}

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

// Eight E2M1 codes -> eight E4M3 codes (columns 0..3 and 4..7 of the word): the magnitude by look-up, then the signs,
// which prmt gathers into the top bits of the bytes.
__device__ __forceinline__ void expand_word(uint32_t word, uint2 magnitudes, uint32_t& low, uint32_t& high) {
    const uint32_t index = word & 0x77777777u;
    const uint32_t shifted = word << 4;
    low = look_up(magnitudes, index) | (__byte_perm(shifted, word, 0x5140) & 0x80808080u);
    high = look_up(magnitudes, index >> 16) | (__byte_perm(shifted, word, 0x7362) & 0x80808080u);
}

// Fragments of the four wgmma of a step: a[j][r] row r * 8 and K bytes 4t.., a[j][2 + r] the same row, K bytes 16 + 4t..
__device__ __forceinline__ void expand_weights(const SharedStorage& shared, const WeightRows& rows, const RawWeights& raw,
                                               uint32_t (&a)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint2 magnitudes = shared.magnitudes[min(rows.largest[r] - raw.scale[r], 15u)];
        expand_word(raw.codes[r].x, magnitudes, a[0][r], a[0][2 + r]);
        expand_word(raw.codes[r].y, magnitudes, a[1][r], a[1][2 + r]);
        expand_word(raw.codes[r].z, magnitudes, a[2][r], a[2][2 + r]);
        expand_word(raw.codes[r].w, magnitudes, a[3][r], a[3][2 + r]);
    }
}

// -- product ------------------------------------------------------------------------------------------------------------

// wgmma m64nNk32 e4m3 with A from registers; N = 96 is not among the common shapes
template <int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t descriptor, bool accumulate) {
    if constexpr (kN != 96) {
        wgmma_e4m3_rs<kN>(d, a, descriptor, accumulate);
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47}, {%48, %49, %50, %51}, %52, p, 1, 1;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
              "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
              "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
              "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
              "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
              "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(static_cast<uint32_t>(accumulate)));
#elif !defined(__CUDACC__)
        wgmma_e4m3_rs<kN>(d, a, descriptor, accumulate);
#endif
    }
}

// mbarrier.arrive.shared::cluster on block `rank`: releases a stage that was only read, by wgmma that have completed.
// Not .release.cluster: it adds a fence at GPU scope, which waits for the weights in flight.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier, uint32_t rank) {
#if defined(__CUDA_ARCH__)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx::map_to_rank(barrier, rank)) : "memory");
#else
    ptx::mbarrier_arrive_remote(ptx::map_to_rank(barrier, rank));
#endif
}

struct Consumer {
    SharedStorage& shared;
    const GroupedGemmSm90Params& p;
    int num_steps;
    int thread;   // of the warpgroup
    int group;    // 0 or 1
    Ring ring;

    // One step: multiply with `now`, expand the next step into `next` from `raw`, then refill `raw` for step + 3.
    template <int kN>
    __device__ __forceinline__ void run_step(int step, bool never, const WeightRows& rows, RawWeights& raw,
                                             uint32_t (&now)[4][4], uint32_t (&next)[4][4], float (&part)[kN / 2],
                                             float (&sums)[kN / 2]) {
        ptx::mbarrier_wait(ptx::smem_address(&shared.full[ring.stage]), ring.phase);
        const uint64_t descriptor = smem_descriptor_k128(ptx::smem_address(shared.ring[ring.stage]));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply<kN>(part, now[j], advance_descriptor(descriptor, 32 * j), j > 0 || never);
        wgmma_commit();
        if (step + 1 < num_steps) {
            expand_weights(shared, rows, raw, next);
            if (step + 3 < num_steps) load_weights(p, rows, step + 3, raw);
#pragma unroll
            for (int j = 0; j < 4; ++j) fence_registers(next[j]);  // expanded before the wait, not after it
        }
        wgmma_wait<0>();
        fence_registers(part);
        if (thread % 32 < kCluster)  // this warp is done with the stage in both blocks
            arrive_in_block(ptx::smem_address(&shared.empty[ring.stage]), thread % 32);
        ring.advance();
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sums[i] += part[i];
    }

    // Everything the epilogue wants from global memory, requested before anything waits.
    template <int kN>
    struct StoreScales {
        uint2 columns;          // scale bytes of this thread's eight columns
        float rows[kN / 16];    // scales of rows thread / 8 + 16 i
    };

    template <int kN>
    __device__ __forceinline__ void load_scales(const Work& work, StoreScales<kN>& scales) {
        const int column = work.first_column + group * 64 + thread % 8 * 8;
        scales.columns = make_uint2(0, 0);
        if (column < p.num_out)
            scales.columns = *reinterpret_cast<const uint2*>(p.weight_row + static_cast<int64_t>(work.expert) * p.num_out + column);
#pragma unroll
        for (int i = 0; i < kN / 16; ++i) {
            const int row = thread / 8 + 16 * i;
            scales.rows[i] = row < work.num_rows ? p.row_scale[work.first_row + row] : 0.0f;
        }
    }

    // Sums -> bf16 -> [row][64 columns] in shared memory -> scaled -> global.
    template <int kN>
    __device__ __forceinline__ void store(const Work& work, const StoreScales<kN>& scales, const float (&sums)[kN / 2]) {
        const int warp = thread / 32, lane = thread % 32;
        uint8_t* staged = shared.staged[group];
        ptx::named_barrier_sync(1 + group, 128);  // the warpgroup has read the previous tile
        const uint32_t base = ptx::smem_address(staged) + ((lane / 16) * 8 + lane % 8) * 128 +
                              ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
        for (int n = 0; n < kN / 8; n += 2)  // matrices: columns 0..7 and 8..15 of rows 8n.., then of rows 8n + 8..
            ptx::stmatrix_x4_trans(base + n * 8 * 128, ptx::pack_bf16x2(sums[4 * n], sums[4 * n + 1]),
                                   ptx::pack_bf16x2(sums[4 * n + 2], sums[4 * n + 3]),
                                   ptx::pack_bf16x2(sums[4 * n + 4], sums[4 * n + 5]),
                                   ptx::pack_bf16x2(sums[4 * n + 6], sums[4 * n + 7]));
        ptx::named_barrier_sync(1 + group, 128);
        const int chunk = thread % 8, column = work.first_column + group * 64 + chunk * 8;
        if (column >= p.num_out) return;
        uint32_t factors[4];  // 2^(byte - 127 - 6) of the eight columns, bf16 pairs
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = (i < 2 ? scales.columns.x : scales.columns.y) >> (16 * (i % 2));
            factors[i] = column_factor(pair & 0xffu) | column_factor(pair >> 8 & 0xffu) << 16;
        }
#pragma unroll
        for (int i = 0; i < kN / 16; ++i) {
            const int row = thread / 8 + 16 * i;
            if (row >= work.num_rows) break;
            const uint32_t bits = float_bits(scales.rows[i]) >> 16;  // a power of two, or NaN
            const uint32_t scale = bits | bits << 16;
            uint4 v = *reinterpret_cast<const uint4*>(staged + row * 128 + (chunk ^ (row % 8)) * 16);
            v.x = bf16x2_product(bf16x2_product(v.x, factors[0]), scale);
            v.y = bf16x2_product(bf16x2_product(v.y, factors[1]), scale);
            v.z = bf16x2_product(bf16x2_product(v.z, factors[2]), scale);
            v.w = bf16x2_product(bf16x2_product(v.w, factors[3]), scale);
            *reinterpret_cast<uint4*>(p.out + (work.first_row + row) * p.num_out + column) = v;
        }
    }

    // bf16 bits of 2^(byte - 133); byte 255 is NaN
    static __device__ __forceinline__ uint32_t column_factor(uint32_t byte) {
        if (byte == 255) return 0x7fc0u;
        return byte > 6 ? (byte - 6) << 7 : 1u << byte;
    }

    // One tile of width kN. Weights of its first two steps are already on their way into raw0 and raw1; those of the
    // next tile are requested before the epilogue.
    template <int kN>
    __device__ __forceinline__ void run_tile(const Work& work, const Work& next_work, bool has_next, bool never,
                                             WeightRows& rows, RawWeights& raw0, RawWeights& raw1) {
        float sums[kN / 2], part[kN / 2];
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sums[i] = part[i] = 0.0f;
        uint32_t even[4][4], odd[4][4];
        expand_weights(shared, rows, raw0, even);
        if (num_steps > 2) load_weights(p, rows, 2, raw0);
        for (int step = 0; step < num_steps; step += 2) {
            run_step<kN>(step, never, rows, raw1, even, odd, part, sums);
            if (step + 1 < num_steps) run_step<kN>(step + 1, never, rows, raw0, odd, even, part, sums);
        }
        StoreScales<kN> scales;
        load_scales<kN>(work, scales);
        if (has_next) request(next_work, rows, raw0, raw1);
        store<kN>(work, scales, sums);
    }

    __device__ __forceinline__ void request(const Work& work, WeightRows& rows, RawWeights& raw0, RawWeights& raw1) {
        Work own = work;
        own.first_column += group * 64;
        rows = weight_rows(p, own, thread);
        load_weights(p, rows, 0, raw0);
        if (num_steps > 1) load_weights(p, rows, 1, raw1);
    }
};

__device__ __forceinline__ void consume(SharedStorage& shared, const GroupedGemmSm90Params& p, int num_tiles, int num_steps, int rank) {
    Consumer consumer{shared, p, num_steps, static_cast<int>(threadIdx.x) % 128, static_cast<int>(threadIdx.x) / 128 - 1, {}};
    const int stride = static_cast<int>(gridDim.x) / kCluster;
    int tile = static_cast<int>(blockIdx.x) / kCluster;
    if (tile >= num_tiles) return;
    // the first product of a chain must not see a constant: ptxas would add a fence (wgmma_sm90.cuh)
    const bool never = p.num_out < 0;
    WeightRows rows;
    RawWeights raw0, raw1;
    Work work = find_work(shared, p, tile, rank);
    consumer.request(work, rows, raw0, raw1);
    while (true) {
        tile += stride;
        const bool has_next = tile < num_tiles;
        const Work next = has_next ? find_work(shared, p, tile, rank) : work;
        switch (work.width) {
            case 32: consumer.run_tile<32>(work, next, has_next, never, rows, raw0, raw1); break;
            case 64: consumer.run_tile<64>(work, next, has_next, never, rows, raw0, raw1); break;
            case 96: consumer.run_tile<96>(work, next, has_next, never, rows, raw0, raw1); break;
            default: consumer.run_tile<128>(work, next, has_next, never, rows, raw0, raw1); break;
        }
        if (!has_next) break;
        work = next;
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
                                                                        const __grid_constant__ RowMaps maps) {
    extern __shared__ __align__(1024) uint8_t smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);
    const int thread = static_cast<int>(threadIdx.x);
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int num_steps = ceil_div(params.k, kBlockK);
    if (thread == 0) {
        for (int i = 0; i < kNumWidths; ++i) ptx::prefetch_tensor_map(&maps.half_of[i]);
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(ptx::smem_address(&shared.full[s]), 1);
            ptx::mbarrier_init(ptx::smem_address(&shared.empty[s]), kEmptyArrivals);
        }
        ptx::fence_mbarrier_init();
    }
    if (thread >= 32 && thread < 48) shared.magnitudes[thread - 32] = magnitude_bytes(thread - 32);
    Scheduler::build(shared.tiles, params.offsets, params.num_experts);
    const int num_tiles = Scheduler::num_tiles(shared.tiles, params.num_experts, params.num_out);
    ptx::cluster_arrive();  // both blocks' barriers exist before anyone signals them
    ptx::cluster_wait();

    if (thread < 128) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (thread < 32) produce(shared, params, maps, num_tiles, num_steps, rank);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        consume(shared, params, num_tiles, num_steps, rank);
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
    RowMaps maps;
    for (int i = 0; i < kNumWidths; ++i)
        maps.half_of[i] = make_tensor_map({"moe.grouped_gemm_sm90: folded", TmaType::kUint8, params.folded, 2,
                                           {padded, static_cast<uint64_t>(params.num_rows)}, {padded},
                                           {kBlockK, static_cast<uint32_t>((i + 1) * kRowStep / kCluster)}});
    const int64_t most_tiles =
        min_of<int64_t>(params.num_rows, ceil_div<int64_t>(params.num_rows, kMaxRows) + params.num_experts) *
        ceil_div(params.num_out, kCluster * kColumns);
    const auto clusters = static_cast<unsigned>(min_of<int64_t>(most_tiles, num_sms / kCluster));
    launch(op, grouped_gemm_sm90_kernel,
           {dim3(clusters * kCluster), dim3(kThreads), sizeof(SharedStorage), params.stream, kCluster}, params, maps);
}

}  // namespace mdi::moe
