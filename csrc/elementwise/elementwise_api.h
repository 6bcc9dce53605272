// Tensors -> checks -> Params -> launch for the elementwise ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#include "elementwise/expand_api.h"
#ifdef MDI_WITH_CUDA
#include "elementwise/elementwise.h"
#endif

namespace mdi::elementwise {

// `scale` of the quantising ops: uint8 [T, N/32] for one scale per 32 columns, float32 [T] for the folded form.
inline void define_elementwise(Library& m) {
    define_expand(m);
    m.def("elementwise_rmsnorm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");
    m.def("elementwise_act_quant(Tensor x, Tensor(a!) codes, Tensor(b!) scale) -> ()");
    m.def("elementwise_act_quant_folded(Tensor x, Tensor(a!) codes, Tensor(b!) row_scale) -> ()");
    m.def("elementwise_rmsnorm_quant(Tensor x, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) codes, "
          "Tensor(c!) scale) -> ()");
    m.def("elementwise_fold_scales(Tensor codes, Tensor scale, Tensor(a!) folded, Tensor(b!) row_scale) -> ()");
    m.def("elementwise_rope(Tensor x, Tensor positions, Tensor table, bool inverse, Tensor(a!) out) -> ()");
    m.def("elementwise_rope_quant(Tensor x, Tensor positions, Tensor table, bool inverse, Tensor(a!) codes, Tensor(b!) scale) -> ()");
    m.def("elementwise_hc_mix(Tensor streams, Tensor fn, Tensor base, Tensor scale, int sinkhorn_iters, float hc_eps, "
          "float norm_eps, Tensor(a!) workspace, Tensor(b!) pre, Tensor(c!) post, Tensor(d!) comb) -> ()");
    m.def("elementwise_hc_expand_mix(Tensor y, Tensor streams, Tensor last_pre, Tensor last_post, Tensor last_comb, "
          "Tensor fn, Tensor base, Tensor scale, int sinkhorn_iters, float hc_eps, float norm_eps, Tensor(a!) workspace, "
          "Tensor(b!) out, Tensor(c!) x, Tensor(d!) pre, Tensor(e!) post, Tensor(f!) comb) -> ()");
    const std::string expand_mix_norm_quant = "elementwise_hc_expand_mix_norm_quant";
    const std::string operands =
        "(Tensor y, Tensor streams, Tensor last_pre, Tensor last_post, Tensor last_comb, Tensor fn, Tensor base, Tensor scale, "
        "int sinkhorn_iters, float hc_eps, float norm_eps, Tensor norm_weight, bool keep_x, Tensor(a!) workspace, Tensor(b!) out, "
        "Tensor(c!) x, Tensor(d!) codes, Tensor(e!) codes_scale, Tensor(f!) pre, Tensor(g!) post, Tensor(h!) comb) -> ()";
    m.def((expand_mix_norm_quant + operands).c_str());
#ifdef MDI_WITH_SM90
    m.def((expand_mix_norm_quant + "_sm90" + operands).c_str());
#endif
    m.def("elementwise_hc_collapse(Tensor streams, Tensor pre, Tensor(a!) out) -> ()");
    m.def("elementwise_hc_collapse_norm(Tensor streams, Tensor pre, Tensor weight, float eps, Tensor(a!) out) -> ()");
    m.def("elementwise_hc_collapse_norm_quant(Tensor streams, Tensor pre, Tensor weight, float eps, Tensor(a!) out, "
          "Tensor(b!) codes, Tensor(c!) scale) -> ()");
    m.def("elementwise_hc_expand(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor(a!) out) -> ()");
    m.def("elementwise_engram_gate(Tensor streams, Tensor z, Tensor q_weight, Tensor k_weight, float eps, "
          "Tensor(a!) out) -> ()");
}

#ifdef MDI_WITH_CUDA
inline void check_operand(const char* op, const char* name, const Tensor& tensor, int32_t device,
                          std::initializer_list<ScalarType> dtypes, std::initializer_list<Dim> shape) {
    check_cuda_tensor(op, name, tensor, device);
    check_dtype(op, name, tensor, dtypes);
    check_shape(op, name, tensor, shape);
}

inline void check_dense(const char* op, const char* name, const Tensor& tensor, int32_t device,
                        std::initializer_list<ScalarType> dtypes, std::initializer_list<Dim> shape, int64_t align = 16) {
    check_operand(op, name, tensor, device, dtypes, shape);
    check_contiguous(op, name, tensor);
    check_align(op, name, tensor, align);
}

// bf16 [T, N] whose rows may lie apart: returns the distance of two rows in elements
inline int64_t check_rows(const char* op, const char* name, const Tensor& tensor, int32_t device, int64_t tokens, int64_t width) {
    check_operand(op, name, tensor, device, {ScalarType::BFloat16}, {{"T", tokens}, {"N", width}});
    check_stride(op, name, tensor, 1, 1);
    check_align(op, name, tensor, 16);
    const int64_t stride = tokens > 1 ? tensor.stride(0) : width;
    if (stride % 8 != 0) fail(op, name, "must have a row stride that is a multiple of 8, got ", stride);
    return stride;
}

inline void check_width(const char* op, const char* name, int64_t width, int64_t multiple, int64_t largest) {
    if (width < multiple || width % multiple != 0 || width > largest)
        fail(op, name, "must have a row width N that is a multiple of ", multiple, " from ", multiple, " to ", largest,
             ", got ", width);
}

inline int64_t check_streams(const char* op, const Tensor& streams, int32_t device) {
    MDI_CHECK(op, streams, streams.dim() == 3, "must be [T, n, N], got ", list_string(streams.sizes()));
    MDI_CHECK(op, streams, streams.size(1) >= 1 && streams.size(1) <= 4, "must have n = 1..4 streams, got ", streams.size(1));
    check_dense(op, "streams", streams, device, {ScalarType::BFloat16},
                {{"T", streams.size(0)}, {"n", streams.size(1)}, {"N", streams.size(2)}});
    return streams.size(1);
}

inline RowParams row_source(const char* op, const Tensor& x, const DeviceScope& scope) {
    MDI_CHECK(op, x, x.dim() == 2, "must be [T, N], got ", list_string(x.sizes()));
    check_width(op, "x", x.size(1), kQuantGroup, kMaxRowWidth);
    RowParams p = {};
    p.num_tokens = x.size(0);
    p.width = static_cast<int>(x.size(1));
    p.x_stride = check_rows(op, "x", x, scope.device, x.size(0), x.size(1));
    p.x = data<const bf16>(x);
    p.stream = scope.stream;
    return p;
}

inline RowParams stream_source(const char* op, const Tensor& streams, const Tensor& pre, const DeviceScope& scope) {
    RowParams p = {};
    p.num_streams = static_cast<int>(check_streams(op, streams, scope.device));
    check_width(op, "streams", streams.size(2), kQuantGroup, kMaxCollapseWidth);
    check_dense(op, "pre", pre, scope.device, {ScalarType::Float}, {{"T", streams.size(0)}, {"n", streams.size(1)}}, 4);
    p.num_tokens = streams.size(0);
    p.width = static_cast<int>(streams.size(2));
    p.streams = data<const bf16>(streams);
    p.pre = data<const float>(pre);
    p.stream = scope.stream;
    return p;
}

inline void add_norm(const char* op, RowParams& p, const Tensor& weight, double eps, const DeviceScope& scope) {
    check_dense(op, "weight", weight, scope.device, {ScalarType::BFloat16, ScalarType::Float}, {{"N", p.width}});
    p.weight = weight.data_ptr();
    p.weight_is_f32 = weight.scalar_type() == ScalarType::Float;
    p.eps = static_cast<float>(eps);
}

inline void add_out(const char* op, RowParams& p, const Tensor& out, const DeviceScope& scope) {
    check_dense(op, "out", out, scope.device, {ScalarType::BFloat16}, {{"T", p.num_tokens}, {"N", p.width}});
    p.out = data<bf16>(out);
}

inline void add_quant(const char* op, RowParams& p, const Tensor& codes, const Tensor& scale, const DeviceScope& scope) {
    check_dense(op, "codes", codes, scope.device, {ScalarType::Float8_e4m3fn}, {{"T", p.num_tokens}, {"N", p.width}});
    p.codes = data<uint8_t>(codes);
    if (scale.scalar_type() == ScalarType::Float) {
        check_dense(op, "row_scale", scale, scope.device, {ScalarType::Float}, {{"T", p.num_tokens}}, 4);
        p.quant = Quant::kFolded;
        p.row_scale = data<float>(scale);
    } else {
        check_dense(op, "scale", scale, scope.device, {ScalarType::Byte},
                    {{"T", p.num_tokens}, {"N/32", p.width / kQuantGroup}}, 1);
        p.quant = Quant::kGroup;
        p.scale = data<uint8_t>(scale);
    }
}

inline void rmsnorm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
    constexpr const char* op = "elementwise.rmsnorm";
    const DeviceScope scope(x);
    RowParams p = row_source(op, x, scope);
    add_norm(op, p, weight, eps, scope);
    add_out(op, p, out, scope);
    launch_row(p);
}

