// csrc/indexer/quantise.cu on the CPU: see cuda_on_cpu.h.
#include "indexer/indexer.h"

using namespace mdi::indexer;

extern "C" void quantise(int64_t rows, int head_dim, const uint16_t* x, uint8_t* codes, uint8_t* scale, int64_t codes_stride,
                         int64_t scale_stride, const int32_t* slots, int64_t num_slots) {
    launch_quantise("quantise", {rows, head_dim, x, codes, scale, codes_stride, scale_stride, slots, num_slots, nullptr});
}

extern "C" void rope_quant_query(int64_t tokens, int heads, int head_dim, int rope_dim, const uint16_t* x, const int32_t* positions,
                                 const float* table, uint8_t* codes, uint8_t* scale) {
    launch_rope_quant_query({tokens * heads, head_dim, x, codes, scale, head_dim / 2, head_dim / 32, nullptr, tokens * heads, nullptr},
                            {heads, rope_dim, positions, table});
}
