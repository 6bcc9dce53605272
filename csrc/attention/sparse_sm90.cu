// Sparse attention over packed KV rows on Hopper (wgmma). Same function as sparse.cu; model spec 4.5 and 4.6.
//
// Floor of T=4096, H=64, 640 slots (GPU clocks per step of 64 slots and SM): tensor cores 2 x 64 x 64 x 512 multiply-adds
// = 2,048; shared memory at 128 B: Q 64 + K 64 KiB for S, V 64 + P 16 KiB for O, 64 KiB to write K = 272 KiB = 2,180; ALU
// to expand 32,768 elements about 1,000 of each scheduler. Packed rows from L2: 18 (FP4) or 33 KiB (FP8), a third of bf16
// keys. 10 steps a token, 31 tokens an SM: 0.39 ms at 1.755 GHz if the three overlap.
//
// Measured on an H200 (T=4096, 640 slots, model-like indices): whole tiles, one producer warpgroup with the packed rows on
// their way in registers 0.95 ms (2.5 us a compressed step); tiles in parts, two producer warpgroups, still registers 1.04 ms
// (3.0 us; 128 slots 0.30 after 0.33 ms). ptxas has all register loads in flight share a scoreboard, so that the L2 latency
// was waited for once a step in the first and four times in the second. Through shared memory, as now: not measured yet.
//
// One persistent block per SM walks over (token, 64 heads) items; four warpgroups:
//   producers (warpgroups 2 and 3, 64 registers): copy packed rows by index to shared memory, a step ahead, four lanes a row, and
//     expand them to bf16 in the free one of two K tiles; copy Q under the first tile of its item;
//   consumers (warpgroups 0 and 1, 192 registers): step b belongs to consumer b % 2, which makes S = Q K^T (m64n64k16) and
//     the softmax, and hands P (bf16) and the running maximum to the other through shared memory. Both add P V to their half
//     of O (64 heads x 256 dims as two m64n128k16, the widest that ptxas takes at 512 threads; own P from registers, the
//     other's from shared memory). So one consumer's softmax runs under the other's products.
// Barriers (mbarrier; a phase per use): full[2][4] two atoms of a K tile written: S follows the producer through the tile;
// empty[2][2] consumer c is done with the tile, whose half of the atoms is then free, because only its values are in there and
// S was complete before; p_ready[2] P and maximum of a step published (they are free again when the last full[] of the step
// after next completes, because that needs both empty[]); q_full, q_empty per item.
//
// Shared memory: Q 64 KiB, K 2 x 64 KiB, P 2 x 8 KiB, packed rows 16 KiB, the rest 2.2 KiB = 226.2 KiB. Tiles are
// atoms of 64 columns (128 bytes a row) under the 128-byte swizzle: K-major for Q, K in S and P, MN-major for V = the same K tile.
// Tiles are in the order and scale of row_codec.cuh: Q is permuted on its way in and O on its way out; the scale of S and the
// last factor of O take the key factor back, exactly.
//
// A lane that is negative, at or past compressed_len, or outside the pool is never read through: zero row, score -inf. A
// token without a valid lane gives 0. Results depend on nothing but the token itself. Limits: D = 512, H <= 128.
// SASS: HGMMA
#include <cuda_bf16.h>

#include "attention/attention.h"
#include "attention/row_codec.cuh"
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"

namespace mdi::attention {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kHeads = 64;  // M of the products
constexpr int kSlots = 64;  // slots of a step
constexpr int kConsumers = 2;
constexpr int kGroupThreads = 128;
constexpr int kProducerThreads = 2 * kGroupThreads;
constexpr int kThreads = kConsumers * kGroupThreads + kProducerThreads;
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;
constexpr int kAtomBytes = 64 * 128;                  // 64 rows of 64 bf16 columns
constexpr int kAtoms = kHeadDim / 64;
constexpr int kTileBytes = kAtoms * kAtomBytes;
constexpr int kQuarters = 4;                          // parts of a K tile, two atoms each: S starts on the first
constexpr int kHalfDims = kHeadDim / kConsumers;      // dims of O a consumer owns
constexpr int kProducerWarps = kProducerThreads / 32;
constexpr int kWarpRows = kSlots / kProducerWarps;    // rows of a step a producer warp expands, four lanes each
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxStart = -1e30f;                   // finite: a masked step must not make NaN
constexpr uint32_t kConsumerBarrier = 1, kGroupBarrier = 2;  // named barriers; kGroupBarrier + consumer

struct SharedStorage {
    uint8_t q[kTileBytes];
    uint8_t k[2][kTileBytes];
    uint8_t p[kConsumers][kAtomBytes];
    uint4 staged[4][kProducerThreads];      // packed bytes on their way, a column per producer thread
    float row_max[kConsumers][kHeads];      // running maximum after the consumer's latest step
    float row_sum[2][kConsumers][kHeads];   // by parity of the item
    float sink[kMaxHeads];
    uint32_t valid[2][2];                   // bit s: slot s of the step may be seen; a byte per producer warp
    uint64_t full[2][kQuarters], empty[2][kConsumers], p_ready[kConsumers], q_full, q_empty;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

MDI_DEVICE float exp_of(float x) { return ptx::exp2_approx(x * kLog2e); }

// Where row r, 16-byte chunk c of an atom lies (both tile and atom start at a multiple of 1024)
MDI_DEVICE uint32_t atom_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

MDI_DEVICE uint32_t address_of(const void* shared) { return ptx::smem_address(shared); }

// Descriptors here differ only in their low word, address and all, so that a step is one 32-bit addition in a uniform
// register. The address goes through an opaque move: otherwise the compiler keeps all 40 of them in registers or spills.
struct Descriptor {
    uint32_t low, high;

