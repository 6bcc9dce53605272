// One pass over rows of N columns; which parts run is chosen by the launcher, so that every fusion gives the bits of the
// separate ops:
//     collapse   x[t] = bf16( sum_s pre[t, s] * streams[t, s] )                      (hc_collapse, model spec 3.2)
//     norm       y = bf16( w * (x * rstd) ),  rstd = 1 / sqrt(mean(x^2) + eps)       (rmsnorm, 3.6)
//     group      amax over 32 columns, s = ceilpow2(max(amax, 1e-4) * fp32(1/448)), code = e4m3(y / s)   (act_quant, 8)
//     folded     every code re-expressed at the row's largest s: one scale a row     (act_quant_folded)
//     rope       the last columns of every head rotated (common/rotary.cuh), rounded to bf16, then group or folded (rope_quant)
// The collapse is rounded to bf16 before the norm and the quantiser reads the rounded norm, as the separate ops would.
//
// Block = blockDim.y rows of blockDim.x threads. A thread owns kChunks vectors of 8 columns, vector c * blockDim.x + x, in
// registers from the load to the store: each row is read once and written once. Four neighbouring lanes hold one group.
// In normed rows of 256 threads and more a thread stands for two of these: half as much to do once a thread, same sums.
// Row sums: a thread's own columns in order, a butterfly over the warp, then the warps in order. The shape of the block
// depends on N only, so a row's bits depend neither on T nor on the other parts of the pass.
// Shared memory: at most 256 bytes. Limits: N % 32 == 0, N <= 16384 (rows) or 10240 (streams).
// Non-finite input: a NaN reaches every output of its row through the norm, or of its group (scale byte 255) without one.
#include "common/launch.h"
#include "common/rotary.cuh"
#include "elementwise/row_pass.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kQuantThreads = 512;

template <int kChunks, int kParts, bool kCollapse, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) row_kernel(RowParams p) {
    __shared__ RowScratch<float> sum_scratch;
    __shared__ RowScratch<uint32_t> max_scratch;
    row_pass<kChunks, kParts, kCollapse>(p, static_cast<int>(blockIdx.x), sum_scratch, max_scratch);
}

// Quantisation alone, of rows or of rows of heads that are rotated first. There are no float sums over a row, so the shape of the
// block is free: kChunks vectors a thread, all loaded before the first is used. Bound by instructions, not by memory.
template <int kChunks, bool kRope>
__global__ void __launch_bounds__(kQuantThreads) quantise_kernel(RowParams p, HeadRope rope) {
    __shared__ RowScratch<uint32_t> scratch;
    const int row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
    const bool live = row < p.num_tokens;  // every thread stays for the barrier
    const int step = static_cast<int>(blockDim.x) * kVector;
    const int first = static_cast<int>(threadIdx.x) * kVector;
    const int token = kRope ? row / rope.groups : row;
    const bf16* source = p.x + token * p.x_stride + (kRope ? (row - token * rope.groups) * p.width : 0);
    uint4 x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * step;
        x[c] = make_uint4(0, 0, 0, 0);
        if (live && column < p.width) x[c] = *reinterpret_cast<const uint4*>(source + column);
    }
    if (kRope && live) {
        const int nope_dim = rope.head_dim - rope.rope_dim;
        const float* table = rope.table + static_cast<int64_t>(rope.positions[token]) * rope.rope_dim;
        int in_head = first % rope.head_dim;
        const int head_step = step % rope.head_dim;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (in_head >= nope_dim) x[c] = rotate_eight(x[c], table + (in_head - nope_dim), rope.inverse);
            in_head += head_step;
            if (in_head >= rope.head_dim) in_head -= rope.head_dim;
        }
    }
    uint2 codes[kChunks];
    int byte[kChunks];
    uint32_t row_byte[1] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        quantise_vector(x[c], codes[c], byte[c]);
        row_byte[0] = max_of(row_byte[0], static_cast<uint32_t>(byte[c]));
    }
    const bool folded = p.quant == Quant::kFolded;
    if (folded) row_byte[0] = row_reduce<0>(row_byte, Max{}, 0u, scratch);
    if (live) store_codes<kChunks>(p, row, folded, codes, byte, static_cast<int>(row_byte[0]));
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

template <int kChunks, bool kRope>
void launch_quantise(const char* op, const RowParams& p, const HeadRope& rope) {
    const int threads = row_threads<kChunks>(p.width);
    const int rows = rows_per_block(threads);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, rows));
    launch(op, quantise_kernel<kChunks, kRope>,
           {dim3(blocks), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, p.stream}, p, rope);
}

template <int kChunks, int kParts, bool kCollapse, int kMaxThreads>
void launch_rows(const RowParams& p, int threads) {
    const int rows = rows_per_block(threads);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens, rows));
    launch("elementwise.row", row_kernel<kChunks, kParts, kCollapse, kMaxThreads>,
           {dim3(blocks), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0, p.stream}, p);
}

}  // namespace

void launch_row(const RowParams& p) {
    // Two vectors a thread up to N = 10240 for both sources, so that collapse + norm sums like norm alone.
    const int threads = row_threads<2>(p.width);
    if (p.streams != nullptr)
        launch_rows<2, 1, true, 640>(p, threads);
    else if (p.weight == nullptr)
        p.width <= 2 * kVector * kQuantThreads ? launch_quantise<2, false>("elementwise.act_quant", p, {})
                                               : launch_quantise<4, false>("elementwise.act_quant", p, {});
    else if (p.width > kMaxCollapseWidth)
        launch_rows<4, 1, false, 512>(p, row_threads<4>(p.width));
    else if (row_threads_in_halves(threads))
        launch_rows<2, 2, false, 320>(p, threads / 2);
    else
        launch_rows<2, 1, false, 640>(p, threads);
}

void launch_rope_quant(const RowParams& p, const HeadRope& rope) {
    launch_quantise<4, true>("elementwise.rope_quant", p, rope);
}

void launch_fold_scales(const FoldScalesParams& p) {
    launch("elementwise.fold_scales", fold_scales_kernel,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(kFoldThreads), 0, p.stream}, p);
}

}  // namespace mdi::elementwise
