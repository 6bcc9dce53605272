// Grouped product over experts, activations E4M3 with one E8M0 scale per 32 columns, weights MXFP4 as stored:
//     out[i, o] = bf16( sum_k A[row(i), k] * B[e(i), o, k] ),  row(i) = a_rows ? a_rows[i] : i   (model spec 6.2)
//
// Both operands are exact in bf16 (e4m3 * 2^s has 4 significant bits, e2m1 * 2^s has 2), so the product is one bf16
// mma.sync m16n8k16 with fp32 accumulation and one rounding at the end. No expanded copy exists in global memory.
//
// A block of 4 warps (2 x 2, 64 x 64 each) computes 128 x 128 of one expert; two blocks share an SM, so that one
// block's prologue, epilogue and barriers hide behind the other. Per step of 64 columns:
//   cp.async      codes of A (gathered rows) and nibbles of B, four stages deep
//   convert_a     one thread = one row: 64 E4M3 codes times their scales -> bf16 in shared memory, one step ahead
//   mma_step      ldmatrix of A; B is expanded in registers on its way from shared memory (two warps expand the same)
// The order of columns inside a group of 32 is permuted identically for A and B: lane t of a quad owns columns
// 8t .. 8t+7 of the group, one 32-bit word of nibbles, and the pair p of that word is (nibble p, nibble p + 4). Pair
// 2j is b[0] of the group's j-th mma, pair 2j + 1 is b[1]. A sum over k does not care, and neither shuffles nor byte
// permutations are needed for B.
//
// A row tile with at most 64 rows (the ragged end of an expert) uses 4 x 1 warps of 64 x 32 instead.
// Scale bytes: every E8M0 byte is exact as long as the value itself fits bf16. Bytes above 128 of B need a second
// multiply; blocks that meet one in a step take the slower loop for that step (vote in the step's barrier).
// Columns past K, rows past the expert's and output columns past O are zero-filled, never read; rows at or past
// offsets[E] are never written. A negative a_rows entry counts as a zero row.
//
// SASS: HMMA
// Shared memory 90 KiB: A codes 4 x 8, B nibbles 4 x 4, A bf16 2 x 16 (also the output tile), B factors 2 x 1, tiles 8.
// Limits: E <= 1024, K and O multiples of 32, row tiles x column tiles < 2^31.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "moe/moe.h"
#include "moe/scheduler.cuh"

namespace mdi::moe {
namespace {

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 64;
constexpr int kStages = 4;
constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 2;
constexpr int kRowTiles = 4;  // 16-row fragments of a warp: 64 rows, whatever the warp layout

using Scheduler = TileScheduler<kBlockM, kBlockN, kThreads>;

struct SharedStorage {
    alignas(128) uint8_t a_codes[kStages][kBlockM * kBlockK];       // chunk c (16 codes) of row r at c ^ (r / 2 % 4)
    alignas(128) uint8_t b_codes[kStages][kBlockN * kBlockK / 2];   // chunk c (32 codes) of row r at c ^ (r / 4 % 2)
    alignas(128) uint16_t a[2][kBlockM * kBlockK];                  // bf16; chunk c (8 values) of row r at c ^ (r % 8)
    uint32_t b_factor[2][kBlockN * 2];                              // [row][group]: the scale as a bf16 pair
    Scheduler::Storage tiles;
};
static_assert(sizeof(SharedStorage) * kBlocksPerSm <= 226 * 1024, "two blocks must fit an SM");
static_assert(kBlockM == kThreads && kBlockN == kThreads, "convert_a and load_scales: one thread per row");
static_assert(sizeof(SharedStorage::a) == kBlockM * kBlockN * 2, "the output tile reuses the A buffers");

constexpr uint32_t kTwoTo126 = 0x7e807e80u;  // bf16 pair
constexpr uint32_t kOne = 0x3f803f80u;
constexpr uint32_t kMarked = 0x80008000u;    // factor of a scale byte above 128, to be applied after 2^126

// E2M1 placed on the low bits of the bf16 exponent is 2^-126 times its value, so byte s stands for the factor
// 2^126 * 2^(s - 127) = 2^(s - 1): in range up to byte 128.
__device__ __forceinline__ uint32_t b_factor_of(uint32_t byte) {
    if (byte == 255) return 0x7fff7fffu;
    if (byte > 128) return kMarked | byte << 7 | byte << 23;
    return (byte + 126) << 7 | (byte + 126) << 23;
}

// Eight nibbles -> four bf16 pairs (nibble p, nibble p + 4), scaled.
template <bool kWideScales>
__device__ __forceinline__ void expand_b(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
    pairs[0] = (word << 6 & 0x01c001c0u) | (word << 12 & 0x80008000u);
    pairs[1] = (word << 2 & 0x01c001c0u) | (word << 8 & 0x80008000u);
    pairs[2] = (word >> 2 & 0x01c001c0u) | (word << 4 & 0x80008000u);
    pairs[3] = (word >> 6 & 0x01c001c0u) | (word & 0x80008000u);
    if constexpr (kWideScales) {
        const bool marked = (factor & kMarked) != 0;
        const uint32_t first = marked ? kTwoTo126 : kOne;
        factor &= ~kMarked;
#pragma unroll
        for (int p = 0; p < 4; ++p) pairs[p] = bf16x2_product(pairs[p], first);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = bf16x2_product(pairs[p], factor);
}

// Two E4M3 codes (low byte first) times `scale` -> bf16 pair; NaN codes give NaN.
__device__ __forceinline__ uint32_t expand_a(uint32_t codes, float scale) {
    float low, high;
#if defined(__CUDA_ARCH__)
    uint32_t half_pair;  // PTX: cvt.rn.f16x2.e4m3x2
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half_pair) : "h"(static_cast<uint16_t>(codes)));
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
        : "=f"(low), "=f"(high)
        : "r"(half_pair));
#else
    low = e4m3_decode(codes & 0xffu), high = e4m3_decode(codes >> 8 & 0xffu);
#endif
    return ptx::pack_bf16x2(low * scale, high * scale);
}

