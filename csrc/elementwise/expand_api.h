// Tensors -> checks -> Params -> launch for elementwise.expand_fp8 and expand_fp4. Included by elementwise_api.h.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "elementwise/expand.h"
#endif

namespace mdi::elementwise {

inline void define_expand(Library& m) {
    m.def("elementwise_expand_fp8(Tensor codes, Tensor scale, Tensor(a!) out) -> ()");
    m.def("elementwise_expand_fp4(Tensor packed, Tensor scale, Tensor(a!) out) -> ()");
}

#ifdef MDI_WITH_CUDA
inline ExpandParams expand_params(const char* op, const Tensor& codes, int64_t codes_per_byte, const Tensor& scale,
                                  const Tensor& out, const DeviceScope& scope) {
    MDI_CHECK(op, codes, codes.dim() == 2, "must have two dimensions, got ", list_string(codes.sizes()));
    const int64_t m = codes.size(0), k = codes.size(1) * codes_per_byte;
    MDI_CHECK(op, codes, k % 32 == 0, "must hold a multiple of 32 columns, got ", k);
    MDI_CHECK_SHAPE(op, scale, {"M", m}, {"K/32", k / 32});
    MDI_CHECK_SHAPE(op, out, {"M", m}, {"K", k});
    MDI_CHECK_DTYPE(op, scale, ScalarType::Byte);
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"codes", codes}, {"scale", scale}, {"out", out}}) {
        check_cuda_tensor(op, name, tensor, scope.device);
        check_contiguous(op, name, tensor);
    }
    MDI_CHECK_ALIGN(op, codes, 16);
    MDI_CHECK_ALIGN(op, out, 16);
    return {m, k, data<const uint8_t>(codes), data<const uint8_t>(scale), data<uint16_t>(out), scope.stream};
}

inline void expand_fp8(const Tensor& codes, const Tensor& scale, const Tensor& out) {
    const DeviceScope scope(codes);
    MDI_CHECK_DTYPE("elementwise.expand_fp8", codes, ScalarType::Byte, ScalarType::Float8_e4m3fn);
    launch_expand_fp8(expand_params("elementwise.expand_fp8", codes, 1, scale, out, scope));
}

inline void expand_fp4(const Tensor& packed, const Tensor& scale, const Tensor& out) {
    const DeviceScope scope(packed);
    MDI_CHECK_DTYPE("elementwise.expand_fp4", packed, ScalarType::Byte);
    launch_expand_fp4(expand_params("elementwise.expand_fp4", packed, 2, scale, out, scope));
}

inline void implement_expand(Library& m) {
    m.impl("elementwise_expand_fp8", TORCH_BOX(&expand_fp8));
    m.impl("elementwise_expand_fp4", TORCH_BOX(&expand_fp4));
}
#endif

}  // namespace mdi::elementwise
