// Index scores of the candidate blocks (candidate_logits.cu: same function, same bits) from folded keys: int8 rows (fold.cuh)
// and mma.sync s8.
//
// Every token has its own 16,384 keys, so a kernel that fetches them for each token moves 1 KiB of int8 a block, 8.9 GB at 4,096
// tokens, and waits for L2 (measured: 77 % of its rate, 1.24 ms). Here the keys stay and the tokens travel: the blocks of 8 keys
// of all sequences are dealt to the thread blocks, one an SM (block number b to thread block b % G), each folds its own into
// shared memory once (131,072 keys: 125 blocks, 129 KiB) and then scores all tokens against what it holds. A token costs 4 KiB of
// folded queries and a short list an SM, 2.3 GB in all. Dealing in turn spreads blocks that many tokens want over all SMs. More
// blocks than shared memory holds are done in rounds. Measured on an H200, 4,096 tokens, 2,048 blocks each: 1.05 ms, 0.06 of it
// `prepare`. The rest is the sum of the products (6 cycles an mma.sync, in which the scheduler issues nothing else) and of all
// other instructions; so what counts is their number.
//
// Passes (one stream, no host synchronisation):
//   prepare        a token a thread block: queries folded into B fragments; the candidates sorted by the bucket (round, thread
//                  block) that holds them; -inf for the columns without a visible entry; largest visible count of each sequence
//   score          persistent, one thread block an SM: rows folded into shared memory, then a token a warp: two blocks a step
//                  (M = 16: lanes g < 4 hold the keys of the first, as rows g and g + 8, lanes g >= 4 those of the second). The
//                  next token's queries and list are fetched meanwhile
//   second pass    candidate_logits.cu for tokens whose queries and for blocks whose keys do not fold; nothing otherwise
//
// Byte order of a block in shared memory: 16 bytes at 256 * s + 16 * (4 * (g % 4) + t) are the A fragment of MMA step s of lane
// (g, t): words 2s and 2s + 1 of quarter t of key g % 4, interleaved with those of key g % 4 + 4; its 8 factors last.
// Head sums: score_tile.cuh. The order inside a bucket depends on atomics, a key's score does not depend on that order.
// Limits: Hi <= 32, Di = 128, blocks of 8, pages of whole blocks, at most kMaxBuckets buckets and kMaxCandidates candidates;
// otherwise, or without a workspace, candidate_logits.cu does everything. Workspace: candidate_workspace_bytes().
// SASS: IMMA
#include "common/launch.h"
#include "common/math.h"
#include "common/ptx_sm80.cuh"
#include "indexer/fold.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

