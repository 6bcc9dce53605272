// Index scores of the candidate blocks (candidate_logits.cu: same function, same bits) from folded keys: int8 rows (fold.cuh)
// and wgmma s8.
//
// Every token has its own 16,384 keys, so a kernel that fetches them for each token moves 1 KiB of int8 a block, 8.9 GB at 4,096
// tokens, and waits for L2 (measured: 77 % of its rate, 1.24 ms). Here the keys stay and the tokens travel: the blocks of 8 keys
// of all sequences are dealt to the thread blocks, one an SM (block number b to thread block b % G), each folds its own into
// shared memory once (131,072 keys: 125 blocks, 129 KiB) and then scores all tokens against what it holds. A token costs 4 KiB of
// folded queries and a short list an SM, 2.3 GB in all. Dealing in turn spreads blocks that many tokens want over all SMs. More
// blocks than shared memory holds are done in rounds.
//
// Passes (one stream, no host synchronisation):
//   prepare        a token a thread block: queries folded into the image that wgmma reads; the candidates sorted by the bucket
//                  (round, thread block) that holds them; -inf for blocks that are not wholly visible; largest visible count of
//                  each sequence
//   score          persistent, one thread block an SM: rows folded into shared memory, then a token a warpgroup. Producer warps
//                  fetch the records and lists of the tokens to come
//   second pass    candidate_logits.cu for tokens whose queries and for blocks whose keys do not fold; nothing otherwise
//
// A step of a warpgroup: 64 keys, which are 8 blocks of the token's list (A), times 32 heads (B, N = 32), K = 128. Blocks lie
// anywhere, and a descriptor steps evenly from 8 rows to the next 8, so A comes from registers: a warp loads the fragments of two
// blocks (M = 16: lanes g < 4 hold the keys of the first, as rows g and g + 8, lanes g >= 4 those of the second). A warp without
// blocks in a token's last step loads nothing and only takes part in the products.
//
// Measured on an H200, 4,096 tokens, 2,048 blocks of 131,072 keys each: 0.90 ms (with mma.sync, a token a warp: 1.05), 0.05 of it
// `prepare`. Shared memory takes 275 cycles of about 380 a token and SM (half of them the fragments of A, a quarter B), the last
// step of a token is half empty on average. What counts are instructions: with the code of both buffers in a row, so that shared
// addresses and descriptors are constants, a step has 89 and a token 33 beside them (in a loop over buffers 94 and 56: 0.96 ms).
// What shortens waits instead does not help: items or fragments of the next step loaded ahead, three buffers, producers whose lanes
// poll a slot each.
//
// Byte order of a block in shared memory: 16 bytes at 256 * s + 16 * (4 * (g % 4) + t) are the A fragment of K step s of lane
// (g, t): words 2s and 2s + 1 of quarter t of key g % 4, interleaved with those of key g % 4 + 4.
// Head sums: score_tile.cuh. The order inside a bucket depends on atomics, a key's score does not depend on that order.
// Limits: Hi <= 32, Di = 128, blocks of 8, pages of whole blocks, kMaxFoldedCandidates candidates, kMaxFoldedEntries entries in the
// page tables of all sequences (14 rounds of 132 SMs; every round goes through all tokens, about 0.1 ms for 4,096 of them that
// want none of its blocks). ops/indexer.py gives what is past them to candidate_logits.cu. Workspace: candidate_workspace_bytes().
// SASS: IGMMA
#include "common/launch.h"
#include "common/math.h"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "indexer/fold.cuh"
#include "indexer/indexer.h"
#include "indexer/score_tile.cuh"

#include <cstddef>
#include <type_traits>

