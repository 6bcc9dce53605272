// What hc_mix.cu, hc_expand_mix.cu and hc_expand_mix_sm90.cu share: the pass over the streams that makes the partial sums of the
// projection (the last one moves its tiles otherwise), and the coefficients made of them. See hc_mix.cu for the scheme. All do the
// arithmetic of a tile with one template, so their sums have one order.
#pragma once
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kMixWarps = 10;                           // that move tiles and multiply
constexpr int kCopyThreads = kMixWarps * 32;
constexpr int kSumThreads = 64;                         // that fetch coefficients and add up the warps' sums
constexpr int kMixThreads = kCopyThreads + kSumThreads;
constexpr int kWarpColumns = 16;                        // columns of a warp in every stream: one mma of K = 16 a stream
constexpr int kSlice = kMixWarps * kWarpColumns;        // columns of a block
constexpr int kTileTokens = 16;                         // M of the mma
constexpr int kNumPlanes = 3;                           // hi, mid, lo
constexpr int kSliceVectors = kSlice / kVector;
static_assert(kSliceVectors * kTileTokens == kCopyThreads, "a thread copies the same vector of every row of its token");

template <int kStreams>
struct MixTraits {
    static constexpr int kNumMixes = 2 * kStreams + kStreams * kStreams;
    static constexpr int kColTiles = ceil_div(kNumMixes, 8);       // mma column tiles
    static constexpr int kRows = 8 * kColTiles;                    // rows of fn in the mma, zero past kNumMixes
    static constexpr int kPartial = kRows + 4;                     // floats of a token and slice: sums, then the square sum
};

// Shared memory: kStages tiles [token][row][column of the slice], row = stream (then y), each with the tokens' coefficients
// [post | comb | pre] when expanding; then two buffers of the warps' sums [warp][token][rows of fn, square sum].
template <int kStreams, bool kExpand>
struct PassTraits : MixTraits<kStreams> {
    using Mix = MixTraits<kStreams>;
    static constexpr int kTokenRows = kStreams + (kExpand ? 1 : 0);
    // bf16 between tokens: 8 or 24 words past a multiple of 32, so that the 8-byte reads of four tokens fall on all banks
    static constexpr int kTokenPitch = kTokenRows * kSlice + 16;
    static constexpr int kPost = 0, kComb = kStreams, kPre = kStreams + kStreams * kStreams;
    static constexpr int kCoefficients = align_up(2 * kStreams + kStreams * kStreams, 4);
    // floats between tokens: 4 past a multiple of 8, so that the 16-byte reads of eight tokens fall on all 32 banks
    static constexpr int kCoefficientPitch = kCoefficients % 8 == 4 ? kCoefficients : kCoefficients + 4;
    static constexpr int kTileBytes = kTileTokens * kTokenPitch * 2;
    static constexpr int kStageBytes = kTileBytes + (kExpand ? kTileTokens * kCoefficientPitch * 4 : 0);
    static constexpr int kSumPitch = Mix::kRows + 2;  // sums, then the square sum
    static constexpr int kWarpFloats = kTileTokens * kSumPitch;
    static constexpr int kBufferFloats = kMixWarps * kWarpFloats;
    static constexpr int kStages = min_of(8, (227 * 1024 - 2 * kBufferFloats * 4) / kStageBytes);
    static constexpr int kAhead = kStages - 2;  // tiles in flight; one is computed, one is copied out
    static constexpr int kSmemBytes = kStages * kStageBytes + 2 * kBufferFloats * 4;
    static_assert(kAhead >= 3 && kStageBytes % 16 == 0, "a pipeline");
};

// Where a tile lies in shared memory: bf16 between a token's rows and between tokens, and the bytes before the coefficients.
template <int kRowStride_, int kTokenPitch_, int kCoefficientsAt_>
struct TileLayout {
    static constexpr int kRowStride = kRowStride_, kTokenPitch = kTokenPitch_, kCoefficientsAt = kCoefficientsAt_;
};

// This lane's part of fn for the whole kernel: the mma B operand of every stream, column tile and plane.
template <int kStreams>
struct Fragments {
    uint32_t pair[kStreams][MixTraits<kStreams>::kColTiles][kNumPlanes][2];
};

