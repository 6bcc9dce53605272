// One pass over rows of N columns; which parts run is chosen by the launcher, so that every fusion gives the bits of the
// separate ops:
//     collapse   x[t] = bf16( sum_s pre[t, s] * streams[t, s] )                      (hc_collapse, model spec 3.2)
//     norm       y = bf16( w * (x * rstd) ),  rstd = 1 / sqrt(mean(x^2) + eps)       (rmsnorm, 3.6)
//     group      amax over 32 columns, s = ceilpow2(max(amax, 1e-4) * fp32(1/448)), code = e4m3(y / s)   (act_quant, 8)
//     folded     every code re-expressed at the row's largest s: one scale a row     (act_quant_folded)
// The collapse is rounded to bf16 before the norm and the quantiser reads the rounded norm, as the separate ops would.
//
// Block = blockDim.y rows of blockDim.x threads. A thread owns kChunks vectors of 8 columns, vector c * blockDim.x + x, in
// registers from the load to the store: each row is read once and written once. Four neighbouring lanes hold one group.
// Row sums: a thread's own columns in order, a butterfly over the warp, then the warps in order. The shape of the block
// depends on N only, so a row's bits depend neither on T nor on the other parts of the pass.
// Shared memory: at most 256 bytes. Limits: N % 32 == 0, N <= 16384 (rows) or 10240 (streams).
// Non-finite input: a NaN reaches every output of its row through the norm, or of its group (scale byte 255) without one.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/reduce.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kMaxWarps = 32;

// Combines a value over the threads of each row of the block, warps in order. `scratch`: one element a warp.
template <class T, class Op>
MDI_DEVICE T row_reduce(T value, Op op, T* scratch) {
    value = warp_reduce(value, op);
    const int num_warps = static_cast<int>(blockDim.x) / 32;
    if (num_warps == 1) return value;
    T* row_scratch = scratch + threadIdx.y * num_warps;
    if (threadIdx.x % 32 == 0) row_scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T result = row_scratch[0];
    for (int warp = 1; warp < num_warps; ++warp) result = op(result, row_scratch[warp]);
    return result;
}

template <bool kCollapse>
MDI_DEVICE uint4 load_vector(const RowParams& p, int64_t token, int column, const float (&pre)[kMaxStreams]) {
    if constexpr (!kCollapse) {
        return *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + column);
    } else {
        const bf16* first = p.streams + token * p.num_streams * p.width + column;
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

template <int kChunks, bool kCollapse, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) row_kernel(RowParams p) {
    __shared__ float sum_scratch[kMaxWarps];
    __shared__ uint32_t max_scratch[kMaxWarps];
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool live = token < p.num_tokens;  // every thread stays for the barriers
    const int step = static_cast<int>(blockDim.x) * kVector;
    const int first = static_cast<int>(threadIdx.x) * kVector;

    float pre[kMaxStreams] = {};
    if constexpr (kCollapse) {
#pragma unroll
        for (int s = 0; s < kMaxStreams; ++s)
            if (live && s < p.num_streams) pre[s] = p.pre[token * p.num_streams + s];
    }
    uint4 x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * step;
        x[c] = make_uint4(0, 0, 0, 0);
        if (live && column < p.width) x[c] = load_vector<kCollapse>(p, token, column, pre);
    }

    if (p.weight != nullptr) {
        float square = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            float value[kVector];
            unpack(x[c], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) square = fmaf(value[i], value[i], square);
        }
        square = row_reduce(square, Sum{}, sum_scratch);
        const float rstd = 1.0f / sqrtf(square / static_cast<float>(p.width) + p.eps);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = first + c * step;
            if (column >= p.width) continue;
            float value[kVector], weight[kVector];
            unpack(x[c], value);
            load_weight(p, column, weight);
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = weight[i] * (value[i] * rstd);
            x[c] = pack(value);
        }
    }
    if (p.out != nullptr && live) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = first + c * step;
            if (column < p.width) *reinterpret_cast<uint4*>(p.out + token * p.width + column) = x[c];
        }
    }
    if (p.quant == Quant::kNone) return;

    uint2 codes[kChunks];
    int byte[kChunks];
    uint32_t row_byte = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        float value[kVector];
        unpack(x[c], value);
        byte[c] = act_quant_scale(bits_float(warp_max<4>(largest_abs_bits(value))));
        codes[c] = encode_e4m3x8(value, e8m0_inverse(static_cast<uint8_t>(byte[c])));
        // a vector past the row's end is zero: its byte is the floor of the rule and never the only largest one
        row_byte = max_of(row_byte, static_cast<uint32_t>(byte[c]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte = row_reduce(row_byte, Max{}, max_scratch);
    if (!live) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * step;
        if (column >= p.width) continue;
        if (folded) codes[c] = fold_e4m3x8(codes[c], byte[c], static_cast<int>(row_byte));
        *reinterpret_cast<uint2*>(p.codes + token * p.width + column) = codes[c];
        if (!folded && threadIdx.x % 4 == 0)
            p.scale[token * (p.width / kQuantGroup) + column / kQuantGroup] = static_cast<uint8_t>(byte[c]);
    }
    if (folded && threadIdx.x == 0) p.row_scale[token] = e8m0_decode(static_cast<uint8_t>(row_byte));
}

