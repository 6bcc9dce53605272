// Quantises KV vectors into packed cache rows (model spec 4.4); the input is the bf16 value after RoPE.
//
//   write_window:      s = ceilpow2(max(amax, 1e-4) / 448) per 32 elements, codes = e4m3(x / s): D codes, D/32 scales
//   write_compressed:  s = e4m3(max(amax, 6 * 2^-9) / 6) per 16 elements, codes = e2m1(x / s): D/2 bytes, D/16 scales
//
//   write_normed_window: write_window of bf16(rope(bf16(rmsnorm(x)))), one warp a row, with the bits of the separate ops
//
// Otherwise one thread per eight elements: one 16-byte load, one 8- or 4-byte store; the 4 (window) or 2 (compressed) threads of
// a scale group are neighbours in a warp and share the maximum by shuffle. The maximum is taken over the bits of |x|, so
// a NaN or an infinity is not lost. A negative slot writes nothing. Two equal slots: either row wins, whole or in part.
// Limits: D a multiple of 32. Offsets are 64-bit. Memory-bound: 1,552 or 1,312 bytes a row at D = 512.
#include "attention/attention.h"
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "common/rotary.cuh"
#include "elementwise/row_pass.cuh"

namespace mdi::attention {
namespace {

constexpr int kThreads = 256;
constexpr int kElems = 8;  // per thread

struct MaxBits {
    MDI_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Bytes of `word` to `to`, in one store where the row stride keeps the alignment.
template <class Word>
MDI_DEVICE void store_word(uint8_t* to, uint64_t word) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(Word) == 0) {
        *reinterpret_cast<Word*>(to) = static_cast<Word>(word);
    } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
    }
}

// Elements first..first+7 of one row, and the maximum of |x| over the kGroup elements of their scale group.
template <int kGroup>
MDI_DEVICE float load_group(const WriteRowsParams& params, int64_t row, int first, bool active, float (&x)[kElems]) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (active) raw = *reinterpret_cast<const uint4*>(params.in + row * params.in_stride + first);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
        x[i] = bits_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
        top = MaxBits{}(top, abs_bits(x[i]));
    }
    return bits_float(warp_reduce<kGroup / kElems>(top, MaxBits{}));
}

template <bool kWindow>
__global__ void __launch_bounds__(kThreads) write_rows_kernel(const WriteRowsParams params) {
    const int threads_per_row = params.dim / kElems;
    const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = thread_idx / threads_per_row;
    const int first = static_cast<int>(thread_idx % threads_per_row) * kElems;
    const int slot = row < params.num_rows ? params.slots[row] : -1;
    const bool active = slot >= 0;  // the same for all threads of a row, so for all of a scale group
    float x[kElems];
    if (kWindow) {
        const uint8_t scale = act_quant_scale(load_group<32>(params, row, first, active, x));
        if (!active) return;
        const float inverse = e8m0_inverse(scale);
        uint64_t codes = 0;
#pragma unroll
        for (int i = 0; i < kElems; i += 2) {
            codes |= static_cast<uint64_t>(e4m3x2_encode(x[i] * inverse, x[i + 1] * inverse)) << (8 * i);
        }
        uint8_t* to = params.rows + slot * static_cast<int64_t>(params.dim + params.dim / 32);
        store_word<uint64_t>(to + first, codes);
        if (first % 32 == 0) to[params.dim + first / 32] = scale;
    } else {
        const uint8_t scale = nvfp4_scale(load_group<16>(params, row, first, active, x));
        if (!active) return;
        const float divisor = e4m3_decode(scale);
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < kElems; i += 2) {
            const uint8_t pair = e2m1x2_encode(rounded_quotient(x[i], divisor), rounded_quotient(x[i + 1], divisor));
            codes |= static_cast<uint32_t>(pair) << (4 * i);
        }
        uint8_t* to = params.rows + slot * static_cast<int64_t>(params.dim / 2 + params.dim / 16);
        store_word<uint32_t>(to + first / 2, codes);
        if (first % 16 == 0) to[params.dim / 2 + first / 16] = scale;
    }
}

// Both vectors of a lane, of 32 lanes a row: as rmsnorm of so short a row sums them.
constexpr int kNormChunks = 2;
constexpr int kNormThreads = 128;

__global__ void __launch_bounds__(kNormThreads) normed_window_kernel(const WriteRowsParams params, const NormRope norm) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + threadIdx.x / 32;
    const int slot = row < params.num_rows ? params.slots[row] : -1;
    if (slot < 0) return;  // the whole warp
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float* angles = norm.table + static_cast<int64_t>(norm.positions[row]) * norm.rope_dim;
    const int nope_dim = params.dim - norm.rope_dim;
    uint4 x[kNormChunks];
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < kNormChunks; ++c) {
        const int first = (c * 32 + lane) * kElems;
        x[c] = make_uint4(0, 0, 0, 0);
        if (first < params.dim) x[c] = *reinterpret_cast<const uint4*>(params.in + row * params.in_stride + first);
    }
#pragma unroll
    for (int c = 0; c < kNormChunks; ++c) square = elementwise::add_squares(x[c], square);
    const float rstd = elementwise::reciprocal_rms(warp_sum(square), params.dim, norm.eps);
    uint8_t* to = params.rows + slot * static_cast<int64_t>(params.dim + params.dim / 32);
#pragma unroll
    for (int c = 0; c < kNormChunks; ++c) {
        const int first = (c * 32 + lane) * kElems;
        if (first < params.dim) {
            float weight[kElems];
            elementwise::load_weight(norm.weight, norm.weight_is_f32, first, weight);
            x[c] = elementwise::normalise(x[c], rstd, weight);
            if (first >= nope_dim) x[c] = rotate_eight(x[c], angles + (first - nope_dim), false);
        }
        uint2 codes;
        int scale;
        elementwise::quantise_vector(x[c], codes, scale);
        if (first >= params.dim) continue;
        store_word<uint64_t>(to + first, codes.x | static_cast<uint64_t>(codes.y) << 32);
        if (first % 32 == 0) to[params.dim + first / 32] = static_cast<uint8_t>(scale);
    }
}

template <bool kWindow>
void launch_write_rows(const char* name, const WriteRowsParams& params) {
    const int64_t num_threads = static_cast<int64_t>(params.num_rows) * (params.dim / kElems);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(num_threads, kThreads));
    launch(name, write_rows_kernel<kWindow>, {dim3(blocks), dim3(kThreads), 0, params.stream}, params);
}

}  // namespace

void launch_write_window(const WriteRowsParams& params) { launch_write_rows<true>("attention.write_window", params); }

void launch_write_compressed(const WriteRowsParams& params) {
    launch_write_rows<false>("attention.write_compressed", params);
}

void launch_write_normed_window(const WriteRowsParams& params, const NormRope& norm) {
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(params.num_rows, kNormThreads / 32));
    launch("attention.write_normed_window", normed_window_kernel, {dim3(blocks), dim3(kNormThreads), 0, params.stream}, params, norm);
}

}  // namespace mdi::attention
