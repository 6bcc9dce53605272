// elementwise.expand_fp8 and expand_fp4 on the CPU: see cuda_on_cpu.h.
#include "elementwise/expand.h"

extern "C" void expand(int fp4, int64_t m, int64_t k, const uint8_t* codes, const uint8_t* scale, uint16_t* out) {
    const mdi::elementwise::ExpandParams params{m, k, codes, scale, out, nullptr};
    fp4 ? mdi::elementwise::launch_expand_fp4(params) : mdi::elementwise::launch_expand_fp8(params);
}
