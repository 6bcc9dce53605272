// Attention over packed KV rows: parameters and launchers. No torch in here.
//
// Packed rows (uint8, model spec 4.4): a window row is D E4M3 codes then D/32 E8M0 bytes (528 B at D = 512); a
// compressed row is D/2 bytes of E2M1 pairs (even element in the low nibble) then D/16 E4M3 bytes (288 B). An expanded row
// holds the bf16 values of either over the key factor of row_codec.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::attention {

constexpr int kHeadDim = 512;  // the only D the sparse kernels take
constexpr int kWindowRowBytes = kHeadDim + kHeadDim / 32;
constexpr int kCompressedRowBytes = kHeadDim / 2 + kHeadDim / 16;
constexpr int kExpandedRowBytes = kHeadDim * 2;
constexpr int kMaxHeads = 128;

struct ExpandRowsParams {
    int num_rows;         // rows of `out`
    int num_packed_rows;  // rows of `packed`; others count as not there
    bool window;          // FP8 rows, else FP4
    const uint8_t* packed;
    const int32_t* pages;  // row i of `out` is row pages[i / page_rows] * page_rows + i % page_rows of `packed`; nullptr: row i
    int page_rows;
    uint8_t* out;          // [num_rows, kExpandedRowBytes]
    cudaStream_t stream;
};

struct WriteRowsParams {
    int num_rows;             // T or G
    int dim;                  // D
    const __nv_bfloat16* in;  // [num_rows, D]
    int64_t in_stride;        // elements between rows of `in`, a multiple of 8
    uint8_t* rows;            // [S, row bytes], contiguous
    const int32_t* slots;     // [num_rows], destination row, negative = skip
    cudaStream_t stream;
};

// What happens to a window row before it is quantised: RMSNorm, rotary embedding of the last rope_dim columns.
struct NormRope {
    const void* weight;        // [D] bf16 or float32
    bool weight_is_f32;
    float eps;                 // added to the mean square
    int rope_dim;              // R, a multiple of 8
    const int32_t* positions;  // [num_rows]
    const float* table;        // [P, R/2, 2]: cos, sin, 16-byte aligned
};
constexpr int kMaxNormDim = 512;  // D of the rows that one warp norms

struct CompressParams {
    int num_groups;             // G
    int ratio;                  // r, tokens per group
    int dim;                    // D, a multiple of 4
    int num_tokens;             // T; a group row v >= T means row v - T of the tail buffers
    const float* kv;            // [T, D]
    const float* score;         // [T, D]; nullptr when r == 1
    const float* tail_kv;       // [tail rows, D] or nullptr
    const float* tail_score;    // [tail rows, D] or nullptr
    const int32_t* group_rows;  // [G, r]
    __nv_bfloat16* out;         // [G, D]
    cudaStream_t stream;
};

// Rotary embedding around sparse attention: the last rope_dim columns of every head of q and, inversely, of the output.
struct SparseRotary {
    const int32_t* positions;  // [T]; nullptr: none
    const float* table;        // [P, R/2, 2]: cos, sin, 16-byte aligned
    int rope_dim;              // R, a multiple of 8 up to kMaxRopeDim
};
constexpr int kMaxRopeDim = 64;
constexpr int kCodeHeads = 8;  // heads of a row of SparseParams::codes

struct SparseParams {
    int num_tokens;                 // T
    int num_heads;                  // H, a multiple of 4, at most kMaxHeads
    int num_window;                 // W, window lanes of a token
    int num_picks;                  // K, compressed lanes of a token; 0 = none
    int num_window_rows;            // rows of the window pool
    int num_compressed_rows;        // rows of the compressed pool
    float softmax_scale;            // multiplies q.k in float32, before the running max
    const __nv_bfloat16* q;         // [T, H, 512]
    int64_t q_stride_token;         // in elements, a multiple of 8
    bool expanded;                  // both pools hold expanded rows; launch_sparse_sm90 only
    const uint8_t* window;          // [num_window_rows, 528], or expanded rows
    const int32_t* window_idx;      // [T, W], pool row, -1 = none
    const uint8_t* compressed;      // [num_compressed_rows, 288], or expanded rows, or nullptr
    const int32_t* compressed_idx;  // [T, K] or nullptr
    const int32_t* compressed_len;  // [T] or nullptr (= K): lanes at or past it are ignored whatever they hold
    const float* sink;              // [H], a scaled logit, only in the denominator
    SparseRotary rotary;            // Hopper kernels only
    __nv_bfloat16* out;             // [T, H, 512], contiguous; nullptr: codes
    uint8_t* codes;                 // [T, H/8, 8 * 512] E4M3 of the rotated output, eight heads a row, folded; needs rotary, H % 8 == 0
    float* row_scale;               // [T, H/8] of codes, powers of two
    cudaStream_t stream;
};

void launch_write_window(const WriteRowsParams& params);
void launch_write_compressed(const WriteRowsParams& params);
void launch_write_normed_window(const WriteRowsParams& params, const NormRope& norm);  // D <= kMaxNormDim
void launch_compress(const CompressParams& params);
void launch_expand_rows(const ExpandRowsParams& params);
void launch_sparse(const SparseParams& params);
void launch_sparse_sm90(const SparseParams& params);        // few tokens: the next one, which gives the same bits
void launch_sparse_split_sm90(const SparseParams& params);

}  // namespace mdi::attention
