// E4M3, E2M1 and E8M0: bit layouts, rounding and the scale rules of the model (model spec 2.2, 4.4 and 8).
// The only place that knows them. Every function runs on host and device with the same result bit for bit; the plain
// PyTorch definition is mini_deepinfer/ops/reference/number_formats.py. No torch; compiles with g++ too.
//
// Rounding is to nearest, ties to the even code; signed zero is kept; encoders saturate. NaN encodes to 0x7f (E4M3)
// or to +6 = 0x7 (E2M1), as cvt.rn.satfinite does.
//
// Group maxima are taken over the BITS of |x| (abs_bits, compared as unsigned): NaN > Inf > finite, so a NaN in a
// group is never lost; the scale byte is then 255 (NaN) and the whole group decodes to NaN.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/math.h"

namespace mdi {

constexpr float kFp4Max = 6.0f;
constexpr float kActQuantFloor = 1e-4f;       // fp8 1x32: scale >= 2^-22
constexpr float kMxfp4Floor = 0x1.8p-124f;    // 6 * 2^-126
constexpr float kNvfp4Floor = 0x1.8p-7f;      // 6 * 2^-9

MDI_HOST_DEVICE uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
#endif
}

MDI_HOST_DEVICE float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
#endif
}

MDI_HOST_DEVICE uint32_t abs_bits(float x) { return float_bits(x) & 0x7fffffffu; }

// ---- bf16 as bits -------------------------------------------------------------------------------------------------

MDI_HOST_DEVICE float bf16_bits_to_float(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

// nearest, ties to even; NaN gives 0x7fff (what cvt.rn.bf16.f32 gives)
MDI_HOST_DEVICE uint16_t float_to_bf16_bits(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// ---- E2M1: 0 .5 1 1.5 2 3 4 6, sign in bit 3 ----------------------------------------------------------------------

MDI_HOST_DEVICE uint8_t e2m1_encode(float x) {
    const uint32_t bits = float_bits(x);
    uint32_t a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7;
    const uint32_t sign = (bits >> 28) & 0x8u;
    if (a >= 0x40c00000u) return static_cast<uint8_t>(sign | 0x7u);  // >= 6
    if (a < 0x3f800000u)                                             // < 1: step 0.5 is the ulp of 2^22
        return static_cast<uint8_t>(sign | (float_bits(bits_float(a) + 4194304.0f) & 0x3u));
    a += 0x001fffffu + ((a >> 22) & 1u);  // to one mantissa bit
    const uint32_t code = (a >> 22) - (126u << 1);
    return static_cast<uint8_t>(sign | (code > 7u ? 7u : code));
}

MDI_HOST_DEVICE float e2m1_decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x8u) << 28;
    const uint32_t exponent = (code >> 1) & 0x3u, mantissa = code & 0x1u;
    if (exponent == 0) return bits_float(sign | (mantissa ? 0x3f000000u : 0u));
    return bits_float(sign | ((exponent + 126u) << 23) | (mantissa << 22));
}

// two values -> one byte, `even` in the low nibble
MDI_HOST_DEVICE uint8_t e2m1x2_encode(float even, float odd) {
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1000
    uint16_t out;  // PTX: cvt.rn.satfinite.e2m1x2.f32 (first source is the high nibble)
    asm("{\n.reg .b8 b;\ncvt.rn.satfinite.e2m1x2.f32 b, %1, %2;\nmov.b16 %0, {b, 0};\n}\n"
        : "=h"(out)
        : "f"(odd), "f"(even));
    return static_cast<uint8_t>(out);
#else
    return static_cast<uint8_t>(e2m1_encode(even) | (e2m1_encode(odd) << 4));
#endif
}

// Eight values of at most eleven significant bits (exact in half precision, or too small to matter) -> eight codes as
// e2m1_encode gives them, the first in the lowest nibble.
MDI_HOST_DEVICE uint32_t e2m1x8_encode(const float (&x)[8]) {
    uint32_t word = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Half-precision pairs (x[i], x[i + 4]). Adding 2^9 times the power of two of |x| (at least 1) leaves one mantissa bit, as
        // a subnormal's step below 1; 2^-14 times the result has the code in its upper bits. NaN becomes 6, as in e2m1_encode.
        uint32_t halves, magnitude, power;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(x[i + 4]), "f"(x[i]));
        asm("min.f16x2 %0, %1, %2;" : "=r"(magnitude) : "r"(halves & 0x7fff7fffu), "r"(0x46004600u));  // 6.0
        power = __vmaxu2(magnitude & 0x7c007c00u, 0x3c003c00u) + 0x24002400u;
        asm("{\nadd.rn.f16x2 %0, %0, %1;\nsub.rn.f16x2 %0, %0, %1;\nmul.rn.f16x2 %0, %0, %2;\n}\n"
            : "+r"(magnitude)
            : "r"(power), "r"(0x04000400u));
        word |= ((magnitude >> 9 & 0x00070007u) | (halves >> 12 & 0x00080008u)) << (4 * i);
    }
