// SwiGLU of the expert products, with clamp, routing weight and the 1x32 FP8 quantisation of the next product's input
// (model spec 6.2, 8), one pass:
//     g = min(gate, limit);  u = clamp(up, -limit, limit);  h = bf16( g / (1 + exp(-g)) * u * row_weight )
//     s = ceilpow2( max(amax32 |h|, 1e-4) / 448 );  code = e4m3( h / s )
// fp32 between the bf16 input and the bf16 h; limit 0 means no clamp. exp and the division are the hardware's (relative
// error about 1e-6, far below the bf16 rounding of h): with the library's the kernel is bound by arithmetic.
//
// A thread takes 8 columns of a row (16 bytes of gate, 16 of up), four neighbouring lanes share a scale group. A block
// walks over rows; rows at or past *num_rows_bound are neither read nor written, so a buffer sized for the worst case
// costs nothing. NaN passes the clamps (comparisons are false for NaN, unlike fmin), makes its group's scale byte 255
// and so reaches the product. A zero group gets the scale of the floor, 2^-22.
// swiglu_fold goes on to one scale per row (docs/numerics.md) in the same pass, with the same bits: in the column order of
// fold_rows for the expert products, or in plain order for a dense one. One row per block, the largest
// scale of the row through shared memory. Bound by instructions as much as by memory: a limit that is a bf16 number, as in the
// released model, clamps the bf16 pairs before they are unpacked, codes are scaled as pairs, and a block's rows follow each
// other without anything on its way (the next row's loads cost more instructions than they hide; other blocks hide them).
// Memory: 4F + 1.03F bytes a row. Limits: F a multiple of 32; swiglu_fold F <= 8192.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"
#include "moe/fold.cuh"
#include "moe/moe.h"

namespace mdi::moe {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kColumns = 8;  // of a thread
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMaxFoldThreads = 1024;
constexpr int kThreadsPerSm = 2048;

// The smaller and the larger of two numbers; NaN if either is.
__device__ __forceinline__ float min_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
    float d;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
#else
    return a != a || a < b ? a : b;
#endif
}

__device__ __forceinline__ float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
#else
    return -min_nan(-a, -b);
#endif
}

// The same of bf16 pairs.
__device__ __forceinline__ uint32_t min_nan_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return ptx::pack_bf16x2(min_nan(bits_float(a << 16), bits_float(b << 16)),
                            min_nan(bits_float(a & 0xffff0000u), bits_float(b & 0xffff0000u)));
#endif
}

__device__ __forceinline__ uint32_t max_nan_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return min_nan_pair(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
#endif
}

// The clamp of both inputs to a limit; 0 stands for none. kPairs: the limit is a bf16 number.
template <bool kPairs>
struct Clamp {
    float limit;
    uint32_t high, low;  // pairs of limit and -limit

    __device__ __forceinline__ explicit Clamp(float l) : limit(l > 0.0f ? l : bits_float(0x7f800000u)) {
        high = (float_bits(limit) >> 16) * 0x10001u;
        low = high | 0x80008000u;
    }
};

__device__ __forceinline__ float swiglu(float gate, float up, float weight) {
    const float silu = __fdividef(gate, 1.0f + ptx::exp2_approx(gate * -kLog2E));
    return __fmul_rn(__fmul_rn(silu, up), weight);
}

// h of two columns
template <bool kPairs>
__device__ __forceinline__ uint32_t swiglu_pair(uint32_t gates, uint32_t ups, const Clamp<kPairs>& clamp, float weight) {
    if constexpr (kPairs) {
        gates = min_nan_pair(gates, clamp.high);
        ups = max_nan_pair(min_nan_pair(ups, clamp.high), clamp.low);
    }
    float gate[2] = {bits_float(gates << 16), bits_float(gates & 0xffff0000u)};
    float up[2] = {bits_float(ups << 16), bits_float(ups & 0xffff0000u)};
    if constexpr (!kPairs) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gate[i] = min_nan(gate[i], clamp.limit);
            up[i] = max_nan(min_nan(up[i], clamp.limit), -clamp.limit);
        }
    }
    return ptx::pack_bf16x2(swiglu(gate[0], up[0], weight), swiglu(gate[1], up[1], weight));
}

