// Params and launchers of expand.cu. No torch in here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::elementwise {

struct ExpandParams {
    int64_t num_rows;      // M
    int64_t num_columns;   // K, a multiple of 32
    const uint8_t* codes;  // expand_fp8: [M, K] E4M3; expand_fp4: [M, K/2], two E2M1 codes a byte, even element low
    const uint8_t* scale;  // [M, K/32] E8M0
    uint16_t* out;         // [M, K] bf16
    cudaStream_t stream;
};

void launch_expand_fp8(const ExpandParams& params);
void launch_expand_fp4(const ExpandParams& params);

}  // namespace mdi::elementwise
