// What fold_rows and swiglu_fold share: the folded form of a row that grouped_gemm_sm90 reads.
//
// Columns are reordered inside every 128: the 32-bit word w = 8t + q (t = 0..3 the scale group, q = 0..7) goes to word
// 4q + t, so that quad lane t of the product's weight fragments owns group t.
#pragma once
#include <cstdint>

#include "common/math.h"
#include "common/number_formats.cuh"

namespace mdi::moe {

// where the 32-bit word `word` of a row goes
__device__ __forceinline__ int folded_word(int word) {
    return word / 32 * 32 + word % 8 * 4 + word % 32 / 8;
}

// four E4M3 codes times 2^-shift, nearest even; NaN stays NaN
__device__ __forceinline__ uint32_t shift_codes(uint32_t codes, int shift) {
#if defined(__CUDA_ARCH__)
    // 2^-shift as a pair of f16, down to the smallest subnormal; below that it is zero and every code rounds to zero
    const float power = bits_float((127u - static_cast<uint32_t>(min(shift, 126))) << 23);
    uint32_t factor, out;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(factor) : "f"(power));
    asm("{\n.reg .b16 l, h;\n.reg .b32 p, q;\n.reg .b16 x, y;\nmov.b32 {l, h}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 p, l;\ncvt.rn.f16x2.e4m3x2 q, h;\n"
        "mul.rn.f16x2 p, p, %2;\nmul.rn.f16x2 q, q, %2;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 x, p;\ncvt.rn.satfinite.e4m3x2.f16x2 y, q;\nmov.b32 %0, {x, y};\n}\n"
        : "=r"(out)
        : "r"(codes), "r"(factor));
    return out;
#else
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<uint32_t>(e4m3_encode(e4m3_decode(codes >> (8 * i) & 0xffu) * exp2f(static_cast<float>(-shift)))) << (8 * i);
    return out;
#endif
}

}  // namespace mdi::moe