namespace mdi::indexer {
namespace folded {  // its own names: on the CPU it shares a translation unit with candidate_logits.cu

constexpr int kDim = 128;
constexpr int kHeads = 32;
constexpr int kBlockKeys = 8;
constexpr int kCodeBytes = kBlockKeys * kDim;
constexpr int kBlockBytes = kCodeBytes + kBlockKeys * 4;  // 1,056: codes, then the factors of the 8 keys
constexpr int kWarps = 20;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxBuckets = 512;
constexpr int kMaxCandidates = 8192;
constexpr int kSharedBytes = 226 * 1024;

// What a warp needs of a token: B fragments of its query rows and the weights.
struct TokenRecord {
    uint4 fragment[kHeads / 8][2][32];  // [n][i][lane (g, t)]: words 4i..4i+3 of quarter t of head 8n + g
    uint32_t weight[kHeads / 2];        // scaled weights (bf16) of heads 2j and 2j + 1
};
static_assert(sizeof(TokenRecord) == 4160, "260 copies of 16 bytes");
constexpr int kMaxSlots = (kSharedBytes - kWarps * static_cast<int>(sizeof(TokenRecord))) / kBlockBytes;  // blocks of an SM

// An entry of a token's list: column block (16 bits), last visible key of the key block (4), where the key block lies (12).
MDI_HOST_DEVICE constexpr uint32_t make_item(int position, int slot, int num_visible) {
    return static_cast<uint32_t>(position) | static_cast<uint32_t>(num_visible - 1) << 16 | static_cast<uint32_t>(slot) << 20;
}
MDI_HOST_DEVICE constexpr uint32_t position_of(uint32_t item) { return item & 0xffffu; }
MDI_HOST_DEVICE constexpr uint32_t slot_of(uint32_t item) { return item >> 20; }
MDI_HOST_DEVICE constexpr bool sees(uint32_t item, uint32_t key) { return (item & 0xf0000u) >= key << 16; }
static_assert(kMaxSlots < 1 << 12 && kMaxCandidates <= 1 << 16, "fields of an item");
static_assert(int64_t{kMaxBuckets} * kMaxBuckets * kMaxSlots < int64_t{1} << 32, "division by multiplication");

struct Workspace {
    TokenRecord* tokens;      // [T]
    uint32_t* items;          // [T, C]: items of bucket b at offsets[b]..offsets[b + 1]
    uint16_t* offsets;        // [T, kMaxBuckets + 1]
    uint8_t* marked_blocks;   // [B, blocks]
    uint8_t* marked_tokens;   // [T]
    int32_t* any_marked;      // [1]
    int32_t* most_visible;    // [B], 16 bytes behind any_marked: one memset clears both
    int num_blocks;           // of a sequence: all that its page table can hold
    int num_owners;           // G: thread blocks of `score`
    int num_slots;            // key blocks of a thread block and round
    int num_rounds;
};

int64_t place(int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, int64_t num_candidates, uint8_t* base, Workspace& w) {
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
        uint8_t* at = base + offset;
        offset += align_up<int64_t>(bytes, 256);
        return at;
    };
    w.tokens = reinterpret_cast<TokenRecord*>(take(num_tokens * static_cast<int64_t>(sizeof(TokenRecord))));
    w.items = reinterpret_cast<uint32_t*>(take(num_tokens * num_candidates * 4));
    w.offsets = reinterpret_cast<uint16_t*>(take(num_tokens * (kMaxBuckets + 1) * 2));
    w.marked_blocks = take(num_seqs * num_blocks);
    w.marked_tokens = take(num_tokens);
    w.any_marked = reinterpret_cast<int32_t*>(take(16 + num_seqs * 4));
    w.most_visible = w.any_marked + 4;
    w.num_blocks = static_cast<int>(num_blocks);
    return offset;
}

__device__ __forceinline__ int visible_of(const LogitsParams& p, int64_t token, int seq) {
    if (seq < 0 || seq >= p.num_seqs) return 0;
    const int64_t held = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;
    return max_of(0, static_cast<int>(min_of<int64_t>(p.visible[token], held)));
}

// ---- prepare ------------------------------------------------------------------------------------------------------

constexpr int kPrepareThreads = 256;

// count[0..size) becomes its exclusive prefix sum; the whole thread block.
__device__ __forceinline__ void prefix_sums(int* count, int size) {
    constexpr int kEach = kMaxBuckets / kPrepareThreads;
    __shared__ int warp_total[kPrepareThreads / 32];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    int mine[kEach], total = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        mine[i] = thread * kEach + i < size ? count[thread * kEach + i] : 0;
        total += mine[i];
    }
    int before = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        before += lane >= step ? other : 0;
    }
    if (lane == 31) warp_total[thread / 32] = before;
    __syncthreads();
    before -= total;
    for (int i = 0; i < thread / 32; ++i) before += warp_total[i];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (thread * kEach + i < size) count[thread * kEach + i] = before;
        before += mine[i];
    }
    __syncthreads();
}