namespace mdi::indexer {
namespace folded {  // its own names: on the CPU it shares a translation unit with candidate_logits.cu

constexpr int kDim = kFoldedHeadDim;
constexpr int kHeads = kFoldedHeads;
constexpr int kBlockKeys = kFoldedBlock;
constexpr int kCodeBytes = kBlockKeys * kDim;
constexpr int kFactorBytes = kBlockKeys * 4;
constexpr int kGroups = 7;     // warpgroups that score
constexpr int kBuffers = 2;    // tokens of a warpgroup in shared memory
constexpr int kProducers = 2;  // warps that fetch; one takes 480 cycles a token, the warpgroups together want one in 400
constexpr int kSlots = kGroups * kBuffers;
constexpr int kThreads = (4 * kGroups + kProducers) * 32;
static_assert(kSlots % kProducers == 0, "a token of a warpgroup always has the same producer");
constexpr int kMaxOwners = 256;  // more SMs stay idle
constexpr int kSharedBytes = 227 * 1024;

// What a warpgroup needs of a token: its folded query rows as wgmma reads them, and the weights.
struct TokenRecord {
    uint8_t image[kHeads * kDim];  // row = head, 128-byte swizzle; 16 bytes at chunk c are words c of quarters 0..3
    uint32_t weight[4][4];         // [t][n]: scaled weights (bf16) of heads 8n + 2t and 8n + 2t + 1
};
static_assert(sizeof(TokenRecord) == 4160, "one bulk copy");

constexpr int kListWords = 236, kMaxItems = kListWords - 8;  // of a token in a bucket; copies start at a multiple of 4 items

struct alignas(1024) TokenSlot {
    TokenRecord record;
    uint32_t list[kListWords];
    uint32_t first, count;  // shared address and number of the token's items in `list`
    int pad[2];
};
static_assert(sizeof(TokenSlot) == 5120, "image on 1024 bytes");
constexpr int kBarrierBytes = 2 * 8 * kSlots;
constexpr int kMaxSlots =  // key blocks of an SM
    (kSharedBytes - 1024 - kBarrierBytes - kSlots * static_cast<int>(sizeof(TokenSlot))) / (kCodeBytes + kFactorBytes);
static_assert(kMaxSlots <= kMaxItems, "a list of different blocks fits");

// An entry of a token's list: column block (from bit 4), where the key block lies (from bit 17), its visible keys (from bit 28).
MDI_HOST_DEVICE constexpr uint32_t make_item(int position, int slot, int num_visible) {
    return static_cast<uint32_t>(position) << 4 | static_cast<uint32_t>(slot) << 17 | static_cast<uint32_t>(num_visible) << 28;
}
MDI_HOST_DEVICE constexpr uint32_t column_bytes_of(uint32_t item) { return item & 0x1fff0u; }
MDI_HOST_DEVICE constexpr uint32_t slot_bits_of(uint32_t item) { return item & 0x1fe0000u; }  // slot << 17
static_assert(kMaxSlots <= 1 << 8 && kMaxFoldedCandidates <= 1 << 13, "fields of an item");

constexpr int64_t kMaxBlocks = kMaxFoldedEntries / kBlockKeys;  // of all sequences
// At least rounds x thread blocks, whatever their number
constexpr int64_t buckets_of(int64_t num_blocks) { return num_blocks / 100 + 2 * kMaxOwners; }
static_assert(kMaxSlots >= 100 && buckets_of(kMaxBlocks) < 1 << 16, "a bucket is half a word");
static_assert(kMaxBlocks * kMaxOwners < int64_t{1} << 32, "division by multiplication");

struct Workspace {
    TokenRecord* tokens;      // [T]
    uint32_t* items;          // [T, C]: items of bucket b at offsets[b]..offsets[b + 1]
    uint16_t* offsets;        // [T, num_buckets + 1]
    uint8_t* marked_blocks;   // [B, blocks]
    uint8_t* marked_tokens;   // [T]
    int32_t* any_marked;      // [1]
    int32_t* most_visible;    // [B], 16 bytes behind any_marked: one memset clears both
    int64_t items_stride;
    int num_blocks;           // of a sequence: all that its page table can hold
    int num_owners;           // G: thread blocks of `score`
    int num_slots;            // key blocks of a thread block and round
    int num_rounds;
    int num_buckets;          // rounds x thread blocks
};

int64_t place(int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, int64_t num_candidates, uint8_t* base, Workspace& w) {
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
        uint8_t* at = base + offset;
        offset += align_up<int64_t>(bytes, 256);
        return at;
    };
    w.tokens = reinterpret_cast<TokenRecord*>(take(num_tokens * static_cast<int64_t>(sizeof(TokenRecord))));
    w.items_stride = align_up<int64_t>(num_candidates, 4);
    w.items = reinterpret_cast<uint32_t*>(take(num_tokens * w.items_stride * 4 + 16));
    w.offsets = reinterpret_cast<uint16_t*>(take(num_tokens * (buckets_of(num_seqs * num_blocks) + 1) * 2));
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
    __shared__ int warp_total[kPrepareThreads / 32];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, each = ceil_div(size, kPrepareThreads);
    const int first = min_of(size, thread * each), last = min_of(size, first + each);
    int total = 0;
    for (int i = first; i < last; ++i) total += count[i];
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
    for (int i = first; i < last; ++i) {
        const int mine = count[i];
        count[i] = before;
        before += mine;
    }
    __syncthreads();
}

// Folds the query rows of a token; threads 4 * head + quarter of whole warps. False: some row does not fold.
__device__ __forceinline__ bool fold_query(const LogitsParams& p, int64_t token, uint8_t* image, TokenRecord& record) {
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
    for (int c = 0; c < 8; ++c)
        *reinterpret_cast<uint32_t*>(image + swizzle128(static_cast<uint32_t>(head * kDim + c * 16 + quarter * 4))) = folded.bytes[c];
    if (quarter == 0)
        reinterpret_cast<uint16_t*>(&record.weight[head % 8 / 2][head / 8])[head % 2] = scaled_weight(weight, folded.exponent);
    return folded.ok && weight_folds(weight);
}

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(LogitsParams p, Workspace w) {
    // per candidate: its item and its bucket, then the items in bucket order; and the number of items of every bucket
    extern __shared__ uint8_t shared_bytes[];
    uint32_t* sorted = reinterpret_cast<uint32_t*>(shared_bytes);
    uint32_t* items = sorted + p.num_candidates;
    uint32_t* places = items + p.num_candidates;  // bucket << 16 | rank inside it
    int* count = reinterpret_cast<int*>(places + p.num_candidates);
    __shared__ uint4 image[kHeads * kDim / 16];
    const int64_t token = blockIdx.x;
    const int seq = p.seq_of_token[token], visible = visible_of(p, token, seq);
    const int num_buckets = w.num_buckets;
    for (int i = threadIdx.x; i < num_buckets; i += kPrepareThreads) count[i] = 0;
    bool ok = true;
    constexpr int kAhead = 8;  // candidates of a thread that are asked for before the queries are folded
    const int32_t* candidates = p.candidates + token * p.num_candidates;
    int ids[kAhead];
    const auto ask = [&](int base) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kPrepareThreads;
            ids[j] = i < p.num_candidates ? candidates[i] : -1;
        }
    };
    ask(static_cast<int>(threadIdx.x));
    if (threadIdx.x < 4 * kHeads) ok = fold_query(p, token, reinterpret_cast<uint8_t*>(image), w.tokens[token]);
    const int bad = __syncthreads_or(!ok);  // also: the counts are zero
    static_assert(sizeof(image) == 16 * kPrepareThreads, "one copy a thread");
    reinterpret_cast<uint4*>(w.tokens[token].image)[threadIdx.x] = image[threadIdx.x];
    if (threadIdx.x == 0) {
        w.marked_tokens[token] = bad != 0;
        if (bad != 0) atomicOr(w.any_marked, 1);
        if (visible > 0) atomicMax(&w.most_visible[seq], visible);
    }

    const int limit = ceil_div(visible, kBlockKeys);  // blocks from here on have no visible entry
    const int first = seq * w.num_blocks;             // number of the sequence's first block
    // number * inverse >> 32 is number / num_owners while their product is below 2^32
    const uint64_t inverse = 0xffffffffu / static_cast<uint32_t>(w.num_owners) + uint64_t{1};
    uint4* out = reinterpret_cast<uint4*>(p.out + token * p.out_stride);
    bool fits = true;
    for (int base = threadIdx.x; base < p.num_candidates; base += kAhead * kPrepareThreads) {
        if (base >= kAhead * kPrepareThreads) ask(base);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kPrepareThreads, id = ids[j];
            if (i >= p.num_candidates) break;
            uint32_t place = 0xffffffffu;
            const bool seen = id >= 0 && id < limit;
            if (seen) {
                const int number = first + id;
                const int turn = static_cast<int>(static_cast<uint32_t>(number) * inverse >> 32);
                const int round = w.num_rounds == 1 ? 0 : turn / w.num_slots;
                const int bucket = round * w.num_owners + number - turn * w.num_owners;
                const int rank = atomicAdd(&count[bucket], 1);
                fits = fits && rank < kMaxItems;
                place = static_cast<uint32_t>(bucket) << 16 | static_cast<uint32_t>(rank);
                items[i] = make_item(i, turn - round * w.num_slots, min_of(kBlockKeys, visible - id * kBlockKeys));
            }
            if (!seen || (id + 1) * kBlockKeys > visible) {  // not all of its keys get a score
                const uint32_t pair = kNegInfBf16 * 0x10001u;
                out[i] = make_uint4(pair, pair, pair, pair);
            }
            places[i] = place;
        }
    }
    uint16_t* offsets = w.offsets + token * (num_buckets + 1);
    if (__syncthreads_or(!fits) != 0) {  // a block that is named many times: the second pass scores this token
        for (int i = threadIdx.x; i <= num_buckets; i += kPrepareThreads) offsets[i] = 0;
        if (threadIdx.x == 0) {
            w.marked_tokens[token] = 1;
            atomicOr(w.any_marked, 1);
        }
        return;
    }
    const int last = count[num_buckets - 1];
    __syncthreads();
    prefix_sums(count, num_buckets);
    const int num_items = count[num_buckets - 1] + last;
    for (int i = threadIdx.x; i <= num_buckets; i += kPrepareThreads)
        offsets[i] = static_cast<uint16_t>(i < num_buckets ? count[i] : num_items);
    for (int i = threadIdx.x; i < p.num_candidates; i += kPrepareThreads)
        if (places[i] != 0xffffffffu) sorted[count[places[i] >> 16] + static_cast<int>(places[i] & 0xffffu)] = items[i];
    __syncthreads();
    for (int i = threadIdx.x; i < num_items; i += kPrepareThreads) w.items[token * w.items_stride + i] = sorted[i];
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
__device__ __forceinline__ void store_block(const Workspace& w, int number, const PackedQuarter& packed, uint8_t* rows,
                                            float* factors, int lane) {
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
    if (lane % 4 == 0) factors[lane / 4] = folded.factor();
    const bool ok = __all_sync(0xffffffffu, folded.ok) != 0;
    if (lane == 0) {
        w.marked_blocks[number] = !ok;
        if (!ok) atomicOr(w.any_marked, 1);
    }
}

