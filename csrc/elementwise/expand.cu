// Quantised rows -> bf16, exactly:  out[m, k] = code[m, k] * 2^(scale[m, k / 32] - 127).
//
// One thread turns 16 bytes of codes into bf16: 16 E4M3 values (half a scale group) or 32 E2M1 values (one group), with
// 16-byte loads and stores. Rows are contiguous and K is a multiple of 32, so a thread's values never cross a group and
// the row structure does not matter: the tensors are flat arrays of groups, and group g has the scale byte scale[g].
// Every product is exact in bf16 (bf16 has the exponent range of the scales; subnormals are kept, so byte 0 is 2^-127);
// only a value past 2^128 becomes Inf. Scale byte 255 and the E4M3 codes 0x7f and 0xff give NaN.
// Limits: none but memory (offsets are 64-bit). Memory-bound: 1.53 or 3 bytes of traffic a value. No shared memory.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "elementwise/expand.h"

namespace mdi::elementwise {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;  // grid-stride beyond that

template <bool kFp4>
__global__ void __launch_bounds__(kThreads)
expand_kernel(const uint4* __restrict__ codes, const uint8_t* __restrict__ scale, uint4* __restrict__ out,
              int64_t num_vectors) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_vectors; i += step) {
        const uint4 packed = codes[i];
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
        const uint32_t factor = e8m0_to_bf16_bits(scale[kFp4 ? i : i / 2]) * 0x10001u;
        if constexpr (kFp4) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t pairs[4];
                fp4x8_to_bf16x8(words[w], pairs);
                out[i * 4 + w] = make_uint4(bf16x2_product(pairs[0], factor), bf16x2_product(pairs[1], factor),
                                            bf16x2_product(pairs[2], factor), bf16x2_product(pairs[3], factor));
            }
        } else {
#pragma unroll
            for (int w = 0; w < 4; w += 2) {
                uint32_t pairs[4];
#pragma unroll
                for (int p = 0; p < 4; ++p)
                    pairs[p] = bf16x2_product(fp8x2_to_bf16x2(words[w + p / 2] >> (16 * (p % 2)) & 0xffffu), factor);
                out[i * 2 + w / 2] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
}

template <bool kFp4>
void launch_expand(const char* name, const ExpandParams& params) {
    const int64_t num_vectors = params.num_rows * params.num_columns / (kFp4 ? 32 : 16);
    const auto blocks = static_cast<unsigned>(min_of(ceil_div<int64_t>(num_vectors, kThreads), kMaxBlocks));
    launch(name, expand_kernel<kFp4>, {dim3(blocks), dim3(kThreads), 0, params.stream},
           reinterpret_cast<const uint4*>(params.codes), params.scale, reinterpret_cast<uint4*>(params.out), num_vectors);
}

}  // namespace

void launch_expand_fp8(const ExpandParams& params) { launch_expand<false>("elementwise.expand_fp8", params); }

void launch_expand_fp4(const ExpandParams& params) { launch_expand<true>("elementwise.expand_fp4", params); }

}  // namespace mdi::elementwise
