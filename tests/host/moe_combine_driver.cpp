// csrc/moe/combine.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void combine(int64_t tokens, int hidden, int k, int out_float, const uint16_t* y, const int32_t* row_of_slot,
                        const uint16_t* shared, void* out) {
    launch_combine({tokens, hidden, k, out_float != 0, y, row_of_slot, shared, out, nullptr});
}

extern "C" void combine_parts(int64_t tokens, int hidden, int k, const uint16_t* y, const int32_t* row_of_slot,
                              const uint16_t* shared, void* out, int num_parts, int own_part, const uint16_t* parts) {
    launch_combine({tokens, hidden, k, false, y, row_of_slot, shared, out, nullptr, true, num_parts, own_part, parts});
}
