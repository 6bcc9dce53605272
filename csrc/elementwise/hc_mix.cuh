// What hc_mix.cu and hc_expand_mix.cu share: the pass over the streams that makes the partial sums of the projection, and the
// coefficients made of them. See hc_mix.cu for the scheme. Both kernels are one template, so their sums have one order.
#pragma once
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kMixWarps = 10;                           // that multiply
constexpr int kCopyThreads = 64;                        // that move tiles between memory and shared memory
constexpr int kMixThreads = kMixWarps * 32 + kCopyThreads;
constexpr int kWarpColumns = 16;                        // columns of a warp in every stream: one mma of K = 16 a stream
constexpr int kSlice = kMixWarps * kWarpColumns;        // columns of a block
constexpr int kTileTokens = 16;                         // M of the mma
constexpr int kNumPlanes = 3;                           // hi, mid, lo
constexpr int kSliceVectors = kSlice / kVector;
constexpr int kCopyTokens = kCopyThreads / kSliceVectors;  // copied side by side; a few threads idle
constexpr int kCopySteps = ceil_div(kTileTokens, kCopyTokens);

template <int kStreams>
struct MixTraits {
    static constexpr int kNumMixes = 2 * kStreams + kStreams * kStreams;
    static constexpr int kColTiles = ceil_div(kNumMixes, 8);       // mma column tiles
    static constexpr int kRows = 8 * kColTiles;                    // rows of fn in the mma, zero past kNumMixes
    static constexpr int kPartial = kRows + 4;                     // floats of a token and slice: sums, then the square sum
    static_assert(kNumMixes + 1 <= 32, "a warp holds the coefficients of a token, one a lane");
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
                value = *reinterpret_cast<const float4*>(p.fn + (static_cast<int64_t>(row) * kStreams + s) * p.width + column);
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

MDI_DEVICE uint2 pack(const float (&value)[4]) { return make_uint2(pack_pair(value[0], value[1]), pack_pair(value[2], value[3])); }

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

// What a copy thread moves: vector `vector` of the rows of tokens local, local + kCopyTokens, ...
struct CopyLane {
    int thread;  // of the copy threads
    int local, vector, column;
    uint64_t policy;  // of what the pass reads once

