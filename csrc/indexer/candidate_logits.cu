// Index scores of the candidate blocks only (model spec 5.5): column c * bs + i of token t is entry candidates[t, c] * bs + i,
//
//   out[t, c * bs + i] = the score of logits.cu for that entry;  -inf where the block is -1 or the entry is not visible
//
// Only the rows of the candidates are read: 68 bytes a row at Di = 128. Every token has its own rows, so nothing is shared
// between tokens: a lane expands its quarter of two key rows in registers and owns exactly the k elements the MMA wants
// from it (score_tile.cuh). Roundings and sum order are those of logits.cu, so a candidate's score has the same bits in both.
//
// staged kernel (blocks of 8, Di = 128, pages of whole blocks: the released model): a warp owns up to 128 blocks of one token.
// It first looks up all their cache rows, then runs a ring of four stages of 4 blocks: a block is 544 contiguous bytes, fetched
// with 16-byte cp.async three stages ahead; nothing but __syncwarp is needed, since no warp reads another's ring.
// The expansion costs more than the products here, so it uses one multiply per pair: codes come out of the bit shuffle as
// value * 2^-126 and are multiplied by scale * 2^(126 - 16) (one bf16 number while the scale byte is 11..144); the queries
// carry the 2^16. Other scale bytes take both multiplies, and the finished dots are then multiplied by 2^-16. All exact.
// After candidate_logits_sm90.cu it scores only the tokens and blocks marked there.
// general kernel (everything else): rows straight from the pool, one group of 16 columns ahead.
//
// The token's query rows stay in registers as B fragments (64 at 32 heads). Groups without a visible entry are filled
// without reading. Shared memory: 38 KiB a block of 4 warps (staged). Limits: those of logits.cu; any block size.
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
            sum_heads<kTiles>(acc, weight, sum_low, sum_high);
        }
        // lane t == 0 stores key g, lane t == 1 key g + 8
        const int store = column + g + 8 * t;
        const uint16_t value = (t == 0 ? has_low : has_high) ? to_bf16_bits(t == 0 ? sum_low : sum_high) : kNegInfBf16;
        if (t < 2 && store < p.num_cols) out[store] = value;
    }
}

// ---- staged -------------------------------------------------------------------------------------------------------

constexpr int kStagedDim = 128;
constexpr int kBlockKeys = 8;
constexpr int kBlockBytes = kBlockKeys * KeyRow<kStagedDim>::kBytes;  // 544: 34 copies of 16 bytes
constexpr int kStageBlocks = 4;
constexpr int kRing = 4;
constexpr int kWarpBlocks = 128;       // most blocks of a warp
constexpr int kBoost = 16;             // queries carry 2^16, keys 2^-16
constexpr int kSecondPassBlocks = 1024;  // thread blocks of a second pass, which usually finds nothing to do

struct StagedWarp {
    alignas(16) uint8_t ring[kRing][kStageBlocks * kBlockBytes];
    int row[kWarpBlocks];              // first cache row of a block, -1 = none of its entries is visible
    int num_visible[kWarpBlocks];      // of its 8 entries; -1 = the block is not to be written
};
static_assert(sizeof(StagedWarp) * kWarps <= 48 * 1024, "static shared memory");