// ld.shared and st.shared
__device__ __forceinline__ uint32_t load_shared_32(uint32_t smem) {
    uint32_t v;
#if !defined(MDI_CUDA_ON_CPU)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
#else
    v = *reinterpret_cast<const uint32_t*>(ptx::smem_pointer(smem));
#endif
    return v;
}
__device__ __forceinline__ uint2 load_shared_64(uint32_t smem) {
    uint2 v;
#if !defined(MDI_CUDA_ON_CPU)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem) : "memory");
#else
    v = *reinterpret_cast<const uint2*>(ptx::smem_pointer(smem));
#endif
    return v;
}
__device__ __forceinline__ uint4 load_shared_128(uint32_t smem) {
    uint4 v;
#if !defined(MDI_CUDA_ON_CPU)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
#else
    v = *reinterpret_cast<const uint4*>(ptx::smem_pointer(smem));
#endif
    return v;
}
__device__ __forceinline__ void store_shared_64(uint32_t smem, uint2 v) {
#if !defined(MDI_CUDA_ON_CPU)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(v.x), "r"(v.y) : "memory");
#else
    *reinterpret_cast<uint2*>(ptx::smem_pointer(smem)) = v;
#endif
}

// st.global.u16 where x >= threshold; without a branch
__device__ __forceinline__ void store_where(uint32_t x, uint32_t threshold, uint64_t address, uint16_t value) {
#if !defined(MDI_CUDA_ON_CPU)
    asm volatile("{\n.reg .pred p;\nsetp.ge.u32 p, %0, %1;\n@p st.global.u16 [%2], %3;\n}\n" ::"r"(x), "r"(threshold), "l"(address),
                 "h"(value)
                 : "memory");
#else
    if (x >= threshold) *reinterpret_cast<uint16_t*>(address) = value;
#endif
}