// two values = hi + mid + lo, each a bf16 pair; exact unless lo falls below the smallest subnormal
MDI_DEVICE void split_pair(float even, float odd, uint32_t& hi, uint32_t& mid, uint32_t& lo) {
    hi = pack_pair(even, odd);
    even -= even_value(hi);
    odd -= odd_value(hi);
    mid = pack_pair(even, odd);
    lo = pack_pair(even - even_value(mid), odd - odd_value(mid));
}

// `column`: the first of this lane's four. K slots 2t, 2t+1 and 2t+8, 2t+9 of the mma stand for them in both operands.
template <int kStreams>
MDI_DEVICE void load_fragments(const HcMixParams& p, int column, Fragments<kStreams>& fn) {
    using T = MixTraits<kStreams>;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        if (s % 2 == 0) __syncwarp();  // not all loads at once: registers
#pragma unroll
        for (int c = 0; c < T::kColTiles; ++c) {
            const int row = c * 8 + g;
            float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < T::kNumMixes && column < p.width)
                value = *reinterpret_cast<const float4*>(p.fn + (static_cast<int64_t>(row) * kStreams + s) * p.width +
                                                         column);
            auto& pair = fn.pair[s][c];
            split_pair(value.x, value.y, pair[0][0], pair[1][0], pair[2][0]);
            split_pair(value.z, value.w, pair[0][1], pair[1][1], pair[2][1]);
        }
    }
}

MDI_DEVICE void unpack(const uint2& packed, float (&value)[4]) {
    value[0] = even_value(packed.x);
    value[1] = odd_value(packed.x);
    value[2] = even_value(packed.y);
    value[3] = odd_value(packed.y);
}

MDI_DEVICE uint2 pack(const float (&value)[4]) {
    return make_uint2(pack_pair(value[0], value[1]), pack_pair(value[2], value[3]));
}

// One token's n floats of a coefficient row; 16 bytes at n = 4.
template <int kStreams>
MDI_DEVICE void copy_coefficients(float* target, const float* source) {
    const uint32_t smem = ptx::smem_address(target);
    if constexpr (kStreams == 4) {
        ptx::cp_async_16(smem, source);
    } else {
#pragma unroll
        for (int i = 0; i < kStreams; ++i) ptx::cp_async_small<4>(smem + 4 * i, source + i);
    }
}

// threadIdx.x, read anew: what a loop derives from it then needs no register from one round to the next
MDI_DEVICE int thread_again() {
#if defined(__CUDA_ARCH__)
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#else
    return static_cast<int>(threadIdx.x);
#endif
}

// The vector that a copying thread moves: of every row of one token, so that neighbouring threads move a row's whole slice.
struct CopyVector {
    int local, vector, column;  // token of the tile, column of the slice, column
    int64_t token;

    MDI_DEVICE explicit CopyVector(int tile) {
        const int thread = thread_again();
        local = thread / kSliceVectors;
        vector = (thread - local * kSliceVectors) * kVector;
        column = static_cast<int>(blockIdx.y) * kSlice + vector;
        token = static_cast<int64_t>(tile) * kTileTokens + local;
    }
};

// Starts the copy of a tile into `stage`. Columns past N become zero; tokens past T are left as they are: no other token's
// result depends on them.
// NOTE: no L2 eviction hint. Slices end inside lines, and with evict-first reads the pass took 28 us more at T = 4096 (H200).
template <int kStreams, bool kExpand>
MDI_DEVICE void fetch_tile(const HcExpandMixParams& p, int tile, char* stage) {
    using T = PassTraits<kStreams, kExpand>;
    const CopyVector at(tile);
    if (at.token >= p.mix.num_tokens) return;
    const bool live = at.column < p.mix.width;
    const uint32_t bytes = live ? 16 : 0;
    const int column = live ? at.column : 0;
    const uint32_t target = ptx::smem_address(stage) + (at.local * T::kTokenPitch + at.vector) * 2;
    const bf16* source = p.mix.streams + at.token * (kStreams * p.mix.width) + column;
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
        ptx::cp_async_16_zfill(target + s * kSlice * 2, source + static_cast<int64_t>(s) * p.mix.width, bytes);
    if constexpr (kExpand)
        ptx::cp_async_16_zfill(target + kStreams * kSlice * 2, p.y + at.token * p.y_stride + column, bytes);
}