    MDI_DEVICE Descriptor(const void* tile, uint32_t leading_bytes) {
        uint32_t address = address_of(tile);
        opaque(address);
        const uint64_t whole = smem_descriptor(address, Swizzle::k128B, leading_bytes, 1024);
        low = static_cast<uint32_t>(whole);
        high = static_cast<uint32_t>(smem_descriptor(0, Swizzle::k128B, 0, 1024) >> 32);
    }
    MDI_DEVICE static void opaque(uint32_t& x) {
#if defined(__CUDA_ARCH__)
        asm volatile("mov.b32 %0, %0;" : "+r"(x));
#endif
    }
    MDI_DEVICE uint64_t at(uint32_t bytes) const { return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4)); }
};

// Stores a warpgroup's 64 x 64 bf16 matrix, held as wgmma accumulators packed in pairs (pair 2t + h: columns 8t.. of row half
// h), to one swizzled atom.
struct AtomWriter {
    uint32_t row_address, chunk_bits;

    MDI_DEVICE AtomWriter(uint8_t* atom, int warp, int lane) {  // lane l gives row l % 8 of matrix l / 8 of four
        const int row = 16 * warp + lane % 16, column_tile = lane / 16;
        row_address = address_of(atom) + row * 128;
        chunk_bits = (column_tile ^ (row & 7)) << 4;
    }
    MDI_DEVICE void store(const uint32_t (&pairs)[16]) const {
#pragma unroll
        for (int t = 0; t < 8; t += 2) {
            ptx::stmatrix_x4(row_address + (chunk_bits ^ (t << 4)), pairs[2 * t], pairs[2 * t + 1], pairs[2 * t + 2], pairs[2 * t + 3]);
        }
    }
};

// ---- items ---------------------------------------------------------------------------------------------------------

// A token is one item, or two above 64 heads.
static_assert(kMaxHeads == 2 * kHeads);
MDI_DEVICE int second_block(const SparseParams& params) { return params.num_heads > kHeads ? 1 : 0; }
MDI_DEVICE int num_items(const SparseParams& params) { return params.num_tokens << second_block(params); }
MDI_DEVICE int token_of(const SparseParams& params, int item) { return item >> second_block(params); }
MDI_DEVICE int first_head_of(const SparseParams& params, int item) { return (item & second_block(params)) * kHeads; }

// Lanes of an item's token that count; `length`: its compressed_len
MDI_DEVICE int lanes_of(const SparseParams& params, int length) {
    return params.num_window + min_of(params.num_picks, max_of(length, 0));
}
MDI_DEVICE int length_of(const SparseParams& params, int item) {
    if (params.compressed_len == nullptr || item >= num_items(params)) return params.num_picks;
    return __ldg(params.compressed_len + token_of(params, item));
}

// ---- producer ------------------------------------------------------------------------------------------------------

// Walks over the steps of this block's items, in order.
struct Cursor {
    int item, first_slot, num_lanes;
    int next_length;  // of the next item; in lane 0: a load by all lanes would go to a uniform register and be waited for at once

