// What the two Hopper kernels of sparse attention do around the products: the rotary embedding of q on its way in, and the forms in
// which O leaves (model spec 4.2, 4.7, 8), with the bits of the separate ops.
//     kPlain    bf16( O )
//     kRotated  bf16( inverse rotation of bf16( O ) )
//     kCodes    that, quantised 1x32 and folded to one scale for each row of eight heads (rope_quant of elementwise/rmsnorm_quant.cu)
// A thread works on chunks of eight columns of one head, neighbouring lanes on neighbouring chunks: a chunk has whole pairs of the
// rotation, four lanes a group of the quantisation.
//
// kCodes knows a row's scale once the largest |o| of all its columns has been exchanged; then most values are rounded once.
// Measured on an H200, memory cold, T=4096, 640 and 128 slots: kRotated 0.802 and 0.277 ms, with passes of their own over q and o 0.843
// and 0.316; kCodes 0.859 and 0.322 instead of 0.929 and 0.400, and 0.874 instead of 0.903 where every chunk has small values that are
// rounded twice. T=256, 640 slots: 0.071 instead of 0.077 and 0.075 instead of 0.076. T=8: 0.028 instead of 0.033, 0.029 instead of 0.034.
#pragma once
#include "attention/sparse_sm90.cuh"
#include "common/rotary.cuh"
#include "elementwise/row_pass.cuh"

namespace mdi::attention::sm90 {

enum class Output { kPlain, kRotated, kCodes };

inline Output output_of(const SparseParams& params) {
    if (params.rotary.positions == nullptr) return Output::kPlain;
    return params.codes == nullptr ? Output::kRotated : Output::kCodes;
}

static_assert(kMaxRopeDim == 64);  // the last atom

// The first angle (cosine, sine, ..) of chunk `chunk` (of eight) of the last 64 columns in a row of the table, negative: not rotated
MDI_DEVICE int first_angle(const SparseRotary& rotary, int chunk) { return chunk * 8 - (kMaxRopeDim - rotary.rope_dim); }
MDI_DEVICE const float* table_row(const SparseRotary& rotary, int position) {
    return rotary.table + static_cast<int64_t>(position) * rotary.rope_dim;
}

// Loads that stay where they are written: what follows runs under their latency.
MDI_DEVICE int load_position(const SparseRotary& rotary, int token) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(rotary.positions + token) : "memory");
    return x;
}
MDI_DEVICE float4 load_pinned(const float* from) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}

// The rotation of a chunk (of eight) of the last 64 columns
struct Rotation {
    bool any = false;
    alignas(16) float angles[8];

    MDI_DEVICE void load(const SparseRotary& rotary, int position, int chunk) {
        const int first = first_angle(rotary, chunk);
        any = first >= 0;
        if (!any) return;
        const float* from = table_row(rotary, position) + first;
        reinterpret_cast<float4*>(angles)[0] = load_pinned(from);
        reinterpret_cast<float4*>(angles)[1] = load_pinned(from + 4);
    }
    MDI_DEVICE uint4 forward(const uint4& x) const { return rotate_eight(x, angles, false); }
    MDI_DEVICE uint4 inverse(const uint4& x) const { return rotate_eight(x, angles, true); }
};

// A head of a token among the [T, H] of the output, plain or as codes
MDI_DEVICE int64_t output_row(const SparseParams& params, int head, int token) {
    return static_cast<int64_t>(token) * params.num_heads + head;
}

// The chunks of O that a consumer's thread takes: a warp has 16 heads, four at a time, eight lanes each.
struct OutputPlace {
    static constexpr int kRows = 4, kRowStep = 4;
    int first_row, chunk;

    MDI_DEVICE explicit OutputPlace(int thread) : first_row(thread / 32 * 16 + thread % 32 / 8), chunk(thread % 8) {}
    MDI_DEVICE int row(int i) const { return first_row + i * kRowStep; }
    // Four rows on, bit 2 of the swizzle changes.
    MDI_DEVICE uint32_t staged(const uint8_t* tile, int atom, int i) const {
        return (address_of(tile) + atom_offset(first_row, chunk) ^ (i % 2 * 64)) + atom * kAtomBytes + i * kRowStep * 128;
    }
    // Where the thread's first chunk goes in params.out or params.codes
    MDI_DEVICE int64_t offset(const SparseParams& params, int item) const {
        return output_row(params, first_head_of(params, item) + first_row, token_of(params, item)) * kHeadDim + chunk * 8;
    }
};

// Largest |x| of a chunk's even and of its odd columns, as bf16 bits: NaN > Inf > finite
MDI_DEVICE uint32_t largest_halves(const uint4& x) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    using elementwise::max_halves;
    return max_halves(max_halves(x.x & kMagnitude, x.y & kMagnitude), max_halves(x.z & kMagnitude, x.w & kMagnitude));
}
MDI_DEVICE uint32_t largest_half(uint32_t halves) { return max_of(halves & 0xffffu, halves >> 16); }

// act_quant_scale of a largest |x| given as bf16 bits
MDI_DEVICE int scale_byte(uint32_t largest) { return act_quant_scale(bits_float(largest << 16)); }