// Codes that are quantised already: a block takes one row, reads its scale bytes for the largest, then folds.
constexpr int kFoldThreads = 128;

__global__ void __launch_bounds__(kFoldThreads) fold_scales_kernel(FoldScalesParams p) {
    __shared__ uint32_t scratch[kFoldThreads / 32];
    const int64_t token = blockIdx.x;
    const int num_groups = p.width / kQuantGroup;
    const uint8_t* scale = p.scale + token * num_groups;
    uint32_t largest = 0;
    for (int g = threadIdx.x; g < num_groups; g += kFoldThreads) largest = max_of(largest, static_cast<uint32_t>(scale[g]));
    const int row_byte = static_cast<int>(block_max<kFoldThreads>(largest, scratch));
    const uint4* codes = reinterpret_cast<const uint4*>(p.codes + token * p.width);
    uint4* folded = reinterpret_cast<uint4*>(p.folded + token * p.width);
#pragma unroll 4
    for (int v = threadIdx.x; v < p.width / 16; v += kFoldThreads) {
        const uint4 packed = codes[v];
        const int byte = scale[v / 2];
        const uint2 low = fold_e4m3x8(make_uint2(packed.x, packed.y), byte, row_byte);
        const uint2 high = fold_e4m3x8(make_uint2(packed.z, packed.w), byte, row_byte);
        folded[v] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (threadIdx.x == 0) p.row_scale[token] = e8m0_decode(static_cast<uint8_t>(row_byte));
}

// Threads of a row: whole warps, as few as hold the row. Depends on N only.
template <int kChunks>
int row_threads(int width) {
    return align_up(ceil_div(ceil_div(width, kVector), kChunks), 32);
}

template <int kChunks, bool kCollapse, int kMaxThreads>
void launch_rows(const RowParams& p) {
    const int threads = row_threads<kChunks>(p.width);
    const int rows = threads >= 128 ? 1 : 128 / threads;
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, rows));
    launch("elementwise.row", row_kernel<kChunks, kCollapse, kMaxThreads>,
           {dim3(blocks), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, p.stream}, p);
}

}  // namespace

void launch_row(const RowParams& p) {
    // Two vectors a thread up to N = 10240 for both sources, so that collapse + norm sums like norm alone.
    if (p.streams != nullptr)
        launch_rows<2, true, 640>(p);
    else if (p.width <= kMaxCollapseWidth)
        launch_rows<2, false, 640>(p);
    else
        launch_rows<4, false, 512>(p);
}

void launch_fold_scales(const FoldScalesParams& p) {
    launch("elementwise.fold_scales", fold_scales_kernel,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(kFoldThreads), 0, p.stream}, p);
}

}  // namespace mdi::elementwise