    MDI_DEVICE CopyLane() {
        thread = static_cast<int>(threadIdx.x) - kMixWarps * 32;
        local = thread / kSliceVectors;
        vector = thread % kSliceVectors * kVector;
        column = static_cast<int>(blockIdx.y) * kSlice + vector;
        if (local >= kCopyTokens) local = kTileTokens;  // idle
        policy = evict_first_policy();
    }
};

// Starts the copy of a tile into `stage`. Columns past N become zero; tokens past T are left as they are: no other token's
// result depends on them.
template <int kStreams, bool kExpand>
MDI_DEVICE void fetch_tile(const HcExpandMixParams& p, const CopyLane& lane, int tile, char* stage) {
    using T = PassTraits<kStreams, kExpand>;
    const HcMixParams& mix = p.mix;
    const int64_t first = static_cast<int64_t>(tile) * kTileTokens;
    const int num_tokens = static_cast<int>(min_of<int64_t>(mix.num_tokens - first, kTileTokens));
    const bool live = lane.column < mix.width;
    const uint32_t bytes = live ? 16 : 0;
    const int column = live ? lane.column : 0;
    const uint32_t target = ptx::smem_address(stage) + (lane.local * T::kTokenPitch + lane.vector) * 2;
    const bf16* source = mix.streams + (first + lane.local) * kStreams * mix.width + column;
    const bf16* y = kExpand ? p.y + (first + lane.local) * p.y_stride + column : nullptr;
#pragma unroll
    for (int k = 0; k < kCopySteps; ++k) {
        if (lane.local + k * kCopyTokens < num_tokens) {
            const uint32_t to = target + k * kCopyTokens * T::kTokenPitch * 2;
#pragma unroll
            for (int s = 0; s < kStreams; ++s)
                cp_async_16_zfill(to + s * kSlice * 2, source + (k * kCopyTokens * kStreams + s) * static_cast<int64_t>(mix.width),
                                  bytes, lane.policy);
            if constexpr (kExpand)
                cp_async_16_zfill(to + kStreams * kSlice * 2, y + k * kCopyTokens * p.y_stride, bytes, lane.policy);
        }
    }
    if constexpr (kExpand) {
        constexpr int kParts = kStreams + 2;  // post, the rows of comb, pre
        float* coefficients = reinterpret_cast<float*>(stage + T::kTileBytes);
        for (int item = lane.thread; item < num_tokens * kParts; item += kCopyThreads) {
            const int part = item % kParts, local = item / kParts;
            const int64_t token = first + local;
            const float* from = part == 0 ? p.post + token * kStreams
                                : part <= kStreams ? p.comb + (token * kStreams + part - 1) * kStreams
                                                   : p.pre + token * kStreams;
            copy_coefficients<kStreams>(coefficients + local * T::kCoefficientPitch + part * kStreams, from);
        }
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

// Expands one token's four columns in the tile: R' over the streams, x over y. `row`: R' as mma operand.
template <int kStreams>
MDI_DEVICE void expand_columns(bf16* token, const float* coefficients, uint2 (&row)[kStreams]) {
    using T = PassTraits<kStreams, true>;
    float c[kStreams], value[4], sum[kStreams][4], x[4];
    read_coefficients<kStreams>(coefficients + T::kPost, c);
    unpack(*reinterpret_cast<const uint2*>(token + kStreams * kSlice), value);
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] = c[i] * value[e];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
        read_coefficients<kStreams>(coefficients + T::kComb + j * kStreams, c);
        unpack(*reinterpret_cast<const uint2*>(token + j * kSlice), value);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][e] = fmaf(c[i], value[e], sum[i][e]);
    }
    read_coefficients<kStreams>(coefficients + T::kPre, c);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        row[s] = pack(sum[s]);
        *reinterpret_cast<uint2*>(token + s * kSlice) = row[s];
        unpack(row[s], value);  // the collapse reads the rounded streams
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = s == 0 ? c[0] * value[e] : fmaf(c[s], value[e], x[e]);
    }
    *reinterpret_cast<uint2*>(token + kStreams * kSlice) = pack(x);
}

// threadIdx.x, read anew: what a loop derives from it then needs no register from one round to the next
MDI_DEVICE unsigned thread_again() {
#if defined(__CUDA_ARCH__)
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#else
    return threadIdx.x;
#endif
}

