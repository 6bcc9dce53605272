// What the two Hopper kernels of sparse attention share (sparse_sm90.cu, sparse_split_sm90.cu): tiles, items, packed rows and
// their expansion to bf16, and the softmax of one step. They give the same bits because every step runs through the same
// instructions: nothing in here may depend on how steps are spread over blocks, and products whose result meets a sum are
// rounded on their own (__fmul_rn), whatever the compiler makes of the code around them.
//
// Tiles are atoms of 64 columns (128 bytes a row) under the 128-byte swizzle: K-major for Q, K in S and P, MN-major for V = the
// same K tile. They are in the order and scale of row_codec.cuh: Q is permuted on its way in and O on its way out; the scale of S
// and the last factor of O take the key factor back, exactly. With expanded rows they are in natural order, which gives the same bits:
// the order of the columns inside the eight of a product's k does not matter to wgmma (test_sparse_expanded_rows_give_the_bits_of_packed_ones).
#pragma once
#include <cuda_bf16.h>

#include "attention/attention.h"
#include "attention/row_codec.cuh"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"

namespace mdi::attention::sm90 {

using bf16 = __nv_bfloat16;

constexpr int kHeads = 64;  // M of the products
constexpr int kSplitBlocks = 8;  // blocks of a cluster that share a token (sparse_split_sm90.cu)
constexpr int kSlots = 64;  // slots of a step
constexpr int kGroupThreads = 128;
constexpr int kAtomBytes = 64 * 128;                  // 64 rows of 64 bf16 columns
constexpr int kAtoms = kHeadDim / 64;
constexpr int kTileBytes = kAtoms * kAtomBytes;
constexpr int kQuarters = 4;                          // parts of a K tile, two atoms each
constexpr int kExpanderThreads = 256;                 // threads that expand a K tile
constexpr int kWarpRows = kSlots / (kExpanderThreads / 32);  // rows of a step that a warp expands, four lanes each
constexpr int kPackedPitch = kCompressedRowBytes;     // bytes from one packed row in shared memory to the next
constexpr int kPackedWarpBytes = kWarpRows * kPackedPitch;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxStart = -1e30f;                   // finite: a masked step must not make NaN

// threadIdx.x read anew: not kept in a register over the inner loop.
MDI_DEVICE int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

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