    MDI_DEVICE Cursor(const SparseParams& params, int first_item)
        : item(first_item), first_slot(0), num_lanes(lanes_of(params, length_of(params, first_item))), next_length(0) {
        load_next(params);
        skip_empty(params);
    }
    MDI_DEVICE void load_next(const SparseParams& params) {
        if (threadIdx.x % 32 == 0) next_length = length_of(params, item + gridDim.x);
    }
    MDI_DEVICE bool done(const SparseParams& params) const { return item >= num_items(params); }
    MDI_DEVICE void skip_empty(const SparseParams& params) {
        while (first_slot >= num_lanes) {
            item += gridDim.x;
            if (done(params)) return;
            num_lanes = lanes_of(params, __shfl_sync(~0u, next_length, 0));
            load_next(params);
            first_slot = 0;
        }
    }
    MDI_DEVICE void advance(const SparseParams& params) {
        first_slot += kSlots;
        skip_empty(params);
    }
};

// The row of a step that one producer lane serves, with the three lanes beside it: lane j of the four has columns 16 j to
// 16 j + 15 of every atom.
struct LaneRow {
    const uint8_t* codes;     // the lane's 16 (window row) or 8 bytes of the first atom
    bool any, window;         // the row is there; it is a window row

    // Starts the index load; the rest follows in `settle`, after other work.
    MDI_DEVICE static int load(const SparseParams& params, const Cursor& at, int tile_row) {
        const int slot = at.first_slot + tile_row;
        if (at.done(params) || slot >= at.num_lanes) return -1;
        const int64_t token_idx = token_of(params, at.item);
        return slot < params.num_window ? params.window_idx[token_idx * params.num_window + slot]
                                        : params.compressed_idx[token_idx * params.num_picks + slot - params.num_window];
    }
    MDI_DEVICE void settle(const SparseParams& params, int idx, int slot, int part) {
        const bool in_window = slot < params.num_window;
        const int limit = in_window ? params.num_window_rows : params.num_compressed_rows;
        any = static_cast<uint32_t>(idx) < static_cast<uint32_t>(limit);
        window = any && in_window;
        codes = (in_window ? params.window + static_cast<int64_t>(idx) * kWindowRowBytes
                           : params.compressed + static_cast<int64_t>(idx) * kCompressedRowBytes) +
                part * (in_window ? 16 : 8);
    }
    // A bit per row of the warp
    MDI_DEVICE uint32_t valid() const {
        uint32_t bits = __ballot_sync(~0u, any) & 0x11111111u;  // the lanes of a row agree: keep one bit
        bits = (bits | bits >> 3) & 0x03030303u;
        bits = (bits | bits >> 6) & 0x000f000fu;
        return (bits | bits >> 12) & 0xffu;
    }
};

// A lane's bytes of its row, copied asynchronously to four slots of its own in shared memory; a slot is refilled as it is used
// up, so a whole step is on its way all the time. (Not in registers: ptxas puts all loads in flight on one scoreboard, and
// the wait for an old one then waits for the newest.) Slot piece % 4 holds a piece of 64 row bytes, a quarter of them the
// lane's: two atoms of a compressed row (four pieces), one atom of a window row (eight, the last four follow the first). The
// scale bytes are spread over the four lanes of the row, eight (compressed) or four (window) each: two atoms' worth.
struct Packed {
    uint4* slots;
    uint32_t scales[2], next_scales[2];

    // One group of copies, also where there is nothing to copy
    MDI_DEVICE void load(const LaneRow& row, int piece) {
        const uint32_t to = address_of(slots + piece % 4 * kProducerThreads);
        if (row.window) {
            ptx::cp_async_16(to, row.codes + piece * 64);
        } else if (row.any) {
            ptx::cp_async_small<8>(to, row.codes + piece * 64);
            ptx::cp_async_small<8>(to + 8, row.codes + piece * 64 + 32);
        }
        ptx::cp_async_commit();
    }
    // The oldest piece under way
    MDI_DEVICE uint4 take(int piece) const {
        ptx::cp_async_wait<3>();
        return slots[piece % 4 * kProducerThreads];
    }
    // A skipped row reads nothing: scale 0 makes any left-over FP4 code 0.
    MDI_DEVICE void load_scales(const LaneRow& row, int part) {
        next_scales[0] = next_scales[1] = 0;
        if (row.window) {  // codes + 512 - 16 part + 4 part
            next_scales[0] = __ldg(reinterpret_cast<const uint32_t*>(row.codes + kHeadDim - 12 * part));
        } else if (row.any) {
            const uint2 v = __ldg(reinterpret_cast<const uint2*>(row.codes + kHeadDim / 2));
            next_scales[0] = v.x, next_scales[1] = v.y;
        }
    }
    MDI_DEVICE void advance_scales() { scales[0] = next_scales[0], scales[1] = next_scales[1]; }
    MDI_DEVICE void start(const LaneRow& row, int part) {
        load_scales(row, part);
        advance_scales();
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) load(row, piece);
    }
};

