// The row pass of rmsnorm_quant.cu as a device function, for the kernels that run it beside other work (hc_expand_mix.cu).
#pragma once
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {

constexpr int kMaxRowWarps = 32;  // of a block: elements of a scratch array
constexpr int kScratchVector = 4;

struct RowScratch {
    alignas(16) float sum[kMaxRowWarps];
    alignas(16) uint32_t max[kMaxRowWarps];
};

// Combines values over the threads of each row of the block: a thread's part p stands for a thread of its own, p * blockDim.x
// further, so that the order (lanes by a butterfly, then the warps in order) depends on parts times threads alone. `scratch`: one
// element a warp and part, each row's filled up with op's neutral element to whole vectors of four.
template <int kParts, class T, class Op>
MDI_DEVICE T row_reduce(const T (&values)[kParts], Op op, T neutral, T* scratch) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int warps = static_cast<int>(blockDim.x) / 32, elements = kParts * warps, padded = align_up(elements, kScratchVector);
    T* row_scratch = scratch + threadIdx.y * padded;
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

MDI_DEVICE void load_weight(const RowParams& p, int column, float (&weight)[kVector]) {
    if (p.weight_is_f32) {
        const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(p.weight) + column);
        const float4 low = source[0], high = source[1];
        const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i) weight[i] = values[i];
    } else {
        unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.weight) + column), weight);
    }
}

// Rows block * blockDim.y ... of the pass; see rmsnorm_quant.cu. Vector (p, c) of a thread is vector c of its part p.
template <int kChunks, int kParts, bool kCollapse>
MDI_DEVICE void row_pass(const RowParams& p, int block, RowScratch& scratch) {
    const int token = block * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    const bool live = token < p.num_tokens;  // every thread stays for the barriers
    const int step = static_cast<int>(blockDim.x) * kVector;
    const int first = static_cast<int>(threadIdx.x) * kVector;

    float pre[kMaxStreams] = {};
    if constexpr (kCollapse) {
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (live && s < p.num_streams) pre[s] = p.pre[static_cast<int64_t>(token) * p.num_streams + s];
    }
    // this thread's first vector in the arrays of whole rows
    const int64_t at = static_cast<int64_t>(token) * p.width + first;
    const bf16* source = kCollapse ? p.streams + static_cast<int64_t>(token) * p.num_streams * p.width + first
                                   : p.x + token * p.x_stride + first;
    constexpr int kVectors = kChunks * kParts;  // vector c * kParts + p is (p, c)
    bool in_row[kVectors];
    uint4 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        in_row[v] = live && first + v * step < p.width;
        x[v] = in_row[v] ? load_vector<kCollapse>(p, source + v * step, pre) : make_uint4(0, 0, 0, 0);
    }

    if (p.weight != nullptr) {
        float squares[kParts] = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float value[kVector];
            unpack(x[v], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) squares[v % kParts] = fmaf(value[i], value[i], squares[v % kParts]);
        }
        const float square = row_reduce(squares, Sum{}, 0.0f, scratch.sum);
        const float rstd = 1.0f / sqrtf(square / static_cast<float>(p.width) + p.eps);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!in_row[v]) continue;
            float value[kVector], weight[kVector];
            unpack(x[v], value);
            load_weight(p, first + v * step, weight);
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = weight[i] * (value[i] * rstd);
            x[v] = pack(value);
        }
    }
    if (p.out != nullptr) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (in_row[v]) *reinterpret_cast<uint4*>(p.out + at + v * step) = x[v];
    }
    if (p.quant == Quant::kNone) return;

    uint2 codes[kVectors];
    int byte[kVectors];
    uint32_t row_byte[1] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const uint32_t largest = warp_reduce<4>(largest_abs_pair(x[v]), PairMax{});
        byte[v] = act_quant_scale(bits_float(max_of(largest << 16, largest & 0xffff0000u)));
        float value[kVector];
        unpack(x[v], value);
        codes[v] = encode_e4m3x8(value, e8m0_inverse(static_cast<uint8_t>(byte[v])));
        // a vector past the row's end is zero: its byte is the floor of the rule and never the only largest one
        row_byte[0] = max_of(row_byte[0], static_cast<uint32_t>(byte[v]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte[0] = row_reduce(row_byte, Max{}, 0u, scratch.max);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!in_row[v]) continue;
        if (folded) codes[v] = fold_e4m3x8(codes[v], byte[v], static_cast<int>(row_byte[0]));
        *reinterpret_cast<uint2*>(p.codes + at + v * step) = codes[v];
        if (!folded && threadIdx.x % 4 == 0) p.scale[(at + v * step) / kQuantGroup] = static_cast<uint8_t>(byte[v]);
    }
    if (folded && live && threadIdx.x == 0) p.row_scale[token] = e8m0_decode(static_cast<uint8_t>(row_byte[0]));
}

// Threads of a row: whole warps, as few as hold the row. Depends on N only.
template <int kChunks>
inline int row_threads(int width) {
    return align_up(ceil_div(ceil_div(width, kVector), kChunks), 32);
}

// Whether a thread can stand for two of them. Fewer threads a row leave less to do once a thread and row; small rows want them all.
inline bool row_threads_in_halves(int threads) { return threads >= 256 && threads % 64 == 0; }

// Rows of a block: one, or as many as make four warps.
inline int rows_per_block(int threads) { return threads >= 128 ? 1 : 128 / threads; }

}  // namespace mdi::elementwise