// A warp's columns of a tile: expand, multiply, and leave its sums in `buffer`.
template <int kStreams, bool kExpand>
MDI_DEVICE void compute_tile(char* stage, const Fragments<kStreams>& fn, float* buffer) {
    using T = PassTraits<kStreams, kExpand>;
    const unsigned thread = thread_again();
    const unsigned warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    uint2 row[2][kStreams];  // tokens g and g + 8
    float* sums = buffer + warp * T::kWarpFloats + g * T::kSumPitch + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bf16* token = reinterpret_cast<bf16*>(stage) + (g + 8 * r) * T::kTokenPitch + warp * kWarpColumns + t * 4;
        if constexpr (kExpand) {
            const float* coefficients = reinterpret_cast<const float*>(stage + T::kTileBytes);
            expand_columns<kStreams>(token, coefficients + (g + 8 * r) * T::kCoefficientPitch, row[r]);
        } else {
#pragma unroll
            for (int s = 0; s < kStreams; ++s) row[r][s] = *reinterpret_cast<const uint2*>(token + s * kSlice);
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
    float sum[kNumPlanes][T::kColTiles][4] = {};  // independent chains: an mma waits for the one kNumPlanes * kColTiles before
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        const uint32_t a[4] = {row[0][s].x, row[1][s].x, row[0][s].y, row[1][s].y};
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

// A finished tile: R' and x to memory, the warps' sums in order to the partial sums.
template <int kStreams, bool kExpand>
MDI_DEVICE void finish_tile(const HcExpandMixParams& p, const CopyLane& lane, int tile, const char* stage, const float* buffer) {
    using T = PassTraits<kStreams, kExpand>;
    const HcMixParams& mix = p.mix;
    const int64_t first = static_cast<int64_t>(tile) * kTileTokens;
    const int num_tokens = static_cast<int>(min_of<int64_t>(mix.num_tokens - first, kTileTokens));
    if constexpr (kExpand) {
        const bf16* source = reinterpret_cast<const bf16*>(stage) + lane.local * T::kTokenPitch + lane.vector;
        bf16* out = p.out + (first + lane.local) * kStreams * mix.width + lane.column;
        bf16* x = p.x + (first + lane.local) * mix.width + lane.column;
        const int last = lane.column < mix.width ? num_tokens : 0;
#pragma unroll
        for (int k = 0; k < kCopySteps; ++k) {
            if (lane.local + k * kCopyTokens < last) {
                const bf16* from = source + k * kCopyTokens * T::kTokenPitch;
#pragma unroll
                for (int s = 0; s < kStreams; ++s)
                    store_evict_first(out + (k * kCopyTokens * kStreams + s) * static_cast<int64_t>(mix.width),
                                      *reinterpret_cast<const uint4*>(from + s * kSlice));
                *reinterpret_cast<uint4*>(x + k * kCopyTokens * static_cast<int64_t>(mix.width)) =
                    *reinterpret_cast<const uint4*>(from + kStreams * kSlice);
            }
        }
    }
    float* partial = mix.partial + (static_cast<int64_t>(blockIdx.y) * mix.num_tokens + first) * T::kPartial;
    constexpr int kPairs = T::kRows / 2, kItems = kTileTokens * kPairs;
#pragma unroll
    for (int item = lane.thread; item < kItems; item += kCopyThreads) {
        const int local = item / kPairs, pair = item % kPairs;
        const float* source = buffer + local * T::kSumPitch + 2 * pair;
        float2 sum = *reinterpret_cast<const float2*>(source);
#pragma unroll
        for (int warp = 1; warp < kMixWarps; ++warp) {
            const float2 more = *reinterpret_cast<const float2*>(source + warp * T::kWarpFloats);
            sum.x += more.x;
            sum.y += more.y;
        }
        if (local < num_tokens) *reinterpret_cast<float2*>(partial + local * T::kPartial + 2 * pair) = sum;
    }
    if (lane.thread < num_tokens) {
        const float* source = buffer + lane.thread * T::kSumPitch + T::kRows;
        float sum = *source;
#pragma unroll
        for (int warp = 1; warp < kMixWarps; ++warp) sum += source[warp * T::kWarpFloats];
        partial[lane.thread * T::kPartial + T::kRows] = sum;
    }
}

// Block (x, y): tiles x * block_tiles ... of column slice y. One barrier a tile: it publishes tile i's data and the results of
// tile i - 1, and after it the stage of tile i - 2 is free.
template <int kStreams, bool kExpand>
__global__ void __launch_bounds__(kMixThreads, 1) hc_pass_kernel(HcExpandMixParams p, int block_tiles) {
    using T = PassTraits<kStreams, kExpand>;
    char* const stages = dynamic_smem();
    float* const buffers = reinterpret_cast<float*>(stages + T::kStages * T::kStageBytes);
    const int first_tile = static_cast<int>(blockIdx.x) * block_tiles;
    const int count = min_of(static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, kTileTokens)) - first_tile, block_tiles);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kMixWarps) {
        Fragments<kStreams> fn;
        const int t = static_cast<int>(threadIdx.x) % 4;
        load_fragments<kStreams>(p.mix, static_cast<int>(blockIdx.y) * kSlice + warp * kWarpColumns + t * 4, fn);
        int stage = 0;
        for (int i = 0; i < count; ++i) {
            __syncthreads();
            compute_tile<kStreams, kExpand>(stages + stage * T::kStageBytes, fn, buffers + i % 2 * T::kBufferFloats);
            stage = stage + 1 == T::kStages ? 0 : stage + 1;
        }
        __syncthreads();
        return;
    }
    const CopyLane lane;
    for (int i = 0; i < T::kAhead; ++i) {
        if (i < count) fetch_tile<kStreams, kExpand>(p, lane, first_tile + i, stages + i * T::kStageBytes);
        ptx::cp_async_commit();
    }
    int finished = 0, free = T::kAhead;  // stages
    for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<T::kAhead - 1>();
        __syncthreads();
        if (i + T::kAhead < count)
            fetch_tile<kStreams, kExpand>(p, lane, first_tile + i + T::kAhead, stages + free * T::kStageBytes);
        ptx::cp_async_commit();
        free = free + 1 == T::kStages ? 0 : free + 1;
        if (i == 0) continue;
        finish_tile<kStreams, kExpand>(p, lane, first_tile + i - 1, stages + finished * T::kStageBytes,
                                       buffers + (i - 1) % 2 * T::kBufferFloats);
        finished = finished + 1 == T::kStages ? 0 : finished + 1;
    }
    __syncthreads();
    finish_tile<kStreams, kExpand>(p, lane, first_tile + count - 1, stages + finished * T::kStageBytes,
                                   buffers + (count - 1) % 2 * T::kBufferFloats);
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

