// Tensors -> checks -> Params -> launch for the dense products. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "linear/linear.h"
#endif

namespace mdi::linear {

inline void define_linear([[maybe_unused]] Library& m) {
#ifdef MDI_WITH_SM90
    m.def("linear_fp8_sm90(Tensor codes, Tensor row_scale, Tensor weight, Tensor weight_scale, Tensor(a!) out) -> ()");
#endif
}

#ifdef MDI_WITH_SM90
inline void fp8_sm90(const Tensor& codes, const Tensor& row_scale, const Tensor& weight, const Tensor& weight_scale,
                     const Tensor& out) {
    constexpr const char* op = "linear.fp8";
    const DeviceScope scope(codes);
    MDI_CHECK(op, codes, codes.dim() == 3, "must be [T, g, K], got ", list_string(codes.sizes()));
    MDI_CHECK(op, weight, weight.dim() == 2, "must be [O, K], got ", list_string(weight.sizes()));
    const int64_t t = codes.size(0), g = codes.size(1), k = codes.size(2), o = weight.size(0);
    const auto check = [&](const char* name, const Tensor& tensor, ScalarType type, std::initializer_list<Dim> shape, int64_t align) {
        check_cuda_tensor(op, name, tensor, scope.device);
        check_dtype(op, name, tensor, {type});
        check_shape(op, name, tensor, shape);
        check_contiguous(op, name, tensor);
        check_align(op, name, tensor, align);
    };
    check("codes", codes, ScalarType::Float8_e4m3fn, {{"T", t}, {"g", g}, {"K", k}}, 16);
    check("row_scale", row_scale, ScalarType::Float, {{"T", t}, {"g", g}}, 4);
    check("weight", weight, ScalarType::Float8_e4m3fn, {{"O", o}, {"K", k}}, 16);
    check("weight_scale", weight_scale, ScalarType::Float, {{"O", o}}, 8);
    check("out", out, ScalarType::BFloat16, {{"T", t}, {"O", o}}, 16);
    MDI_CHECK(op, codes, g > 0 && k > 0 && k % 16 == 0, "must have groups and K a positive multiple of 16, got g=", g, " and K=", k);
    MDI_CHECK(op, weight, o % (g == 1 ? 8 : 64 * g) == 0, "must have a multiple of 8 rows, of 64 in each of several groups, got O=", o,
              " for g=", g);
    MDI_CHECK_INT32(op, t);
    MDI_CHECK_INT32(op, o);
    MDI_CHECK_INT32(op, g * k);
    launch_fp8_sm90({data<const uint8_t>(codes), data<const float>(row_scale), data<const uint8_t>(weight),
                     data<const float>(weight_scale), data<uint16_t>(out), static_cast<int>(t), static_cast<int>(o),
                     static_cast<int>(k), static_cast<int>(g), scope.stream});
}
#endif

#ifdef MDI_WITH_CUDA
inline void implement_linear([[maybe_unused]] Library& m) {
#ifdef MDI_WITH_SM90
    m.impl("linear_fp8_sm90", TORCH_BOX(&fp8_sm90));
#endif
}
#endif

}  // namespace mdi::linear