// What one thread needs of the current tile.
struct Work {
    const GroupedGemmParams& params;
    Tile tile;
    int64_t first_row;    // of out
    int num_rows;         // 1 .. 128
    int thread;           // threadIdx.x, opaque to the compiler: or it keeps every address across tiles, and spills
    int num_steps;        // ceil(K / 64)
    int copy_rows[4];     // rows of a behind this thread's four cp.async, -1 = zero row
    int convert_row;      // row of a behind row threadIdx.x of the tile
    int b_row;            // row of the expert's weight behind row threadIdx.x of the B tile, -1 = past O

    __device__ Work(const GroupedGemmParams& p, const Tile& t) : params(p), tile(t) {
        first_row = static_cast<int64_t>(t.expert_begin) + t.row_tile * kBlockM;
        num_rows = min(kBlockM, t.expert_rows - t.row_tile * kBlockM);
#if defined(__CUDA_ARCH__)
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#else
        thread = static_cast<int>(threadIdx.x);  // CPU tests
#endif
        thread &= kThreads - 1;
        num_steps = ceil_div(p.k, kBlockK);
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_rows[i] = source_row(thread / 4 + 32 * i);
        convert_row = source_row(thread);
        b_row = t.first_column + thread < p.num_out ? t.first_column + thread : -1;
    }

    __device__ int source_row(int row) const {
        if (row >= num_rows) return -1;
        return params.a_rows ? params.a_rows[first_row + row] : static_cast<int>(first_row) + row;
    }
};

__device__ __forceinline__ void load_codes(SharedStorage& shared, const Work& work, int step) {
    const GroupedGemmParams& p = work.params;
    const int thread = work.thread;
    const int stage = step % kStages;
    // the swizzles below do not depend on i: 32 and 64 rows on, they repeat
    const uint32_t a_base = ptx::smem_address(shared.a_codes[stage]) + thread / 4 * 64 + (thread % 4 ^ thread / 8 % 4) * 16;
    const int column = step * kBlockK + thread % 4 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool valid = work.copy_rows[i] >= 0 && column < p.k;
        const uint8_t* source = valid ? p.a + static_cast<int64_t>(work.copy_rows[i]) * p.k + column : p.a;
        ptx::cp_async_16_zfill(a_base + i * 32 * 64, source, valid ? 16 : 0);
    }
    const uint32_t b_base = ptx::smem_address(shared.b_codes[stage]) + thread / 2 * 32 + (thread % 2 ^ thread / 8 % 2) * 16;
    const int b_column = step * kBlockK + thread % 2 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int o = work.tile.first_column + thread / 2 + 64 * i;
        const bool valid = o < p.num_out && b_column < p.k;
        const int64_t weight_row = static_cast<int64_t>(work.tile.expert) * p.num_out + o;
        const uint8_t* source = valid ? p.weight + weight_row * (p.k / 2) + b_column / 2 : p.weight;
        ptx::cp_async_16_zfill(b_base + i * 64 * 32, source, valid ? 16 : 0);
    }
}

// Scale bytes of one step: row threadIdx.x of A and of B, two groups each; 127 where there is nothing to scale.
struct Scales {
    uint32_t a[2], b[2];
};

