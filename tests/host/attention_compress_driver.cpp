// attention.compress on the CPU: see cuda_on_cpu.h.
#include "attention/attention.h"

extern "C" void compress(int groups, int ratio, int dim, int tokens, const float* kv, const float* score, const float* tail_kv,
                         const float* tail_score, const int32_t* group_rows, void* out) {
    mdi::attention::launch_compress({groups, ratio, dim, tokens, kv, score, tail_kv, tail_score, group_rows,
                                     static_cast<__nv_bfloat16*>(out), nullptr});
}
