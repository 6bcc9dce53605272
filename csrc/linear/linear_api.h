// Tensors -> checks -> Params -> launch for the dense products. Included by binding.cpp only.
#pragma once
#include <optional>

#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "linear/linear.h"
#endif

namespace mdi::linear {

inline void define_linear([[maybe_unused]] Library& m) {
#ifdef MDI_WITH_SM90
    m.def(
        "linear_scaled_gemm_sm90(Tensor codes, Tensor row_scale, Tensor weight, Tensor weight_scale, Tensor? positions, "
        "Tensor? table, int head_dim, Tensor(a!) out) -> ()");
#endif
}

#ifdef MDI_WITH_SM90
inline void scaled_gemm(const Tensor& codes, const Tensor& row_scale, const Tensor& weight, const Tensor& weight_scale,
                        const std::optional<Tensor>& positions, const std::optional<Tensor>& table, int64_t head_dim,
                        const Tensor& out) {
    constexpr const char* op = "linear.scaled_gemm";
    const DeviceScope scope(codes);
    MDI_CHECK(op, codes, codes.dim() == 3, "must be [T, g, K], got ", list_string(codes.sizes()));
    MDI_CHECK(op, weight, weight.dim() == 2, "must be [O, K], got ", list_string(weight.sizes()));
    const int64_t tokens = codes.size(0), groups = codes.size(1), k = codes.size(2), columns = weight.size(0);
    const auto check = [&](const char* name, const Tensor& tensor, ScalarType type, std::initializer_list<Dim> shape,
                           int64_t align = 16) {
        check_cuda_tensor(op, name, tensor, scope.device);
        check_dtype(op, name, tensor, {type});
        check_shape(op, name, tensor, shape);
        check_align(op, name, tensor, align);
    };
    check("codes", codes, ScalarType::Float8_e4m3fn, {{"T", tokens}, {"g", groups}, {"K", k}});
    MDI_CHECK_STRIDE(op, codes, 2, 1);
    if (groups > 1) MDI_CHECK_STRIDE(op, codes, 1, k);
    const int64_t codes_stride = tokens > 1 ? codes.stride(0) : groups * k;
    MDI_CHECK(op, codes, codes_stride % 16 == 0, "must have a row stride that is a multiple of 16, got ", codes_stride);
    MDI_CHECK(op, codes, k > 0 && k % 128 == 0, "must have K a positive multiple of 128, got K=", k);
    check("row_scale", row_scale, ScalarType::Float, {{"T", tokens}, {"g", groups}}, 4);
    MDI_CHECK_CONTIGUOUS(op, row_scale);
    check("weight", weight, ScalarType::Float8_e4m3fn, {{"O", columns}, {"K", k}});
    MDI_CHECK_CONTIGUOUS(op, weight);
    MDI_CHECK(op, weight, groups > 0 && columns % (8 * groups) == 0, "must have a multiple of 8 rows for each of g=", groups,
              " groups, got O=", columns);
    check("weight_scale", weight_scale, ScalarType::Float, {{"O", columns}});
    MDI_CHECK_CONTIGUOUS(op, weight_scale);
    check("out", out, ScalarType::BFloat16, {{"T", tokens}, {"O", columns}});
    MDI_CHECK_STRIDE(op, out, 1, 1);
    const int64_t out_stride = tokens > 1 ? out.stride(0) : columns;
    MDI_CHECK(op, out, out_stride % 8 == 0, "must have a row stride that is a multiple of 8, got ", out_stride);
    MDI_CHECK_INT32(op, tokens);
    MDI_CHECK_INT32(op, columns);
    MDI_CHECK_INT32(op, groups * k);
    ScaledGemmParams p = {};
    p.num_rows = static_cast<int>(tokens);
    p.num_columns = static_cast<int>(columns);
    p.k = static_cast<int>(k);
    p.groups = static_cast<int>(groups);
    p.codes = data<const uint8_t>(codes);
    p.codes_stride = codes_stride;
    p.row_scale = data<const float>(row_scale);
    p.weight = data<const uint8_t>(weight);
    p.weight_scale = data<const float>(weight_scale);
    p.out = data<bf16>(out);
    p.out_stride = out_stride;
    p.stream = scope.stream;
    if (positions.has_value() != table.has_value()) fail(op, "table", "must be given together with positions");
    if (table) {
        MDI_CHECK(op, table, table->dim() == 3, "must be [P, R/2, 2], got ", list_string(table->sizes()));
        const int64_t rope_dim = 2 * table->size(1);
        check("table", *table, ScalarType::Float, {{"P", table->size(0)}, {"R/2", rope_dim / 2}, {"2", 2}});
        check_contiguous(op, "table", *table);
        check_cuda_tensor(op, "positions", *positions, scope.device);
        check_dtype(op, "positions", *positions, {ScalarType::Int});
        check_shape(op, "positions", *positions, {{"T", tokens}});
        check_contiguous(op, "positions", *positions);
        MDI_CHECK(op, head_dim, head_dim > 0 && head_dim % 8 == 0 && columns % head_dim == 0 && rope_dim % 8 == 0 && rope_dim <= head_dim,
                  "must be a multiple of 8 that divides O=", columns, ", with R a multiple of 8 up to it, got ", head_dim,
                  " and R=", rope_dim);
        p.head_dim = static_cast<int>(head_dim);
        p.rope_dim = static_cast<int>(rope_dim);
        p.positions = data<const int32_t>(*positions);
        p.table = data<const float>(*table);
    }
    launch_scaled_gemm_sm90(p);
}
#endif

#ifdef MDI_WITH_CUDA
inline void implement_linear([[maybe_unused]] Library& m) {
#ifdef MDI_WITH_SM90
    m.impl("linear_scaled_gemm_sm90", TORCH_BOX(&scaled_gemm));
#endif
}
#endif

}  // namespace mdi::linear