// Folds the query rows of a token into its record; threads 4 * head + quarter of whole warps. False: some row does not fold.
__device__ __forceinline__ bool fold_query(const LogitsParams& p, int64_t token, TokenRecord& record) {
    const int head = threadIdx.x / 4, quarter = threadIdx.x % 4;
    uint32_t word[4] = {0, 0, 0, 0};
    uint32_t scale = 127;
    uint16_t weight = 0;
    if (head < p.num_heads) {
        const int64_t row = token * p.num_heads + head;
        const uint4 v = reinterpret_cast<const uint4*>(p.q_codes)[row * 4 + quarter];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        scale = p.q_scale[row * 4 + quarter];
        weight = p.weights[row];
    }
    const Folded folded = fold_quarter(word, scale);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        record.fragment[head / 8][i][4 * (head % 8) + quarter] =
            make_uint4(folded.bytes[4 * i], folded.bytes[4 * i + 1], folded.bytes[4 * i + 2], folded.bytes[4 * i + 3]);
    if (quarter == 0) reinterpret_cast<uint16_t*>(record.weight)[head] = scaled_weight(weight, folded.exponent);
    return folded.ok && weight_folds(weight);
}

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(LogitsParams p, Workspace w) {
    // per candidate: its item and its bucket, then the items in bucket order
    extern __shared__ uint8_t shared_bytes[];
    uint32_t* sorted = reinterpret_cast<uint32_t*>(shared_bytes);
    uint32_t* items = sorted + p.num_candidates;
    uint32_t* places = items + p.num_candidates;  // bucket << 16 | rank inside it
    __shared__ int count[kMaxBuckets];
    const int64_t token = blockIdx.x;
    const int seq = p.seq_of_token[token], visible = visible_of(p, token, seq);
    const int num_buckets = w.num_owners * w.num_rounds;
    for (int i = threadIdx.x; i < num_buckets; i += kPrepareThreads) count[i] = 0;
    bool ok = true;
    if (threadIdx.x < 4 * kHeads) ok = fold_query(p, token, w.tokens[token]);
    const int bad = __syncthreads_or(!ok);  // also: the counts are zero
    if (threadIdx.x == 0) {
        w.marked_tokens[token] = bad != 0;
        if (bad != 0) atomicOr(w.any_marked, 1);
        if (visible > 0) atomicMax(&w.most_visible[seq], visible);
    }

    const int limit = ceil_div(visible, kBlockKeys);  // blocks from here on have no visible entry
    const int first = seq * w.num_blocks;             // number of the sequence's first block
    // number * inverse >> 32 is number / num_owners while their product is below 2^32; numbers are below kMaxBuckets * kMaxSlots
    const uint32_t inverse = 0xffffffffu / static_cast<uint32_t>(w.num_owners) + 1;
    const int32_t* candidates = p.candidates + token * p.num_candidates;
    uint4* out = reinterpret_cast<uint4*>(p.out + token * p.out_stride);
#pragma unroll 8
    for (int i = threadIdx.x; i < p.num_candidates; i += kPrepareThreads) {
        const int id = candidates[i];
        uint32_t place = 0xffffffffu;
        if (id >= 0 && id < limit) {
            const int number = first + id;
            const int turn = static_cast<int>(static_cast<uint64_t>(number) * inverse >> 32);
            const int round = w.num_rounds == 1 ? 0 : turn / w.num_slots;
            const int bucket = round * w.num_owners + number - turn * w.num_owners;
            place = static_cast<uint32_t>(bucket) << 16 | static_cast<uint32_t>(atomicAdd(&count[bucket], 1));
            items[i] = make_item(i, turn - round * w.num_slots, min_of(kBlockKeys, visible - id * kBlockKeys));
        } else {
            const uint32_t pair = kNegInfBf16 * 0x10001u;
            out[i] = make_uint4(pair, pair, pair, pair);
        }
        places[i] = place;
    }
    __syncthreads();
    const int last = count[num_buckets - 1];
    __syncthreads();
    prefix_sums(count, num_buckets);
    const int num_items = count[num_buckets - 1] + last;
    uint16_t* offsets = w.offsets + token * (kMaxBuckets + 1);
    for (int i = threadIdx.x; i <= num_buckets; i += kPrepareThreads)
        offsets[i] = static_cast<uint16_t>(i < num_buckets ? count[i] : num_items);
    for (int i = threadIdx.x; i < p.num_candidates; i += kPrepareThreads)
        if (places[i] != 0xffffffffu) sorted[count[places[i] >> 16] + static_cast<int>(places[i] & 0xffffu)] = items[i];
    __syncthreads();
    for (int i = threadIdx.x; i < num_items; i += kPrepareThreads) w.items[token * p.num_candidates + i] = sorted[i];
}

// ---- score --------------------------------------------------------------------------------------------------------

// A lane's quarter of a key row of block `number` of all blocks: lanes 4 * key + quarter.
struct PackedQuarter {
    uint32_t word[4], scale;
    bool here;  // somebody sees the block; the same in all lanes
};

