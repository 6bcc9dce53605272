// Eight bf16 values in a 16-byte register group, and the arithmetic around them. Runs on host and device.
#pragma once
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "elementwise/elementwise.h"

namespace mdi::elementwise {

constexpr int kVector = 8;  // bf16 values of one 16-byte access

MDI_HOST_DEVICE uint32_t pack_pair(float even, float odd) {
#if defined(__CUDA_ARCH__)
    uint32_t packed;  // PTX: cvt.rn.bf16x2.f32
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(odd), "f"(even));
    return packed;
#else
    return float_to_bf16_bits(even) | static_cast<uint32_t>(float_to_bf16_bits(odd)) << 16;
#endif
}

MDI_HOST_DEVICE float even_value(uint32_t pair) { return bits_float(pair << 16); }
MDI_HOST_DEVICE float odd_value(uint32_t pair) { return bits_float(pair & 0xffff0000u); }

MDI_HOST_DEVICE void unpack(const uint4& packed, float (&value)[kVector]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = even_value(words[i]);
        value[2 * i + 1] = odd_value(words[i]);
    }
}

MDI_HOST_DEVICE uint4 pack(const float (&value)[kVector]) {
    return make_uint4(pack_pair(value[0], value[1]), pack_pair(value[2], value[3]), pack_pair(value[4], value[5]),
                      pack_pair(value[6], value[7]));
}

// The larger of two bf16 pairs, half by half, as unsigned numbers.
MDI_HOST_DEVICE uint32_t pair_max(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    return max_of(a & 0xffffu, b & 0xffffu) | max_of(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// largest bits of |x| of the even and of the odd values: NaN > Inf > finite
MDI_HOST_DEVICE uint32_t largest_abs_pair(const uint4& packed) {
    constexpr uint32_t kAbs = 0x7fff7fffu;
    return pair_max(pair_max(packed.x & kAbs, packed.y & kAbs), pair_max(packed.z & kAbs, packed.w & kAbs));
}

struct PairMax {
    MDI_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return pair_max(a, b); }
};

// eight values times `factor` -> eight E4M3 codes
MDI_HOST_DEVICE uint2 encode_e4m3x8(const float (&value)[kVector], float factor) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = e4m3x2_encode(rounded_product(value[2 * i], factor), rounded_product(value[2 * i + 1], factor));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Two E4M3 codes times 2^-shift, shift >= 0, rounded to E4M3 again. A product below 2^-10 rounds to zero; the others are exact
// in half precision.
MDI_HOST_DEVICE uint32_t e4m3x2_shift(uint32_t codes, int shift) {
#if defined(__CUDA_ARCH__)
    const uint32_t half = shift < 15 ? (15u - static_cast<uint32_t>(shift)) << 10 : shift < 25 ? 1u << (24 - shift) : 0u;
    uint16_t result;  // PTX: cvt.rn.f16x2.e4m3x2, mul.rn.f16x2, cvt.rn.satfinite.e4m3x2.f16x2
    asm("{\n.reg .b32 v;\ncvt.rn.f16x2.e4m3x2 v, %1;\nmul.rn.f16x2 v, v, %2;\ncvt.rn.satfinite.e4m3x2.f16x2 %0, v;\n}\n"
        : "=h"(result)
        : "h"(static_cast<uint16_t>(codes)), "r"(half << 16 | half));
    return result;
#else
    const float ratio = bits_float(static_cast<uint32_t>(max_of(-shift, -126) + 127) << 23);
    const uint32_t pair = fp8x2_to_bf16x2(codes & 0xffffu);
    return e4m3x2_encode(even_value(pair) * ratio, odd_value(pair) * ratio);
#endif
}

// Eight E4M3 codes of a group with scale byte `byte`, re-expressed at the row's largest scale byte `row_byte`.
MDI_HOST_DEVICE uint2 fold_e4m3x8(const uint2& codes, int byte, int row_byte) {
    const int shift = row_byte - byte;
    const uint32_t low = e4m3x2_shift(codes.x, shift) | e4m3x2_shift(codes.x >> 16, shift) << 16;
    const uint32_t high = e4m3x2_shift(codes.y, shift) | e4m3x2_shift(codes.y >> 16, shift) << 16;
    return shift == 0 ? codes : make_uint2(low, high);  // as they are, whichever NaN they hold
}

// Data of no other thread: it does not displace in L1 what all blocks read.
MDI_DEVICE uint4 load_once(const bf16* source) {
#if defined(__CUDA_ARCH__)
    uint4 v;  // PTX: ld.global.L1::no_allocate
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source)
                 : "memory");
    return v;
#else
    return *reinterpret_cast<const uint4*>(source);
#endif
}

}  // namespace mdi::elementwise