// Keeps a value in its register: without it the compiler computes it again for every item.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// x, from the lane itself: a value that the assembler does not compute again either.
__device__ __forceinline__ uint32_t pinned(uint32_t x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }
__device__ __forceinline__ uint64_t pinned(uint64_t x) {
    return pinned(static_cast<uint32_t>(x)) | static_cast<uint64_t>(pinned(static_cast<uint32_t>(x >> 32))) << 32;
}

// wgmma.mma_async.sync.aligned.m64nNk32.s32.s8.s8, N = 8 kTiles: d = a * b (+ d when `accumulate`); a from registers, b K-major in
// shared memory
template <int kTiles>
__device__ __forceinline__ void wgmma_s8(uint32_t (&d)[4 * kTiles], const uint4& a, uint64_t descriptor_b, bool accumulate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const uint32_t flag = accumulate;
    if constexpr (kTiles == 4)
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]),
              "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(descriptor_b), "r"(flag));
    else if constexpr (kTiles == 2)
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(descriptor_b), "r"(flag));
    else
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(descriptor_b), "r"(flag));
#else
    // rows of a warp, one quad holds a row; b is read where its descriptor points
    const int lane = threadIdx.x % 32, t = lane % 4;
    const uint32_t rows[2][2] = {{a.x, a.z}, {a.y, a.w}};
    const uint32_t b = static_cast<uint32_t>(descriptor_b & 0x3fff) * 16;
    for (int i = 0; i < 4 * kTiles; ++i) {
        const uint32_t column = 8 * (i / 4) + 2 * t + i % 2;
        if (!accumulate) d[i] = 0;
        for (int k = 0; k < 8; ++k) {  // words of 4
            const uint32_t x = __shfl_sync(0xffffffffu, rows[i / 2 % 2][k / 4], lane / 4 * 4 + k % 4);
            const uint32_t y = load_shared_32(swizzle128(b + column * kDim + 4 * k));
            for (int byte = 0; byte < 4; ++byte)
                d[i] += static_cast<uint32_t>(static_cast<int8_t>(x >> 8 * byte) * static_cast<int8_t>(y >> 8 * byte));
        }
    }