inline void act_quant(const Tensor& x, const Tensor& codes, const Tensor& scale) {
    constexpr const char* op = "elementwise.act_quant";
    const DeviceScope scope(x);
    RowParams p = row_source(op, x, scope);
    MDI_CHECK_DTYPE(op, scale, ScalarType::Byte);
    add_quant(op, p, codes, scale, scope);
    launch_row(p);
}

inline void act_quant_folded(const Tensor& x, const Tensor& codes, const Tensor& row_scale) {
    constexpr const char* op = "elementwise.act_quant_folded";
    const DeviceScope scope(x);
    RowParams p = row_source(op, x, scope);
    MDI_CHECK_DTYPE(op, row_scale, ScalarType::Float);
    add_quant(op, p, codes, row_scale, scope);
    launch_row(p);
}

inline void rmsnorm_quant(const Tensor& x, const Tensor& weight, double eps, const Tensor& out, const Tensor& codes,
                          const Tensor& scale) {
    constexpr const char* op = "elementwise.rmsnorm_quant";
    const DeviceScope scope(x);
    RowParams p = row_source(op, x, scope);
    add_norm(op, p, weight, eps, scope);
    add_out(op, p, out, scope);
    add_quant(op, p, codes, scale, scope);
    launch_row(p);
}

inline void fold_scales(const Tensor& codes, const Tensor& scale, const Tensor& folded, const Tensor& row_scale) {
    constexpr const char* op = "elementwise.fold_scales";
    const DeviceScope scope(codes);
    MDI_CHECK(op, codes, codes.dim() == 2, "must be [T, K], got ", list_string(codes.sizes()));
    const int64_t tokens = codes.size(0), width = codes.size(1);
    check_width(op, "codes", width, kQuantGroup, int64_t{1} << 30);
    check_dense(op, "codes", codes, scope.device, {ScalarType::Float8_e4m3fn}, {{"T", tokens}, {"K", width}});
    check_dense(op, "scale", scale, scope.device, {ScalarType::Byte}, {{"T", tokens}, {"K/32", width / kQuantGroup}}, 1);
    check_dense(op, "folded", folded, scope.device, {ScalarType::Float8_e4m3fn}, {{"T", tokens}, {"K", width}});
    check_dense(op, "row_scale", row_scale, scope.device, {ScalarType::Float}, {{"T", tokens}}, 4);
    launch_fold_scales({tokens, static_cast<int>(width), data<const uint8_t>(codes), data<const uint8_t>(scale),
                        data<uint8_t>(folded), data<float>(row_scale), scope.stream});
}