// Where a lane's two chunks of atom 0 lie in a K tile. Eight neighbouring lanes (two rows, the even or the odd chunks) hit
// eight different bank groups.
struct TileWriter {
    uint8_t* chunk[2];

    MDI_DEVICE TileWriter(uint8_t* tile, int row, int part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) chunk[i] = tile + atom_offset(row, part * 2 + i);
    }
    MDI_DEVICE void store(int atom, int i, const uint4& v) const { *reinterpret_cast<uint4*>(chunk[i] + atom * kAtomBytes) = v; }
};

// Both write the two atoms of a quarter and refill the slots that they empty. scales: the row's bytes for these atoms.
template <int kQuarter>
MDI_DEVICE void write_compressed(const TileWriter& to, Packed& from, const uint32_t (&scales)[2], const LaneRow& next, int part) {
    const uint4 taken = from.take(kQuarter);
    const uint32_t codes[4] = {taken.x, taken.y, taken.z, taken.w};
    uint32_t factor[2];
    fp4_factors((scales[0] >> (8 * part) & 0xffu) | (scales[1] >> (8 * part) & 0xffu) << 8, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) to.store(2 * kQuarter + i / 2, i % 2, expand_fp4(codes[i], factor[i / 2]));
    from.load(next, kQuarter);
}

template <int kQuarter>
MDI_DEVICE void write_window(const TileWriter& to, Packed& from, uint32_t scales, const LaneRow& row, const LaneRow& next, int part) {
    scales >>= 8 * (part / 2);
#pragma unroll
    for (int atom = 2 * kQuarter; atom < 2 * kQuarter + 2; ++atom) {
        const uint32_t factor = fp8_factor(scales >> (16 * (atom % 2)) & 0xffu);
        const uint4 taken = from.take(atom);
        const uint32_t codes[4] = {taken.x, taken.y, taken.z, taken.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) to.store(atom, i, expand_fp8(codes[2 * i], codes[2 * i + 1], factor));
        if (atom < 4) {
            from.load(row, atom + 4);
        } else {
            from.load(next, atom - 4);
        }
    }
}

MDI_DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

struct Producer {
    const SparseParams& params;
    SharedStorage& shared;
    int thread, warp, lane;

    MDI_DEVICE Producer(const SparseParams& p, SharedStorage& s)
        : params(p), shared(s), thread(threadIdx.x - kConsumers * kGroupThreads), warp(thread / 32), lane(thread % 32) {}

    MDI_DEVICE const bf16* query(int item, int& num_heads) const {
        const int first_head = first_head_of(params, item);
        num_heads = min_of(kHeads, params.num_heads - first_head);
        return params.q + token_of(params, item) * params.q_stride_token + static_cast<int64_t>(first_head) * kHeadDim;
    }

