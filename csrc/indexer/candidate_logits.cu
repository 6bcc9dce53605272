// Index scores of the candidate blocks only (model spec 5.5): column c * bs + i of token t is entry candidates[t, c] * bs + i,
//
//   out[t, c * bs + i] = the score of logits.cu for that entry;  -inf where the block is -1 or the entry is not visible
//
// Only the rows of the candidates are read: 68 bytes a row at Di = 128. Every token has its own rows, so nothing is shared
// between tokens and nothing is staged: a lane loads its quarter of two key rows straight from the pool (L2), expands it in
// registers and owns exactly the k elements the MMA wants from it (score_tile.cuh). Roundings and sum order are those of
// logits.cu, so a candidate's score has the same bits in both.
//
// A block of 4 warps takes one token and up to 2048 of its columns; a warp takes every fourth group of 16 columns, with
// the next group's rows already in flight. The token's query rows stay in registers as B fragments (64 at 32 heads).
// Groups without a visible entry are filled without reading. Limits: those of logits.cu; any block size. No shared memory.
// SASS: HMMA
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kGroup = 16;             // columns of one MMA tile
constexpr int kChunkCols = 2048;

// Quotient and remainder by a number that is usually a power of two (shift >= 0).
struct Divider {
    int divisor, shift;
    MDI_DEVICE int quotient(int x) const { return shift >= 0 ? x >> shift : x / divisor; }
    MDI_DEVICE int remainder(int x) const { return shift >= 0 ? x & (divisor - 1) : x % divisor; }
};

Divider make_divider(int divisor) {
    Divider out{divisor, -1};
    if (is_power_of_two(divisor))
        for (out.shift = 0; (1 << out.shift) < divisor;) ++out.shift;
    return out;
}

// Cache row of a column, -1 if the column has no visible entry.
__device__ __forceinline__ int64_t row_of_column(const LogitsParams& p, const int32_t* blocks, const int32_t* pages, int visible,
                                                 const Divider& by_block, const Divider& by_page, int column) {
    if (column >= p.num_cols) return -1;
    const int block = blocks[by_block.quotient(column)];
    const int64_t entry = static_cast<int64_t>(block) * p.block_size + by_block.remainder(column);
    if (block < 0 || entry >= visible) return -1;
    const int e = static_cast<int>(entry);  // below visible
    return static_cast<int64_t>(pages[by_page.quotient(e)]) * p.entries_per_page + by_page.remainder(e);
}

template <int kDim>
__device__ __forceinline__ void load_quarter(const uint8_t* keys, int64_t row, int t, Quarter<kDim>& quarter) {
    using Row = KeyRow<kDim>;
#pragma unroll
    for (int w = 0; w < Row::kWords; ++w) quarter.word[w] = 0;
    quarter.scale = 127;
    if (row < 0) return;
    const uint8_t* source = keys + row * Row::kBytes;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(source) + t * Row::kWords * 2;
#pragma unroll
    for (int w = 0; w < Row::kWords; ++w) {
        if constexpr (kDim == 128) quarter.word[w] = reinterpret_cast<const uint32_t*>(halves)[w];
        else quarter.word[w] = halves[2 * w] | static_cast<uint32_t>(halves[2 * w + 1]) << 16;
    }
    quarter.scale = source[Row::kCodeBytes + Row::scale_of_lane(t)];
}

