// Rotary embedding of the last R of d columns in adjacent pairs (model spec 4.2):
//     (a, b) -> (a*c - b*s, a*s + b*c),   c, s = table[position],   s negated for the inverse.
// The four products are rounded to float32 on their own and the sums are not contracted into fused multiply-adds, so that
// the result has the bits of the plain definition; one rounding to bf16. The other columns are copied bit for bit, and not
// touched at all when out is x.
//
// A row is one (token, head). Threads are (row, vector of kColumns columns), vectors fastest, so that neighbouring lanes
// share a row; a thread does kRowsPerThread rows, all loaded before the first store. kColumns is 8 (16-byte accesses), or 2
// where a width, stride or address does not allow that. Heads of a token find the table row in L1.
// Memory-bound: R/d of x is read and written in place, 8 R bytes of table a token. Offsets are 64-bit. No shared memory.
#include <stdexcept>
#include <string>

#include "common/launch.h"
#include "common/rotary.cuh"
#include "elementwise/elementwise.h"

namespace mdi::elementwise {
namespace {

constexpr int kRopeThreads = 256;
constexpr int kRowsPerThread = 2;

template <int kColumns>
struct Words {
    uint32_t word[kColumns / 2];
};

template <int kColumns>
MDI_DEVICE Words<kColumns> load_words(const bf16* source) {
    Words<kColumns> words;
    if constexpr (kColumns == 8) {
        const uint4 packed = *reinterpret_cast<const uint4*>(source);
        words.word[0] = packed.x, words.word[1] = packed.y, words.word[2] = packed.z, words.word[3] = packed.w;
    } else {
        words.word[0] = *reinterpret_cast<const uint32_t*>(source);
    }
    return words;
}

template <int kColumns>
MDI_DEVICE void store_words(bf16* target, const Words<kColumns>& words) {
    if constexpr (kColumns == 8)
        *reinterpret_cast<uint4*>(target) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
    else
        *reinterpret_cast<uint32_t*>(target) = words.word[0];
}

// cosines and sines of kColumns columns, alternating: table row [R/2, 2] read flat
template <int kColumns>
MDI_DEVICE void load_angles(const float* source, float (&angle)[kColumns]) {
    if constexpr (kColumns == 8) {
        const float4 low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
        angle[0] = low.x, angle[1] = low.y, angle[2] = low.z, angle[3] = low.w;
        angle[4] = high.x, angle[5] = high.y, angle[6] = high.z, angle[7] = high.w;
    } else {
        const float2 pair = *reinterpret_cast<const float2*>(source);
        angle[0] = pair.x, angle[1] = pair.y;
    }
}

MDI_DEVICE int64_t offset(int64_t token_stride, int head_dim, uint32_t token, uint32_t head) {
    return static_cast<int64_t>(token) * token_stride + static_cast<int64_t>(head) * head_dim;
}

// first_column: 0, or d - R when the other columns are in place already. A block covers kRopeThreads / vectors rows at a time,
// which are token_step tokens and head_step heads.
template <int kColumns>
__global__ void __launch_bounds__(kRopeThreads)
    rope_kernel(RopeParams p, int first_column, int vectors, int rows_at_once, int token_step, int head_step) {
    const int row_in_block = static_cast<int>(threadIdx.x) / vectors;
    if (row_in_block >= rows_at_once) return;
    const auto num_rows = static_cast<uint32_t>(p.num_tokens * p.num_heads);  // the launcher checked
    const uint32_t first_row = blockIdx.x * static_cast<uint32_t>(rows_at_once * kRowsPerThread) + row_in_block;
    const int nope_dim = p.head_dim - p.rope_dim;
    uint32_t token[kRowsPerThread], head[kRowsPerThread];
    token[0] = first_row / static_cast<uint32_t>(p.num_heads);
    head[0] = first_row - token[0] * static_cast<uint32_t>(p.num_heads);
#pragma unroll
    for (int i = 1; i < kRowsPerThread; ++i) {
        token[i] = token[i - 1] + static_cast<uint32_t>(token_step);
        head[i] = head[i - 1] + static_cast<uint32_t>(head_step);
        if (head[i] >= static_cast<uint32_t>(p.num_heads)) head[i] -= static_cast<uint32_t>(p.num_heads), ++token[i];
    }
    // a block of more than kRopeThreads vectors a row (rows_at_once == 1) loops over the row
    for (int v = static_cast<int>(threadIdx.x) % vectors; v * kColumns + first_column < p.head_dim; v += vectors) {
        const int column = first_column + v * kColumns;
        Words<kColumns> words[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i)
            if (first_row + static_cast<uint32_t>(i * rows_at_once) < num_rows)
                words[i] = load_words<kColumns>(p.x + offset(p.x_stride, p.head_dim, token[i], head[i]) + column);
        float angle[kColumns] = {};
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            if (first_row + static_cast<uint32_t>(i * rows_at_once) >= num_rows) continue;
            if (column >= nope_dim) {
                if (i == 0 || token[i] != token[i - 1])  // heads of one token share its angles
                    load_angles<kColumns>(p.table + static_cast<int64_t>(p.positions[token[i]]) * p.rope_dim + (column - nope_dim),
                                          angle);
#pragma unroll
                for (int w = 0; w < kColumns / 2; ++w)
                    words[i].word[w] = rotate_pair(words[i].word[w], angle[2 * w], p.inverse ? -angle[2 * w + 1] : angle[2 * w + 1]);
            }
            store_words<kColumns>(p.out + offset(p.out_stride, p.head_dim, token[i], head[i]) + column, words[i]);
        }
    }
}

template <int kColumns>
void launch_vectors(const RopeParams& p) {
    const int first_column = p.out == p.x ? p.head_dim - p.rope_dim : 0;
    const int vectors = min_of((p.head_dim - first_column) / kColumns, kRopeThreads);
    const int rows_at_once = kRopeThreads / vectors;
    const int64_t blocks = ceil_div<int64_t>(p.num_tokens * p.num_heads, static_cast<int64_t>(rows_at_once) * kRowsPerThread);
    launch("elementwise.rope", rope_kernel<kColumns>,
           {dim3(static_cast<unsigned>(blocks)), dim3(kRopeThreads), 0, p.stream}, p, first_column, vectors, rows_at_once,
           rows_at_once / p.num_heads, rows_at_once % p.num_heads);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void launch_rope(const RopeParams& p) {
    if (p.rope_dim == 0 && p.out == p.x) return;
    if (p.num_tokens * p.num_heads >= int64_t{1} << 31)
        throw std::runtime_error("elementwise.rope: x must have fewer than 2^31 rows of one head, got T * h = " +
                                 std::to_string(p.num_tokens * p.num_heads));
    const bool wide = p.head_dim % 8 == 0 && p.rope_dim % 8 == 0 && p.x_stride % 8 == 0 && p.out_stride % 8 == 0 &&
                      aligned(p.x) && aligned(p.out) && aligned(p.table);
    if (wide)
        launch_vectors<8>(p);
    else
        launch_vectors<2>(p);
}

}  // namespace mdi::elementwise
