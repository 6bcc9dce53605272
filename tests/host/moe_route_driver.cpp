// csrc/moe/route.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void route(int64_t tokens, int hidden, int experts, int k, float scaling, const uint16_t* x, const uint16_t* weight,
                      const float* bias, int32_t* ids, float* weights) {
    launch_route({tokens, hidden, experts, k, scaling, x, weight, bias, ids, weights, nullptr});
}
