// What happens around the products of the two Hopper kernels of sparse attention: the rotary embedding of q on its way in, and the
// forms in which O leaves (model spec 4.2, 4.7, 8), with the bits of the separate ops.
//     kPlain    bf16( O )
//     kRotated  bf16( inverse rotation of bf16( O ) )
//     kCodes    that, quantised 1x32 and folded to one scale for each row of eight heads (elementwise/row_pass.cuh, rope_quant)
// Everything works on chunks of eight columns of one head in their natural order, a thread each, neighbouring lanes neighbouring
// chunks: a chunk holds whole pairs of the rotation, and four lanes a group of the quantisation.
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

// The angles (cosine, sine, ..) of chunk `chunk` (of eight) of the last 64 columns at a token's position; nullptr: it is not rotated
MDI_DEVICE const float* angles_of(const SparseRotary& rotary, int token, int chunk) {
    const int first = chunk * 8 - (kMaxRopeDim - rotary.rope_dim);
    if (first < 0) return nullptr;
    return rotary.table + static_cast<int64_t>(__ldg(rotary.positions + token)) * rotary.rope_dim + first;
}

// The same in registers
struct Rotation {
    bool any = false;
    alignas(16) float angles[8];

    MDI_DEVICE void load(const SparseRotary& rotary, int token, int chunk) {
        const float4* from = reinterpret_cast<const float4*>(angles_of(rotary, token, chunk));
        any = from != nullptr;
        if (!any) return;
        reinterpret_cast<float4*>(angles)[0] = __ldg(from);
        reinterpret_cast<float4*>(angles)[1] = __ldg(from + 1);
    }
    MDI_DEVICE uint4 forward(const uint4& x) const { return rotate_eight(x, angles, false); }
    MDI_DEVICE uint4 inverse(const uint4& x) const { return rotate_eight(x, angles, true); }
};

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
    MDI_DEVICE bf16* out(const SparseParams& params, int item) const {
        return params.out + (static_cast<int64_t>(token_of(params, item)) * params.num_heads + first_head_of(params, item) + first_row) * kHeadDim +
               chunk * 8;
    }
};

// Scale bytes of two groups of 32 columns, of which this lane and three neighbours hold a chunk each, by act_quant_scale
struct GroupBytes {
    int byte[2];

    MDI_DEVICE GroupBytes(const uint4& a, const uint4& b) {
        using elementwise::max_halves;
        constexpr uint32_t kMagnitude = 0x7fff7fffu;
        const auto largest = [](const uint4& v) {
            return max_halves(max_halves(v.x & kMagnitude, v.y & kMagnitude), max_halves(v.z & kMagnitude, v.w & kMagnitude));
        };
        const uint32_t x = largest(a), y = largest(b);
        uint32_t halves = max_halves(__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632));
        halves = max_halves(halves, __shfl_xor_sync(~0u, halves, 1));
        halves = max_halves(halves, __shfl_xor_sync(~0u, halves, 2));
        byte[0] = act_quant_scale(bits_float(halves << 16));
        byte[1] = act_quant_scale(bits_float(halves & 0xffff0000u));
    }
};

// A chunk's codes at its group's scale. The quotient is taken in bf16, where it is exact.
MDI_DEVICE uint2 encode_chunk(const uint4& x, int byte) {
    const uint32_t inverse = (byte == 255 ? 0x7fc0u : static_cast<uint32_t>(254 - byte) << 7) * 0x10001u;  // bytes up to 247 else
    const auto codes = [=](uint32_t pair) {
        const uint32_t value = bf16x2_product(pair, inverse);
        return static_cast<uint32_t>(e4m3x2_encode(elementwise::even_value(value), elementwise::odd_value(value)));
    };
    return make_uint2(codes(x.x) | codes(x.y) << 16, codes(x.z) | codes(x.w) << 16);
}

// fold_e4m3x8 with a short way for eight codes that stay normal numbers: their exponents are lowered, nothing is rounded.
MDI_DEVICE uint2 fold_chunk(const uint2& codes, uint32_t byte, uint32_t row_byte) {
    constexpr uint32_t kTop = 0x80808080u, kOnes = 0x01010101u;
    const uint32_t lower = (row_byte - byte) * 8;  // exponents start at bit 3
    const uint32_t smallest = (lower + 8) * kOnes;  // magnitude of the smallest code that stays normal
    if ((((codes.x | kTop) - smallest) & ((codes.y | kTop) - smallest) & kTop) == kTop && lower < 0x78) {
        return make_uint2(codes.x - lower * kOnes, codes.y - lower * kOnes);
    }
    return elementwise::fold_e4m3x8(codes, static_cast<int>(byte), static_cast<int>(row_byte));
}