__device__ __forceinline__ Scales load_scales(const Work& work, int step) {
    const GroupedGemmParams& p = work.params;
    const int groups = p.k / 32;
    Scales scales;
    const int64_t a_row = static_cast<int64_t>(work.convert_row) * groups;
    const int64_t b_row = (static_cast<int64_t>(work.tile.expert) * p.num_out + work.b_row) * groups;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
        const int group = 2 * step + g;
        scales.a[g] = work.convert_row >= 0 && group < groups ? p.a_scale[a_row + group] : 127;
        scales.b[g] = work.b_row >= 0 && group < groups ? p.weight_scale[b_row + group] : 127;
    }
    return scales;
}

// Codes of A -> bf16 of the step; factors of B. Returns whether a B scale needs the wide path.
__device__ __forceinline__ bool convert_a(SharedStorage& shared, const Scales& scales, int row, int step) {
    const uint8_t* codes = shared.a_codes[step % kStages] + row * 64;
    uint8_t* values = reinterpret_cast<uint8_t*>(shared.a[step % 2]) + row * 128;
    uint32_t* factors = shared.b_factor[step % 2] + row * 2;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
        const float scale = e8m0_decode(static_cast<uint8_t>(scales.a[g]));
        uint32_t words[8];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const uint4 v = *reinterpret_cast<const uint4*>(codes + ((2 * g + c) ^ (row / 2 % 4)) * 16);
            words[4 * c] = v.x, words[4 * c + 1] = v.y, words[4 * c + 2] = v.z, words[4 * c + 3] = v.w;
        }
        uint32_t chunks[4][4];  // [pair p][quad lane t]: columns 8t + p and 8t + p + 4
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const uint32_t first = __byte_perm(words[2 * t], words[2 * t + 1], 0x5140);   // bytes 0, 4, 1, 5
            const uint32_t second = __byte_perm(words[2 * t], words[2 * t + 1], 0x7362);  // bytes 2, 6, 3, 7
            chunks[0][t] = expand_a(first & 0xffffu, scale);
            chunks[1][t] = expand_a(first >> 16, scale);
            chunks[2][t] = expand_a(second & 0xffffu, scale);
            chunks[3][t] = expand_a(second >> 16, scale);
        }
#pragma unroll
        for (int p = 0; p < 4; ++p)
            *reinterpret_cast<uint4*>(values + ((4 * g + p) ^ (row % 8)) * 16) =
                make_uint4(chunks[p][0], chunks[p][1], chunks[p][2], chunks[p][3]);
        factors[g] = b_factor_of(scales.b[g]);
    }
    return ((scales.b[0] > 128 && scales.b[0] != 255) || (scales.b[1] > 128 && scales.b[1] != 255));
}

// One step of 64 columns for a warp: rows first_row .. +63 of the tile, columns first_column .. +8 * kColumnTiles - 1.
template <int kColumnTiles, bool kWideScales>
__device__ __forceinline__ void mma_step(const SharedStorage& shared, int lane, int step, int first_row, int first_column,
                                         float (&sums)[kRowTiles][8][4]) {
    const uint32_t a_base = ptx::smem_address(shared.a[step % 2]) + (first_row + lane % 16) * 128;
    const uint8_t* b_base = shared.b_codes[step % kStages] + (first_column + lane / 4) * 32 + lane % 4 * 4;
    const uint32_t* factors = shared.b_factor[step % 2] + (first_column + lane / 4) * 2;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
        uint32_t a[2][kRowTiles][4];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
                ptx::ldmatrix_x4(a[j][i], a_base + i * 16 * 128 + (((4 * g + 2 * j) + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
            const uint32_t word =
                *reinterpret_cast<const uint32_t*>(b_base + n * 8 * 32 + (g ^ (lane / 16)) * 16);
            uint32_t b[4];
            expand_b<kWideScales>(word, factors[n * 16 + g], b);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i)
                    ptx::mma_bf16_m16n8k16(sums[i][n], a[j][i], b[2 * j], b[2 * j + 1]);
        }
    }
}

