// Packed KV bytes -> bf16, eight elements (one 16-byte shared-memory chunk) at a time. Exact for every byte: the
// products fit bf16's 8 significant bits, and a NaN code or scale gives NaN.
#pragma once
#include <cstdint>

#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"

namespace mdi::attention {

constexpr int kChunkElems = 8;  // elements of one 16-byte bf16 chunk

// One E4M3 byte, twice, as bf16 (four significant bits: exact; 0x7f is NaN).
MDI_DEVICE uint32_t e4m3_to_bf16x2(uint8_t byte) {
    float value;
#if defined(__CUDA_ARCH__)
    // PTX: cvt.rn.f16x2.e4m3x2 (sm_89)
    asm("{\n.reg .b32 halves;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 halves, %1;\n"
        "mov.b32 {low, high}, halves;\ncvt.f32.f16 %0, low;\n}\n"
        : "=f"(value)
        : "h"(static_cast<uint16_t>(byte)));
#else
    value = e4m3_decode(byte);
#endif
    return ptx::pack_bf16x2(value, value);
}

// Eight E4M3 codes of a window row times their E8M0 scale.
MDI_DEVICE uint4 expand_fp8_chunk(uint2 codes, uint8_t scale_byte) {
    const uint32_t scale = e8m0_to_bf16_bits(scale_byte) * 0x10001u;
    const auto pair = [scale](uint32_t two) { return bf16x2_product(fp8x2_to_bf16x2(two), scale); };
    return make_uint4(pair(codes.x & 0xffffu), pair(codes.x >> 16), pair(codes.y & 0xffffu), pair(codes.y >> 16));
}

// Eight E2M1 codes of a compressed row (element 0 in the lowest nibble) times their E4M3 scale.
MDI_DEVICE uint4 expand_fp4_chunk(uint32_t codes, uint8_t scale_byte) {
    const uint32_t scale = e4m3_to_bf16x2(scale_byte);
    uint32_t pairs[4];
    fp4x8_to_bf16x8(codes, pairs);
    return make_uint4(bf16x2_product(pairs[0], scale), bf16x2_product(pairs[1], scale), bf16x2_product(pairs[2], scale),
                      bf16x2_product(pairs[3], scale));
}

}  // namespace mdi::attention