MDI_DEVICE uint4 scaled(const uint4& x, uint32_t pair) {
    return make_uint4(bf16x2_product(x.x, pair), bf16x2_product(x.y, pair), bf16x2_product(x.z, pair), bf16x2_product(x.w, pair));
}
// 2^(127 - byte) as a bf16 pair: a quotient by the scale is exact in bf16. Finite maxima give bytes up to 247.
MDI_DEVICE uint32_t inverse_scale(int byte) { return (byte == 255 ? 0x7fc0u : static_cast<uint32_t>(254 - byte) << 7) * 0x10001u; }

// The columns of a chunk of a tile are in key order, or as they are (kKeyOrder false).
template <bool kKeyOrder>
MDI_DEVICE uint4 to_tile_order(const uint4& v) {
    return kKeyOrder ? to_key_order(v) : v;
}
template <bool kKeyOrder>
MDI_DEVICE uint4 from_tile_order(const uint4& v) {
    return kKeyOrder ? from_key_order(v) : v;
}

// E4M3 codes, in their natural order, of a chunk
template <bool kKeyOrder>
MDI_DEVICE uint2 encode_chunk(const uint4& x) {
    using elementwise::even_value;
    using elementwise::odd_value;
    const auto pair = [](float even, float odd) { return static_cast<uint32_t>(e4m3x2_encode(even, odd)); };
    if constexpr (kKeyOrder) {
        return make_uint2(pair(even_value(x.x), even_value(x.y)) | pair(even_value(x.z), even_value(x.w)) << 16,
                          pair(odd_value(x.x), odd_value(x.y)) | pair(odd_value(x.z), odd_value(x.w)) << 16);
    }
    return make_uint2(pair(even_value(x.x), odd_value(x.x)) | pair(even_value(x.y), odd_value(x.y)) << 16,
                      pair(even_value(x.z), odd_value(x.z)) | pair(even_value(x.w), odd_value(x.w)) << 16);
}

// Codes folded at a row's scale are rounded twice: at the scale of their group of 32 columns, then at the row's. Where one rounding at
// the row's scale gives a normal number, two give the same: the second loses nothing above 2^-6, and from 15/16 of that up both ways
// end there.

// One rounding. Clears `exact` unless all eight codes are normal numbers (or NaN); else fold_chunk must tell.
template <bool kKeyOrder>
MDI_DEVICE uint2 encode_at_row(const uint4& x, int row_byte, bool& exact) {
    constexpr uint32_t kTop = 0x80808080u, kSmallest = 0x08080808u;
    const uint2 codes = encode_chunk<kKeyOrder>(scaled(x, row_byte == 255 ? 0u : inverse_scale(row_byte)));  // finite values of a NaN row: 0
    exact = exact && (((codes.x | kTop) - kSmallest) & ((codes.y | kTop) - kSmallest) & kTop) == kTop;
    return codes;
}

// Two roundings. largest: |x| of the chunk's group of 32 columns, as bf16 bits
template <bool kKeyOrder>
MDI_DEVICE uint2 fold_chunk(const uint4& x, uint32_t largest, int row_byte) {
    const int byte = scale_byte(largest);
    return elementwise::fold_e4m3x8(encode_chunk<kKeyOrder>(scaled(x, inverse_scale(byte))), byte, row_byte);
}

// Largest |x| of two groups, of which this lane and three neighbours hold a chunk each: that of a's in the lower half. All lanes.
MDI_DEVICE uint32_t largest_of_groups(const uint4& a, const uint4& b) {
    const uint32_t x = largest_halves(a), y = largest_halves(b);
    uint32_t largest = elementwise::max_halves(__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632));
    largest = elementwise::max_halves(largest, __shfl_xor_sync(~0u, largest, 1));
    return elementwise::max_halves(largest, __shfl_xor_sync(~0u, largest, 2));
}

// The output of a token without any lane, by num_threads threads. A rotated zero has the sign that the rotation gives it.
template <Output kOutput>
MDI_DEVICE void store_empty(const SparseParams& params, int token, int first_head, int num_heads, int thread, int num_threads) {
    constexpr int kChunks = kHeadDim / 8, kFirstRotated = kChunks - kMaxRopeDim / 8;
    for (int i = thread; i < num_heads * kChunks; i += num_threads) {
        const int head = first_head + i / kChunks, chunk = i % kChunks;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (kOutput != Output::kPlain && chunk >= kFirstRotated) {
            Rotation rotation;
            rotation.load(params.rotary, load_position(params.rotary, token), chunk - kFirstRotated);
            if (rotation.any) v = rotation.inverse(v);
        }
        if constexpr (kOutput != Output::kCodes) {
            reinterpret_cast<uint4*>(params.out)[output_row(params, head, token) * kChunks + chunk] = v;
        } else {
            const int byte = scale_byte(0);
            const int64_t row = output_row(params, head, token);
            reinterpret_cast<uint2*>(params.codes)[row * kChunks + chunk] = encode_chunk<false>(scaled(v, inverse_scale(byte)));
            if (head % kCodeHeads == 0 && chunk == 0) params.row_scale[row / kCodeHeads] = e8m0_decode(static_cast<uint8_t>(byte));
        }
    }
}

}  // namespace mdi::attention::sm90
