// csrc/moe/place_rows.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void place_rows(int64_t tokens, int k, int picks, const uint8_t* codes, const float* code_scale,
                           const int32_t* row_of_slot, uint8_t* folded, float* row_scale) {
    launch_place_rows({tokens, k, picks, codes, code_scale, row_of_slot, folded, row_scale, nullptr});
}