// h of eight columns of a row as bf16 pairs; `gate` is where their gates are.
template <bool kPairs>
__device__ __forceinline__ uint4 swiglu_columns(uint4 gate, uint4 up, const Clamp<kPairs>& clamp, float weight) {
    return make_uint4(swiglu_pair(gate.x, up.x, clamp, weight), swiglu_pair(gate.y, up.y, clamp, weight),
                      swiglu_pair(gate.z, up.z, clamp, weight), swiglu_pair(gate.w, up.w, clamp, weight));
}

// the larger of two unsigned 16-bit numbers, in both halves
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
}

// Scale byte of the group of four lanes; NaN bits count as the largest. All 32 lanes must call it.
__device__ __forceinline__ uint8_t group_scale(uint4 h) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    const uint32_t largest = max_halves(max_halves(h.x & kMagnitude, h.y & kMagnitude), max_halves(h.z & kMagnitude, h.w & kMagnitude));
    return act_quant_scale(bits_float(warp_max<4>(max(largest & 0xffff0000u, largest << 16))));
}

// E4M3 codes of eight columns with this scale byte. The products are exact in bf16, or too small for a code.
__device__ __forceinline__ uint2 quantise(uint4 h, uint32_t scale) {
    const uint32_t inverse = (scale == 255 ? 0x7fc0u : (254u - scale) << 7) * 0x10001u;  // scales are 255 or below 254
    const uint32_t pairs[4] = {ptx::mul_bf16x2(h.x, inverse), ptx::mul_bf16x2(h.y, inverse), ptx::mul_bf16x2(h.z, inverse),
                               ptx::mul_bf16x2(h.w, inverse)};
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = e4m3x2_encode(bits_float(pairs[i] << 16), bits_float(pairs[i] & 0xffff0000u));
    return make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
}

template <bool kQuantise>
__global__ void __launch_bounds__(kMaxThreads) swiglu_quant_kernel(const __grid_constant__ SwigluQuantParams params) {
    const int parts = params.hidden / kColumns;  // a multiple of 4: the lanes of a group agree on `valid`
    const int padded = align_up(parts, 32);      // whole warps stay in one row
    const Clamp<false> clamp(params.limit);
    int64_t rows = params.num_rows;
    if (params.num_rows_bound) rows = min(rows, static_cast<int64_t>(*params.num_rows_bound));
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        for (int part = static_cast<int>(threadIdx.x); part < padded; part += static_cast<int>(blockDim.x)) {
            const bool valid = part < parts;
            uint4 h = make_uint4(0, 0, 0, 0);
            if (valid) {
                const uint16_t* gate = params.gu + row * 2 * params.hidden + part * kColumns;
                const float weight = params.row_weight ? params.row_weight[row] : 1.0f;
                h = swiglu_columns(ptx::load_streaming(gate), ptx::load_streaming(gate + params.hidden), clamp, weight);
            }
            const int64_t column = row * params.hidden + part * kColumns;
            if constexpr (kQuantise) {
                const uint8_t scale = group_scale(h);
                if (!valid) continue;
                *reinterpret_cast<uint2*>(params.codes + column) = quantise(h, scale);
                if (part % 4 == 0) params.scale[column / 32] = scale;
            } else if (valid) {
                *reinterpret_cast<uint4*>(params.h + column) = h;
            }
        }
    }
}