#else
    for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(e2m1_encode(x[i])) << (4 * i);
#endif
    return word;
}

// ---- E4M3 (the finite-only kind: no infinities, 0x7f and 0xff are NaN) --------------------------------------------

MDI_HOST_DEVICE uint8_t e4m3_encode(float x) {
    const uint32_t bits = float_bits(x);
    uint32_t a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7f;
    const uint32_t sign = (bits >> 24) & 0x80u;
    if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // >= 448
    if (a < 0x3c800000u)  // < 2^-6: subnormal, step 2^-9 is the ulp of 2^14
        return static_cast<uint8_t>(sign | (float_bits(bits_float(a) + 16384.0f) & 0xfu));
    a += 0x0007ffffu + ((a >> 20) & 1u);  // to three mantissa bits
    return static_cast<uint8_t>(sign | ((a >> 20) - (120u << 3)));
}

MDI_HOST_DEVICE float e4m3_decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const uint32_t exponent = (code >> 3) & 0xfu, mantissa = code & 0x7u;
    if (exponent == 15 && mantissa == 7) return bits_float(sign | 0x7fc00000u);
    if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-9f));
    return bits_float(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// two values -> two bytes, `even` in the low byte
MDI_HOST_DEVICE uint16_t e4m3x2_encode(float even, float odd) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t out;  // PTX: cvt.rn.satfinite.e4m3x2.f32 (first source is the high byte)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(odd), "f"(even));
    return out;
#else
    return static_cast<uint16_t>(e4m3_encode(even) | (e4m3_encode(odd) << 8));
#endif
}

// ---- E8M0: 2^(byte - 127), 255 is NaN -----------------------------------------------------------------------------

MDI_HOST_DEVICE float e8m0_decode(uint8_t byte) {
    if (byte == 255) return bits_float(0x7fc00000u);
    return bits_float(byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);
}

// 2^(127 - byte): x * e8m0_inverse(b) is x / e8m0_decode(b), bit for bit
MDI_HOST_DEVICE float e8m0_inverse(uint8_t byte) {
    if (byte >= 254) return bits_float(byte == 254 ? 0x00400000u : 0x7fc00000u);
    return bits_float((254u - byte) << 23);
}

// bf16 bits of 2^(byte - 127): 0 -> 0x0040 (subnormal), 255 -> 0x7fc0
MDI_HOST_DEVICE uint16_t e8m0_to_bf16_bits(uint8_t byte) {
    return static_cast<uint16_t>(byte == 0 ? 0x0040u : (byte == 255 ? 0x7fc0u : static_cast<uint32_t>(byte) << 7));
}

// ---- scale rules; amax = bits_float(max of abs_bits over the group) -----------------------------------------------

// fp32 product rounded on its own (never contracted with a neighbour)
MDI_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

// true division, round to nearest
MDI_HOST_DEVICE float rounded_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// byte of the least power of two >= x, x > 0; NaN and Inf give 255
MDI_HOST_DEVICE uint8_t ceilpow2_byte(float x) {
    const uint32_t byte = ((float_bits(x) & 0x7fffffffu) + 0x7fffffu) >> 23;
    return static_cast<uint8_t>(byte > 255u ? 255u : byte);
}

// max(amax, floor) that keeps a NaN amax
MDI_HOST_DEVICE float floored(float amax, float floor) { return amax < floor ? floor : amax; }

// act_quant and window rows: s = ceilpow2(max(amax, 1e-4) * fp32(1/448))
MDI_HOST_DEVICE uint8_t act_quant_scale(float amax) {
    return ceilpow2_byte(rounded_product(floored(amax, kActQuantFloor), 1.0f / 448.0f));
}

