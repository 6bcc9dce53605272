// Products of row-scaled FP8 operands: what linear_api.h fills in and the launchers take. No torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::linear {

// out[t, o] = bf16( sum over k of codes[t, g, k] * weight[o, k] * row_scale[t, g] * weight_scale[o] ), g = o / (O / groups)
struct Fp8Params {
    const uint8_t* codes;       // E4M3 [T, groups, K]
    const float* row_scale;     // [T, groups]
    const uint8_t* weight;      // E4M3 [O, K]
    const float* weight_scale;  // [O]
    uint16_t* out;              // bf16 [T, O]
    int num_rows;               // T
    int num_columns;            // O
    int k;
    int groups;
    cudaStream_t stream;
};

void launch_fp8_sm90(const Fp8Params& params);

}  // namespace mdi::linear