// [T, h, d] with contiguous heads: the distance of two tokens in elements
inline int64_t check_heads(const char* op, const char* name, const Tensor& tensor, int32_t device, const Tensor& like) {
    check_operand(op, name, tensor, device, {ScalarType::BFloat16},
                  {{"T", like.size(0)}, {"h", like.size(1)}, {"d", like.size(2)}});
    check_stride(op, name, tensor, 2, 1);
    if (tensor.size(1) > 1) check_stride(op, name, tensor, 1, tensor.size(2));
    check_align(op, name, tensor, 4);
    const int64_t stride = tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(1) * tensor.size(2);
    if (stride % 2 != 0) fail(op, name, "must have an even token stride, got ", stride);
    return stride;
}

inline void rope(const Tensor& x, const Tensor& positions, const Tensor& table, bool inverse, const Tensor& out) {
    constexpr const char* op = "elementwise.rope";
    const DeviceScope scope(x);
    MDI_CHECK(op, x, x.dim() == 3, "must be [T, h, d], got ", list_string(x.sizes()));
    MDI_CHECK(op, table, table.dim() == 3, "must be [P, R/2, 2], got ", list_string(table.sizes()));
    RopeParams p = {};
    p.num_tokens = x.size(0);
    MDI_CHECK_INT32(op, x.size(1));
    MDI_CHECK_INT32(op, x.size(2));
    p.num_heads = static_cast<int>(x.size(1));
    p.head_dim = static_cast<int>(x.size(2));
    p.rope_dim = static_cast<int>(2 * table.size(1));
    MDI_CHECK(op, x, p.head_dim % 2 == 0 && p.rope_dim <= p.head_dim, "must have an even head dim d of at least R=", p.rope_dim,
              ", got ", p.head_dim);
    p.x_stride = check_heads(op, "x", x, scope.device, x);
    p.out_stride = check_heads(op, "out", out, scope.device, x);
    check_dense(op, "positions", positions, scope.device, {ScalarType::Int}, {{"T", p.num_tokens}}, 4);
    check_dense(op, "table", table, scope.device, {ScalarType::Float}, {{"P", table.size(0)}, {"R/2", p.rope_dim / 2}, {"2", 2}}, 8);
    p.x = data<const bf16>(x);
    p.out = data<bf16>(out);
    MDI_CHECK(op, out, p.x != p.out || p.x_stride == p.out_stride, "must be x itself or lie apart from it");
    p.positions = data<const int32_t>(positions);
    p.table = data<const float>(table);
    p.inverse = inverse;
    p.stream = scope.stream;
    if (p.head_dim > 0) launch_rope(p);
}