__device__ __forceinline__ PackedQuarter load_block(const LogitsParams& p, const Workspace& w, int number, int lane) {
    const int seq = number / w.num_blocks, block = number - seq * w.num_blocks;
    const int most = seq < p.num_seqs ? w.most_visible[seq] : 0;
    const int entry = block * kBlockKeys + lane / 4, quarter = lane % 4;
    PackedQuarter out = {{0, 0, 0, 0}, 127, block * kBlockKeys < most};
    if (entry < most) {
        const int page = p.page_table[static_cast<int64_t>(seq) * p.pages_per_seq + entry / p.entries_per_page];
        const int64_t row = static_cast<int64_t>(page) * p.entries_per_page + entry % p.entries_per_page;
        const uint8_t* source = p.keys + row * KeyRow<kDim>::kBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.word[i] = reinterpret_cast<const uint32_t*>(source)[4 * quarter + i];
        out.scale = source[KeyRow<kDim>::kCodeBytes + quarter];
    }
    return out;
}

// Folds a block into shared memory; one warp.
__device__ __forceinline__ void store_block(const Workspace& w, int number, const PackedQuarter& packed, uint8_t* rows, int lane) {
    if (!packed.here) return;
    const Folded folded = fold_quarter(packed.word, packed.scale);
    // lanes of keys 0..3 write steps 0 and 1 of themselves and the key 4 further on, lanes of keys 4..7 steps 2 and 3
    const bool first = lane < 16;
    uint32_t mine[4], other[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mine[i] = first ? folded.bytes[i] : folded.bytes[4 + i];
        other[i] = __shfl_xor_sync(0xffffffffu, first ? folded.bytes[4 + i] : folded.bytes[i], 16);
    }
    uint4* target = reinterpret_cast<uint4*>(rows) + (first ? 0 : 32) + lane % 16;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32_t a0 = first ? mine[2 * j] : other[2 * j], b0 = first ? other[2 * j] : mine[2 * j];
        const uint32_t a1 = first ? mine[2 * j + 1] : other[2 * j + 1], b1 = first ? other[2 * j + 1] : mine[2 * j + 1];
        target[16 * j] = make_uint4(a0, b0, a1, b1);
    }
    if (lane % 4 == 0) reinterpret_cast<float*>(rows + kCodeBytes)[lane / 4] = folded.factor();
    const bool ok = __all_sync(0xffffffffu, folded.ok) != 0;
    if (lane == 0) {
        w.marked_blocks[number] = !ok;
        if (!ok) atomicOr(w.any_marked, 1);
    }
}

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: d = a * b (+ d unless kFirst). Lane (g, t): a.x row g, k 4t..4t+3; a.y row
// g + 8; a.z, a.w the same rows, k + 16; b0 column g, k 4t..4t+3; b1 k + 16; d as in mma_bf16_m16n8k16.
template <bool kFirst>
__device__ __forceinline__ void mma_s8_m16n8k32(uint32_t (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__)
    if constexpr (kFirst)
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};\n"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t rows[2][2] = {{a.x, a.z}, {a.y, a.w}}, columns[2] = {b0, b1};
    for (int i = 0; i < 4; ++i) {
        if (kFirst) d[i] = 0;
        for (int source = 0; source < 4; ++source)
            for (int half = 0; half < 2; ++half) {
                const uint32_t x = __shfl_sync(0xffffffffu, rows[i / 2][half], 4 * g + source);
                uint32_t y[2];
                for (int column = 0; column < 2; ++column) {
                    // every lane reads the column it needs: 2t + column
                    y[column] = __shfl_sync(0xffffffffu, columns[half], 4 * (2 * t + column) + source);
                }
                for (int byte = 0; byte < 4; ++byte)
                    d[i] += static_cast<uint32_t>(static_cast<int8_t>(x >> 8 * byte) * static_cast<int8_t>(y[i % 2] >> 8 * byte));
            }
    }
#endif
}

template <int kTiles>
struct Query {
    uint32_t b[kTiles][8];
    uint32_t weight[kTiles][2];  // heads 8n + 2t and 8n + 2t + 1, bf16 in the upper half
};