// A finished tile's R' and x to memory.
template <int kStreams>
MDI_DEVICE void store_tile(const HcExpandMixParams& p, int tile, const char* stage) {
    using T = PassTraits<kStreams, true>;
    const CopyVector at(tile);
    if (at.token >= p.mix.num_tokens || at.column >= p.mix.width) return;
    const bf16* source = reinterpret_cast<const bf16*>(stage) + at.local * T::kTokenPitch + at.vector;
    bf16* out = p.out + at.token * (kStreams * p.mix.width) + at.column;
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(s) * p.mix.width) =
            *reinterpret_cast<const uint4*>(source + s * kSlice);
    *reinterpret_cast<uint4*>(p.x + at.token * p.mix.width + at.column) =
        *reinterpret_cast<const uint4*>(source + kStreams * kSlice);
}

// Starts the copy of the tokens' coefficients: one of kThreads threads copies post, a row of comb, or pre of a token.
template <int kStreams, int kThreads>
MDI_DEVICE void fetch_coefficients(const HcExpandMixParams& p, int thread, int tile, float* coefficients) {
    using T = PassTraits<kStreams, true>;
    constexpr int kParts = kStreams + 2, kItems = kTileTokens * kParts;
#pragma unroll
    for (int k = 0; k < ceil_div(kItems, kThreads); ++k) {
        const int item = thread + k * kThreads, local = item / kParts, part = item % kParts;
        const int64_t token = static_cast<int64_t>(tile) * kTileTokens + local;
        if (item >= kItems || token >= p.mix.num_tokens) continue;
        const bool is_comb = part > 0 && part <= kStreams;
        const float* first = is_comb ? p.comb + (part - 1) * kStreams : part == 0 ? p.post : p.pre;
        copy_coefficients<kStreams>(coefficients + local * T::kCoefficientPitch + part * kStreams,
                                    first + token * (is_comb ? kStreams * kStreams : kStreams));
    }
}

// n coefficients of a token; one 16-byte read at n = 4
template <int kStreams>
MDI_DEVICE void read_coefficients(const float* source, float (&c)[kStreams]) {
    if constexpr (kStreams == 4) {
        const float4 four = *reinterpret_cast<const float4*>(source);
        c[0] = four.x, c[1] = four.y, c[2] = four.z, c[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < kStreams; ++i) c[i] = source[i];
    }
}

// Expands one token's four columns in the tile: R' over the streams, x over y, kRowStride apart. `row`: R' as mma operand.
template <int kStreams, int kRowStride>
MDI_DEVICE void expand_columns(bf16* token, const float* coefficients, uint2 (&row)[kStreams]) {
    using T = PassTraits<kStreams, true>;
    float c[kStreams], value[4], sum[kStreams][4], x[4];
    read_coefficients<kStreams>(coefficients + T::kPost, c);
    unpack(*reinterpret_cast<const uint2*>(token + kStreams * kRowStride), value);
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] = c[i] * value[e];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
        read_coefficients<kStreams>(coefficients + T::kComb + j * kStreams, c);
        unpack(*reinterpret_cast<const uint2*>(token + j * kRowStride), value);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][e] = fmaf(c[i], value[e], sum[i][e]);
    }
    read_coefficients<kStreams>(coefficients + T::kPre, c);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        row[s] = pack(sum[s]);
        *reinterpret_cast<uint2*>(token + s * kRowStride) = row[s];
        unpack(row[s], value);  // the collapse reads the rounded streams
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = s == 0 ? c[0] * value[e] : fmaf(c[s], value[e], x[e]);
    }
    *reinterpret_cast<uint2*>(token + kStreams * kRowStride) = pack(x);
}