inline void rope_quant(const Tensor& x, const Tensor& positions, const Tensor& table, bool inverse, const Tensor& codes,
                       const Tensor& scale) {
    constexpr const char* op = "elementwise.rope_quant";
    const DeviceScope scope(x);
    MDI_CHECK(op, x, x.dim() == 3, "must be [T, h, d], got ", list_string(x.sizes()));
    const int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2);
    check_dense(op, "x", x, scope.device, {ScalarType::BFloat16}, {{"T", tokens}, {"h", heads}, {"d", dim}});
    MDI_CHECK(op, codes, codes.dim() == 3, "must be [T, g, K], got ", list_string(codes.sizes()));
    const int64_t groups = codes.size(1), width = codes.size(2);
    check_width(op, "codes", width, kQuantGroup, kMaxRowWidth);
    MDI_CHECK(op, codes, dim > 0 && groups * width == heads * dim && width % dim == 0, "must hold whole heads of x in every group, got ",
              list_string(codes.sizes()));
    MDI_CHECK_INT32(op, tokens * groups);
    const bool folded = scale.scalar_type() == ScalarType::Float;
    check_dense(op, "codes", codes, scope.device, {ScalarType::Float8_e4m3fn}, {{"T", tokens}, {"g", groups}, {"K", width}});
    if (folded)
        check_dense(op, "scale", scale, scope.device, {ScalarType::Float}, {{"T", tokens}, {"g", groups}}, 4);
    else
        check_dense(op, "scale", scale, scope.device, {ScalarType::Byte},
                    {{"T", tokens}, {"g", groups}, {"K/32", width / kQuantGroup}}, 1);
    MDI_CHECK(op, table, table.dim() == 3, "must be [P, R/2, 2], got ", list_string(table.sizes()));
    const int64_t rope_dim = 2 * table.size(1);
    check_dense(op, "positions", positions, scope.device, {ScalarType::Int}, {{"T", tokens}}, 4);
    check_dense(op, "table", table, scope.device, {ScalarType::Float}, {{"P", table.size(0)}, {"R/2", rope_dim / 2}, {"2", 2}});
    MDI_CHECK(op, x, dim % 8 == 0 && rope_dim % 8 == 0 && rope_dim <= dim,
              "must have a head dim d and R that are multiples of 8, R <= d, got d=", dim, " R=", rope_dim);
    RowParams p = {};
    p.num_tokens = tokens * groups;
    p.width = static_cast<int>(width);
    p.x = data<const bf16>(x);
    p.x_stride = heads * dim;
    p.stream = scope.stream;
    p.quant = folded ? Quant::kFolded : Quant::kGroup;
    p.codes = data<uint8_t>(codes);
    p.scale = folded ? nullptr : data<uint8_t>(scale);
    p.row_scale = folded ? data<float>(scale) : nullptr;
    launch_rope_quant(p, {static_cast<int>(groups), static_cast<int>(dim), static_cast<int>(rope_dim),
                          data<const int32_t>(positions), data<const float>(table), inverse});
}