// Sums -> bf16 -> shared memory (the A buffers) -> 16-byte stores of the rows and columns that exist.
template <int kColumnTiles>
__device__ __forceinline__ void store_tile(SharedStorage& shared, const Work& work, int first_row, int first_column,
                                           const float (&sums)[kRowTiles][8][4]) {
    const int thread = work.thread, lane = thread % 32;
    uint8_t* staged = reinterpret_cast<uint8_t*>(shared.a);  // [128][16 chunks of 8 columns], chunk c of row r at c ^ (r % 8)
    __syncthreads();  // every warp is done with the A buffers
    uint8_t* base = staged + (first_row + lane / 4) * 256 + lane % 4 * 4;  // row % 8 is lane / 4 in every fragment
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
        uint8_t* column = base + ((first_column / 8 + n) ^ (lane / 4)) * 16;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<uint32_t*>(column + (i * 16 + half * 8) * 256) =
                    ptx::pack_bf16x2(sums[i][n][2 * half], sums[i][n][2 * half + 1]);
    }
    __syncthreads();
    const GroupedGemmParams& p = work.params;
    const int column = work.tile.first_column + thread % 16 * 8;
    if (column < p.num_out) {
        for (int row = thread / 16; row < work.num_rows; row += kThreads / 16) {
            const uint4 value = *reinterpret_cast<const uint4*>(staged + row * 256 + (thread % 16 ^ (row % 8)) * 16);
            *reinterpret_cast<uint4*>(p.out + (work.first_row + row) * p.num_out + column) = value;
        }
    }
    __syncthreads();  // the next tile's convert_a writes here
}

// kColumnTiles = 8: 2 x 2 warps of 64 x 64; 4: 1 x 4 warps of 64 x 32, for at most 64 rows.
template <int kColumnTiles>
__device__ __forceinline__ void compute_tile(SharedStorage& shared, const Work& work) {
    const int warp = work.thread / 32;
    const int first_row = kColumnTiles == 8 ? warp / 2 * 64 : 0;
    const int first_column = kColumnTiles == 8 ? warp % 2 * 64 : warp * 32;
    float sums[kRowTiles][8][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][n][j] = 0.0f;

#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
        if (step < work.num_steps) load_codes(shared, work, step);
        ptx::cp_async_commit();
    }
    Scales scales = load_scales(work, 0);
    ptx::cp_async_wait<kStages - 2>();  // step 0 has landed
    __syncthreads();
    bool wide = convert_a(shared, scales, work.thread, 0);
    if (work.num_steps > 1) scales = load_scales(work, 1);
    for (int step = 0; step < work.num_steps; ++step) {
        ptx::cp_async_wait<kStages - 3>();  // this thread's part of step + 1 has landed
        // Past the barrier: everyone's part of step + 1 is in shared memory, bf16 A and factors of `step` are written,
        // and step - 1 is finished (its stage and the other A buffer are free).
        const bool any_wide = __syncthreads_or(wide);
        if (step + kStages - 1 < work.num_steps) load_codes(shared, work, step + kStages - 1);
        ptx::cp_async_commit();
        if (step + 1 < work.num_steps) {
            wide = convert_a(shared, scales, work.thread, step + 1);
            if (step + 2 < work.num_steps) scales = load_scales(work, step + 2);
        }
        if (any_wide) mma_step<kColumnTiles, true>(shared, work.thread % 32, step, first_row, first_column, sums);
        else mma_step<kColumnTiles, false>(shared, work.thread % 32, step, first_row, first_column, sums);
    }
    store_tile<kColumnTiles>(shared, work, first_row, first_column, sums);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) grouped_gemm_kernel(const __grid_constant__ GroupedGemmParams params) {
    extern __shared__ __align__(128) uint8_t smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);
    Scheduler::build(shared.tiles, params.offsets, params.num_experts);
    const int num_tiles = Scheduler::num_tiles(shared.tiles, params.num_experts, params.num_out);
    for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x)) {
        const Work work(params, Scheduler::find(shared.tiles, params.num_experts, params.num_out, tile));
        if (work.num_rows <= 64) compute_tile<4>(shared, work);
        else compute_tile<8>(shared, work);
    }
}

}  // namespace

void launch_grouped_gemm(const GroupedGemmParams& params) {
    if (params.num_rows == 0 || params.num_experts == 0) return;
    int device = 0, num_sms = 0;
    check_cuda("moe.grouped_gemm", cudaGetDevice(&device));
    check_cuda("moe.grouped_gemm", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    // at most this many tiles exist, wherever the offsets lie
    const int64_t most_tiles = min_of<int64_t>(params.num_rows, ceil_div<int64_t>(params.num_rows, kBlockM) + params.num_experts) *
                               ceil_div(params.num_out, kBlockN);
    const auto blocks = static_cast<unsigned>(min_of<int64_t>(most_tiles, static_cast<int64_t>(num_sms) * kBlocksPerSm));
    launch("moe.grouped_gemm", grouped_gemm_kernel, {dim3(blocks), dim3(kThreads), sizeof(SharedStorage), params.stream},
           params);
}

}  // namespace mdi::moe
