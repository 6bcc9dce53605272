// The row pass of rmsnorm_quant.cu as a device function, for the kernels that run it beside other work (hc_expand_mix.cu).
#pragma once
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kMaxRowWarps = 32;  // of a block: elements of the two scratch arrays

// Combines a value over the threads of each row of the block, warps in order. `scratch`: one element a warp.
template <class T, class Op>
MDI_DEVICE T row_reduce(T value, Op op, T* scratch) {
    value = warp_reduce(value, op);
    const int num_warps = static_cast<int>(blockDim.x) / 32;
    if (num_warps == 1) return value;
    T* row_scratch = scratch + threadIdx.y * num_warps;
    if (threadIdx.x % 32 == 0) row_scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T result = row_scratch[0];
    for (int warp = 1; warp < num_warps; ++warp) result = op(result, row_scratch[warp]);
    return result;
}

template <bool kCollapse>
MDI_DEVICE uint4 load_vector(const RowParams& p, int64_t token, int column, const float (&pre)[kMaxStreams]) {
    if constexpr (!kCollapse) {
        return *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + column);
    } else {
        const bf16* first = p.streams + token * p.num_streams * p.width + column;
        uint4 packed[kMaxStreams];
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (s < p.num_streams) packed[s] = *reinterpret_cast<const uint4*>(first + static_cast<int64_t>(s) * p.width);
        float sum[kVector];
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s) {
            if (s >= p.num_streams) continue;
            float value[kVector];
            unpack(packed[s], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[i] = s == 0 ? pre[0] * value[i] : fmaf(pre[s], value[i], sum[i]);
        }
        return pack(sum);
    }
}

MDI_DEVICE void load_weight(const RowParams& p, int column, float (&weight)[kVector]) {
    if (p.weight_is_f32) {
        const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(p.weight) + column);
        const float4 low = source[0], high = source[1];
        const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i) weight[i] = values[i];
    } else {
        unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.weight) + column), weight);
    }
}

// Rows block * blockDim.y ... of the pass; see rmsnorm_quant.cu.
template <int kChunks, bool kCollapse>
MDI_DEVICE void row_pass(const RowParams& p, int block, float* sum_scratch, uint32_t* max_scratch) {
    const int token = block * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    const bool live = token < p.num_tokens;  // every thread stays for the barriers
    const int step = static_cast<int>(blockDim.x) * kVector;
    const int first = static_cast<int>(threadIdx.x) * kVector;

    float pre[kMaxStreams] = {};
    if constexpr (kCollapse) {
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (live && s < p.num_streams) pre[s] = p.pre[static_cast<int64_t>(token) * p.num_streams + s];
    }
    uint4 x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * step;
        x[c] = make_uint4(0, 0, 0, 0);
        if (live && column < p.width) x[c] = load_vector<kCollapse>(p, token, column, pre);
    }

    if (p.weight != nullptr) {
        float square = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            float value[kVector];
            unpack(x[c], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) square = fmaf(value[i], value[i], square);
        }
        square = row_reduce(square, Sum{}, sum_scratch);
        const float rstd = 1.0f / sqrtf(square / static_cast<float>(p.width) + p.eps);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = first + c * step;
            if (column >= p.width) continue;
            float value[kVector], weight[kVector];
            unpack(x[c], value);
            load_weight(p, column, weight);
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = weight[i] * (value[i] * rstd);
            x[c] = pack(value);
        }
    }
    if (p.out != nullptr && live) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = first + c * step;
            if (column < p.width) *reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(token) * p.width + column) = x[c];
        }
    }
    if (p.quant == Quant::kNone) return;

    uint2 codes[kChunks];
    int byte[kChunks];
    uint32_t row_byte = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        float value[kVector];
        unpack(x[c], value);
        byte[c] = act_quant_scale(bits_float(warp_max<4>(largest_abs_bits(value))));
        codes[c] = encode_e4m3x8(value, e8m0_inverse(static_cast<uint8_t>(byte[c])));
        // a vector past the row's end is zero: its byte is the floor of the rule and never the only largest one
        row_byte = max_of(row_byte, static_cast<uint32_t>(byte[c]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte = row_reduce(row_byte, Max{}, max_scratch);
    if (!live) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * step;
        if (column >= p.width) continue;
        if (folded) codes[c] = fold_e4m3x8(codes[c], byte[c], static_cast<int>(row_byte));
        *reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(token) * p.width + column) = codes[c];
        if (!folded && threadIdx.x % 4 == 0)
            p.scale[static_cast<int64_t>(token) * (p.width / kQuantGroup) + column / kQuantGroup] = static_cast<uint8_t>(byte[c]);
    }
    if (folded && threadIdx.x == 0) p.row_scale[token] = e8m0_decode(static_cast<uint8_t>(row_byte));
}

// Threads of a row: whole warps, as few as hold the row. Depends on N only.
template <int kChunks>
inline int row_threads(int width) {
    return align_up(ceil_div(ceil_div(width, kVector), kChunks), 32);
}

// Rows of a block: one, or as many as make four warps.
inline int rows_per_block(int threads) { return threads >= 128 ? 1 : 128 / threads; }

}  // namespace mdi::elementwise