// Scores, before their factors, of two blocks of keys: `block` is the first one in lanes 0..15, the second one in lanes 16..31.
// Lane (g, t) gets key g % 4 + 4 * (t % 2) of its half's block.
template <int kTiles>
__device__ __forceinline__ float score_blocks(const uint8_t* block, const Query<kTiles>& query, int lane) {
    uint32_t acc[kTiles][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint4 a = reinterpret_cast<const uint4*>(block)[16 * step + lane % 16];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (step == 0) mma_s8_m16n8k32<true>(acc[n], a, query.b[n][0], query.b[n][1]);
            else mma_s8_m16n8k32<false>(acc[n], a, query.b[n][2 * step], query.b[n][2 * step + 1]);
        }
    }
    // Sums start from -0, that is from their first term; against +0 that can only make a zero negative, see the caller.
    float low = -0.0f, high = -0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        add_folded_heads(low, acc[n][0], acc[n][1], query.weight[n][0], query.weight[n][1]);
        add_folded_heads(high, acc[n][2], acc[n][3], query.weight[n][0], query.weight[n][1]);
    }
    // lanes of even t go on with the low row, of odd t with the high one: p0 + p1 and p2 + p3
    const bool odd = lane % 2 != 0;
    const float sum = (odd ? high : low) + __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1) score_kernel(LogitsParams p, Workspace w) {
    extern __shared__ uint8_t shared_bytes[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint8_t* rows = shared_bytes;
    TokenRecord& record = reinterpret_cast<TokenRecord*>(rows + w.num_slots * kBlockBytes)[warp];
    const int owner = static_cast<int>(blockIdx.x);
    const uint32_t key = g % 4 + 4 * (t % 2);  // of the lane's block: see score_blocks
    const auto fetch = [&](int64_t token) {  // the next token's record, 260 copies of 16 bytes
        if (token < p.num_tokens) {
            const uint8_t* source = reinterpret_cast<const uint8_t*>(&w.tokens[token]) + lane * 16;
            const uint32_t target = ptx::smem_address(&record) + lane * 16;
#pragma unroll
            for (int i = 0; i < 8; ++i) ptx::cp_async_16(target + 512 * i, source + 512 * i);
            if (lane < 4) ptx::cp_async_16(target + 4096, source + 4096);
        }
        ptx::cp_async_commit();
    };
    for (int round = 0; round < w.num_rounds; ++round) {
        const int bucket = round * w.num_owners + owner;
        const auto begin_of = [&](int64_t token, int which) {
            return token < p.num_tokens ? static_cast<int>(w.offsets[token * (kMaxBuckets + 1) + bucket + which]) : 0;
        };
        const auto item_at = [&](int64_t token, int i, int end) {
            return i < end ? w.items[token * p.num_candidates + i] : 0u;
        };
        fetch(warp);
        if (round > 0) __syncthreads();
        const auto number_of = [&](int slot) { return (round * w.num_slots + slot) * w.num_owners + owner; };
        for (int slot = warp; slot < w.num_slots; slot += 4 * kWarps) {  // four blocks of a warp in flight
            PackedQuarter packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) packed[i] = load_block(p, w, number_of(slot + i * kWarps), lane);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (slot + i * kWarps < w.num_slots)
                    store_block(w, number_of(slot + i * kWarps), packed[i], rows + (slot + i * kWarps) * kBlockBytes, lane);
        }
        __syncthreads();

        int begin = begin_of(warp, 0), end = begin_of(warp, 1);
        int next_begin = begin_of(warp + kWarps, 0), next_end = begin_of(warp + kWarps, 1);
        uint32_t list = item_at(warp, begin + lane, end);
        uint16_t* out = p.out + warp * p.out_stride + key;
        for (int64_t token = warp; token < p.num_tokens; token += kWarps) {
            ptx::cp_async_wait<0>();
            __syncwarp();
            Query<kTiles> query;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint4 v = record.fragment[n][i][lane];
                    query.b[n][4 * i] = v.x, query.b[n][4 * i + 1] = v.y, query.b[n][4 * i + 2] = v.z, query.b[n][4 * i + 3] = v.w;
                }
                const uint32_t pair = record.weight[4 * n + t];
                query.weight[n][0] = pair << 16, query.weight[n][1] = pair & 0xffff0000u;
            }
            __syncwarp();  // everybody has read it
            fetch(token + kWarps);
            const uint32_t next_list = item_at(token + kWarps, next_begin + lane, next_end);
            const int after_begin = begin_of(token + 2 * kWarps, 0), after_end = begin_of(token + 2 * kWarps, 1);

            for (;;) {  // 32 items of the list a time
                const int here = min_of(32, end - begin);
                const int stored = t < 2 ? here - lane / 16 : 0;  // lanes t >= 2 hold what lanes t < 2 store
                for (int i = 0; i < here; i += 2) {
                    const uint32_t item = __shfl_sync(0xffffffffu, list, i + lane / 16);
                    const uint8_t* block = rows + slot_of(item) * kBlockBytes;
                    const float sum = score_blocks<kTiles>(block, query, lane);
                    const float factor = reinterpret_cast<const float*>(block + kCodeBytes)[key];
                    // + 0: a sum of nothing but zeros is +0 in the reference
                    const uint16_t value = to_bf16_bits(__fmaf_rn(sum, factor, 0.0f));
                    if (i < stored) out[position_of(item) * kBlockKeys] = sees(item, key) ? value : kNegInfBf16;
                }
                begin += 32;
                if (begin >= end) break;
                list = item_at(token, begin + lane, end);
            }
            out += kWarps * p.out_stride;
            begin = next_begin, end = next_end, list = next_list, next_begin = after_begin, next_end = after_end;
        }
    }
    ptx::cp_async_wait<0>();
}

