// csrc/moe/swiglu_quant.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void swiglu_quant(int64_t rows, int hidden, float limit, const uint16_t* gu, const float* row_weight,
                             const int32_t* bound, uint8_t* codes, uint8_t* scale, uint16_t* h) {
    launch_swiglu_quant({rows, hidden, limit, gu, row_weight, bound, codes, scale, h, nullptr});
}

extern "C" void swiglu_fold(int64_t rows, int hidden, float limit, const uint16_t* gu, const float* row_weight,
                            const int32_t* bound, bool expert_order, uint8_t* folded, float* row_scale) {
    launch_swiglu_fold({{rows, hidden, limit, gu, row_weight, bound, nullptr, nullptr, nullptr, nullptr}, expert_order, folded, row_scale});
}