// A warp's columns of a tile: expand, multiply, and leave its sums in `buffer`. thread: threadIdx.x, or thread_again().
template <int kStreams, bool kExpand, class Layout>
MDI_DEVICE void compute_tile(char* stage, const Fragments<kStreams>& fn, float* buffer, int thread) {
    using T = PassTraits<kStreams, kExpand>;
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    uint2 row[2][kStreams];  // tokens g and g + 8
    float* sums = buffer + warp * T::kWarpFloats + g * T::kSumPitch + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bf16* token = reinterpret_cast<bf16*>(stage) + (g + 8 * r) * Layout::kTokenPitch + warp * kWarpColumns + t * 4;
        if constexpr (kExpand) {
            const float* coefficients = reinterpret_cast<const float*>(stage + Layout::kCoefficientsAt);
            expand_columns<kStreams, Layout::kRowStride>(token, coefficients + (g + 8 * r) * T::kCoefficientPitch, row[r]);
        } else {
#pragma unroll
            for (int s = 0; s < kStreams; ++s) row[r][s] = *reinterpret_cast<const uint2*>(token + s * Layout::kRowStride);
        }
        float square = 0.0f;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            float value[4];
            unpack(row[r][s], value);
#pragma unroll
            for (int e = 0; e < 4; ++e) square = fmaf(value[e], value[e], square);
        }
        square = warp_sum<4>(square);
        if (t == 0) sums[8 * r * T::kSumPitch + T::kRows] = square;
    }
    // The same value, which the compiler does not know: else ptxas copies an operand several times, 66 moves a tile at n = 4.
    const auto separate = [](uint32_t x) { return byte_select(x, x, 0x3210); };
    float sum[kNumPlanes][T::kColTiles][4] = {};  // independent chains: an mma waits for the one kNumPlanes * kColTiles before
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        const uint32_t a[4] = {separate(row[0][s].x), separate(row[1][s].x), separate(row[0][s].y), separate(row[1][s].y)};
#pragma unroll
        for (int plane = 0; plane < kNumPlanes; ++plane)
#pragma unroll
            for (int c = 0; c < T::kColTiles; ++c)
                ptx::mma_bf16_m16n8k16(sum[plane][c], a, fn.pair[s][c][plane][0], fn.pair[s][c][plane][1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < T::kColTiles; ++c)
            *reinterpret_cast<float2*>(sums + 8 * r * T::kSumPitch + c * 8) =
                make_float2(sum[0][c][2 * r] + (sum[1][c][2 * r] + sum[2][c][2 * r]),
                            sum[0][c][2 * r + 1] + (sum[1][c][2 * r + 1] + sum[2][c][2 * r + 1]));
    }
}

// A finished tile's sums over the warps, in order, to the partial sums of column slice `slice`.
template <int kStreams, bool kExpand>
MDI_DEVICE void add_warps(const HcMixParams& p, int slice, int thread, int tile, const float* buffer) {
    using T = PassTraits<kStreams, kExpand>;
    constexpr int kPairs = T::kRows / 2, kSteps = kTileTokens * kPairs / kSumThreads;
    static_assert(kSteps * kSumThreads == kTileTokens * kPairs, "no summing thread idles");
    const int64_t first = static_cast<int64_t>(tile) * kTileTokens;
    float* partial = p.partial + (static_cast<int64_t>(slice) * p.num_tokens + first) * T::kPartial;
    float2 sum[kSteps][kMixWarps];
    float square[kMixWarps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const int item = thread + k * kSumThreads;
        const float* source = buffer + item / kPairs * T::kSumPitch + item % kPairs * 2;
#pragma unroll
        for (int warp = 0; warp < kMixWarps; ++warp)
            sum[k][warp] = *reinterpret_cast<const float2*>(source + warp * T::kWarpFloats);
    }
#pragma unroll
    for (int warp = 0; warp < kMixWarps; ++warp)
        square[warp] = buffer[warp * T::kWarpFloats + thread % kTileTokens * T::kSumPitch + T::kRows];
#pragma unroll
    for (int warp = 1; warp < kMixWarps; ++warp) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            sum[k][0].x += sum[k][warp].x;
            sum[k][0].y += sum[k][warp].y;
        }
        square[0] += square[warp];
    }
    const int num_tokens = static_cast<int>(min_of<int64_t>(p.num_tokens - first, kTileTokens));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const int item = thread + k * kSumThreads, local = item / kPairs;
        if (local < num_tokens) *reinterpret_cast<float2*>(partial + local * T::kPartial + item % kPairs * 2) = sum[k][0];
    }
    if (thread < num_tokens) partial[thread * T::kPartial + T::kRows] = square[0];
}

