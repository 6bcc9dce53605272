// Index keys and queries to FP4 with one power-of-two scale per 32 elements (mxfp4, model spec 4.4), and the
// translation of logical cache entries to physical rows.
//
//   s = ceilpow2(max(amax, 6 * 2^-126) * fp32(1/6)),  code = e2m1(x / s)      (the rules live in number_formats.cuh)
//
// Four threads own one group of 32 elements, 8 each (one 16-byte load of bf16, one 4-byte word of codes); the group
// maximum is taken over the bits of |x|, so that NaN and Inf reach the scale byte (255) instead of being dropped.
// write_keys scatters a row's codes and scales to rows[slots[r]]; a slot of -1 (or outside the pool) writes nothing.
// quant_query is the same kernel without slots. Limits: Di a multiple of 64; offsets are 64-bit. Memory-bound.
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "indexer/indexer.h"

namespace mdi::indexer {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) quantise_kernel(QuantParams p) {
    const int groups_per_row = p.head_dim / 32;
    const int64_t num_groups = p.num_rows * groups_per_row;
    const int64_t group = static_cast<int64_t>(blockIdx.x) * (kThreads / 4) + threadIdx.x / 4;
    const int part = threadIdx.x % 4;
    const bool inside = group < num_groups;  // the lanes behind the end stay for the shuffles

    uint32_t pairs[4] = {0, 0, 0, 0};
    if (inside) {
        const uint4 v = reinterpret_cast<const uint4*>(p.x)[group * 4 + part];
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    }
    float x[8];
    uint32_t amax = 0;
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = bits_float(pairs[i] << 16);
        x[2 * i + 1] = bits_float(pairs[i] & 0xffff0000u);
        amax = max_of(amax, max_of(abs_bits(x[2 * i]), abs_bits(x[2 * i + 1])));
    }
    amax = max_of(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = max_of(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    if (!inside) return;

    const uint8_t scale = mxfp4_scale(bits_float(amax));
    const float inverse = e8m0_inverse(scale);
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i)
        word |= static_cast<uint32_t>(e2m1x2_encode(rounded_product(x[2 * i], inverse),
                                                    rounded_product(x[2 * i + 1], inverse))) << (8 * i);

    const int64_t row = group / groups_per_row;
    const int in_row = static_cast<int>(group - row * groups_per_row);
    const int64_t slot = p.slots != nullptr ? p.slots[row] : row;
    if (slot < 0 || slot >= p.num_slots) return;
    // a key row of 34 bytes (Di = 64) is only 2-byte aligned: two halves
    uint16_t* codes = reinterpret_cast<uint16_t*>(p.codes + slot * p.codes_stride + in_row * 16 + part * 4);
    codes[0] = static_cast<uint16_t>(word);
    codes[1] = static_cast<uint16_t>(word >> 16);
    if (part == 0) p.scale[slot * p.scale_stride + in_row] = scale;
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

}  // namespace

void launch_quantise(const char* op, const QuantParams& params) {
    const int64_t blocks = ceil_div<int64_t>(params.num_rows * (params.head_dim / 32), kThreads / 4);
    launch(op, quantise_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, params.stream}, params);
}

void launch_cache_rows(const CacheRowsParams& params) {
    const int64_t blocks = ceil_div<int64_t>(static_cast<int64_t>(params.num_tokens) * params.num_picks, kThreads);
    launch("indexer.cache_rows", cache_rows_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, params.stream},
           params);
}

}  // namespace mdi::indexer
