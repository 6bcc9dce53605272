// What hc_mix.cu and hc_expand_mix.cu share: fn split into three bf16 planes in shared memory, the tensor-core step, the
// partial sums, and the coefficients made of them. See hc_mix.cu for the scheme. The order of every
// sum is the same in both, so that their coefficients have the same bits.
#pragma once
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kSlice = 320;         // columns of a block
constexpr int kStep = 32;           // columns of a step: 8 a lane, two mma of K = 16
constexpr int kNumPlanes = 3;       // hi, mid, lo
constexpr int kMixThreads = 256;
constexpr int kMixWarps = kMixThreads / 32;

template <int kStreams>
struct MixTraits {
    static constexpr int kNumMixes = 2 * kStreams + kStreams * kStreams;
    static constexpr int kColTiles = ceil_div(kNumMixes, 8);       // mma column tiles
    static constexpr int kRows = 8 * kColTiles;                    // rows of a plane, zero past kNumMixes
    static constexpr int kPitch = kStreams * kSlice + 32;          // bf16 of a row; 64 bytes past a multiple of 128
    static constexpr int kPartial = kRows + 8;                     // floats of a token and slice: sums, then the square sum
    static constexpr int kSmemBytes = kNumPlanes * kRows * kPitch * 2;
    static_assert(kNumMixes + 1 <= 32, "a warp holds the coefficients of a token, one a lane");
    static_assert(kPitch * 2 % 128 == 64, "rows g and g + 1 must fall on different banks");
    static_assert(kSmemBytes <= 227 * 1024, "shared memory of a block");
};

// value = hi + mid + lo, each a bf16; exact unless lo falls below the smallest subnormal
MDI_DEVICE void split_bf16(float value, bf16 (&plane)[kNumPlanes]) {
#pragma unroll
    for (int p = 0; p < kNumPlanes; ++p) {
        plane[p] = static_cast<bf16>(pack_pair(value, 0.0f) & 0xffffu);
        value -= bf16_bits_to_float(plane[p]);
    }
}

// This block's columns of fn, split, into shared memory [plane][row][stream * kSlice + column]; zero outside fn.
template <int kStreams>
MDI_DEVICE void load_planes(const HcMixParams& p, int first_column, bf16* planes) {
    using T = MixTraits<kStreams>;
    constexpr int kPerRow = kSlice / 4;
    constexpr int kItems = T::kRows * kStreams * kPerRow;
#pragma unroll 10
    for (int item = threadIdx.x; item < kItems; item += kMixThreads) {
        const int column = item % kPerRow * 4, stream = item / kPerRow % kStreams, row = item / (kPerRow * kStreams);
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < T::kNumMixes && first_column + column < p.width)
            value = *reinterpret_cast<const float4*>(p.fn + (static_cast<int64_t>(row) * kStreams + stream) * p.width +
                                                     first_column + column);
        bf16 split[4][kNumPlanes];
        split_bf16(value.x, split[0]);
        split_bf16(value.y, split[1]);
        split_bf16(value.z, split[2]);
        split_bf16(value.w, split[3]);
#pragma unroll
        for (int plane = 0; plane < kNumPlanes; ++plane)
            *reinterpret_cast<uint2*>(planes + (plane * T::kRows + row) * T::kPitch + stream * kSlice + column) =
                make_uint2(split[0][plane] | static_cast<uint32_t>(split[1][plane]) << 16,
                           split[2][plane] | static_cast<uint32_t>(split[3][plane]) << 16);
    }
}

// A step of one stream for a warp tile of 16 kRowTiles tokens: the 8 columns of this lane in rows g, g + 8, ...
template <int kRowTiles>
using Rows = uint4[2 * kRowTiles];