// Block (x, y): tiles x * block_tiles ... of column slice y. One barrier a tile: it publishes tile i's data and the results of
// tile i - 1, and after it the stage of tile i - 2 is free.
template <int kStreams, bool kExpand>
__global__ void __launch_bounds__(kMixThreads, 1) hc_pass_kernel(HcExpandMixParams p, int block_tiles) {
    using T = PassTraits<kStreams, kExpand>;
    using Layout = TileLayout<kSlice, T::kTokenPitch, T::kTileBytes>;
    char* const stages = dynamic_smem();
    float* const buffers = reinterpret_cast<float*>(stages + T::kStages * T::kStageBytes);
    const int first_tile = static_cast<int>(blockIdx.x) * block_tiles;
    const int count = min_of(static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, kTileTokens)) - first_tile, block_tiles);
    if (threadIdx.x < kCopyThreads) {
        for (int i = 0; i < T::kAhead; ++i) {
            if (i < count) fetch_tile<kStreams, kExpand>(p, first_tile + i, stages + i * T::kStageBytes);
            ptx::cp_async_commit();
        }
        Fragments<kStreams> fn;
        const int warp = static_cast<int>(threadIdx.x) / 32, t = static_cast<int>(threadIdx.x) % 4;
        load_fragments<kStreams>(p.mix, static_cast<int>(blockIdx.y) * kSlice + warp * kWarpColumns + t * 4, fn);
        const auto stage = [&](int i) { return stages + i % T::kStages * T::kStageBytes; };
        const auto move_tiles = [&](int i) {
            if (i + T::kAhead < count) fetch_tile<kStreams, kExpand>(p, first_tile + i + T::kAhead, stage(i + T::kAhead));
            ptx::cp_async_commit();
            if constexpr (kExpand)
                if (i > 0) store_tile<kStreams>(p, first_tile + i - 1, stage(i - 1));
        };
        for (int i = 0; i < count; ++i) {
            ptx::cp_async_wait<T::kAhead - 1>();
            __syncthreads();
            // of the warps of a scheduler, some move while others multiply
            const bool move_first = thread_again() / 128 % 2 == 0;
            if (move_first) move_tiles(i);
            compute_tile<kStreams, kExpand, Layout>(stage(i), fn, buffers + i % 2 * T::kBufferFloats, thread_again());
            if (!move_first) move_tiles(i);
        }
        __syncthreads();
        if constexpr (kExpand) store_tile<kStreams>(p, first_tile + count - 1, stage(count - 1));
        return;
    }
    const int thread = static_cast<int>(threadIdx.x) - kCopyThreads, slice = static_cast<int>(blockIdx.y);
    const auto coefficients = [&](int s) { return reinterpret_cast<float*>(stages + s * T::kStageBytes + T::kTileBytes); };
    int free = T::kAhead;  // stage
    if constexpr (kExpand) {
        for (int i = 0; i < T::kAhead; ++i) {
            if (i < count) fetch_coefficients<kStreams, kSumThreads>(p, thread, first_tile + i, coefficients(i));
            ptx::cp_async_commit();
        }
    }
    for (int i = 0; i < count; ++i) {
        if constexpr (kExpand) ptx::cp_async_wait<T::kAhead - 1>();
        __syncthreads();
        if constexpr (kExpand) {
            if (i + T::kAhead < count)
                fetch_coefficients<kStreams, kSumThreads>(p, thread, first_tile + i + T::kAhead, coefficients(free));
            ptx::cp_async_commit();
            free = free + 1 == T::kStages ? 0 : free + 1;
        }
        if (i > 0) add_warps<kStreams, kExpand>(p.mix, slice, thread, first_tile + i - 1, buffers + (i - 1) % 2 * T::kBufferFloats);
    }
    __syncthreads();
    add_warps<kStreams, kExpand>(p.mix, slice, thread, first_tile + count - 1, buffers + (count - 1) % 2 * T::kBufferFloats);
}

// About one block a multiprocessor: blocks take as many tiles as that needs. Tiles are independent, so this choice does not
// touch the results.
inline int pass_block_tiles(int64_t num_tokens, int width) {
    constexpr int kTargetBlocks = 128;
    const int64_t num_tiles = ceil_div<int64_t>(num_tokens, kTileTokens);
    return static_cast<int>(max_of<int64_t>(ceil_div<int64_t>(num_tiles * ceil_div(width, kSlice), kTargetBlocks), 1));
}

template <int kStreams, bool kExpand>
void launch_hc_pass(const char* name, const HcExpandMixParams& p) {
    const int num_slices = ceil_div(p.mix.width, kSlice);
    const int block_tiles = pass_block_tiles(p.mix.num_tokens, p.mix.width);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(ceil_div<int64_t>(p.mix.num_tokens, kTileTokens), block_tiles));
    launch(name, hc_pass_kernel<kStreams, kExpand>,
           {dim3(blocks, static_cast<unsigned>(num_slices)), dim3(kMixThreads), PassTraits<kStreams, kExpand>::kSmemBytes,
            p.mix.stream},
           p, block_tiles);
}

MDI_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

