// Params structs and launcher declarations of the moe kernels. No torch in here.
// Letters: T tokens, N hidden, E experts (of this rank), K columns of the product, O output columns, F expert hidden,
// M = T * k routed slots (the most rows a product can have), k picks per token.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mdi::moe {

struct RouteParams {
    int64_t num_tokens;         // T
    int hidden, num_experts, k; // N (a multiple of 32), E <= 512, k <= 32
    float scaling;              // multiplies the normalised weights
    const uint16_t* x;          // [T, N] bf16
    const uint16_t* weight;     // [E, N] bf16
    const float* bias;          // [E], selection only
    int32_t* ids;               // [T, k], ascending
    float* weights;             // [T, k]
    cudaStream_t stream;
};

struct PermuteParams {
    int64_t num_slots;          // M = T * k < 2^31
    int first_expert, num_local;
    const int32_t* ids;         // [M]
    int32_t* row_of_slot;       // [M], -1 = another rank's expert
    int32_t* slot_of_row;       // [M], -1 behind the last row
    int32_t* offsets;           // [num_local + 1]
    int32_t* counts;            // workspace [permute_num_blocks(M), num_local]
    int k;                      // picks per token: slot s is of token s / k
    const float* weights;       // [M] routing weight of every slot, or null: no token_of_row and row_weight
    int32_t* token_of_row;      // [M], 0 behind the last row
    float* row_weight;          // [M], 0 behind the last row
    cudaStream_t stream;
};

struct GroupedGemmParams {
    int64_t num_rows;           // M, rows of out: an upper bound of offsets[E]
    int64_t num_a_rows;         // rows of a
    int num_experts, k, num_out;  // E, K, O; K and O multiples of 32
    const uint8_t* a;           // [num_a_rows, K] E4M3 codes
    const uint8_t* a_scale;     // [num_a_rows, K/32] E8M0
    const int32_t* a_rows;      // [M] row of a for every row of out, or null: the same row
    const uint8_t* weight;      // [E, O, K/2] E2M1, even column in the low nibble
    const uint8_t* weight_scale;  // [E, O, K/32] E8M0
    const int32_t* offsets;     // [E + 1], rows offsets[e] .. offsets[e+1] - 1 belong to expert e
    uint16_t* out;              // [M, O] bf16
    cudaStream_t stream;
};

// Rows of a, re-expressed in E4M3 with one power-of-two scale per row, in the order and the column order that
// grouped_gemm_sm90 reads.
struct FoldRowsParams {
    int64_t num_rows;           // M
    int k, num_experts;         // K, a multiple of 32; offsets[E] bounds the rows
    const uint8_t* a;           // [.., K] E4M3
    const uint8_t* a_scale;     // [.., K/32] E8M0
    const int32_t* a_rows;      // [M] or null
    const int32_t* offsets;     // [E + 1]
    uint8_t* folded;            // [M, align_up(K, 128)]
    float* row_scale;           // [M]
    cudaStream_t stream;
};

// Tokens that are folded already, each to the rows of the product that it has: what launch_fold_rows makes of unfolded ones.
struct PlaceRowsParams {
    int64_t num_tokens;         // T
    int k, picks;               // K, a multiple of 32; k <= 32 slots of a token
    const uint8_t* codes;       // [T, K] E4M3
    const float* code_scale;    // [T]
    const int32_t* row_of_slot; // [T, k], -1 = skip
    uint8_t* folded;            // [M, align_up(K, 128)]
    float* row_scale;           // [M]
    cudaStream_t stream;
};

struct GroupedGemmSm90Params {
    int64_t num_rows;           // M
    int num_experts, k, num_out;
    const uint8_t* folded;      // of launch_fold_rows, launch_place_rows or launch_swiglu_fold
    const float* row_scale;     // [M]
    const int32_t* words;       // [E, O, K/8] a packed weight (mini_deepinfer/ops/packed_weight.py): FP4 codes,
    const uint8_t* shifts;      // [E, ceil(K/128), O, 4] 8 times the binades of each group below the row's largest, modulo 128,
    const uint8_t* largest;     // [E, O] largest scale byte of the row
    const int32_t* offsets;
    uint16_t* out;              // [M, O] bf16
    cudaStream_t stream;
};

struct SwigluQuantParams {
    int64_t num_rows;           // M
    int hidden;                 // F, a multiple of 32
    float limit;                // 0 = no clamp
    const uint16_t* gu;         // [M, 2F] bf16: gate, then up
    const float* row_weight;    // [M] or null
    const int32_t* num_rows_bound;  // [1] or null: rows at or past it are not written
    uint8_t* codes;             // [M, F] E4M3, or null: write h
    uint8_t* scale;             // [M, F/32] E8M0
    uint16_t* h;                // [M, F] bf16, when codes is null
    cudaStream_t stream;
};

struct SwigluFoldParams {
    SwigluQuantParams swiglu;   // codes, scale and h unused; F <= 8192
    bool expert_order;          // columns as launch_fold_rows writes them; else as they are
    uint8_t* folded;            // [M, expert_order ? align_up(F, 128) : F]
    float* row_scale;           // [M]
};

struct CombineParams {
    int64_t num_tokens;         // T
    int hidden, k;              // N (a multiple of 8), k <= 32
    bool out_float;             // out is float32 instead of bf16
    const uint16_t* y;          // [rows, N] bf16
    const int32_t* row_of_slot; // [T, k], -1 = skip
    const uint16_t* shared;     // [T, N] bf16 or null
    void* out;                  // [T, N]
    cudaStream_t stream;
    bool has_parts = false;     // bf16 out only: the sums of other ranks belong to the result
    int num_parts = 0, own_part = 0;  // P; this rank's sum comes before part own_part
    const uint16_t* parts = nullptr;  // [P, T, N] bf16
};

constexpr int kMaxExperts = 1024;      // grouped_gemm, permute: experts of one rank
constexpr int kPermuteBlockSlots = 2048;

constexpr int64_t permute_num_blocks(int64_t num_slots) {
    return num_slots <= kPermuteBlockSlots ? 1 : (num_slots + kPermuteBlockSlots - 1) / kPermuteBlockSlots;
}

void launch_route(const RouteParams& params);
void launch_route_sm90(const RouteParams& params);
void launch_permute(const PermuteParams& params);
void launch_grouped_gemm(const GroupedGemmParams& params);
void launch_fold_rows(const FoldRowsParams& params);
void launch_place_rows(const PlaceRowsParams& params);
void launch_grouped_gemm_sm90(const GroupedGemmSm90Params& params);
void launch_swiglu_quant(const SwigluQuantParams& params);
void launch_swiglu_fold(const SwigluFoldParams& params);
void launch_combine(const CombineParams& params);

}  // namespace mdi::moe