// Lanes 8b..8b+7 copy block b of the stage.
__device__ __forceinline__ void fetch_stage(const uint8_t* keys, StagedWarp& shared, int stage, int lane) {
    const int block = lane / 8, part = lane % 8;
    const int row = shared.row[stage * kStageBlocks + block];
    if (row >= 0) {
        const uint8_t* source = keys + static_cast<int64_t>(row) * KeyRow<kStagedDim>::kBytes + part * 16;
        const uint32_t target = ptx::smem_address(shared.ring[stage % kRing] + block * kBlockBytes + part * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::cp_async_16(target + 128 * i, source + 128 * i);
        if (part < 2) ptx::cp_async_16(target + 512, source + 512);
    }
}

template <bool kOneMultiply>
__device__ __forceinline__ uint32_t expand_key_pair(uint32_t raw, uint32_t factor) {
    return kOneMultiply ? bf16x2_product(raw, factor) : bf16x2_product(bf16x2_product(raw, 0x7e807e80u), factor);
}

// acc += 16 keys (lane: its quarter of rows g and g + 8) x 8 * kTiles query rows
template <bool kOneMultiply, int kTiles>
__device__ __forceinline__ void multiply(const Quarter<kStagedDim>& low, const Quarter<kStagedDim>& high, uint32_t factor_low,
                                         uint32_t factor_high, const uint32_t (&b)[kTiles][16], float (&acc)[kTiles][4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // word w: pairs 4w .. 4w + 3, steps 2w and 2w + 1
        const uint32_t first[4] = {expand_key_pair<kOneMultiply>(raw_pair<0>(low.word[w]), factor_low),
                                   expand_key_pair<kOneMultiply>(raw_pair<0>(high.word[w]), factor_high),
                                   expand_key_pair<kOneMultiply>(raw_pair<1>(low.word[w]), factor_low),
                                   expand_key_pair<kOneMultiply>(raw_pair<1>(high.word[w]), factor_high)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) ptx::mma_bf16_m16n8k16(acc[n], first, b[n][4 * w], b[n][4 * w + 1]);
        const uint32_t second[4] = {expand_key_pair<kOneMultiply>(raw_pair<2>(low.word[w]), factor_low),
                                    expand_key_pair<kOneMultiply>(raw_pair<2>(high.word[w]), factor_high),
                                    expand_key_pair<kOneMultiply>(raw_pair<3>(low.word[w]), factor_low),
                                    expand_key_pair<kOneMultiply>(raw_pair<3>(high.word[w]), factor_high)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) ptx::mma_bf16_m16n8k16(acc[n], second, b[n][4 * w + 2], b[n][4 * w + 3]);
    }
}

__device__ __forceinline__ Quarter<kStagedDim> read_quarter(const uint8_t* row, int t) {
    Quarter<kStagedDim> out;
#pragma unroll
    for (int w = 0; w < 4; ++w) out.word[w] = reinterpret_cast<const uint32_t*>(row)[4 * t + w];
    out.scale = row[KeyRow<kStagedDim>::kCodeBytes + t];
    return out;
}

// One warp's share of a token: candidates from first_block on.
template <int kHeads>
__device__ __forceinline__ void score_staged(const LogitsParams& p, StagedWarp& shared, int64_t token, int first_block, int warp_blocks) {
    constexpr int kTiles = kHeads / 8;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_blocks = min_of(warp_blocks, p.num_candidates - first_block);
    if (num_blocks <= 0) return;

    const int seq = p.seq_of_token[token];
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;  // no entry past the page table exists
    const int visible = seq >= 0 && seq < p.num_seqs ? static_cast<int>(min_of<int64_t>(p.visible[token], held)) : 0;
    const int num_stages = ceil_div(num_blocks, kStageBlocks);
    const bool all_blocks = p.any_marked == nullptr || p.marked_tokens[token] != 0;
    bool none = true;
    for (int i = lane; i < num_stages * kStageBlocks; i += 32) {
        const int block = i < num_blocks ? p.candidates[token * p.num_candidates + first_block + i] : -1;
        const int64_t entry = static_cast<int64_t>(block) * kBlockKeys;
        int row = -1, count = 0;
        if (block >= 0 && entry < visible) {
            const int e = static_cast<int>(entry);
            row = p.page_table[static_cast<int64_t>(seq) * p.pages_per_seq + e / p.entries_per_page] * p.entries_per_page +
                  e % p.entries_per_page;
            count = min_of(kBlockKeys, visible - e);
        }
        if (!all_blocks) {  // second pass: what is not marked is there already
            if (count == 0 || p.marked_tiles[static_cast<int64_t>(seq) * p.marked_stride + block] == 0) row = count = -1;
        }
        none = none && count < 0;
        shared.row[i] = row;
        shared.num_visible[i] = count;
    }
    if (__all_sync(0xffffffffu, none) != 0) return;

    uint32_t b[kTiles][16], weight[kTiles];
    bool boosted = true;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int head = 8 * n + g;
        if (head < p.num_heads) boosted = boosted && p.q_scale[(token * p.num_heads + head) * 4 + t] <= 230;
        weight[n] = load_weight_pair(p.weights, token, p.num_heads, 8 * n + 2 * t, true);
    }
    boosted = __all_sync(0xffffffffu, boosted) != 0;
    const uint32_t boost = boosted ? (127u + kBoost) << 7 : 127u << 7;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        load_query_fragment<kStagedDim>(p.q_codes, p.q_scale, token, p.num_heads, 8 * n + g, t, true, b[n]);
#pragma unroll
        for (int i = 0; i < 16; ++i) b[n][i] = bf16x2_product(b[n][i], boost * 0x10001u);
    }
    __syncwarp();

