// Packed KV bytes -> bf16 chunks of eight columns for shared memory, as the sparse kernels want them.
//
// Key order: inside every eight columns the order is 0 4 1 5 2 6 3 7, what the nibbles of a word give without a permutation.
// Products over columns do not care, as long as Q is permuted too (to_key_order); O comes out permuted (from_key_order).
// Key factor: a chunk holds k / kKeyFactor, so that decoding FP4 is one multiplication by a factor that stays finite in bf16.
// Both are exact: the values fit bf16's eight significant bits (only window values below 2^-117 lose bits).
#pragma once
#include <cstdint>

#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"

namespace mdi::attention {

constexpr int kChunkElems = 8;  // columns of one 16-byte chunk
constexpr float kKeyFactor = 512.f;

MDI_DEVICE uint4 to_key_order(const uint4& v) {
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
}

MDI_DEVICE uint4 from_key_order(const uint4& v) {
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                      __byte_perm(v.z, v.w, 0x7632));
}

// Eight E2M1 codes times scale * 2^117, in the order 0 4 1 5 2 6 3 7. Bits s|eem of a nibble become the sign, the low
// exponent bits and the top mantissa bit of a bf16 worth value * 2^-126 (subnormal codes included).
MDI_DEVICE uint4 expand_fp4(uint32_t codes, uint32_t factor) {
    constexpr uint32_t kMagnitude = 0x01c001c0u, kSign = 0x80008000u;
    return make_uint4(bf16x2_product((codes << 6 & kMagnitude) | (codes << 12 & kSign), factor),
                      bf16x2_product((codes << 2 & kMagnitude) | (codes << 8 & kSign), factor),
                      bf16x2_product((codes >> 2 & kMagnitude) | (codes << 4 & kSign), factor),
                      bf16x2_product((codes >> 6 & kMagnitude) | (codes & kSign), factor));
}

// The factors of expand_fp4 for two E4M3 scales (low byte, high byte): each times 2^117 = 2^126 / kKeyFactor, as a bf16 pair.
// NaN stays NaN.
MDI_DEVICE void fp4_factors(uint32_t scales, uint32_t (&factor)[2]) {
    float value[2];
#if defined(__CUDA_ARCH__)
    // PTX: cvt.rn.f16x2.e4m3x2
    asm("{\n.reg .b32 halves;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 halves, %2;\n"
        "mov.b32 {low, high}, halves;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(value[0]), "=f"(value[1])
        : "h"(static_cast<uint16_t>(scales)));
#else
    value[0] = e4m3_decode(static_cast<uint8_t>(scales));
    value[1] = e4m3_decode(static_cast<uint8_t>(scales >> 8));
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = ptx::pack_bf16x2(value[i] * 0x1p117f, value[i] * 0x1p117f);
}

// Eight E4M3 codes times 2^120 (exact values) times the scale, in the order 0 4 1 5 2 6 3 7. A NaN code makes the chunk NaN:
// the row's score is NaN either way.
MDI_DEVICE uint4 expand_fp8(uint32_t low, uint32_t high, uint32_t factor) {
    const auto pair = [=](uint32_t select) {
        const uint32_t t = __byte_perm(low, high, select);  // a code in the upper byte of each half
        return bf16x2_product(bf16x2_product((t >> 4 & 0x07f007f0u) | (t & 0x80008000u), 0x7b807b80u), factor);
    };
    uint4 out = make_uint4(pair(0x4400), pair(0x5511), pair(0x6622), pair(0x7733));
    const uint32_t nan = (((low & 0x7f7f7f7fu) + 0x01010101u) | ((high & 0x7f7f7f7fu) + 0x01010101u)) & 0x80808080u;
    if (nan != 0) out = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
    return out;
}

// The factor of expand_fp8: 2^(byte - 127) / kKeyFactor as a bf16 pair; 255 is NaN.
MDI_DEVICE uint32_t fp8_factor(uint32_t byte) {
    uint32_t bits = (byte - 9) << 7;
    if (byte < 10) bits = 0x80u >> (10 - byte);  // bf16 subnormals
    if (byte == 255) bits = 0x7fc0u;
    return bits * 0x10001u;
}

}  // namespace mdi::attention
