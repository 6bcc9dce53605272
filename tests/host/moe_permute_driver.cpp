// csrc/moe/permute.cu on the CPU: see cuda_on_cpu.h.
#include "moe/moe.h"

using namespace mdi::moe;

extern "C" void dispatch(int64_t slots, int first_expert, int num_local, const int32_t* ids, int32_t* row_of_slot,
                         int32_t* slot_of_row, int32_t* offsets, int32_t* counts, int k, const float* weights,
                         int32_t* token_of_row, float* row_weight) {
    launch_permute({slots, first_expert, num_local, ids, row_of_slot, slot_of_row, offsets, counts, k, weights, token_of_row,
                    row_weight, nullptr});
}
