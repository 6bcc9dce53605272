// csrc/moe/grouped_gemm.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void grouped_gemm(int64_t rows, int64_t a_rows_count, int experts, int k, int num_out, const uint8_t* a,
                             const uint8_t* a_scale, const int32_t* a_rows, const uint8_t* weight,
                             const uint8_t* weight_scale, const int32_t* offsets, uint16_t* out) {
    launch_grouped_gemm({rows, a_rows_count, experts, k, num_out, a, a_scale, a_rows, weight, weight_scale, offsets, out, nullptr});
}
