// Eight bf16 values in a 16-byte register group, and the arithmetic around them. Runs on host and device.
#pragma once
#include "common/number_formats.cuh"
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

// largest bits of |x|: NaN > Inf > finite
MDI_HOST_DEVICE uint32_t largest_abs_bits(const float (&value)[kVector]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = max_of(largest, abs_bits(value[i]));
    return largest;
}

// the larger of two unsigned 16-bit numbers, in both halves
MDI_HOST_DEVICE uint32_t max_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    return max_of(a & 0xffff0000u, b & 0xffff0000u) | max_of(a & 0xffffu, b & 0xffffu);
#endif
}

// the same of eight packed values
MDI_HOST_DEVICE uint32_t largest_abs_bits(const uint4& packed) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    const uint32_t largest = max_halves(max_halves(packed.x & kMagnitude, packed.y & kMagnitude),
                                        max_halves(packed.z & kMagnitude, packed.w & kMagnitude));
    return max_of(largest & 0xffff0000u, largest << 16);
}

// eight values times `factor` -> eight E4M3 codes
MDI_HOST_DEVICE uint2 encode_e4m3x8(const float (&value)[kVector], float factor) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = e4m3x2_encode(rounded_product(value[2 * i], factor), rounded_product(value[2 * i + 1], factor));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Eight E4M3 codes of a group with scale byte `byte`, re-expressed at the row's largest scale byte `row_byte`: each code times
// 2^(byte - row_byte), to nearest even. On a GPU the product is taken in half precision. Codes are multiples of 2^-9 with four
// significant bits and halves are multiples of 2^-24, so a product that half precision cannot hold is far below the smallest
// code: it rounds to zero either way.
MDI_HOST_DEVICE uint2 fold_e4m3x8(const uint2& codes, int byte, int row_byte) {
    if (byte == row_byte) return codes;
    const uint32_t words[2] = {codes.x, codes.y};
    uint32_t folded[2];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const int drop = row_byte - byte;  // half-precision bits of 2^-drop: normal, subnormal, zero
    const uint32_t half = drop < 15 ? static_cast<uint32_t>(15 - drop) << 10 : (drop <= 24 ? 1u << (24 - drop) : 0u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // PTX: cvt.rn.f16x2.e4m3x2, mul.rn.f16x2, cvt.rn.satfinite.e4m3x2.f16x2
        asm("{\n.reg .b16 low, high;\n.reg .b32 a, b;\n"
            "mov.b32 {low, high}, %1;\n"
            "cvt.rn.f16x2.e4m3x2 a, low;\ncvt.rn.f16x2.e4m3x2 b, high;\n"
            "mul.rn.f16x2 a, a, %2;\nmul.rn.f16x2 b, b, %2;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 low, a;\ncvt.rn.satfinite.e4m3x2.f16x2 high, b;\n"
            "mov.b32 %0, {low, high};\n}\n"
            : "=r"(folded[i])
            : "r"(words[i]), "r"(half * 0x10001u));
    }
#else
    const float ratio = bits_float(static_cast<uint32_t>(max_of(byte - row_byte, -126) + 127) << 23);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t low = fp8x2_to_bf16x2(words[i] & 0xffffu), high = fp8x2_to_bf16x2(words[i] >> 16);
        folded[i] = e4m3x2_encode(even_value(low) * ratio, odd_value(low) * ratio) |
                    static_cast<uint32_t>(e4m3x2_encode(even_value(high) * ratio, odd_value(high) * ratio)) << 16;
    }
#endif
    return make_uint2(folded[0], folded[1]);
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
