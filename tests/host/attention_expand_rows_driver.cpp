// attention.expand_rows on the CPU: see cuda_on_cpu.h.
#include "attention/attention.h"

extern "C" void expand_rows(int count, int packed_count, int window, const uint8_t* packed, const int32_t* pages, int page_rows, uint8_t* out) {
    mdi::attention::launch_expand_rows({count, packed_count, window != 0, packed, pages, page_rows, out, nullptr});
}