template <int kStreams, int kRowTiles>
struct Accumulators {
    float sum[kRowTiles][MixTraits<kStreams>::kColTiles][4];    // float32 sum of hi over the finished steps
    float high[kRowTiles][MixTraits<kStreams>::kColTiles][4];   // hi of this step
    float rest[kRowTiles][MixTraits<kStreams>::kColTiles][4];   // mid and lo
    float square[2 * kRowTiles];                             // of this lane's columns in its rows
};

MDI_DEVICE void multiply(float (&d)[4], const uint4& upper, const uint4& lower, const uint4& fn) {
    // K slots 2t, 2t+1 and 2t+8, 2t+9 of the two mma stand for this lane's columns 0..3 and 4..7 in both operands
    const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
    const uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
    ptx::mma_bf16_m16n8k16(d, first, fn.x, fn.y);
    ptx::mma_bf16_m16n8k16(d, second, fn.z, fn.w);
}

// `fragment`: this lane's 16 bytes of row g, plane 0, at the step's columns
template <int kStreams, int kRowTiles>
MDI_DEVICE void add_step(const Rows<kRowTiles>& rows, const bf16* fragment, Accumulators<kStreams, kRowTiles>& acc) {
    using T = MixTraits<kStreams>;
#pragma unroll
    for (int plane = 0; plane < kNumPlanes; ++plane) {
#pragma unroll
        for (int c = 0; c < T::kColTiles; ++c) {
            const uint4 fn = *reinterpret_cast<const uint4*>(fragment + (plane * T::kRows + c * 8) * T::kPitch);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                multiply(plane == 0 ? acc.high[r][c] : acc.rest[r][c], rows[2 * r], rows[2 * r + 1], fn);
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
        float value[kVector];
        unpack(rows[r], value);
#pragma unroll
        for (int e = 0; e < kVector; ++e) acc.square[r] = fmaf(value[e], value[e], acc.square[r]);
    }
}

template <int kStreams, int kRowTiles>
MDI_DEVICE void promote(Accumulators<kStreams, kRowTiles>& acc) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < MixTraits<kStreams>::kColTiles; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc.sum[r][c][i] += acc.high[r][c][i];
                acc.high[r][c][i] = 0.0f;
            }
}

template <int kStreams, int kRowTiles>
MDI_DEVICE void store_partial(const HcMixParams& p, int64_t first_token, Accumulators<kStreams, kRowTiles>& acc) {
    using T = MixTraits<kStreams>;
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    float* partial = p.partial + static_cast<int64_t>(blockIdx.y) * p.num_tokens * T::kPartial;
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
        const float square = warp_sum<4>(acc.square[r]);
        const int64_t token = first_token + g + 8 * r;
        if (token >= p.num_tokens) continue;
        float* target = partial + token * T::kPartial;
#pragma unroll
        for (int c = 0; c < T::kColTiles; ++c)
            *reinterpret_cast<float2*>(target + c * 8 + 2 * t) =
                make_float2(acc.sum[r / 2][c][r % 2 * 2] + acc.rest[r / 2][c][r % 2 * 2],
                            acc.sum[r / 2][c][r % 2 * 2 + 1] + acc.rest[r / 2][c][r % 2 * 2 + 1]);
        if (t == 0) target[T::kRows] = square;
    }
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

// As many tiles a block as keep about 128 blocks: fewer blocks split fn less often. A warp takes every eighth tile of its
// block; tiles are independent, so this choice does not touch the results.
inline int tiles_per_block(int64_t num_tiles, int num_slices) {
    constexpr int kTargetBlocks = 128, kMaxTiles = 8 * kMixWarps;
    const int64_t wanted = ceil_div<int64_t>(num_tiles * num_slices, kTargetBlocks);
    return static_cast<int>(min_of<int64_t>(max_of<int64_t>(wanted, 1), kMaxTiles));
}

// Adds the slices' partial sums and makes the coefficients (kernel 2 of hc_mix.cu).
void launch_hc_coefficients(const HcMixParams& p);

}  // namespace mdi::elementwise