// The codes of a thread's chunks (OutputPlace) in kParts atoms, first at the scale of their own group of 32 columns
template <int kParts>
struct OutputCodes {
    uint2 codes[OutputPlace::kRows][kParts];
    uint32_t bytes[OutputPlace::kRows] = {};  // of the groups, a byte for each part
    uint32_t row_byte[2] = {};                // largest of the warp's heads 0..7 and 8..15
    static_assert(kParts <= 4 && OutputPlace::kRows * OutputPlace::kRowStep == 2 * kCodeHeads);

    // Two chunks of row i
    MDI_DEVICE void quantise(int i, int part, const uint4 (&x)[2]) {
        const GroupBytes group(x[0], x[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            codes[i][part + j] = encode_chunk(x[j], group.byte[j]);
            bytes[i] |= static_cast<uint32_t>(group.byte[j]) << (8 * (part + j));
            row_byte[i / 2] = max_of(row_byte[i / 2], static_cast<uint32_t>(group.byte[j]));
        }
    }
    MDI_DEVICE void reduce() {
        row_byte[0] = __reduce_max_sync(~0u, row_byte[0]);
        row_byte[1] = __reduce_max_sync(~0u, row_byte[1]);
    }
    // Folded at row_byte. head: the warp's first of the item, first_dim: of part 0
    MDI_DEVICE void store(const SparseParams& params, int item, int head, int num_heads, int first_dim, const OutputPlace& place,
                          bool with_scale) const {
        const int token = token_of(params, item), lane = thread_index() % 32;
        const int64_t row = static_cast<int64_t>((first_head_of(params, item) + head) / kCodeHeads) * params.num_tokens + token;
        uint8_t* to = params.codes + row * (kCodeHeads * kHeadDim) + (place.first_row - head) * kHeadDim + first_dim + place.chunk * 8;
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            if (head + f * kCodeHeads >= num_heads) break;
#pragma unroll
            for (int i = 2 * f; i < 2 * f + 2; ++i) {
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    *reinterpret_cast<uint2*>(to + i % 2 * OutputPlace::kRowStep * kHeadDim + part * 64) = 
                        fold_chunk(codes[i][part], bytes[i] >> (8 * part) & 0xffu, row_byte[f]);
                }
            }
            to += static_cast<int64_t>(params.num_tokens) * (kCodeHeads * kHeadDim);
            if (with_scale && lane == 0) params.row_scale[row + f * static_cast<int64_t>(params.num_tokens)] = e8m0_decode(static_cast<uint8_t>(row_byte[f]));
        }
    }
};

// The output of a token without any lane, columns first_dim up to end_dim, by num_threads threads. A rotated zero keeps the sign that
// the rotation gives it.
template <Output kOutput>
MDI_DEVICE void store_empty(const SparseParams& params, int token, int first_head, int num_heads, int first_dim, int end_dim, int thread,
                            int num_threads) {
    const int chunks = (end_dim - first_dim) / 8;
    for (int i = thread; i < num_heads * chunks; i += num_threads) {
        const int head = first_head + i / chunks, dim = first_dim + i % chunks * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (kOutput != Output::kPlain && dim >= kHeadDim - 64) {
            Rotation rotation;
            rotation.load(params.rotary, token, (dim - (kHeadDim - 64)) / 8);
            if (rotation.any) v = rotation.inverse(v);
        }
        if constexpr (kOutput != Output::kCodes) {
            *reinterpret_cast<uint4*>(params.out + (static_cast<int64_t>(token) * params.num_heads + head) * kHeadDim + dim) = v;
        } else {
            const int byte = act_quant_scale(0.f);
            const int64_t row = static_cast<int64_t>(head / kCodeHeads) * params.num_tokens + token;
            *reinterpret_cast<uint2*>(params.codes + (row * kCodeHeads + head % kCodeHeads) * kHeadDim + dim) = encode_chunk(v, byte);
            if (head % kCodeHeads == 0 && dim == 0) params.row_scale[row] = e8m0_decode(static_cast<uint8_t>(byte));
        }
    }
}

}  // namespace mdi::attention::sm90
