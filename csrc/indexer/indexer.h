// Params structs and launcher declarations of the indexer kernels. No torch in here.
//
// Letters: T tokens, Hi index heads, Di index head dim, C candidate blocks, K picks, n score columns.
// A key row is Di/2 bytes of E2M1 codes (even element in the low nibble), then Di/32 E8M0 bytes (model spec 4.4).
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::indexer {

struct QuantParams {
    int64_t num_rows;        // G keys, or T * Hi queries
    int head_dim;            // Di, 64 or 128
    const uint16_t* x;       // [num_rows, Di] bf16
    uint8_t* codes;          // row r at codes + slot * codes_stride
    uint8_t* scale;          // row r at scale + slot * scale_stride
    int64_t codes_stride, scale_stride;  // bytes
    const int32_t* slots;    // [num_rows], -1 = skip; null = row r goes to r
    int64_t num_slots;       // slots outside 0..num_slots-1 are skipped
    cudaStream_t stream;
};

// Rotation of a query's last rope_dim columns before it is quantised.
struct QueryRope {
    int num_heads;             // Hi: rows of a token
    int rope_dim;              // R, a multiple of 8 up to Di
    const int32_t* positions;  // [T]
    const float* table;        // [P, R/2, 2]: cos, sin, 16-byte aligned
};

struct CacheRowsParams {
    int num_tokens, num_picks, entries_per_page, pages_per_seq;
    const int32_t* ids;           // [T, K] logical entries, -1 stays -1
    const int32_t* page_table;    // [B, pages_per_seq]
    const int32_t* seq_of_token;  // [T]
    int32_t* rows;                // [T, K]
    cudaStream_t stream;
};

struct LogitsParams {
    int num_tokens, num_heads, head_dim, num_cols, entries_per_page, pages_per_seq;
    const uint8_t* q_codes;       // [T, Hi, Di/2]
    const uint8_t* q_scale;       // [T, Hi, Di/32]
    const uint16_t* weights;      // [T, Hi] bf16
    const uint8_t* keys;          // [S, Di/2 + Di/32]
    const int32_t* page_table;    // [B, pages_per_seq]
    const int32_t* seq_of_token;  // [T]
    const int32_t* visible;       // [T]
    const int32_t* candidates;    // candidate_logits: [T, C] block ids, -1 = none; logits: null
    int num_candidates, block_size;
    uint16_t* out;                // [T, num_cols] bf16
    int64_t out_stride;           // elements
    int num_seqs;                 // B
    uint8_t* workspace;           // sm90: logits_workspace_bytes() or candidate_workspace_bytes() bytes, 16-byte aligned
    // second pass of the sm90 kernels: the portable ones score only the marked tokens and keys (null: everything)
    const int32_t* any_marked;        // 0: nothing to do
    const uint8_t* marked_tokens;     // logits: [ceil(T / 16)], 16 tokens each; candidate_logits: [T]
    const uint8_t* marked_tiles;      // [B, marked_stride], 64 keys each (logits) or 8 (candidate_logits)
    int marked_stride;
    cudaStream_t stream;
};

// What the sm90 score kernels take; ops/indexer.py gives other work to the portable ones.
constexpr int kFoldedHeads = 32, kFoldedHeadDim = 128;           // at most; exactly
constexpr int64_t kMaxFoldedStride = 1 << 26;                    // logits: 16 rows of scores are addressed with 32 bits
constexpr int kFoldedBlock = 8, kMaxFoldedCandidates = 8192;     // candidate_logits: block_size; C
constexpr int64_t kMaxFoldedEntries = 1 << 21;                   // candidate_logits: of all page tables

struct TopkParams {
    int num_tokens, num_cols, k, num_blocks;  // picks of topk, blocks of candidate_blocks
    bool is_float;                // scores are fp32, else bf16
    const void* scores;           // [T, num_cols]
    int64_t stride;               // elements
    const int32_t* visible;       // [T] or null; columns at or past it are ignored
    int block_size;               // topk: entries per candidate block; candidate_blocks: columns per block
    const int32_t* candidates;    // topk: [T, num_candidates] or null
    int num_candidates;
    int32_t* ids;                 // topk: [T, k] ascending, -1 behind
    int32_t* count;               // topk: [T] or null
    int32_t* blocks;              // candidate_blocks: [T, num_blocks] ascending, -1 behind
    cudaStream_t stream;
};

void launch_quantise(const char* op, const QuantParams& params);
void launch_rope_quant_query(const QuantParams& params, const QueryRope& rope);
void launch_cache_rows(const CacheRowsParams& params);
void launch_logits(const LogitsParams& params);
void launch_logits_marked(const LogitsParams& params, int num_blocks);  // Hi <= 32 and Di = 128
int64_t logits_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t num_cols);
void launch_logits_sm90(const LogitsParams& params);
void launch_candidate_logits(const LogitsParams& params);
int64_t candidate_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t entries_per_seq, int64_t num_candidates);
void launch_candidate_logits_sm90(const LogitsParams& params);
void launch_topk(const TopkParams& params);
void launch_candidate_blocks(const TopkParams& params);
void launch_topk_blocks(const TopkParams& params);  // both; candidates null

}  // namespace mdi::indexer
