// Rotary embedding of adjacent pairs of bf16 values (model spec 4.2): (a, b) -> (a*c - b*s, a*s + b*c).
// The four products are rounded to float32 on their own and the sums are not contracted into fused multiply-adds, so that
// the result has the bits of the plain definition; one rounding to bf16. The inverse takes s negated.
#pragma once
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"

namespace mdi {

// float32 a*c + b*s with two rounded products and a rounded sum
MDI_DEVICE float sum_of_products(float a, float c, float b, float s) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(__fmul_rn(a, c), __fmul_rn(b, s));
#else
    const volatile float left = a * c, right = b * s;
    return left + right;
#endif
}

// a pair of bf16 values, the even one in the low half
MDI_DEVICE uint32_t rotate_pair(uint32_t pair, float cosine, float sine) {
    const float a = bits_float(pair << 16), b = bits_float(pair & 0xffff0000u);
    return ptx::pack_bf16x2(sum_of_products(a, cosine, b, -sine), sum_of_products(a, sine, b, cosine));
}

// Eight values of one row. angles: the eight floats (cosine, sine, ..) of their pairs in the table, 16-byte aligned.
MDI_DEVICE uint4 rotate_eight(const uint4& x, const float* angles, bool inverse) {
    const float4 low = reinterpret_cast<const float4*>(angles)[0], high = reinterpret_cast<const float4*>(angles)[1];
    return make_uint4(rotate_pair(x.x, low.x, inverse ? -low.y : low.y), rotate_pair(x.y, low.z, inverse ? -low.w : low.w),
                      rotate_pair(x.z, high.x, inverse ? -high.y : high.y), rotate_pair(x.w, high.z, inverse ? -high.w : high.w));
}

}  // namespace mdi
