// The row pass of rmsnorm_quant.cu as a device function, for the kernels that run it beside other work (hc_expand_mix.cu).
#pragma once
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kMaxRowWarps = 32;  // of a block: elements of a scratch array
constexpr int kScratchVector = 4;

template <class T>
struct RowScratch {
    alignas(16) T element[kMaxRowWarps];
};

// Threads of a row, blockDim.x; kThreads > 0: known when compiled.
template <int kThreads>
MDI_DEVICE int row_block() {
    return kThreads > 0 ? kThreads : static_cast<int>(blockDim.x);
}

// Combines values over the threads of each row of the block: part p of a thread stands for a thread of its own, p * blockDim.x
// further, so that the order (lanes by a butterfly, then the warps in order) depends on parts times threads alone. `scratch`
// takes one element a warp and part, each row's filled up with op's neutral element to whole vectors of four.
template <int kThreads, int kParts, class T, class Op>
MDI_DEVICE T row_reduce(const T (&values)[kParts], Op op, T neutral, RowScratch<T>& scratch) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int warps = row_block<kThreads>() / 32, elements = kParts * warps, padded = align_up(elements, kScratchVector);
    T* row_scratch = scratch.element + threadIdx.y * padded;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const T value = warp_reduce(values[part], op);
        if (elements == 1) return value;
        if (lane == 0) row_scratch[part * warps + warp] = value;
    }
    if (warp == 0 && lane >= 1 && elements - 1 + lane < padded) row_scratch[elements - 1 + lane] = neutral;
    __syncthreads();
    T result = {};
#pragma unroll 1
    for (int first = 0; first < padded; first += kScratchVector) {
        T four[kScratchVector];
        *reinterpret_cast<uint4*>(four) = *reinterpret_cast<const uint4*>(row_scratch + first);
        result = first == 0 ? four[0] : op(result, four[0]);
#pragma unroll
        for (int i = 1; i < kScratchVector; ++i) result = op(result, four[i]);
    }
    return result;
}

template <bool kCollapse>
MDI_DEVICE uint4 load_vector(const RowParams& p, const bf16* first, const float (&pre)[kMaxStreams]) {
    if constexpr (!kCollapse) {
        return *reinterpret_cast<const uint4*>(first);
    } else {
        uint4 packed[kMaxStreams];
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (s < p.num_streams) packed[s] = *reinterpret_cast<const uint4*>(first + static_cast<int64_t>(s) * p.width);
        float sum[kVector];
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s) {
            if (s >= p.num_streams) continue;
            float value[kVector];
            unpack(packed[s], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[i] = s == 0 ? pre[0] * value[i] : fmaf(pre[s], value[i], sum[i]);
        }
        return pack(sum);
    }
}

MDI_DEVICE void load_weight(const void* source, bool is_f32, int column, float (&weight)[kVector]) {
    if (is_f32) {
        const float4* words = reinterpret_cast<const float4*>(static_cast<const float*>(source) + column);
        const float4 low = words[0], high = words[1];
        const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i) weight[i] = values[i];
    } else {
        unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(source) + column), weight);
    }
}

// RMSNorm of a row whose vectors lie in the registers of several threads: each adds its squares in column order, the sums are
// reduced over the row, each scales its vectors.
MDI_DEVICE float add_squares(const uint4& x, float sum) {
    float value[kVector];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(value[i], value[i], sum);
    return sum;
}

MDI_DEVICE float reciprocal_rms(float square_sum, int width, float eps) {
    return 1.0f / sqrtf(square_sum / static_cast<float>(width) + eps);
}

MDI_DEVICE uint4 normalise(const uint4& x, float rstd, const float (&weight)[kVector]) {
    float value[kVector];
    unpack(x, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] = weight[i] * (value[i] * rstd);
    return pack(value);
}

// One vector of a group of four neighbouring lanes: its E4M3 codes at the group's scale, and the scale byte.
MDI_DEVICE void quantise_vector(const uint4& x, uint2& codes, int& byte) {
    byte = act_quant_scale(bits_float(warp_max<4>(largest_abs_bits(x))));
    float value[kVector];
    unpack(x, value);
    codes = encode_e4m3x8(value, e8m0_inverse(static_cast<uint8_t>(byte)));
}

