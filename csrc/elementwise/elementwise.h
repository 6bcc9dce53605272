// Params and launchers of the elementwise stage: norms, activation quantisation, rotary embedding, hyper-connections and
// the engram gate. Torch-free: elementwise_api.h turns tensors into these, the .cu files launch them.
// Letters: T tokens, N hidden (or any row width), n streams, h heads, d head dim, R rotary dims, P positions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "elementwise/expand.h"

namespace mdi::elementwise {

using bf16 = uint16_t;  // the bits

constexpr int kMaxStreams = 4;
constexpr int kQuantGroup = 32;  // columns that share one activation scale

enum class Quant : int {
    kNone = 0,    // bf16 only
    kGroup = 1,   // E4M3 codes and one E8M0 byte per 32 columns
    kFolded = 2,  // the same codes re-expressed at the row's largest scale, one float32 scale per row
};

// One pass over rows: [collapse the streams] -> [RMSNorm] -> [bf16 out] -> [quantise]. Unused parts have null pointers.
struct RowParams {
    int64_t num_tokens;
    int width;             // N, a multiple of 32
    const bf16* x;         // [T, N]; null when streams is set
    int64_t x_stride;      // elements between rows of x
    const bf16* streams;   // [T, n, N] contiguous, or null
    const float* pre;      // [T, n], the collapse weights of streams
    int num_streams;       // n, 1..4
    const void* weight;    // [N] bf16 or float32, or null: no norm
    bool weight_is_f32;
    float eps;             // added to the mean square
    bf16* out;             // [T, N] contiguous, or null
    Quant quant;
    uint8_t* codes;        // [T, N] E4M3
    uint8_t* scale;        // [T, N/32] E8M0 (kGroup)
    float* row_scale;      // [T], a power of two (kFolded)
    cudaStream_t stream;
};
constexpr int kMaxRowWidth = 16384;       // of x
constexpr int kMaxCollapseWidth = 10240;  // of streams, and of the engram gate
void launch_row(const RowParams& p);

// Rows [T * g, N] of x [T, g * N] whose heads are rotated before they are quantised: N = heads of a group x head_dim.
struct HeadRope {
    int groups;                // g, rows of a token
    int head_dim, rope_dim;    // the last rope_dim of head_dim columns are rotated; both multiples of 8
    const int32_t* positions;  // [T]
    const float* table;        // [P, R/2, 2]: cos, sin, 16-byte aligned
    bool inverse;
};
void launch_rope_quant(const RowParams& p, const HeadRope& rope);  // num_tokens = T * g, x_stride between tokens

struct FoldScalesParams {
    int64_t num_tokens;
    int width;                   // K, a multiple of 32
    const uint8_t* codes;        // [T, K] E4M3
    const uint8_t* scale;        // [T, K/32] E8M0
    uint8_t* folded;             // [T, K] E4M3
    float* row_scale;            // [T]
    cudaStream_t stream;
};
void launch_fold_scales(const FoldScalesParams& p);

struct RopeParams {
    int64_t num_tokens;
    int num_heads, head_dim, rope_dim;  // rope_dim <= head_dim, both even
    const bf16* x;                      // [T, h, d], heads contiguous
    int64_t x_stride;                   // elements between tokens of x
    bf16* out;                          // [T, h, d], may be x
    int64_t out_stride;
    const int32_t* positions;           // [T], in 0..P-1 (the table's owner guarantees it)
    const float* table;                 // [P, R/2, 2]: cos, sin
    bool inverse;                       // rotate by minus the angle
    cudaStream_t stream;
};
void launch_rope(const RopeParams& p);

// Hyper-connection coefficients of T tokens; see hc_mix.cu for the split over columns.
struct HcMixParams {
    int64_t num_tokens;
    int num_streams, width;   // n, N (a multiple of 8)
    const bf16* streams;      // [T, n, N] contiguous
    const float* fn;          // [2n + n*n, n*N]
    const float* base;        // [2n + n*n]
    const float* scale;       // [3]: pre, post, comb
    int sinkhorn_iters;
    float hc_eps, norm_eps;
    float* partial;           // workspace, hc_mix_workspace_floats() of it
    float* pre;               // [T, n]
    float* post;              // [T, n]
    float* comb;              // [T, n, n], row = input stream, column = output stream
    cudaStream_t stream;
};
int64_t hc_mix_workspace_floats(int64_t num_tokens, int num_streams, int width);
void launch_hc_mix(const HcMixParams& p);

struct HcExpandParams {
    int64_t num_tokens;
    int num_streams, width;   // n, N (a multiple of 8)
    const bf16* y;            // [T, N]
    int64_t y_stride;
    const bf16* streams;      // [T, n, N] contiguous
    const float* post;        // [T, n]
    const float* comb;        // [T, n, n]
    bf16* out;                // [T, n, N] contiguous, may be streams
    cudaStream_t stream;
};
void launch_hc_expand(const HcExpandParams& p);

// hc_expand, hc_collapse of its result and hc_mix of its result in one pass over the streams.
struct HcExpandMixParams {
    HcMixParams mix;          // streams [T, n, N] before the expansion; coefficients of the expanded streams
    const bf16* y;            // [T, N], the previous sublayer's output
    int64_t y_stride;
    const float* pre;         // [T, n], [T, n], [T, n, n]: the previous sublayer's coefficients
    const float* post;
    const float* comb;
    bf16* out;                // [T, n, N] contiguous, may be mix.streams
    bf16* x;                  // [T, N] contiguous, the collapse; then, if row wants it, its norm
};
// row: norm and quantisation of x beside the coefficients (row->x = p.x, N <= kMaxCollapseWidth, N % 32 == 0), or null.
void launch_hc_expand_mix(const HcExpandMixParams& p, const RowParams* row);
void launch_hc_expand_mix_sm90(const HcExpandMixParams& p, const RowParams* row);  // the same bits

struct EngramGateParams {
    int64_t num_tokens;
    int num_streams, width;   // n, N (a multiple of 8, at most kMaxCollapseWidth)
    const bf16* streams;      // [T, n, N] contiguous
    const bf16* z;            // [T, (n+1)*N]: n keys, then the value
    int64_t z_stride;
    const bf16* q_weight;     // [n, N]
    const bf16* k_weight;     // [n, N]
    float eps;
    bf16* out;                // [T, n, N] contiguous, may be streams
    cudaStream_t stream;
};
void launch_engram_gate(const EngramGateParams& p);

}  // namespace mdi::elementwise
