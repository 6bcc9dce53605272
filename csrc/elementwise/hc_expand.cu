// Writing a sublayer's output back into the streams (model spec 3.5):
//     out[t, i, :] = bf16( post[t, i] * y[t, :] + sum_j comb[t, j, i] * streams[t, j, :] ),   j ascending, float32 FMAs.
// comb's row j is the input stream, its column i the output stream.
//
// A block takes one token; a thread takes 8 columns of all n streams at a time and holds them in registers before it
// stores, so out may be streams. Memory-bound: (2n + 1) * N * 2 bytes a token. No shared memory. Limits: N % 8 == 0.
#include "common/launch.h"
#include "elementwise/elementwise.h"
#include "elementwise/vector.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kExpandThreads = 320;  // two steps over N = 5120

template <int kStreams>
__global__ void __launch_bounds__(kExpandThreads) hc_expand_kernel(HcExpandParams p) {
    const int64_t token = blockIdx.x;
    float post[kStreams], comb[kStreams][kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        post[i] = p.post[token * kStreams + i];
#pragma unroll
        for (int j = 0; j < kStreams; ++j) comb[j][i] = p.comb[(token * kStreams + j) * kStreams + i];
    }
    const bf16* y = p.y + token * p.y_stride;
    const bf16* streams = p.streams + token * kStreams * p.width;
    bf16* out = p.out + token * kStreams * p.width;
    for (int column = static_cast<int>(threadIdx.x) * kVector; column < p.width; column += static_cast<int>(blockDim.x) * kVector) {
        uint4 packed[kStreams];
        const uint4 packed_y = *reinterpret_cast<const uint4*>(y + column);
#pragma unroll
        for (int j = 0; j < kStreams; ++j)
            packed[j] = *reinterpret_cast<const uint4*>(streams + static_cast<int64_t>(j) * p.width + column);
        float sum[kStreams][kVector], value[kVector];
        unpack(packed_y, value);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum[i][e] = post[i] * value[e];
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
            unpack(packed[j], value);
#pragma unroll
            for (int i = 0; i < kStreams; ++i)
#pragma unroll
                for (int e = 0; e < kVector; ++e) sum[i][e] = fmaf(comb[j][i], value[e], sum[i][e]);
        }
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
            *reinterpret_cast<uint4*>(out + static_cast<int64_t>(i) * p.width + column) = pack(sum[i]);
    }
}

template <int kStreams>
void launch_streams(const HcExpandParams& p) {
    const int threads = min_of(align_up(ceil_div(p.width, kVector), 32), kExpandThreads);
    launch("elementwise.hc_expand", hc_expand_kernel<kStreams>,
           {dim3(static_cast<unsigned>(p.num_tokens)), dim3(static_cast<unsigned>(threads)), 0, p.stream}, p);
}

}  // namespace

void launch_hc_expand(const HcExpandParams& p) {
    switch (p.num_streams) {
        case 1: return launch_streams<1>(p);
        case 2: return launch_streams<2>(p);
        case 3: return launch_streams<3>(p);
        default: return launch_streams<4>(p);
    }
}

}  // namespace mdi::elementwise