// The thread's vectors of one row of p.codes, with their group scales or folded at the row's largest scale.
template <int kChunks, int kThreads = 0>
MDI_DEVICE void store_codes(const RowParams& p, int row, bool folded, const uint2 (&codes)[kChunks], const int (&byte)[kChunks],
                            int row_byte) {
    const int step = row_block<kThreads>() * kVector, width = kThreads > 0 ? kChunks * step : p.width;
    uint8_t* target = p.codes + static_cast<int64_t>(row) * width;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = static_cast<int>(threadIdx.x) * kVector + c * step;
        if (column >= width) continue;
        *reinterpret_cast<uint2*>(target + column) = folded ? fold_e4m3x8(codes[c], byte[c], row_byte) : codes[c];
        if (!folded && threadIdx.x % 4 == 0)
            p.scale[static_cast<int64_t>(row) * (width / kQuantGroup) + column / kQuantGroup] = static_cast<uint8_t>(byte[c]);
    }
    if (folded && threadIdx.x == 0) p.row_scale[row] = e8m0_decode(static_cast<uint8_t>(row_byte));
}

// Rows block * blockDim.y ... of the pass; see rmsnorm_quant.cu. Vector v of a thread is vector v / kParts of part v % kParts.
// kThreads > 0: one row a block, of exactly what kThreads threads hold: neither bounds nor addresses have to be found out.
template <int kChunks, int kParts, bool kCollapse, int kThreads = 0>
MDI_DEVICE void row_pass(const RowParams& p, int block, RowScratch<float>& sum_scratch, RowScratch<uint32_t>& max_scratch) {
    constexpr int kVectors = kChunks * kParts;
    const int token = block * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    const bool live = token < p.num_tokens;
    if (kThreads > 0 && !live) return;  // else every thread stays for the barriers: another row of the block may need them
    const int step = row_block<kThreads>() * kVector, width = kThreads > 0 ? kVectors * step : p.width;
    const int first = static_cast<int>(threadIdx.x) * kVector;

    float pre[kMaxStreams] = {};
    if constexpr (kCollapse) {
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (live && s < p.num_streams) pre[s] = p.pre[static_cast<int64_t>(token) * p.num_streams + s];
    }
    const bf16* source = kCollapse ? p.streams + static_cast<int64_t>(token) * p.num_streams * p.width + first
                                   : p.x + token * p.x_stride + first;
    bool in_row[kVectors];
    uint4 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        in_row[v] = kThreads > 0 || (live && first + v * step < width);
        x[v] = in_row[v] ? load_vector<kCollapse>(p, source + v * step, pre) : make_uint4(0, 0, 0, 0);
    }

    if (p.weight != nullptr) {
        float squares[kParts] = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) squares[v % kParts] = add_squares(x[v], squares[v % kParts]);
        const float rstd = reciprocal_rms(row_reduce<kThreads>(squares, Sum{}, 0.0f, sum_scratch), width, p.eps);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!in_row[v]) continue;
            float weight[kVector];
            load_weight(p.weight, p.weight_is_f32, first + v * step, weight);
            x[v] = normalise(x[v], rstd, weight);
        }
    }
    if (p.out != nullptr) {
        bf16* out = p.out + static_cast<int64_t>(token) * width + first;
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (in_row[v]) *reinterpret_cast<uint4*>(out + v * step) = x[v];
    }
    if (p.quant == Quant::kNone) return;

    uint2 codes[kVectors];
    int byte[kVectors];
    uint32_t row_byte[1] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        quantise_vector(x[v], codes[v], byte[v]);
        // a vector past the row's end is zero: its byte is the floor of the rule and never the only largest one
        row_byte[0] = max_of(row_byte[0], static_cast<uint32_t>(byte[v]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte[0] = row_reduce<kThreads>(row_byte, Max{}, 0u, max_scratch);
    if (live) store_codes<kVectors, kThreads>(p, token, folded, codes, byte, static_cast<int>(row_byte[0]));
}

// Threads of a row: whole warps, as few as hold the row. Depends on N only.
template <int kChunks>
inline int row_threads(int width) {
    return align_up(ceil_div(ceil_div(width, kVector), kChunks), 32);
}

// Whether a thread stands for two of them: half as much to do once a thread and row. Small rows want all threads.
inline bool row_threads_in_halves(int threads) { return threads >= 256 && threads % 64 == 0; }

// Rows of a block: one, or as many as make four warps.
inline int rows_per_block(int threads) { return threads >= 128 ? 1 : 128 / threads; }

}  // namespace mdi::elementwise