template <int kHeads, int kDim>
__global__ void __launch_bounds__(kThreads) candidate_logits_kernel(LogitsParams p, int num_chunks, Divider by_block, Divider by_page) {
    using Row = KeyRow<kDim>;
    constexpr int kTiles = kHeads / 8;
    const int64_t token = blockIdx.x / num_chunks;
    const int first_col = static_cast<int>(blockIdx.x % num_chunks) * kChunkCols;
    const int end_col = min_of(first_col + kChunkCols, p.num_cols);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    const int seq = p.seq_of_token[token];
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;  // no entry past the page table exists
    const int visible = seq >= 0 && seq < p.num_seqs ? static_cast<int>(min_of<int64_t>(p.visible[token], held)) : 0;
    const int32_t* blocks = p.candidates + token * p.num_candidates;
    const int32_t* pages = p.page_table + static_cast<int64_t>(seq) * p.pages_per_seq;
    uint16_t* out = p.out + token * p.out_stride;

    uint32_t b[kTiles][Row::kPairs], weight[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        load_query_fragment<kDim>(p.q_codes, p.q_scale, token, p.num_heads, 8 * n + g, t, true, b[n]);
        weight[n] = load_weight_pair(p.weights, token, p.num_heads, 8 * n + 2 * t, true);
    }

    int column = first_col + warp * kGroup;
    int64_t row_low = row_of_column(p, blocks, pages, visible, by_block, by_page, column + g);
    int64_t row_high = row_of_column(p, blocks, pages, visible, by_block, by_page, column + g + 8);
    Quarter<kDim> low, high;
    load_quarter<kDim>(p.keys, row_low, t, low);
    load_quarter<kDim>(p.keys, row_high, t, high);
    for (; column < end_col; column += kWarps * kGroup) {
        const bool has_low = row_low >= 0, has_high = row_high >= 0;
        const Quarter<kDim> key_low = low, key_high = high;
        // the next group's rows: in flight while this one is scored
        const int next = column + kWarps * kGroup < end_col ? column + kWarps * kGroup : p.num_cols;
        row_low = row_of_column(p, blocks, pages, visible, by_block, by_page, next + g);
        row_high = row_of_column(p, blocks, pages, visible, by_block, by_page, next + g + 8);
        load_quarter<kDim>(p.keys, row_low, t, low);
        load_quarter<kDim>(p.keys, row_high, t, high);

        float sum_low = 0.0f, sum_high = 0.0f;
        if (__any_sync(0xffffffffu, has_low || has_high)) {
            uint32_t a_low[Row::kPairs], a_high[Row::kPairs];
            expand_quarter<kDim>(key_low, a_low);
            expand_quarter<kDim>(key_high, a_high);
            float acc[kTiles][4];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll
            for (int s = 0; s < Row::kSteps; ++s) {
                const uint32_t a[4] = {a_low[2 * s], a_high[2 * s], a_low[2 * s + 1], a_high[2 * s + 1]};
#pragma unroll
                for (int n = 0; n < kTiles; ++n) ptx::mma_bf16_m16n8k16(acc[n], a, b[n][2 * s], b[n][2 * s + 1]);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                add_heads(sum_low, acc[n][0], acc[n][1], weight[n]);
                add_heads(sum_high, acc[n][2], acc[n][3], weight[n]);
            }
            sum_low = quad_sum(sum_low);
            sum_high = quad_sum(sum_high);
        }
        // lane t == 0 stores key g, lane t == 1 key g + 8
        const int store = column + g + 8 * t;
        const uint16_t value = (t == 0 ? has_low : has_high) ? to_bf16_bits(t == 0 ? sum_low : sum_high) : kNegInfBf16;
        if (t < 2 && store < p.num_cols) out[store] = value;
    }
}

template <int kHeads, int kDim>
void launch_one(const LogitsParams& p) {
    const int num_chunks = ceil_div(p.num_cols, kChunkCols);
    const int64_t blocks = static_cast<int64_t>(p.num_tokens) * num_chunks;
    launch("indexer.candidate_logits", candidate_logits_kernel<kHeads, kDim>,
           {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream}, p, num_chunks, make_divider(p.block_size),
           make_divider(p.entries_per_page));
}

template <int kDim>
void launch_heads(const LogitsParams& p) {
    if (p.num_heads <= 8) launch_one<8, kDim>(p);
    else if (p.num_heads <= 16) launch_one<16, kDim>(p);
    else if (p.num_heads <= 32) launch_one<32, kDim>(p);
    else launch_one<64, kDim>(p);
}

}  // namespace

void launch_candidate_logits(const LogitsParams& params) {
    if (params.head_dim == 128) launch_heads<128>(params);
    else launch_heads<64>(params);
}

}  // namespace mdi::indexer
