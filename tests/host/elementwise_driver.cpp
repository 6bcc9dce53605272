// The elementwise kernels on the CPU: see cuda_on_cpu.h. Null pointers choose the parts of a row pass, as in RowParams.
#include "elementwise/elementwise.h"

using namespace mdi::elementwise;

extern "C" {

void run_row(int64_t tokens, int width, const uint16_t* x, int64_t x_stride, const uint16_t* streams, const float* pre,
             int num_streams, const void* weight, int weight_is_f32, float eps, uint16_t* out, uint8_t* codes,
             uint8_t* scale, float* row_scale) {
    const Quant quant = codes == nullptr ? Quant::kNone : (row_scale != nullptr ? Quant::kFolded : Quant::kGroup);
    launch_row({tokens, width, x, x_stride, streams, pre, num_streams, weight, weight_is_f32 != 0, eps, out, quant, codes,
                scale, row_scale, nullptr});
}

void run_fold_scales(int64_t tokens, int width, const uint8_t* codes, const uint8_t* scale, uint8_t* folded,
                     float* row_scale) {
    launch_fold_scales({tokens, width, codes, scale, folded, row_scale, nullptr});
}

void run_rope(int64_t tokens, int heads, int dim, int rope_dim, const uint16_t* x, int64_t x_stride, uint16_t* out,
              int64_t out_stride, const int32_t* positions, const float* table, int inverse) {
    launch_rope({tokens, heads, dim, rope_dim, x, x_stride, out, out_stride, positions, table, inverse != 0, nullptr});
}

void run_rope_quant(int64_t tokens, int groups, int width, int head_dim, int rope_dim, const uint16_t* x,
                    const int32_t* positions, const float* table, int inverse, uint8_t* codes, uint8_t* scale,
                    float* row_scale) {
    RowParams p = {};
    p.num_tokens = tokens * groups, p.width = width, p.x = x, p.x_stride = static_cast<int64_t>(groups) * width;
    p.quant = row_scale != nullptr ? Quant::kFolded : Quant::kGroup;
    p.codes = codes, p.scale = scale, p.row_scale = row_scale;
    launch_rope_quant(p, {groups, head_dim, rope_dim, positions, table, inverse != 0});
}

void run_hc_mix(int64_t tokens, int n, int width, const uint16_t* streams, const float* fn, const float* base,
                const float* scale, int iters, float hc_eps, float norm_eps, float* partial, float* pre, float* post,
                float* comb) {
    launch_hc_mix({tokens, n, width, streams, fn, base, scale, iters, hc_eps, norm_eps, partial, pre, post, comb, nullptr});
}

void run_hc_expand_mix(int64_t tokens, int n, int width, const uint16_t* y, int64_t y_stride, const uint16_t* streams,
                       const float* last_pre, const float* last_post, const float* last_comb, const float* fn,
                       const float* base, const float* scale, int iters, float hc_eps, float norm_eps, float* partial,
                       uint16_t* out, uint16_t* x, float* pre, float* post, float* comb) {
    launch_hc_expand_mix({{tokens, n, width, streams, fn, base, scale, iters, hc_eps, norm_eps, partial, pre, post, comb,
                           nullptr},
                          y, y_stride, last_pre, last_post, last_comb, out, x},
                         nullptr);
}

void run_hc_expand_mix_norm_quant(int64_t tokens, int n, int width, const uint16_t* y, int64_t y_stride,
                                  const uint16_t* streams, const float* last_pre, const float* last_post,
                                  const float* last_comb, const float* fn, const float* base, const float* scale, int iters,
                                  float hc_eps, float norm_eps, const void* weight, int weight_is_f32, int keep_x,
                                  float* partial, uint16_t* out, uint16_t* x, uint8_t* codes, uint8_t* group_scale,
                                  float* row_scale, float* pre, float* post, float* comb) {
    const RowParams row{tokens, width, x, width, nullptr, nullptr, 0, weight, weight_is_f32 != 0, norm_eps,
                        keep_x != 0 ? x : nullptr, row_scale != nullptr ? Quant::kFolded : Quant::kGroup, codes, group_scale,
                        row_scale, nullptr};
    launch_hc_expand_mix({{tokens, n, width, streams, fn, base, scale, iters, hc_eps, norm_eps, partial, pre, post, comb,
                           nullptr},
                          y, y_stride, last_pre, last_post, last_comb, out, x},
                         &row);
}

void run_hc_expand(int64_t tokens, int n, int width, const uint16_t* y, int64_t y_stride, const uint16_t* streams,
                   const float* post, const float* comb, uint16_t* out) {
    launch_hc_expand({tokens, n, width, y, y_stride, streams, post, comb, out, nullptr});
}

void run_engram_gate(int64_t tokens, int n, int width, const uint16_t* streams, const uint16_t* z, int64_t z_stride,
                     const uint16_t* q_weight, const uint16_t* k_weight, float eps, uint16_t* out) {
    launch_engram_gate({tokens, n, width, streams, z, z_stride, q_weight, k_weight, eps, out, nullptr});
}

}  // extern "C"