#endif
}

struct Shared {  // of a thread block, from a multiple of 1024
    uint32_t slots, rows, factors, full, empty;  // shared addresses
    __device__ __forceinline__ Shared(uint32_t base, int num_slots) {
        slots = base;
        rows = base + kSlots * static_cast<uint32_t>(sizeof(TokenSlot));
        factors = rows + num_slots * kCodeBytes;
        full = factors + num_slots * kFactorBytes;
        empty = full + 8 * kSlots;
    }
};

__device__ __forceinline__ int padded_tokens(int num_tokens) { return ceil_div(num_tokens, kSlots) * kSlots; }

// Fetches every kProducers-th token's record and list; one warp. A lane prepares a token, so that what is done one token after
// another, by that lane alone, is short.
__device__ __forceinline__ void produce(const LogitsParams& p, const Workspace& w, const Shared& at, int producer, int bucket,
                                        uint32_t& phase) {
    const int lane = threadIdx.x % 32, end_token = padded_tokens(p.num_tokens);
    const auto offset_of = [&](int token, int which) {
        const int64_t at_token = static_cast<int64_t>(token) * (w.num_buckets + 1);
        return token < p.num_tokens ? static_cast<int>(w.offsets[at_token + bucket + which]) : 0;
    };
    constexpr uint32_t kStep = kProducers * static_cast<uint32_t>(sizeof(TokenSlot));
    uint32_t target = at.slots + producer * static_cast<uint32_t>(sizeof(TokenSlot)), full = at.full + 8 * producer;
    uint32_t end_target = target + kSlots / kProducers * kStep;
    keep(target), keep(full), keep(end_target);
    int token = producer + kProducers * lane;
    int next_begin = offset_of(token, 0), next_end = offset_of(token, 1);
    for (int first_token = producer; first_token < end_token; first_token += 32 * kProducers) {
        const int begin = next_begin, count = next_end - begin, shift = begin % 4;
        const uint32_t bytes = count == 0 ? 0 : static_cast<uint32_t>(align_up(shift + count, 4)) * 4;
        const uint32_t record_bytes = count == 0 ? 0 : sizeof(TokenRecord);
        const void* record = &w.tokens[token];
        const void* list = &w.items[token * w.items_stride + begin - shift];
        token += 32 * kProducers;
        next_begin = offset_of(token, 0), next_end = offset_of(token, 1);
        for (int i = 0; i < 32 && first_token + i * kProducers < end_token; ++i) {
            if (lane == i) {
                const uint32_t items = target + static_cast<uint32_t>(offsetof(TokenSlot, list));
                ptx::mbarrier_wait(full + 8 * kSlots, phase ^ 1);  // empty
                store_shared_64(target + static_cast<uint32_t>(offsetof(TokenSlot, first)), make_uint2(items + 4 * shift, count));
                ptx::mbarrier_arrive_expect_tx(full, bytes + record_bytes);
                if (count > 0) {
                    ptx::bulk_load(target, record, sizeof(TokenRecord), full);
                    ptx::bulk_load(items, list, bytes, full);
                }
            }
            __syncwarp();  // nobody may wait for a slot before its last token has been waited for
            target += kStep, full += 8 * kProducers;
            if (target == end_target) target -= kSlots / kProducers * kStep, full -= 8 * kSlots, phase ^= 1;
        }
    }
}