inline HcMixParams mix_params(const char* op, const Tensor& streams, const Tensor& fn, const Tensor& base, const Tensor& scale,
                              int64_t sinkhorn_iters, double hc_eps, double norm_eps, const Tensor& workspace,
                              const Tensor& pre, const Tensor& post, const Tensor& comb, const DeviceScope& scope) {
    const int64_t n = check_streams(op, streams, scope.device), tokens = streams.size(0), width = streams.size(2);
    const int64_t mixes = 2 * n + n * n;
    check_width(op, "streams", width, 8, int64_t{1} << 20);
    MDI_CHECK(op, sinkhorn_iters, sinkhorn_iters >= 1 && sinkhorn_iters <= 1000, "must be 1..1000, got ", sinkhorn_iters);
    check_dense(op, "fn", fn, scope.device, {ScalarType::Float}, {{"2n+n*n", mixes}, {"n*N", n * width}});
    check_dense(op, "base", base, scope.device, {ScalarType::Float}, {{"2n+n*n", mixes}}, 4);
    check_dense(op, "scale", scale, scope.device, {ScalarType::Float}, {{"3", 3}}, 4);
    const int64_t floats = hc_mix_workspace_floats(tokens, static_cast<int>(n), static_cast<int>(width));
    check_dense(op, "workspace", workspace, scope.device, {ScalarType::Float}, {{"floats", floats}});
    check_dense(op, "pre", pre, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}}, 4);
    check_dense(op, "post", post, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}}, 4);
    check_dense(op, "comb", comb, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}, {"n", n}}, 4);
    HcMixParams p = {};
    p.num_tokens = tokens;
    p.num_streams = static_cast<int>(n);
    p.width = static_cast<int>(width);
    p.streams = data<const bf16>(streams);
    p.fn = data<const float>(fn);
    p.base = data<const float>(base);
    p.scale = data<const float>(scale);
    p.sinkhorn_iters = static_cast<int>(sinkhorn_iters);
    p.hc_eps = static_cast<float>(hc_eps);
    p.norm_eps = static_cast<float>(norm_eps);
    p.partial = data<float>(workspace);
    p.pre = data<float>(pre);
    p.post = data<float>(post);
    p.comb = data<float>(comb);
    p.stream = scope.stream;
    return p;
}

inline void hc_mix(const Tensor& streams, const Tensor& fn, const Tensor& base, const Tensor& scale, int64_t sinkhorn_iters,
                   double hc_eps, double norm_eps, const Tensor& workspace, const Tensor& pre, const Tensor& post,
                   const Tensor& comb) {
    const DeviceScope scope(streams);
    launch_hc_mix(mix_params("elementwise.hc_mix", streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps, workspace,
                             pre, post, comb, scope));
}

inline HcExpandMixParams expand_mix_params(const char* op, const Tensor& y, const HcMixParams& mix, const Tensor& last_pre,
                                           const Tensor& last_post, const Tensor& last_comb, const Tensor& out,
                                           const Tensor& x, const DeviceScope& scope) {
    HcExpandMixParams p = {};
    p.mix = mix;
    const int64_t tokens = mix.num_tokens, n = mix.num_streams, width = mix.width;
    MDI_CHECK(op, y, y.dim() == 2, "must be [T, N], got ", list_string(y.sizes()));
    p.y_stride = check_rows(op, "y", y, scope.device, tokens, width);
    const int64_t align = n == 4 ? 16 : 4;  // the kernel copies n coefficients at a time
    check_dense(op, "last_pre", last_pre, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}}, align);
    check_dense(op, "last_post", last_post, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}}, align);
    check_dense(op, "last_comb", last_comb, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}, {"n", n}}, align);
    check_dense(op, "out", out, scope.device, {ScalarType::BFloat16}, {{"T", tokens}, {"n", n}, {"N", width}});
    check_dense(op, "x", x, scope.device, {ScalarType::BFloat16}, {{"T", tokens}, {"N", width}});
    p.y = data<const bf16>(y);
    p.pre = data<const float>(last_pre);
    p.post = data<const float>(last_post);
    p.comb = data<const float>(last_comb);
    p.out = data<bf16>(out);
    p.x = data<bf16>(x);
    return p;
}

