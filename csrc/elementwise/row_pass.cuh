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

MDI_DEVICE void load_weight(const void* source, bool is_f32, int column, float (&weight)[kVector]) {
    if (is_f32) {
        const float4* words = reinterpret_cast<const float4*>(static_cast<const float*>(source) + column);
        const float4 low = words[0], high = words[1];
        const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i) weight[i] = values[i];
    } else {
        unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(source) + column), weight);
    }
}

// RMSNorm of a row whose vectors lie in the registers of several threads: each adds its squares in column order, the sums are
// reduced over the row, each scales its vectors.
MDI_DEVICE float add_squares(const uint4& x, float sum) {
    float value[kVector];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(value[i], value[i], sum);
    return sum;
}

MDI_DEVICE float reciprocal_rms(float square_sum, int width, float eps) {
    return 1.0f / sqrtf(square_sum / static_cast<float>(width) + eps);
}

MDI_DEVICE uint4 normalise(const uint4& x, float rstd, const float (&weight)[kVector]) {
    float value[kVector];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] = weight[i] * (value[i] * rstd);
    return pack(value);
}

// One vector of a group of four neighbouring lanes: its E4M3 codes at the group's scale, and the scale byte.
MDI_DEVICE void quantise_vector(const uint4& x, uint2& codes, int& byte) {
    byte = act_quant_scale(bits_float(warp_max<4>(largest_abs_bits(x))));
    float value[kVector];
    unpack(x, value);
    codes = encode_e4m3x8(value, e8m0_inverse(static_cast<uint8_t>(byte)));
}

// The thread's vectors of one row of p.codes, with their group scales or folded at the row's largest scale.
template <int kChunks>
MDI_DEVICE void store_codes(const RowParams& p, int row, bool folded, const uint2 (&codes)[kChunks], const int (&byte)[kChunks],
                            int row_byte) {
    const int step = static_cast<int>(blockDim.x) * kVector;
    uint8_t* target = p.codes + static_cast<int64_t>(row) * p.width;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = static_cast<int>(threadIdx.x) * kVector + c * step;
        if (column >= p.width) continue;
        *reinterpret_cast<uint2*>(target + column) = folded ? fold_e4m3x8(codes[c], byte[c], row_byte) : codes[c];
        if (!folded && threadIdx.x % 4 == 0)
            p.scale[static_cast<int64_t>(row) * (p.width / kQuantGroup) + column / kQuantGroup] = static_cast<uint8_t>(byte[c]);
    }
    if (folded && threadIdx.x == 0) p.row_scale[row] = e8m0_decode(static_cast<uint8_t>(row_byte));
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
        for (int c = 0; c < kChunks; ++c) square = add_squares(x[c], square);
        const float rstd = reciprocal_rms(row_reduce(square, Sum{}, sum_scratch), p.width, p.eps);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = first + c * step;
            if (column >= p.width) continue;
            float weight[kVector];
            load_weight(p.weight, p.weight_is_f32, column, weight);
            x[c] = normalise(x[c], rstd, weight);
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
        quantise_vector(x[c], codes[c], byte[c]);
        // a vector past the row's end is zero: its byte is the floor of the rule and never the only largest one
        row_byte = max_of(row_byte, static_cast<uint32_t>(byte[c]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte = row_reduce(row_byte, Max{}, max_scratch);
    if (live) store_codes<kChunks>(p, token, folded, codes, byte, static_cast<int>(row_byte));
}

// Threads of a row: whole warps, as few as hold the row. Depends on N only.
template <int kChunks>
inline int row_threads(int width) {
    return align_up(ceil_div(ceil_div(width, kVector), kChunks), 32);
}

// Rows of a block: one, or as many as make four warps.
inline int rows_per_block(int threads) { return threads >= 128 ? 1 : 128 / threads; }

}  // namespace mdi::elementwise
