// The codecs of csrc/common/number_formats.cuh against the host emulation in the toolkit's cuda_fp4.h, cuda_fp8.h and
// cuda_bf16.h. Plain g++:  g++ -std=c++17 -O2 -I$CUDA_HOME/include -Icsrc tests/host/codecs_against_vendor.cpp
// Argument: step through the 2^32 float patterns (1 = all of them, about 20 s).
#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "common/number_formats.cuh"

namespace {

bool same(float a, float b) { return mdi::float_bits(a) == mdi::float_bits(b) || (a != a && b != b); }

float vendor_fp4(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp4_to_halfraw(static_cast<__nv_fp4_storage_t>(code), __NV_E2M1)));
}

float vendor_fp8(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

float vendor_e8m0(uint8_t code) { return __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(code))); }

}  // namespace

int main(int argc, char** argv) {
    const uint64_t step = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 1;
    uint64_t wrong = 0;
    const auto report = [&](const char* what, uint64_t input, unsigned vendor, unsigned ours) {
        if (wrong++ < 10) std::printf("%s: input %08llx vendor %x ours %x\n", what, (unsigned long long)input, vendor, ours);
    };
    for (uint64_t i = 0; i < 1ull << 32; i += step) {
        const float x = mdi::bits_float(static_cast<uint32_t>(i));
        const unsigned fp4 = __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest) & 0xf;
        const unsigned fp8 = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        const unsigned bf16 = __nv_bfloat16_raw(__float2bfloat16_rn(x)).x;
        if (fp4 != mdi::e2m1_encode(x)) report("e2m1_encode", i, fp4, mdi::e2m1_encode(x));
        if (fp8 != mdi::e4m3_encode(x)) report("e4m3_encode", i, fp8, mdi::e4m3_encode(x));
        if (bf16 != mdi::float_to_bf16_bits(x)) report("float_to_bf16_bits", i, bf16, mdi::float_to_bf16_bits(x));
    }
    for (unsigned code = 0; code < 256; ++code) {
        const auto byte = static_cast<uint8_t>(code);
        if (!same(vendor_fp8(byte), mdi::e4m3_decode(byte))) report("e4m3_decode", code, 0, 0);
        if (!same(vendor_e8m0(byte), mdi::e8m0_decode(byte))) report("e8m0_decode", code, 0, 0);
        if (code < 16 && !same(vendor_fp4(byte), mdi::e2m1_decode(byte))) report("e2m1_decode", code, 0, 0);
    }
    std::printf("%s: %llu differences\n", wrong ? "FAIL" : "OK", (unsigned long long)wrong);
    return wrong != 0;
}
