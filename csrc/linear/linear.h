// Dense products of row-scaled FP8 operands: parameters and launcher. No torch in here (style guide 3).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::linear {

using bf16 = uint16_t;  // the bits

// out[t, o] = bf16(sum_k codes[t, g(o), k] * weight[o, k]) * row_scale[t, g(o)] * weight_scale[o], g(o) = o / (O / groups);
// then, with a table, the last rope_dim of every head_dim columns of out are rotated (model spec 4.2).
struct ScaledGemmParams {
    int num_rows;               // T
    int num_columns;            // O
    int k;                      // K of one group, a multiple of 128
    int groups;                 // g; O / groups is a multiple of 8
    const uint8_t* codes;       // [T, groups * K] E4M3
    int64_t codes_stride;       // bytes between rows, a multiple of 16
    const float* row_scale;     // [T, groups], powers of two
    const uint8_t* weight;      // [O, K] E4M3, contiguous
    const float* weight_scale;  // [O], powers of two
    bf16* out;                  // [T, O]
    int64_t out_stride;         // elements between rows, a multiple of 8
    int head_dim, rope_dim;     // multiples of 8
    const int32_t* positions;   // [T]
    const float* table;         // [P, rope_dim / 2, 2], 16-byte aligned; null: no rotation
    cudaStream_t stream;
};
void launch_scaled_gemm_sm90(const ScaledGemmParams& params);

}  // namespace mdi::linear
