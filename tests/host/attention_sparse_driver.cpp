// attention.sparse (portable) on the CPU: see cuda_on_cpu.h.
#include "attention/attention.h"

extern "C" void sparse(int tokens, int heads, int window_lanes, int picks, int window_rows, int compressed_rows, float scale,
                       const void* q, const uint8_t* window, const int32_t* window_idx, const uint8_t* compressed,
                       const int32_t* compressed_idx, const int32_t* compressed_len, const float* sink, void* out) {
    mdi::attention::SparseParams params = {};
    params.num_tokens = tokens;
    params.num_heads = heads;
    params.num_window = window_lanes;
    params.num_picks = picks;
    params.num_window_rows = window_rows;
    params.num_compressed_rows = compressed_rows;
    params.softmax_scale = scale;
    params.q = static_cast<const __nv_bfloat16*>(q);
    params.q_stride_token = static_cast<int64_t>(heads) * mdi::attention::kHeadDim;
    params.window = window;
    params.window_idx = window_idx;
    params.compressed = compressed;
    params.compressed_idx = compressed_idx;
    params.compressed_len = compressed_len;
    params.sink = sink;
    params.out = static_cast<__nv_bfloat16*>(out);
    mdi::attention::launch_sparse(params);
}
