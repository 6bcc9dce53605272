// Compressor pooling (model spec 4.3): r tokens -> one row, per channel, in float32.
//
//   p_i = exp(score_i - max) / sum_i exp(score_i - max);   out = bf16(p_0 * kv_0 + p_1 * kv_1 + ...)
//
// Products and sums are rounded one by one, in the order of the group. Without scores (r == 1): a gather and a rounding.
// One thread per group and four channels: 16-byte loads, one 8-byte store. A group row v < T is row v of this step's
// tensors, v >= T is row v - T of the tail kept from the step before. Limits: D a multiple of 4, any r >= 1; offsets are
// 64-bit. Memory-bound: 4 KiB x r read and 1 KiB written per group at D = 512 with scores.
#include "attention/attention.h"
#include "common/launch.h"
#include "common/number_formats.cuh"
#include "common/ptx_sm80.cuh"

namespace mdi::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kChannels = 4;  // per thread

// Four channels of one group member, from this step's tensor or from the tail.
MDI_DEVICE float4 load_member(const float* step, const float* tail, const CompressParams& params, int row, int first) {
    const bool in_step = row < params.num_tokens;
    const float* from = in_step ? step : tail;
    const int64_t offset = static_cast<int64_t>(in_step ? row : row - params.num_tokens) * params.dim + first;
    return *reinterpret_cast<const float4*>(from + offset);
}

MDI_DEVICE void add_product(float& sum, float weight, float value, bool first) {
    const float product = __fmul_rn(weight, value);
    sum = first ? product : __fadd_rn(sum, product);
}

__global__ void __launch_bounds__(kThreads) compress_kernel(const CompressParams params) {
    const int threads_per_row = params.dim / kChannels;
    const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t group = thread_idx / threads_per_row;
    const int first = static_cast<int>(thread_idx % threads_per_row) * kChannels;
    if (group >= params.num_groups) return;
    const int32_t* rows = params.group_rows + group * params.ratio;

    float4 pooled;
    if (params.score == nullptr) {
        pooled = load_member(params.kv, params.tail_kv, params, rows[0], first);
    } else {
        float4 top = load_member(params.score, params.tail_score, params, rows[0], first);
        for (int i = 1; i < params.ratio; ++i) {
            const float4 score = load_member(params.score, params.tail_score, params, rows[i], first);
            top = make_float4(fmaxf(top.x, score.x), fmaxf(top.y, score.y), fmaxf(top.z, score.z), fmaxf(top.w, score.w));
        }
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = 0; i < params.ratio; ++i) {
            const float4 score = load_member(params.score, params.tail_score, params, rows[i], first);
            total.x += expf(score.x - top.x);
            total.y += expf(score.y - top.y);
            total.z += expf(score.z - top.z);
            total.w += expf(score.w - top.w);
        }
        pooled = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = 0; i < params.ratio; ++i) {
            const float4 score = load_member(params.score, params.tail_score, params, rows[i], first);
            const float4 value = load_member(params.kv, params.tail_kv, params, rows[i], first);
            add_product(pooled.x, __fdiv_rn(expf(score.x - top.x), total.x), value.x, i == 0);
            add_product(pooled.y, __fdiv_rn(expf(score.y - top.y), total.y), value.y, i == 0);
            add_product(pooled.z, __fdiv_rn(expf(score.z - top.z), total.z), value.z, i == 0);
            add_product(pooled.w, __fdiv_rn(expf(score.w - top.w), total.w), value.w, i == 0);
        }
    }
    *reinterpret_cast<uint2*>(params.out + group * params.dim + first) =
        make_uint2(ptx::pack_bf16x2(pooled.x, pooled.y), ptx::pack_bf16x2(pooled.z, pooled.w));
}

}  // namespace

void launch_compress(const CompressParams& params) {
    const int64_t num_threads = static_cast<int64_t>(params.num_groups) * (params.dim / kChannels);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(num_threads, kThreads));
    launch("attention.compress", compress_kernel, {dim3(blocks), dim3(kThreads), 0, params.stream}, params);
}

}  // namespace mdi::attention