template <int kTiles>
void launch_score(const LogitsParams& p, const Workspace& w) {
    const size_t bytes = static_cast<size_t>(w.num_slots) * kBlockBytes + kWarps * sizeof(TokenRecord);
    launch("indexer.candidate_logits", score_kernel<kTiles>,
           {dim3(static_cast<unsigned>(w.num_owners)), dim3(kThreads), bytes, p.stream}, p, w);
}

// Deals the key blocks of all sequences to the SMs; false: more than kMaxBuckets could hold.
bool deal(const LogitsParams& p, Workspace& w) {
    int device = 0;
    check_cuda("indexer.candidate_logits", cudaGetDevice(&device));
    check_cuda("indexer.candidate_logits", cudaDeviceGetAttribute(&w.num_owners, cudaDevAttrMultiProcessorCount, device));
    const int64_t each = ceil_div<int64_t>(static_cast<int64_t>(p.num_seqs) * w.num_blocks, w.num_owners);
    w.num_rounds = static_cast<int>(min_of<int64_t>(ceil_div<int64_t>(each, kMaxSlots), kMaxBuckets + 1));
    w.num_slots = static_cast<int>(ceil_div<int64_t>(each, max_of(w.num_rounds, 1)));
    return each > 0 && w.num_owners > 1 && w.num_rounds * w.num_owners <= kMaxBuckets;
}

}  // namespace folded

int64_t candidate_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t entries_per_seq, int64_t num_candidates) {
    folded::Workspace w;
    return folded::place(num_tokens, num_seqs, ceil_div<int64_t>(entries_per_seq, folded::kBlockKeys), num_candidates, nullptr, w);
}

void launch_candidate_logits_sm90(const LogitsParams& params) {
    LogitsParams p = params;
    const bool folds = p.workspace != nullptr && p.head_dim == folded::kDim && p.num_heads <= folded::kHeads &&
                       p.block_size == folded::kBlockKeys && p.entries_per_page % folded::kBlockKeys == 0 &&
                       p.num_candidates <= folded::kMaxCandidates && reinterpret_cast<uintptr_t>(p.keys) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride % 8 == 0;
    folded::Workspace w;
    if (folds)
        folded::place(p.num_tokens, p.num_seqs, static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page / folded::kBlockKeys,
                      p.num_candidates, p.workspace, w);
    if (!folds || !folded::deal(p, w)) {
        launch_candidate_logits(p);
        return;
    }
    check_cuda("indexer.candidate_logits",
               cudaMemsetAsync(w.any_marked, 0, 16 + static_cast<size_t>(p.num_seqs) * sizeof(int32_t), p.stream));
    launch("indexer.candidate_logits", folded::prepare_kernel,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(folded::kPrepareThreads),
            static_cast<size_t>(p.num_candidates) * 3 * sizeof(uint32_t), p.stream},
           p, w);
    if (p.num_heads <= 8) folded::launch_score<1>(p, w);
    else if (p.num_heads <= 16) folded::launch_score<2>(p, w);
    else folded::launch_score<4>(p, w);
    p.any_marked = w.any_marked;
    p.marked_tokens = w.marked_tokens;
    p.marked_tiles = w.marked_blocks;
    p.marked_stride = w.num_blocks;
    launch_candidate_logits(p);
}

}  // namespace mdi::indexer