inline void hc_expand_mix(const Tensor& y, const Tensor& streams, const Tensor& last_pre, const Tensor& last_post,
                          const Tensor& last_comb, const Tensor& fn, const Tensor& base, const Tensor& scale,
                          int64_t sinkhorn_iters, double hc_eps, double norm_eps, const Tensor& workspace, const Tensor& out,
                          const Tensor& x, const Tensor& pre, const Tensor& post, const Tensor& comb) {
    constexpr const char* op = "elementwise.hc_expand_mix";
    const DeviceScope scope(streams);
    const HcMixParams mix = mix_params(op, streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps, workspace, pre, post,
                                       comb, scope);
    launch_hc_expand_mix(expand_mix_params(op, y, mix, last_pre, last_post, last_comb, out, x, scope), nullptr);
}

// kLaunch: launch_hc_expand_mix, or another launcher with the same bits.
template <void (*kLaunch)(const HcExpandMixParams&, const RowParams*)>
inline void hc_expand_mix_norm_quant(const Tensor& y, const Tensor& streams, const Tensor& last_pre, const Tensor& last_post,
                                     const Tensor& last_comb, const Tensor& fn, const Tensor& base, const Tensor& scale,
                                     int64_t sinkhorn_iters, double hc_eps, double norm_eps, const Tensor& norm_weight,
                                     bool keep_x, const Tensor& workspace, const Tensor& out, const Tensor& x,
                                     const Tensor& codes, const Tensor& codes_scale, const Tensor& pre, const Tensor& post,
                                     const Tensor& comb) {
    constexpr const char* op = "elementwise.hc_expand_mix_norm_quant";
    const DeviceScope scope(streams);
    const HcMixParams mix = mix_params(op, streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps, workspace, pre, post,
                                       comb, scope);
    const HcExpandMixParams p = expand_mix_params(op, y, mix, last_pre, last_post, last_comb, out, x, scope);
    check_width(op, "streams", mix.width, kQuantGroup, kMaxCollapseWidth);
    RowParams row = row_source(op, x, scope);
    add_norm(op, row, norm_weight, norm_eps, scope);
    if (keep_x) add_out(op, row, x, scope);
    add_quant(op, row, codes, codes_scale, scope);
    kLaunch(p, &row);
}

inline void hc_collapse(const Tensor& streams, const Tensor& pre, const Tensor& out) {
    constexpr const char* op = "elementwise.hc_collapse";
    const DeviceScope scope(streams);
    RowParams p = stream_source(op, streams, pre, scope);
    add_out(op, p, out, scope);
    launch_row(p);
}

inline void hc_collapse_norm(const Tensor& streams, const Tensor& pre, const Tensor& weight, double eps, const Tensor& out) {
    constexpr const char* op = "elementwise.hc_collapse_norm";
    const DeviceScope scope(streams);
    RowParams p = stream_source(op, streams, pre, scope);
    add_norm(op, p, weight, eps, scope);
    add_out(op, p, out, scope);
    launch_row(p);
}

inline void hc_collapse_norm_quant(const Tensor& streams, const Tensor& pre, const Tensor& weight, double eps,
                                   const Tensor& out, const Tensor& codes, const Tensor& scale) {
    constexpr const char* op = "elementwise.hc_collapse_norm_quant";
    const DeviceScope scope(streams);
    RowParams p = stream_source(op, streams, pre, scope);
    add_norm(op, p, weight, eps, scope);
    add_out(op, p, out, scope);
    add_quant(op, p, codes, scale, scope);
    launch_row(p);
}