#pragma unroll
    for (int stage = 0; stage < kRing - 1; ++stage) {
        if (stage < num_stages) fetch_stage(p.keys, shared, stage, lane);
        ptx::cp_async_commit();
    }
    uint16_t* out = p.out + token * p.out_stride + static_cast<int64_t>(first_block) * kBlockKeys;
    for (int stage = 0; stage < num_stages; ++stage) {
        ptx::cp_async_wait<kRing - 2>();
        __syncwarp();  // the stage's bytes are there for every lane, and nobody reads the slot that is fetched next
        if (stage + kRing - 1 < num_stages) fetch_stage(p.keys, shared, stage + kRing - 1, lane);
        ptx::cp_async_commit();
#pragma unroll 1
        for (int m = 0; m < kStageBlocks / 2; ++m) {
            const int block = stage * kStageBlocks + 2 * m;
            const int count_low = shared.num_visible[block], count_high = shared.num_visible[block + 1];
            float sum_low = 0.0f, sum_high = 0.0f;
            if (count_low > 0 || count_high > 0) {
                const uint8_t* rows = shared.ring[stage % kRing] + 2 * m * kBlockBytes + g * KeyRow<kStagedDim>::kBytes;
                const Quarter<kStagedDim> low = read_quarter(rows, t), high = read_quarter(rows + kBlockBytes, t);
                float acc[kTiles][4];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
                // rows that are not visible may hold anything: they do not decide
                const bool plain = (g >= count_low || (low.scale >= 11 && low.scale <= 144)) &&
                                   (g >= count_high || (high.scale >= 11 && high.scale <= 144));
                if (boosted && __all_sync(0xffffffffu, plain)) {
                    const uint32_t low_factor = ((low.scale & 0xffu) + 126u - kBoost & 0xffu) << 7;
                    const uint32_t high_factor = ((high.scale & 0xffu) + 126u - kBoost & 0xffu) << 7;
                    multiply<true>(low, high, low_factor * 0x10001u, high_factor * 0x10001u, b, acc);
                } else {
                    multiply<false>(low, high, scale_pair(low.scale), scale_pair(high.scale), b, acc);
                    const float undo = boosted ? bits_float((127u - kBoost) << 23) : 1.0f;
#pragma unroll
                    for (int n = 0; n < kTiles; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc[n][i] *= undo;
                }
                sum_heads<kTiles>(acc, weight, sum_low, sum_high);
            }
            // lane t == 0 stores key g of the first block, lane t == 1 of the second
            const int count = t == 0 ? count_low : count_high;
            const bool seen = g < count;
            const uint16_t value = seen ? to_bf16_bits(t == 0 ? sum_low : sum_high) : kNegInfBf16;
            if (t < 2 && count >= 0 && block + t < num_blocks) out[(block + t) * kBlockKeys + g] = value;
        }
    }
    ptx::cp_async_wait<0>();
    __syncwarp();  // the next share writes the same shared memory
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads <= 32 ? 4 : 2)
    staged_kernel(LogitsParams p, int num_chunks, int warp_blocks, int64_t num_shares) {
    __shared__ StagedWarp shared_warps[kWarps];
    if (p.any_marked != nullptr && *p.any_marked == 0) return;
    const int warp = threadIdx.x / 32;
    for (int64_t share = blockIdx.x; share < num_shares; share += gridDim.x)
        score_staged<kHeads>(p, shared_warps[warp], share / num_chunks,
                             (static_cast<int>(share % num_chunks) * kWarps + warp) * warp_blocks, warp_blocks);
}

template <int kHeads>
void launch_staged(const LogitsParams& p) {
    // fewer blocks a warp when few tokens would leave SMs idle
    int warp_blocks = kWarpBlocks;
    while (warp_blocks > 16 && static_cast<int64_t>(p.num_tokens) * ceil_div(p.num_candidates, kWarps * warp_blocks) < 1024)
        warp_blocks /= 2;
    const int num_chunks = ceil_div(p.num_candidates, kWarps * warp_blocks);
    const int64_t shares = static_cast<int64_t>(p.num_tokens) * num_chunks;
    const int64_t blocks = p.any_marked == nullptr ? shares : min_of<int64_t>(shares, kSecondPassBlocks);
    launch("indexer.candidate_logits", staged_kernel<kHeads>, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream}, p,
           num_chunks, warp_blocks, shares);
}

template <int kHeads, int kDim>
void launch_one(const LogitsParams& p) {
    if constexpr (kDim == kStagedDim) {
        if (p.block_size == kBlockKeys && p.entries_per_page % kBlockKeys == 0 && reinterpret_cast<uintptr_t>(p.keys) % 16 == 0) {
            launch_staged<kHeads>(p);
            return;
        }
    }
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
