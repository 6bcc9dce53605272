// attention.write_window and attention.write_compressed on the CPU: see cuda_on_cpu.h.
#include "attention/attention.h"

extern "C" void write_rows(int window, int count, int dim, const void* in, uint8_t* rows, const int32_t* slots) {
    const mdi::attention::WriteRowsParams params{count, dim, static_cast<const __nv_bfloat16*>(in), dim, rows, slots, nullptr};
    window ? mdi::attention::launch_write_window(params) : mdi::attention::launch_write_compressed(params);
}

extern "C" void write_normed_window(int count, int dim, int rope_dim, const void* in, int64_t in_stride, const void* weight, float eps,
                                    const int32_t* positions, const float* table, uint8_t* rows, const int32_t* slots) {
    mdi::attention::launch_write_normed_window(
        {count, dim, static_cast<const __nv_bfloat16*>(in), in_stride, rows, slots, nullptr},
        {weight, false, eps, rope_dim, positions, table});
}