inline void hc_expand(const Tensor& y, const Tensor& streams, const Tensor& post, const Tensor& comb, const Tensor& out) {
    constexpr const char* op = "elementwise.hc_expand";
    const DeviceScope scope(streams);
    const int64_t n = check_streams(op, streams, scope.device), tokens = streams.size(0), width = streams.size(2);
    check_width(op, "streams", width, 8, int64_t{1} << 28);
    MDI_CHECK(op, y, y.dim() == 2, "must be [T, N], got ", list_string(y.sizes()));
    const int64_t y_stride = check_rows(op, "y", y, scope.device, tokens, width);
    check_dense(op, "post", post, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}}, 4);
    check_dense(op, "comb", comb, scope.device, {ScalarType::Float}, {{"T", tokens}, {"n", n}, {"n", n}}, 4);
    check_dense(op, "out", out, scope.device, {ScalarType::BFloat16}, {{"T", tokens}, {"n", n}, {"N", width}});
    launch_hc_expand({tokens, static_cast<int>(n), static_cast<int>(width), data<const bf16>(y), y_stride,
                      data<const bf16>(streams), data<const float>(post), data<const float>(comb), data<bf16>(out),
                      scope.stream});
}

inline void engram_gate(const Tensor& streams, const Tensor& z, const Tensor& q_weight, const Tensor& k_weight, double eps,
                        const Tensor& out) {
    constexpr const char* op = "elementwise.engram_gate";
    const DeviceScope scope(streams);
    const int64_t n = check_streams(op, streams, scope.device), tokens = streams.size(0), width = streams.size(2);
    check_width(op, "streams", width, 8, kMaxCollapseWidth);
    MDI_CHECK(op, z, z.dim() == 2, "must be [T, (n+1)*N], got ", list_string(z.sizes()));
    const int64_t z_stride = check_rows(op, "z", z, scope.device, tokens, (n + 1) * width);
    check_dense(op, "q_weight", q_weight, scope.device, {ScalarType::BFloat16}, {{"n", n}, {"N", width}});
    check_dense(op, "k_weight", k_weight, scope.device, {ScalarType::BFloat16}, {{"n", n}, {"N", width}});
    check_dense(op, "out", out, scope.device, {ScalarType::BFloat16}, {{"T", tokens}, {"n", n}, {"N", width}});
    launch_engram_gate({tokens, static_cast<int>(n), static_cast<int>(width), data<const bf16>(streams), data<const bf16>(z),
                        z_stride, data<const bf16>(q_weight), data<const bf16>(k_weight), static_cast<float>(eps),
                        data<bf16>(out), scope.stream});
}

inline void implement_elementwise(Library& m) {
    implement_expand(m);
    m.impl("elementwise_rmsnorm", TORCH_BOX(&rmsnorm));
    m.impl("elementwise_act_quant", TORCH_BOX(&act_quant));
    m.impl("elementwise_act_quant_folded", TORCH_BOX(&act_quant_folded));
    m.impl("elementwise_rmsnorm_quant", TORCH_BOX(&rmsnorm_quant));
    m.impl("elementwise_fold_scales", TORCH_BOX(&fold_scales));
    m.impl("elementwise_rope", TORCH_BOX(&rope));
    m.impl("elementwise_rope_quant", TORCH_BOX(&rope_quant));
    m.impl("elementwise_hc_mix", TORCH_BOX(&hc_mix));
    m.impl("elementwise_hc_expand_mix", TORCH_BOX(&hc_expand_mix));
    m.impl("elementwise_hc_expand_mix_norm_quant", TORCH_BOX(&hc_expand_mix_norm_quant<launch_hc_expand_mix>));
#ifdef MDI_WITH_SM90
    m.impl("elementwise_hc_expand_mix_norm_quant_sm90", TORCH_BOX(&hc_expand_mix_norm_quant<launch_hc_expand_mix_sm90>));
#endif
    m.impl("elementwise_hc_collapse", TORCH_BOX(&hc_collapse));
    m.impl("elementwise_hc_collapse_norm", TORCH_BOX(&hc_collapse_norm));
    m.impl("elementwise_hc_collapse_norm_quant", TORCH_BOX(&hc_collapse_norm_quant));
    m.impl("elementwise_hc_expand", TORCH_BOX(&hc_expand));
    m.impl("elementwise_engram_gate", TORCH_BOX(&engram_gate));
}
#endif

}  // namespace mdi::elementwise