template <int kTiles>
__device__ __forceinline__ void consume(const LogitsParams& p, const Workspace& w, const Shared& at, int group, uint32_t& phase) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t key = g % 4 + 4 * (t % 2);  // of the lane's block, see the sums below
    const uint32_t threshold = t < 2 ? (key + 1) << 28 : 0xffffffffu;  // lanes t >= 2 hold what lanes t < 2 store
    const uint32_t my_rows = pinned(at.rows + lane % 16 * 16), my_factors = pinned(at.factors + key * 4);
    const uint32_t my_weights = kHeads * kDim + t * 16;
    const bool odd = lane % 2 != 0;
    uint32_t start = 2 * warp + lane / 16;  // the lane's first item; in turns: the last ones must not always fall to the same warps
    uint64_t row_out = reinterpret_cast<uint64_t>(p.out + group * p.out_stride + key);
    const uint64_t row_step = pinned(static_cast<uint64_t>(kGroups * 2 * p.out_stride));
    const uint32_t first_source = at.slots + group * static_cast<uint32_t>(sizeof(TokenSlot)), first_full = at.full + 8 * group;
    const int end_token = padded_tokens(p.num_tokens);
    uint4 a[4] = {};
    for (int token = group; token < end_token; token += kSlots, phase ^= 1) {
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {  // straight-line code: shared addresses and descriptors are constants
            const uint32_t source = first_source + buffer * kGroups * static_cast<uint32_t>(sizeof(TokenSlot));
            const uint32_t full = first_full + buffer * 8 * kGroups;
            ptx::mbarrier_wait(full, phase);
            const uint2 items = load_shared_64(source + static_cast<uint32_t>(offsetof(TokenSlot, first)));
            uint32_t weight[2 * kTiles];
            const uint4 pairs = load_shared_128(source + my_weights);
            const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) weight[2 * n] = pair[n] << 16, weight[2 * n + 1] = pair[n] & 0xffff0000u;
            fence_registers(weight);  // unpacked once
            int left = __shfl_sync(0xffffffffu, static_cast<int>(items.y), 0);  // known to be uniform
            uint32_t list = items.x + 4 * start;
            const uint64_t queries = smem_descriptor_k128(source);
            const auto step = [&](auto whole) {  // whole: there are 8 items
                const bool here = whole || static_cast<int>(start) < left;
                const uint32_t item = here ? load_shared_32(list) : 0;
                const bool any_here = whole || __any_sync(0xffffffffu, here) != 0;  // false: this warp only takes part in the products
                float factor = 0.0f;
                if (any_here) {
                    const uint32_t bits = slot_bits_of(item);
                    const uint32_t row = (bits >> 7) + my_rows;
#pragma unroll
                    for (int k = 0; k < 4; ++k) a[k] = load_shared_128(row + 256 * k);
                    factor = bits_float(load_shared_32((bits >> 12) + my_factors));
                }
                uint32_t acc[4 * kTiles];
                fence_registers(acc);
#pragma unroll
                for (int k = 0; k < 4; ++k) keep(a[k].x), keep(a[k].y), keep(a[k].z), keep(a[k].w);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) wgmma_s8<kTiles>(acc, a[k], advance_descriptor(queries, 32 * k), k > 0);
                wgmma_commit();
                wgmma_wait<0>();
                fence_registers(acc);
                if (!any_here) return;
                // Sums start from -0, that is from their first term; against +0 that can only make a zero negative, see below
                float low = -0.0f, high = -0.0f;
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    add_folded_heads(low, acc[4 * n], acc[4 * n + 1], weight[2 * n], weight[2 * n + 1]);
                    add_folded_heads(high, acc[4 * n + 2], acc[4 * n + 3], weight[2 * n], weight[2 * n + 1]);
                }
                // lanes of even t go on with the low row, of odd t with the high one: p0 + p1 and p2 + p3
                float sum = (odd ? high : low) + __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                // + 0: a sum of nothing but zeros is +0 in the reference
                const uint16_t value = to_bf16_bits(__fmaf_rn(sum, factor, 0.0f));
                store_where(item, threshold, row_out + column_bytes_of(item), value);
            };
            for (; left >= 8; left -= 8, list += 32) step(std::true_type());
            if (left != 0) step(std::false_type());
            ptx::mbarrier_arrive(full + 8 * kSlots);  // empty; every lane: faster than one lane after __syncwarp
            start = (start + 2) & 7;
            row_out += row_step;
        }
    }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1) score_kernel(LogitsParams p, Workspace w) {
    extern __shared__ uint8_t shared_bytes[];
    uint8_t* shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t{1023});
    const Shared at(ptx::smem_address(shared), w.num_slots);
    uint8_t* rows = shared + kSlots * sizeof(TokenSlot);
    float* factors = reinterpret_cast<float*>(rows + w.num_slots * kCodeBytes);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    const int owner = static_cast<int>(blockIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(at.full + 8 * i, 1);
            ptx::mbarrier_init(at.empty + 8 * i, 128);
        }
        ptx::fence_mbarrier_init();
    }
    uint32_t phase = 0;
    for (int round = 0; round < w.num_rounds; ++round) {
        __syncthreads();  // the barriers are there; the last round is over
        constexpr int kWarps = kThreads / 32;
        const auto number_of = [&](int slot) { return (round * w.num_slots + slot) * w.num_owners + owner; };
        for (int slot = warp; slot < w.num_slots; slot += 4 * kWarps) {  // four blocks of a warp in flight
            PackedQuarter packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) packed[i] = load_block(p, w, number_of(slot + i * kWarps), lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at_slot = slot + i * kWarps;
                if (at_slot < w.num_slots)
                    store_block(w, number_of(at_slot), packed[i], rows + at_slot * kCodeBytes, factors + at_slot * kBlockKeys, lane);
            }
        }
        __syncthreads();
        const int bucket = round * w.num_owners + owner;
        if (warp >= 4 * kGroups) produce(p, w, at, warp - 4 * kGroups, bucket, phase);
        else consume<kTiles>(p, w, at, warp / 4, phase);
    }
}