    MDI_DEVICE explicit AtomWriter(uint8_t* atom) {  // lane l gives row l % 8 of matrix l / 8 of four
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, column_tile = threadIdx.x / 16 % 2;
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

using ptx::load_shared_v4;

MDI_DEVICE void load_shared_v2(uint32_t address, uint32_t& x, uint32_t& y) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
MDI_DEVICE uint32_t load_shared_u16(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}
MDI_DEVICE int load_shared_s32(uint32_t address) {
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
MDI_DEVICE void store_shared_v4(uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

MDI_DEVICE void store_shared_u8(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

MDI_DEVICE void store_shared_u16(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(v)) : "memory");
}

MDI_DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

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

// ---- packed rows ---------------------------------------------------------------------------------------------------

// The row of a step that one producer lane serves, with three other lanes of its warp.
struct LaneRow {
    int idx;      // row of its pool, negative: none
    bool window;  // it is a window row

    MDI_DEVICE bool any() const { return idx >= 0; }

    MDI_DEVICE void settle(const SparseParams& params, int loaded, int slot) {
        const bool in_window = slot < params.num_window;
        const int limit = in_window ? params.num_window_rows : params.num_compressed_rows;
        idx = static_cast<uint32_t>(loaded) < static_cast<uint32_t>(limit) ? loaded : -1;
        window = any() && in_window;
    }
};

// Eight E2M1 codes times scale * 2^117 as row_codec.cuh's expand_fp4: the same bits with fewer shifts. A nibble times
// 2^12 + 2^6 puts its sign and its magnitude where bf16 wants them; what else appears is masked off.
MDI_DEVICE uint4 expand_nibbles(uint32_t codes, uint32_t factor) {
    constexpr uint32_t kKept = 0x81c081c0u;
    const uint32_t upper = codes >> 8;
    return make_uint4(bf16x2_product((codes & 0x000f000fu) * 0x1040u & kKept, factor),
                      bf16x2_product((codes & 0x00f000f0u) * 0x0104u & kKept, factor),
                      bf16x2_product((upper & 0x000f000fu) * 0x1040u & kKept, factor),
                      bf16x2_product((upper & 0x00f000f0u) * 0x0104u & kKept, factor));
}

// Sixteen E4M3 codes of one scale as expand_fp8 with fp8_factor would: the same bits with one product instead of two unless the
// scale is above 2^16. A NaN code makes all sixteen NaN.
MDI_DEVICE void expand_codes(const uint4& codes, uint32_t scale, uint4& low, uint4& high) {
    constexpr uint32_t kMagnitude = 0x07f007f0u, kSign = 0x80008000u, kBits = 0x7f7f7f7fu, kOnes = 0x01010101u;
    constexpr uint32_t kLargest = 254 - 111;  // with the 2^120 that make a code's bits its value
    const uint32_t nan = ((codes.x & kBits) + kOnes) | ((codes.y & kBits) + kOnes) | ((codes.z & kBits) + kOnes) | ((codes.w & kBits) + kOnes);
    uint32_t factor = (scale <= kLargest ? scale + 111 : 247) * 0x00800080u;
    if ((nan & 0x80808080u) != 0) factor = 0x7fff7fffu;
    const auto pair = [=](uint32_t low, uint32_t high, uint32_t select) {
        const uint32_t t = __byte_perm(low, high, select);  // a code in both bytes of each half
        return bf16x2_product((t * 16 & kMagnitude) | (t & kSign), factor);
    };
    const auto chunk = [=](uint32_t a, uint32_t b) { return make_uint4(pair(a, b, 0x4400), pair(a, b, 0x5511), pair(a, b, 0x6622), pair(a, b, 0x7733)); };
    low = chunk(codes.x, codes.y);
    high = chunk(codes.z, codes.w);
    if (scale > kLargest) {
        const uint32_t rest = fp8_factor(scale);
        const auto product = [=](const uint4& v) {
            return make_uint4(bf16x2_product(v.x, rest), bf16x2_product(v.y, rest), bf16x2_product(v.z, rest), bf16x2_product(v.w, rest));
        };
        low = product(low);
        high = product(high);
    }
}

// A warp's packed bytes: eight rows, copied asynchronously to shared memory and taken from there to registers as they are expanded,
// so that the next ones are on their way meanwhile. Lane l expands row l / 2 % 8 with three other lanes: of four units of 16 bytes
// each takes one, so that eight neighbouring lanes (four rows, two units) hit all banks, here and in the tile.
//   compressed: unit `part` of each 64 bytes = 32 columns = four chunks of atom 2 * quarter + part / 2
//   window: unit window_unit(part) of each 64 bytes = 16 columns = two chunks of an atom
// The buffer holds a compressed row (288 bytes), or two quarters of a window row and its scales. A lane copies the codes that it takes
// itself; the scales are for all four.
struct Packed {
    uint32_t lane_slot;          // the lane's row in the warp's buffer
    uint4 codes[2];              // compressed: of two quarters; window: two atoms of one
    uint32_t scales[2];          // compressed: two bytes a quarter; window: the eight of a half
    uint32_t second_scales[2];

    MDI_DEVICE static int row_of(int lane) { return lane / 2 % 8; }
    MDI_DEVICE static int part_of(int lane) { return lane % 2 + lane / 16 * 2; }
    MDI_DEVICE static int window_unit(int part) { return part % 2 * 2 + part / 2; }

    // staged: kPackedWarpBytes of this warp
    MDI_DEVICE Packed(const void* staged, int lane) : lane_slot(address_of(staged) + row_of(lane) * kPackedPitch) {}

    // Starts the copies of a compressed row; a window row or one that is not there is left alone. The first scales, so that no copy
    // waits for the address of another.
    MDI_DEVICE void start_compressed(const SparseParams& params, const LaneRow& from, int part) const {
        if (from.any() && !from.window) {
            const uint8_t* bytes = params.compressed + (static_cast<int64_t>(from.idx) * kCompressedRowBytes + part * 16);
            const uint32_t to = lane_slot + part * 16;
            if (part < 2) ptx::cp_async_16(to + 256, bytes + 256);
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::cp_async_16(to + 64 * i, bytes + 64 * i);
        }
    }
    // Starts the copies of a quarter of a window row, as one group; the first with the scales
    template <int kQuarter>
    MDI_DEVICE void start_quarter(const SparseParams& params, const LaneRow& from, int part) const {
        if (from.window) {
            const uint8_t* bytes = params.window + (static_cast<int64_t>(from.idx) * kWindowRowBytes + window_unit(part) * 16);
            if (kQuarter == 0 && part == 0) ptx::cp_async_16(lane_slot + 256, bytes + kHeadDim);
#pragma unroll
            for (int i = 0; i < 2; ++i) ptx::cp_async_16(quarter_at(kQuarter, part) + i * 64, bytes + kQuarter * 128 + i * 64);
        }
        ptx::cp_async_commit();
    }
    // Where the lane's first unit of a quarter of a window row lies; the second is 64 bytes on.
    MDI_DEVICE uint32_t quarter_at(int quarter, int part) const { return lane_slot + window_unit(part) * 16 + quarter % 2 * 128; }
    // A row that fits, or the first half of a window row, as two groups; all lanes
    MDI_DEVICE void start(const SparseParams& params, const LaneRow& from, int part) const {
        __syncwarp();  // every lane has read what is overwritten
        start_compressed(params, from, part);
        start_quarter<0>(params, from, part);
        start_quarter<1>(params, from, part);
    }

    // All lanes: the copies of all but the latest kPending groups are there.
    template <int kPending>
    MDI_DEVICE static void wait() {
        ptx::cp_async_wait<kPending>();
        __syncwarp();
    }
    // The lane's bytes of a quarter of a window row, from two addresses, and the scales if it is the first
    template <int kQuarter>
    MDI_DEVICE void take_window(uint32_t first, uint32_t second) {
        codes[0] = load_shared_v4(first);
        codes[1] = load_shared_v4(second);
        if (kQuarter == 0) {
            load_shared_v2(lane_slot + 256, scales[0], scales[1]);
            load_shared_v2(lane_slot + 256 + 8, second_scales[0], second_scales[1]);
        }
        if (kQuarter == 2) scales[0] = second_scales[0], scales[1] = second_scales[1];
    }
    // The lane's bytes of a quarter of a compressed row and of the next quarter; kQuarter is even.
    template <int kQuarter>
    MDI_DEVICE void take_compressed(bool any, int part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = load_shared_v4(lane_slot + 16 * part + 64 * (kQuarter + i));
            scales[i] = any ? load_shared_u16(lane_slot + 256 + 2 * part + 8 * (kQuarter + i)) : 0;  // any code times 0 is 0
        }
    }
};

// Where a lane's chunks of a K tile lie in its first two atoms (see Packed for the columns). tile: its address, or 0 for offsets.
struct LaneChunks {
    uint32_t compressed, window;

    MDI_DEVICE LaneChunks(uint32_t tile, int tile_row, int part) {
        const uint32_t first = tile + atom_offset(tile_row, part % 2 * 4);
        compressed = first + part / 2 * kAtomBytes;
        window = first ^ (part / 2 << 5);
    }
    // chunk: 0 to 3 as expand_quarter numbers them
    MDI_DEVICE uint32_t at(bool is_window, int chunk) const {
        return is_window ? (window ^ (chunk % 2 * 16)) + chunk / 2 * kAtomBytes : compressed ^ (chunk * 16);
    }
};

// Expands one quarter (two atoms) of the lane's row: four chunks. Rows of a warp may differ in kind.
template <int kQuarter>
MDI_DEVICE void expand_quarter(const Packed& packed, const LaneRow& row, int part, uint4 (&chunks)[4]) {
    if (row.window) {
#pragma unroll
        for (int atom = 0; atom < 2; ++atom) {
            expand_codes(packed.codes[atom], packed.scales[kQuarter % 2] >> (8 * (2 * atom + part % 2)) & 0xffu, chunks[2 * atom],
                         chunks[2 * atom + 1]);
        }
    } else {
        const uint4& v = packed.codes[kQuarter % 2];
        uint32_t factor[2];
        fp4_factors(packed.scales[kQuarter % 2], factor);
        chunks[0] = expand_nibbles(v.x, factor[0]);
        chunks[1] = expand_nibbles(v.y, factor[0]);
        chunks[2] = expand_nibbles(v.z, factor[1]);
        chunks[3] = expand_nibbles(v.w, factor[1]);
    }
}

// The rows of the warp that are there, a bit each; all lanes
MDI_DEVICE uint8_t valid_rows(const LaneRow& row) {
    uint32_t bits = __ballot_sync(~0u, row.any()) & 0x5555u;  // lanes 0, 2, ... 14
    bits = (bits | bits >> 1) & 0x3333u;
    bits = (bits | bits >> 2) & 0x0f0fu;
    return static_cast<uint8_t>(bits | bits >> 4);
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// Masks the scores of a step (bit i of `valid`: slot i is there) and takes the largest of each row into `top`, in log2 and equal in
// the four lanes of the row. Returns what the scores are still to be multiplied by.
MDI_DEVICE float mask_scores(float (&s)[kSlots / 2], float softmax_scale, uint32_t valid_low, uint32_t valid_high, int lane,
                             float (&top)[2]) {
    float scale = softmax_scale * (kKeyFactor * kLog2e);
    if (!(scale > 0.f)) {  // the order changes, or -inf would be lost
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i) s[i] = __fmul_rn(s[i], scale);
        scale = 1.f;
    }
    if ((valid_low & valid_high) != ~0u) {
        const int shift = 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i) {
            const int tile = i / 4;  // slots 8 * tile + 2 * (lane % 4) + i % 2
            if (((tile < 4 ? valid_low : valid_high) >> shift >> (8 * (tile % 4) + i % 2) & 1) == 0) s[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        float largest[2] = {fmaxf(s[2 * f], s[2 * f + 1]), fmaxf(s[2 * f + 4], s[2 * f + 5])};  // of even and odd tiles
#pragma unroll
        for (int i = 8; i < kSlots / 2; i += 4) {
            float& x = largest[i / 4 % 2];
            x = fmaxf(x, fmaxf(s[i + 2 * f], s[i + 2 * f + 1]));
        }
        top[f] = fmaxf(largest[0], largest[1]);
    }
#pragma unroll
    for (int f = 0; f < 2; ++f) top[f] = fmaxf(top[f], __shfl_xor_sync(~0u, top[f], 1));
#pragma unroll
    for (int f = 0; f < 2; ++f) top[f] = __fmul_rn(fmaxf(top[f], __shfl_xor_sync(~0u, top[f], 2)), scale);
    return scale;
}

// The sink in log2
MDI_DEVICE float sink_of(const SparseParams& params, int head) { return __fmul_rn(__ldg(params.sink + head), kLog2e); }

// The running maximum, which P refers to (model spec 4.6). A NaN does not move it.
MDI_DEVICE float next_max(float m, float top) { return top > m ? top : m; }

// p = 2^(scale * s - max): this thread's part of the sums takes it unrounded, the products rounded.
MDI_DEVICE void exponentiate(const float (&s)[kSlots / 2], float scale, const float (&new_max)[2], float (&part)[2],
                             uint32_t (&p)[kSlots / 4]) {
    float sums[2][2] = {};  // of even and odd tiles
#pragma unroll
    for (int i = 0; i < kSlots / 4; ++i) {
        const float p0 = ptx::exp2_approx(__fmaf_rn(s[2 * i], scale, -new_max[i % 2]));
        const float p1 = ptx::exp2_approx(__fmaf_rn(s[2 * i + 1], scale, -new_max[i % 2]));
        sums[i / 2 % 2][i % 2] += p0 + p1;
        p[i] = ptx::pack_bf16x2(p0, p1);
    }
    part[0] = sums[0][0] + sums[1][0];
    part[1] = sums[0][1] + sums[1][1];
}

// What O is multiplied by; sink: in log2. The exponent is kept finite; a NaN sink stays NaN.
MDI_DEVICE float output_factor(float valid_sum, float sink, float m) {
    const float exponent = sink - m;
    const float total = valid_sum + exp2f(exponent > 127.f ? 127.f : exponent);
    return valid_sum == 0.f ? 0.f : kKeyFactor / total;  // 0: no valid lane (p of the largest score is about 1)
}

}  // namespace mdi::attention::sm90