    // Q of an item: copied as it is, while the first K tile is written; then permuted in place by the thread that copied it.
    MDI_DEVICE void start_query(int item, int item_count) const {
        int num_heads;
        const bf16* from = query(item, num_heads);
        ptx::mbarrier_wait(address_of(&shared.q_empty), (item_count & 1) ^ 1);
        const int chunk = thread % 64;  // of 64 in a row
        uint8_t* to = shared.q + chunk / 8 * kAtomBytes;
#pragma unroll 2
        for (int head = thread / 64; head < num_heads; head += kProducerThreads / 64) {
            ptx::cp_async_16(address_of(to + atom_offset(head, chunk % 8)), from + head * kHeadDim + chunk * 8);
        }
        ptx::cp_async_commit();
    }
    MDI_DEVICE void finish_query(int item) const {
        const int num_heads = min_of(kHeads, params.num_heads - first_head_of(params, item)), chunk = thread % 64;
        uint8_t* to = shared.q + chunk / 8 * kAtomBytes;
        ptx::cp_async_wait<4>();  // the tile just written committed at least four groups after it, the next step's rows
#pragma unroll 2
        for (int head = thread / 64; head < kHeads; head += kProducerThreads / 64) {
            uint4* at = reinterpret_cast<uint4*>(to + atom_offset(head, chunk % 8));
            uint4 v = make_uint4(0, 0, 0, 0);
            if (head < num_heads) v = *at;
            *at = to_key_order(v);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(address_of(&shared.q_full));
        const int next = item + gridDim.x;
        if (next < num_items(params)) {
            int lines;
            const uint8_t* line = reinterpret_cast<const uint8_t*>(query(next, lines));
            lines *= kHeadDim * 2 / 128;
            for (int i = thread; i < lines; i += kProducerThreads) prefetch_l2(line + i * 128);
        }
    }

    // One quarter of the row's step, from registers to the K tile. Rows of a warp may differ in kind.
    template <int kQuarter>
    MDI_DEVICE void write_quarter(const TileWriter& to, Packed& packed, const LaneRow& row, const LaneRow& next, int part,
                                  int buffer) const {
        const uint32_t scales[2] = {__shfl_sync(~0u, packed.scales[0], kQuarter, 4), __shfl_sync(~0u, packed.scales[1], kQuarter, 4)};
        if (row.window) {
            write_window<kQuarter>(to, packed, scales[0], row, next, part);
        } else {
            write_compressed<kQuarter>(to, packed, scales, next, part);
        }
        if (kQuarter == 0) packed.load_scales(next, part);
        __syncwarp();
        // The fence between these stores and the wgmma that reads them is the consumer's: here it would wait for the loads of
        // the next step.
        const uint32_t valid = kQuarter == kQuarters - 1 ? row.valid() : 0;
        if (lane == 0) {
            if (kQuarter == kQuarters - 1) reinterpret_cast<uint8_t*>(shared.valid[buffer])[warp] = static_cast<uint8_t>(valid);
            ptx::mbarrier_arrive(address_of(&shared.full[buffer][kQuarter]));
        }
    }

    MDI_DEVICE void run() {
        Cursor at(params, blockIdx.x);
        if (at.done(params)) return;
        const int tile_row = warp * kWarpRows + lane / 4, part = lane % 4;
        // Three steps are under way: one in registers, the row numbers of the next known, those of the one after that on their
        // way.
        LaneRow row, next_row;
        row.settle(params, LaneRow::load(params, at, tile_row), at.first_slot + tile_row, part);
        Cursor ahead = at;
        ahead.advance(params);
        next_row.settle(params, LaneRow::load(params, ahead, tile_row), ahead.first_slot + tile_row, part);
        Packed packed = {};
        packed.slots = &shared.staged[0][thread];
        packed.start(row, part);

        int item_count = 0;
        for (int b = 0; !at.done(params); ++b) {
            const int buffer = b & 1, item = at.item;
            const bool is_first = at.first_slot == 0;
            if (is_first) start_query(item, item_count++);
            at = ahead;
            ahead.advance(params);
            const int idx_ahead = LaneRow::load(params, ahead, tile_row);

            const TileWriter to(shared.k[buffer], tile_row, part);
            const uint32_t parity = (b >> 1 & 1) ^ 1;
            ptx::mbarrier_wait(address_of(&shared.empty[buffer][0]), parity);
            write_quarter<0>(to, packed, row, next_row, part, buffer);
            write_quarter<1>(to, packed, row, next_row, part, buffer);
            ptx::mbarrier_wait(address_of(&shared.empty[buffer][1]), parity);
            write_quarter<2>(to, packed, row, next_row, part, buffer);
            write_quarter<3>(to, packed, row, next_row, part, buffer);
            packed.advance_scales();
            row = next_row;
            next_row.settle(params, idx_ahead, ahead.first_slot + tile_row, part);
            if (is_first) finish_query(item);
        }
    }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

struct Consumer {
    const SparseParams& params;
    SharedStorage& shared;
    const int group, other;          // this consumer, 0 or 1, and the other one
    int warp, lane, row;             // row: the thread's first head in the tile, the second is row + 8
    float o[2][kHalfDims / 4];       // 64 heads x two times 128 dims over the warpgroup
    float m[2], sum[2];              // running maximum, and the sum over this consumer's own steps

    MDI_DEVICE Consumer(const SparseParams& p, SharedStorage& s, int consumer) : params(p), shared(s), group(consumer), other(consumer ^ 1) {
        warp = threadIdx.x / 32 % 4;
        lane = threadIdx.x % 32;
        row = 16 * warp + lane / 4;
    }

    MDI_DEVICE void arrive(const uint64_t& barrier) const {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(address_of(&barrier));
    }

    // Takes over a new running maximum: rescales what was summed under the old one. O holds nothing before an item's first
    // product (`started`), which overwrites it.
    MDI_DEVICE void rescale(const float (&new_max)[2], bool started) {
        const float alpha[2] = {exp_of(m[0] - new_max[0]), exp_of(m[1] - new_max[1])};
        m[0] = new_max[0];
        m[1] = new_max[1];
        sum[0] *= alpha[0];
        sum[1] *= alpha[1];
        if (started && __any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < kHalfDims / 2; ++i) o[i / 64][i % 64] *= alpha[i / 2 % 2];
        }
    }

    // V = the K tile's atoms of this consumer's dims, MN-major: atoms along N, rows along K
    MDI_DEVICE Descriptor values(int buffer) const { return {shared.k[buffer] + group * (kAtoms / 2) * kAtomBytes, kAtomBytes}; }

    // The other consumer's step b: waits for its P, adjusts to its maximum and starts O += P V.
    MDI_DEVICE void start_other(int b, bool started) {
        ptx::mbarrier_wait(address_of(&shared.p_ready[other]), b >> 1 & 1);
        ptx::fence_proxy_async();
        const float new_max[2] = {shared.row_max[other][row], shared.row_max[other][row + 8]};
        rescale(new_max, started);
        const Descriptor p(shared.p[other], 16), v = values(other);
        fence_registers(o[0]);
        fence_registers(o[1]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlots / 16; ++k) {
            wgmma_bf16_ss<kHalfDims / 2, 0, 1>(o[0], p.at(k * 32), v.at(k * 2048), started || k > 0);
            wgmma_bf16_ss<kHalfDims / 2, 0, 1>(o[1], p.at(k * 32), v.at(k * 2048 + 2 * kAtomBytes), started || k > 0);
        }
        wgmma_commit();
    }

    // S = Q K^T of this consumer's own step b, one quarter of the dims a group
    template <int kFirst, int kEnd>
    MDI_DEVICE void start_scores(float (&s)[kSlots / 2], int b) const {
        const Descriptor q(shared.q, 16), k(shared.k[group], 16);
#pragma unroll
        for (int quarter = kFirst; quarter < kEnd; ++quarter) {
            ptx::mbarrier_wait(address_of(&shared.full[group][quarter]), b >> 1 & 1);
            ptx::fence_proxy_async();  // the producer's stores to K, for the wgmma of both consumers (p_ready orders the other)
            if (quarter == 0) fence_registers(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t offset = (2 * quarter + i / 4) * kAtomBytes + i % 4 * 32;
                wgmma_bf16_ss<kSlots>(s, q.at(offset), k.at(offset), quarter + i > 0);
            }
            wgmma_commit();
        }
    }

    // Scales and masks the scores, and returns the new running maximum (equal in the four lanes of a row).
    MDI_DEVICE void mask_and_max(float (&s)[kSlots / 2], float (&new_max)[2]) const {
        const float scale = params.softmax_scale * kKeyFactor;
        new_max[0] = m[0];
        new_max[1] = m[1];
        const uint32_t valid[2] = {shared.valid[group][0], shared.valid[group][1]};
        if ((valid[0] & valid[1]) != ~0u) {
            const int shift = 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < kSlots / 2; ++i) {
                const int tile = i / 4;  // slots 8 * tile + 2 * (lane % 4) + i % 2
                if ((valid[tile / 4] >> shift >> (8 * (tile % 4) + i % 2) & 1) == 0) s[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i) {
            s[i] *= scale;
            new_max[i / 2 % 2] = fmaxf(new_max[i / 2 % 2], s[i]);
        }
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            new_max[f] = fmaxf(new_max[f], __shfl_xor_sync(~0u, new_max[f], 1));
            new_max[f] = fmaxf(new_max[f], __shfl_xor_sync(~0u, new_max[f], 2));
        }
    }

    // p = exp(s - max): the sum takes it unrounded, the products rounded. Publishes P and the maximum to the other consumer.
    MDI_DEVICE void probabilities(const float (&s)[kSlots / 2], const float (&new_max)[2], float (&part)[2],
                                  uint32_t (&p)[kSlots / 4]) {
        part[0] = part[1] = 0.f;
#pragma unroll
        for (int i = 0; i < kSlots / 4; ++i) {
            const float p0 = exp_of(s[2 * i] - new_max[i % 2]), p1 = exp_of(s[2 * i + 1] - new_max[i % 2]);
            part[i % 2] += p0 + p1;
            p[i] = ptx::pack_bf16x2(p0, p1);
        }
        AtomWriter(shared.p[group], warp, lane).store(p);
        if (lane % 4 == 0) {
            shared.row_max[group][row] = new_max[0];
            shared.row_max[group][row + 8] = new_max[1];
        }
        ptx::fence_proxy_async();  // the other consumer's wgmma reads P
        arrive(shared.p_ready[group]);
    }

    // O += P V of the own step, P from registers
    MDI_DEVICE void own_values(uint32_t (&p)[kSlots / 4], bool started) {
        const Descriptor v = values(group);
        fence_registers(o[0]);
        fence_registers(o[1]);
        fence_registers(p);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlots / 16; ++k) {
            const uint32_t a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
            wgmma_bf16_rs<kHalfDims / 2, 1>(o[0], a, v.at(k * 2048), started || k > 0);
            wgmma_bf16_rs<kHalfDims / 2, 1>(o[1], a, v.at(k * 2048 + 2 * kAtomBytes), started || k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(o[0]);
        fence_registers(o[1]);
    }

    MDI_DEVICE void finish_other() {
        wgmma_wait<0>();
        fence_registers(o[0]);
        fence_registers(o[1]);
    }

    // When a consumer adds the values of the other's step b - 1: not at all (b is the first of the item), before its own
    // scores, or after them. A template argument, because ptxas serialises wgmma groups that are open across a branch.
    enum class Other { kNone, kBefore, kAfter };

    // The consumer's own step b. is_second: O holds nothing yet when the other's step b - 1 comes. is_last: of its own;
    // keep_tile: of the item, whose tile `store` still wants.
    template <Other kWhen>
    MDI_DEVICE void own_step(int b, bool is_second, bool is_last, bool keep_tile) {
        float s[kSlots / 2], new_max[2], part[2];
        uint32_t p[kSlots / 4];
        if constexpr (kWhen == Other::kBefore) {
            start_other(b - 1, !is_second);
            start_scores<0, 2>(s, b);
            wgmma_wait<2>();
            arrive(shared.empty[other][group]);
            start_scores<2, 4>(s, b);
            wgmma_wait<0>();
        } else if constexpr (kWhen == Other::kAfter) {
            start_scores<0, 4>(s, b);
            start_other(b - 1, !is_second);
            wgmma_wait<1>();
        } else {
            start_scores<0, 4>(s, b);
            wgmma_wait<0>();
        }
        fence_registers(s);
        if (is_last) arrive(shared.q_empty);
        mask_and_max(s, new_max);
        probabilities(s, new_max, part, p);
        if constexpr (kWhen == Other::kAfter) {
            wgmma_wait<0>();
            arrive(shared.empty[other][group]);
        }
        fence_registers(o[0]);
        fence_registers(o[1]);
        rescale(new_max, kWhen != Other::kNone);
        sum[0] += part[0];
        sum[1] += part[1];
        own_values(p, kWhen != Other::kNone);
        if (!keep_tile) arrive(shared.empty[group][group]);
    }

    // Steps first..last of one item; step b is in K tile b % 2, which is also the consumer it belongs to.
    MDI_DEVICE void attend(int first, int last) {
        m[0] = m[1] = kMaxStart;
        sum[0] = sum[1] = 0.f;
        int b = first + ((first ^ group) & 1);
        if (b > last) arrive(shared.q_empty);  // no step of its own
        if (b == first) {
            own_step<Other::kNone>(b, false, b + 2 > last, b == last);
            b += 2;
        }
        if (group == 0) {
            for (; b <= last; b += 2) own_step<Other::kBefore>(b, b == first + 1, b + 2 > last, b == last);
        } else {
            for (; b <= last; b += 2) own_step<Other::kAfter>(b, b == first + 1, b + 2 > last, b == last);
        }
        if (((last ^ group) & 1) != 0) {
            start_other(last, last != first);
            finish_other();
        }
    }

    // o / (l + exp(sink - m)), rounded, to 16-byte stores through this consumer's half of the last K tile, which then is free:
    // only its own values are read there, and the scores of the step were complete before P.
    MDI_DEVICE void store(int item, int item_count, int buffer) {
        const int first_head = first_head_of(params, item);
        const int num_heads = min_of(kHeads, params.num_heads - first_head);
        float(&sums)[kConsumers][kHeads] = shared.row_sum[item_count & 1];
        float factor[2], sink[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            sink[f] = row + 8 * f < num_heads ? shared.sink[first_head + row + 8 * f] : 0.f;
            sum[f] += __shfl_xor_sync(~0u, sum[f], 1);
            sum[f] += __shfl_xor_sync(~0u, sum[f], 2);
            if (lane % 4 == 0) sums[group][row + 8 * f] = sum[f];
        }
        ptx::named_barrier_sync(kConsumerBarrier, kConsumers * kGroupThreads);  // sums are there
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const int head = row + 8 * f;
            const float valid_sum = sums[0][head] + sums[1][head];
            const float exponent = sink[f] - m[f];
            const float total = valid_sum + expf(exponent > 88.f ? 88.f : exponent);  // finite; a NaN sink stays NaN
            factor[f] = valid_sum == 0.f ? 0.f : kKeyFactor / total;          // 0: no valid lane (the largest p is 1)
        }
        const int first_row = threadIdx.x % kGroupThreads / 8, chunk = threadIdx.x % 8;
        bf16* out = params.out + (static_cast<int64_t>(token_of(params, item)) * params.num_heads + first_head + first_row) * kHeadDim +
                    group * kHalfDims + chunk * 8;
        uint8_t* tile = shared.k[buffer] + group * (kAtoms / 2) * kAtomBytes;
#pragma unroll
        for (int part = 0; part < kHalfDims / 64; ++part) {
            uint32_t pairs[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float* value = o[part / 2] + part % 2 * 32 + 2 * i;
                pairs[i] = ptx::pack_bf16x2(value[0] * factor[i % 2], value[1] * factor[i % 2]);
            }
            AtomWriter(tile + part * kAtomBytes, warp, lane).store(pairs);
        }
        ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
        const uint8_t* staged = tile + atom_offset(first_row, chunk);  // row + 16 has the same swizzle
#pragma unroll
        for (int part = 0; part < kHalfDims / 64; ++part) {
#pragma unroll
            for (int i = 0; i < kHeads / 16; ++i) {
                const uint4 v = *reinterpret_cast<const uint4*>(staged + part * kAtomBytes + i * 16 * 128);
                if (first_row + i * 16 < num_heads) {
                    *reinterpret_cast<uint4*>(out + i * 16 * kHeadDim + part * 64) = from_key_order(v);
                }
            }
        }
        arrive(shared.empty[buffer][group]);
    }

    MDI_DEVICE void store_zeros(int item) const {
        const int first_head = first_head_of(params, item);
        const int num_heads = min_of(kHeads, params.num_heads - first_head);
        bf16* out = params.out + (static_cast<int64_t>(token_of(params, item)) * params.num_heads + first_head) * kHeadDim;
        for (int i = threadIdx.x; i < num_heads * kHeadDim / 8; i += kConsumers * kGroupThreads) {
            reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
        }
    }

    MDI_DEVICE void run() {
        int b = 0, item_count = 0;  // steps and non-empty items so far, as the producer counts them
        int length = length_of(params, blockIdx.x), next_length = 0;
        for (int item = blockIdx.x; item < num_items(params); item += gridDim.x, length = __shfl_sync(~0u, next_length, 0)) {
            const int num_steps = (lanes_of(params, length) + kSlots - 1) / kSlots;
            // Arrives under this item's work; a load by all lanes would go to a uniform register, which is waited for at once.
            if (lane == 0) next_length = length_of(params, item + gridDim.x);
            if (num_steps == 0) {
                store_zeros(item);
                continue;
            }
            ptx::mbarrier_wait(address_of(&shared.q_full), item_count & 1);
            attend(b, b + num_steps - 1);
            b += num_steps;
            store(item, item_count, (b - 1) & 1);
            ++item_count;
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) sparse_sm90_kernel(const __grid_constant__ SparseParams params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            for (uint64_t& full : shared.full[i]) ptx::mbarrier_init(address_of(&full), kProducerWarps);  // a lane of each
            for (uint64_t& empty : shared.empty[i]) ptx::mbarrier_init(address_of(&empty), 4);      // a lane of each warp of the consumer
            ptx::mbarrier_init(address_of(&shared.p_ready[i]), 4);         // a lane of each warp of consumer i
        }
        ptx::mbarrier_init(address_of(&shared.q_full), kProducerWarps);    // a lane of each
        ptx::mbarrier_init(address_of(&shared.q_empty), 8);
        ptx::fence_mbarrier_init();
    }
    if (static_cast<int>(threadIdx.x) < params.num_heads) shared.sink[threadIdx.x] = __ldg(params.sink + threadIdx.x);
    __syncthreads();
    const int role = threadIdx.x / kGroupThreads;
    if (role >= kConsumers) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        Producer(params, shared).run();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        Consumer(params, shared, role).run();
    }
}

}  // namespace

void launch_sparse_sm90(const SparseParams& params) {
    int device = 0, num_sms = 0;
    check_cuda("attention.sparse", cudaGetDevice(&device));
    check_cuda("attention.sparse", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const int items = params.num_tokens * ((params.num_heads + kHeads - 1) / kHeads);
    const dim3 grid(min_of(items, num_sms));
    launch("attention.sparse", sparse_sm90_kernel, {grid, dim3(kThreads), sizeof(SharedStorage), params.stream}, params);
}

}  // namespace mdi::attention