template <int kTiles>
void launch_score(const LogitsParams& p, const Workspace& w) {
    const size_t bytes =
        static_cast<size_t>(w.num_slots) * (kCodeBytes + kFactorBytes) + kSlots * sizeof(TokenSlot) + kBarrierBytes + 1024;
    launch("indexer.candidate_logits", score_kernel<kTiles>,
           {dim3(static_cast<unsigned>(w.num_owners)), dim3(kThreads), bytes, p.stream}, p, w);
}

// Deals the key blocks of all sequences to the SMs.
void deal(const LogitsParams& p, Workspace& w) {
    int device = 0, num_sms = 0;
    check_cuda("indexer.candidate_logits", cudaGetDevice(&device));
    check_cuda("indexer.candidate_logits", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    w.num_owners = min_of(num_sms, kMaxOwners);
    const int each = max_of(1, ceil_div(p.num_seqs * w.num_blocks, w.num_owners));
    w.num_rounds = ceil_div(each, kMaxSlots);
    w.num_slots = ceil_div(each, w.num_rounds);
    w.num_buckets = w.num_rounds * w.num_owners;
}

}  // namespace folded

int64_t candidate_workspace_bytes(int64_t num_tokens, int64_t num_seqs, int64_t entries_per_seq, int64_t num_candidates) {
    folded::Workspace w;
    return folded::place(num_tokens, num_seqs, ceil_div<int64_t>(entries_per_seq, folded::kBlockKeys), num_candidates, nullptr, w);
}

void launch_candidate_logits_sm90(const LogitsParams& params) {
    LogitsParams p = params;
    folded::Workspace w;
    folded::place(p.num_tokens, p.num_seqs, static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page / folded::kBlockKeys,
                  p.num_candidates, p.workspace, w);
    folded::deal(p, w);
    check_cuda("indexer.candidate_logits",
               cudaMemsetAsync(w.any_marked, 0, 16 + static_cast<size_t>(p.num_seqs) * sizeof(int32_t), p.stream));
    launch("indexer.candidate_logits", folded::prepare_kernel,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(folded::kPrepareThreads),
            (static_cast<size_t>(p.num_candidates) * 3 + w.num_buckets) * sizeof(uint32_t), p.stream},
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