// index keys and queries: s = ceilpow2(max(amax, 6 * 2^-126) * fp32(1/6))
MDI_HOST_DEVICE uint8_t mxfp4_scale(float amax) {
    return ceilpow2_byte(rounded_product(floored(amax, kMxfp4Floor), 1.0f / 6.0f));
}

// compressed rows: s = e4m3(max(amax, 6 * 2^-9) / 6), an E4M3 code; codes are e2m1(rounded_quotient(x, s))
MDI_HOST_DEVICE uint8_t nvfp4_scale(float amax) {
    return e4m3_encode(rounded_quotient(floored(amax, kNvfp4Floor), kFp4Max));
}

// ---- byte-wise pair decode to bf16x2 (low half = even element), exact ----------------------------------------------

// a * b for two bf16 pairs held as bits; one rounding, subnormals kept (fma with -0 so that signed zero survives)
MDI_HOST_DEVICE uint32_t bf16x2_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;  // PTX: fma.rn.bf16x2
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
#else
    const uint16_t low = float_to_bf16_bits(bf16_bits_to_float(a & 0xffffu) * bf16_bits_to_float(b & 0xffffu));
    const uint16_t high = float_to_bf16_bits(bf16_bits_to_float(a >> 16) * bf16_bits_to_float(b >> 16));
    return low | static_cast<uint32_t>(high) << 16;
#endif
}

// One byte of two E2M1 codes -> the pair times 2^-126, as bf16 bits. The code's exponent and mantissa land on the low
// bits of the bf16 exponent and the top of its mantissa, so subnormal codes become bf16 subnormals: no special case.
MDI_HOST_DEVICE uint32_t fp4x2_raw_bf16x2(uint32_t byte) {
    const uint32_t t = byte | byte << 12;  // nibbles at bits 0..3 and 16..19
    return (t << 6 & 0x01c001c0u) | (t << 12 & 0x80008000u);
}

// One byte of two E2M1 codes -> bf16x2.
MDI_HOST_DEVICE uint32_t fp4x2_to_bf16x2(uint32_t byte) {
    return bf16x2_product(fp4x2_raw_bf16x2(byte), 0x7e807e80u);  // * 2^126
}

// Byte i of the result is byte (selector >> 4i & 7) of the eight bytes b:a (PTX: prmt.b32, no sign mode).
MDI_HOST_DEVICE uint32_t byte_select(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (8 * (selector >> 4 * i & 7u)) & 0xffu) << 8 * i;
    return out;
#endif
}

// Eight E2M1 codes (a little-endian word, element 0 in the lowest nibble) -> four bf16x2, elements in order. A look-up in
// registers: four magnitudes at once select the low and the high byte of their bf16 value; then signs go to bits 15, 31.
MDI_HOST_DEVICE void fp4x8_to_bf16x8(uint32_t word, uint32_t (&out)[4]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int half = 0; half < 2; ++half) {
        const uint32_t codes = word >> (16 * half);
        const uint32_t low = byte_select(0xc0800000u, 0xc0804000u, codes & 0x7777u);
        const uint32_t high = byte_select(0x3f3f3f00u, 0x40404040u, codes & 0x7777u);
        out[2 * half] = byte_select(low, high, 0x5140) | (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u);
        out[2 * half + 1] = byte_select(low, high, 0x7362) | (codes << 4 & 0x8000u) | (codes << 16 & 0x80000000u);
    }
}

// Two E4M3 codes (low byte = even element) -> the pair times 2^-120, as bf16 bits; NaN codes give +-480 * 2^-120.
MDI_HOST_DEVICE uint32_t fp8x2_raw_bf16x2(uint32_t pair) {
    const uint32_t t = (pair & 0xffu) | (pair << 8 & 0xff0000u);  // bytes at bits 0..7 and 16..23
    return (t << 4 & 0x07f007f0u) | (t << 8 & 0x80008000u);
}

// Two E4M3 codes (low byte = even element) -> bf16x2; NaN codes give NaN.
MDI_HOST_DEVICE uint32_t fp8x2_to_bf16x2(uint32_t pair) {
    const uint32_t raw = fp8x2_raw_bf16x2(pair);
    uint32_t value = bf16x2_product(raw, 0x7b807b80u);  // * 2^120
    if ((raw & 0x07f0u) == 0x07f0u) value |= 0x7fffu;   // both tests are rare: NaN codes only
    if ((raw & 0x07f00000u) == 0x07f00000u) value |= 0x7fff0000u;
    return value;
}

}  // namespace mdi