// One row per block at a time; thread `part` has columns 8 part .. 8 part + 7. In expert order parts past F write the zeros up
// to a multiple of 128 (a group of zeros has the smallest scale there is).
template <bool kPairs, bool kExpertOrder>
__global__ void __launch_bounds__(kMaxFoldThreads, 2) swiglu_fold_kernel(const __grid_constant__ SwigluFoldParams params) {
    __shared__ uint32_t largest_of_warp[2][32];
    const SwigluQuantParams& p = params.swiglu;
    const int part = static_cast<int>(threadIdx.x), warp = part / 32, lane = part % 32;
    const int num_warps = static_cast<int>(blockDim.x) / 32;
    const int width = kExpertOrder ? align_up(p.hidden, 128) : p.hidden;
    const bool valid = part * kColumns < p.hidden, stores = part * kColumns < width;
    constexpr int kNext = kExpertOrder ? 4 : 1;  // from word 2 part to 2 part + 1
    const Clamp<kPairs> clamp(p.limit);
    int num_rows = static_cast<int>(p.num_rows);
    if (p.num_rows_bound) num_rows = min(num_rows, *p.num_rows_bound);

    int row = static_cast<int>(blockIdx.x);
    const uint16_t* gates = p.gu + static_cast<int64_t>(row) * (2 * p.hidden) + part * kColumns;
    uint32_t* folded = reinterpret_cast<uint32_t*>(params.folded + static_cast<int64_t>(row) * width) +
                       (kExpertOrder ? folded_word(2 * part) : 2 * part);
    const int64_t gates_step = static_cast<int64_t>(gridDim.x) * (2 * p.hidden);
    const int64_t folded_step = static_cast<int64_t>(gridDim.x) * (width / 4);
    int turn = 0;  // two sets of maxima: one barrier a row is enough
    for (; row < num_rows; row += static_cast<int>(gridDim.x), gates += gates_step, folded += folded_step, turn ^= 1) {
        uint4 gate = make_uint4(0, 0, 0, 0), up = gate;
        if (valid) gate = ptx::load_streaming(gates), up = ptx::load_streaming(gates + p.hidden);
        const uint4 h = swiglu_columns(gate, up, clamp, p.row_weight ? p.row_weight[row] : 1.0f);
        const uint32_t scale = group_scale(h);
        const uint32_t of_warp = __reduce_max_sync(kFullWarp, scale);
        if (lane == 0) largest_of_warp[turn][warp] = of_warp;
        const uint2 codes = quantise(h, scale);
        __syncthreads();
        const uint32_t largest = __reduce_max_sync(kFullWarp, lane < num_warps ? largest_of_warp[turn][lane] : 0u);
        if (stores) {
            const int shift = static_cast<int>(largest - scale);
            folded[0] = shift_codes(codes.x, shift);
            folded[kNext] = shift_codes(codes.y, shift);
        }
        if (part == 0) params.row_scale[row] = e8m0_decode(static_cast<uint8_t>(largest));
    }
}

template <bool kPairs>
void launch_swiglu_fold(const SwigluFoldParams& params, const LaunchConfig& config) {
    if (params.expert_order) launch("moe.swiglu_fold", swiglu_fold_kernel<kPairs, true>, config, params);
    else launch("moe.swiglu_fold", swiglu_fold_kernel<kPairs, false>, config, params);
}

int num_sms_of(const char* op) {
    int device = 0, num_sms = 0;
    check_cuda(op, cudaGetDevice(&device));
    check_cuda(op, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    return num_sms;
}

}  // namespace

void launch_swiglu_fold(const SwigluFoldParams& params) {
    if (params.swiglu.num_rows == 0) return;
    const int threads = align_up(align_up(params.swiglu.hidden, 128) / kColumns, 32);
    const int64_t most_blocks = static_cast<int64_t>(num_sms_of("moe.swiglu_fold")) * (kThreadsPerSm / threads);
    const LaunchConfig config{dim3(static_cast<unsigned>(min_of(params.swiglu.num_rows, most_blocks))),
                              dim3(static_cast<unsigned>(threads)), 0, params.swiglu.stream};
    if ((float_bits(params.swiglu.limit) & 0xffffu) == 0) launch_swiglu_fold<true>(params, config);
    else launch_swiglu_fold<false>(params, config);
}

void launch_swiglu_quant(const SwigluQuantParams& params) {
    if (params.num_rows == 0) return;
    const int threads = min_of(align_up(params.hidden / kColumns, 32), kMaxThreads);
    const int64_t most_blocks = static_cast<int64_t>(num_sms_of("moe.swiglu_quant")) * (kThreadsPerSm / threads);
    const LaunchConfig config{dim3(static_cast<unsigned>(min_of(params.num_rows, most_blocks))),
                              dim3(static_cast<unsigned>(threads)), 0, params.stream};
    if (params.codes) launch("moe.swiglu_quant", swiglu_quant_kernel<true>, config, params);
    else launch("moe.swiglu_quant", swiglu_quant_kernel<false>, config, params);
}

}  // namespace mdi::moe
