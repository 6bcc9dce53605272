// csrc/moe/fold.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void fold_rows(int64_t rows, int k, int experts, const uint8_t* a, const uint8_t* a_scale, const int32_t* a_rows,
                          const int32_t* offsets, uint8_t* folded, float* row_scale) {
    launch_fold_rows({rows, k, experts, a, a_scale, a_rows, offsets, folded, row_scale, nullptr});
}