// Lane 2n + j*n + i gives logit C0[j, i] and gets comb[j, i]; the other lanes take part in the shuffles only.
template <int kStreams>
MDI_DEVICE float sinkhorn(float logit, int iters, float eps) {
    constexpr int kFirst = 2 * kStreams;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int element = min_of(max_of(lane - kFirst, 0), kStreams * kStreams - 1);
    const int row = kFirst + element / kStreams * kStreams, column = kFirst + element % kStreams;  // their first lanes
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

// A warp makes one token's coefficients from the partial sums, slices in order; lane 2n + j*n + i holds comb[j, i].
template <int kStreams>
MDI_DEVICE void make_coefficients(const HcMixParams& p, int num_slices, int64_t token) {
    using T = MixTraits<kStreams>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // lanes past the square sum repeat it
    const float* partial = p.partial + token * T::kPartial + min_of(lane, T::kRows);
    float sum = 0.0f;
#pragma unroll 8
    for (int slice = 0; slice < num_slices; ++slice) sum += partial[static_cast<int64_t>(slice) * p.num_tokens * T::kPartial];
    const float square = __shfl_sync(kFullWarp, sum, T::kRows);
    const float rstd = 1.0f / sqrtf(square / static_cast<float>(kStreams * p.width) + p.norm_eps);
    const int mix = min_of(lane, T::kNumMixes - 1);
    const int group = mix < kStreams ? 0 : (mix < 2 * kStreams ? 1 : 2);
    const float logit = fmaf(rounded_product(sum, rstd), p.scale[group], p.base[mix]);
    const float comb = sinkhorn<kStreams>(logit, p.sinkhorn_iters, p.hc_eps);
    if (lane < kStreams)
        p.pre[token * kStreams + lane] = sigmoid(logit) + p.hc_eps;
    else if (lane < 2 * kStreams)
        p.post[token * kStreams + lane - kStreams] = 2.0f * sigmoid(logit);
    else if (lane < T::kNumMixes)
        p.comb[token * kStreams * kStreams + lane - 2 * kStreams] = comb;
}

// Adds the slices' partial sums and makes the coefficients (kernel 2 of hc_mix.cu).
void launch_hc_coefficients(const HcMixParams& p);

}  // namespace mdi::elementwise
