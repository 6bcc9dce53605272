// csrc/indexer/quantise.cu on the CPU: see cuda_on_cpu.h.
#include "indexer/indexer.h"

using namespace mdi::indexer;

extern "C" void quantise(int64_t rows, int head_dim, const uint16_t* x, uint8_t* codes, uint8_t* scale, int64_t codes_stride,
                         int64_t scale_stride, const int32_t* slots, int64_t num_slots) {
    launch_quantise("quantise", {rows, head_dim, x, codes, scale, codes_stride, scale_stride, slots, num_slots, nullptr});
}