constexpr int kTokensPerWarp = 2;  // of the coefficients: sixteen lanes a token, one an element of comb
constexpr int kTokenLanes = 32 / kTokensPerWarp;

// Lane j*n + i of a token's lanes gives logit C0[j, i] and gets comb[j, i]; lanes past n*n take part in the shuffles only.
template <int kStreams>
MDI_DEVICE float sinkhorn(float logit, int iters, float eps) {
    static_assert(kStreams * kStreams <= kTokenLanes, "a lane an element");
    const int lane = static_cast<int>(threadIdx.x) % 32, first = lane - lane % kTokenLanes;
    const int element = min_of(lane - first, kStreams * kStreams - 1);
    const int row = first + element / kStreams * kStreams, column = first + element % kStreams;  // their first lanes
    const auto row_sum = [&](float x) {
        float sum = __shfl_sync(kFullWarp, x, row);
#pragma unroll
        for (int i = 1; i < kStreams; ++i) sum += __shfl_sync(kFullWarp, x, row + i);
        return sum;
    };
    const auto column_sum = [&](float x) {
        float sum = __shfl_sync(kFullWarp, x, column);
#pragma unroll
        for (int j = 1; j < kStreams; ++j) sum += __shfl_sync(kFullWarp, x, column + j * kStreams);
        return sum;
    };
    float largest = __shfl_sync(kFullWarp, logit, row);
#pragma unroll
    for (int i = 1; i < kStreams; ++i) largest = fmaxf(largest, __shfl_sync(kFullWarp, logit, row + i));
    float x = expf(logit - largest);
    x = x / row_sum(x) + eps;
    x = x / (column_sum(x) + eps);
    for (int iter = 1; iter < iters; ++iter) {
        x = x / (row_sum(x) + eps);
        x = x / (column_sum(x) + eps);
    }
    return x;
}

// A warp makes the coefficients of kTokensPerWarp tokens, the first of them `token`, from the partial sums, slices in order. A
// lane sums two columns: of comb, and of pre, post or (lanes past them) the squares.
template <int kStreams>
MDI_DEVICE void make_coefficients(const HcMixParams& p, int num_slices, int token) {
    using T = MixTraits<kStreams>;
    const int lane = static_cast<int>(threadIdx.x) % 32, element = lane % kTokenLanes;
    const bool live = token + lane / kTokenLanes < p.num_tokens;
    if (live) token += lane / kTokenLanes;  // else the first token again
    const int comb_mix = 2 * kStreams + min_of(element, kStreams * kStreams - 1);
    const float* partial = p.partial + static_cast<int64_t>(token) * T::kPartial;
    float comb_sum = 0.0f, other_sum = 0.0f;
#pragma unroll 8
    for (int slice = 0; slice < num_slices; ++slice) {
        comb_sum += partial[comb_mix];
        other_sum += partial[element < 2 * kStreams ? element : T::kRows];
        partial += static_cast<int64_t>(p.num_tokens) * T::kPartial;
    }
    const float square = __shfl_sync(kFullWarp, other_sum, lane | (kTokenLanes - 1));
    const float rstd = 1.0f / sqrtf(square / static_cast<float>(kStreams * p.width) + p.norm_eps);
    const auto logit_of = [&](float sum, int mix, int group) {
        return fmaf(rounded_product(sum, rstd), p.scale[group], p.base[mix]);
    };
    const float comb = sinkhorn<kStreams>(logit_of(comb_sum, comb_mix, 2), p.sinkhorn_iters, p.hc_eps);
    if (!live) return;
    const int64_t at = static_cast<int64_t>(token) * kStreams;
    if (element < kStreams)
        p.pre[at + element] = sigmoid(logit_of(other_sum, element, 0)) + p.hc_eps;
    else if (element < 2 * kStreams)
        p.post[at + element - kStreams] = 2.0f * sigmoid(logit_of(other_sum, element, 1));
    if (element < kStreams * kStreams) p.comb[at * kStreams + element] = comb;
}

// What follows the pass: the coefficients, and with row norm and quantisation of x (hc_expand_mix.cu). The pass worked through groups
// of group_tokens tokens side by side, each in order; a multiple of kTileTokens.
void launch_hc_finish(const HcExpandMixParams& p, const RowParams* row, int64_t group_tokens);

// Adds the slices' partial sums and makes the coefficients (kernel 2 of hc_mix.cu).
void launch_hc_coefficients(const HcMixParams& p);

}  // namespace mdi::elementwise
