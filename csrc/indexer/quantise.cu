// Index keys and queries to FP4 with one power-of-two scale per 32 elements (mxfp4, model spec 4.4), and the
// translation of logical cache entries to physical rows.
//
//   s = ceilpow2(max(amax, 6 * 2^-126) * fp32(1/6)),  code = e2m1(x / s)      (the rules live in number_formats.cuh)
//
// Four threads own one group of 32 elements, 8 each (one 16-byte load of bf16, one 4-byte word of codes); the group
// maximum is taken over the bits of |x|, so that NaN and Inf reach the scale byte (255) instead of being dropped.
// write_keys scatters a row's codes and scales to rows[slots[r]]; a slot of -1 (or outside the pool) writes nothing.
// quant_query is the same kernel without slots; rope_quant_query first rotates the last R columns (common/rotary.cuh) and
// rounds them to bf16, as the op rope does. Limits: Di 64 or 128; offsets are 64-bit. Memory-bound.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/rotary.cuh"
#include "indexer/indexer.h"

namespace mdi::indexer {
namespace {

constexpr int kThreads = 256;

// Block: Di / 8 threads a row, one vector each, so that four neighbouring lanes share a group.
template <bool kRope>
__global__ void __launch_bounds__(kThreads) quantise_kernel(QuantParams p, QueryRope rope) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int vector = static_cast<int>(threadIdx.x);
    const bool inside = row < p.num_rows;  // the lanes behind the end stay for the shuffles
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (inside) {
        packed = *reinterpret_cast<const uint4*>(p.x + row * p.head_dim + vector * 8);
        if constexpr (kRope) {
            const int column = vector * 8 - (p.head_dim - rope.rope_dim);
            const uint32_t token = static_cast<uint32_t>(row) / static_cast<uint32_t>(rope.num_heads);
            const float* angles = rope.table + static_cast<int64_t>(rope.positions[token]) * rope.rope_dim;
            if (column >= 0) packed = rotate_eight(packed, angles + column, false);
        }
    }
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
    uint32_t amax = 0;
    for (int i = 0; i < 4; ++i)
        amax = max_of(amax, max_of(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
    amax = max_of(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = max_of(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    if (!inside) return;

    const uint8_t scale = mxfp4_scale(bits_float(amax << 16));
    const float inverse = e8m0_inverse(scale);
    float x[8];
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = rounded_product(bits_float(pairs[i] << 16), inverse);
        x[2 * i + 1] = rounded_product(bits_float(pairs[i] & 0xffff0000u), inverse);
    }
    const uint32_t word = e2m1x8_encode(x);

    const int64_t slot = p.slots != nullptr ? p.slots[row] : row;
    if (slot < 0 || slot >= p.num_slots) return;
    // a key row of 34 bytes (Di = 64) is only 2-byte aligned: two halves
    uint16_t* codes = reinterpret_cast<uint16_t*>(p.codes + slot * p.codes_stride + vector * 4);
    codes[0] = static_cast<uint16_t>(word);
    codes[1] = static_cast<uint16_t>(word >> 16);
    if (vector % 4 == 0) p.scale[slot * p.scale_stride + vector / 4] = scale;
}

__global__ void __launch_bounds__(kThreads) cache_rows_kernel(CacheRowsParams p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= static_cast<int64_t>(p.num_tokens) * p.num_picks) return;
    const int id = p.ids[i];
    int row = -1;
    if (id >= 0) {
        const int seq = p.seq_of_token[i / p.num_picks];
        const int page = p.page_table[static_cast<int64_t>(seq) * p.pages_per_seq + id / p.entries_per_page];
        row = page * p.entries_per_page + id % p.entries_per_page;
    }
    p.rows[i] = row;
}

template <bool kRope>
void launch_rows(const char* op, const QuantParams& params, const QueryRope& rope) {
    const auto threads = static_cast<unsigned>(params.head_dim / 8), rows = kThreads / threads;
    const int64_t blocks = ceil_div<int64_t>(params.num_rows, rows);
    launch(op, quantise_kernel<kRope>, {dim3(static_cast<unsigned>(blocks)), dim3(threads, rows), 0, params.stream}, params, rope);
}

}  // namespace

void launch_quantise(const char* op, const QuantParams& params) { launch_rows<false>(op, params, {}); }

void launch_rope_quant_query(const QuantParams& params, const QueryRope& rope) {
    launch_rows<true>("indexer.rope_quant_query", params, rope);
}

void launch_cache_rows(const CacheRowsParams& params) {
    const int64_t blocks = ceil_div<int64_t>(static_cast<int64_t>(params.num_tokens) * params.num_picks, kThreads);
    launch("indexer.cache_rows", cache_rows_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, params.stream},
           params);
}

}  // namespace mdi::indexer
