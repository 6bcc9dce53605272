// Checks of the fiber harness itself: barriers with divergent warps, shuffles, votes, reductions, ldmatrix and mma.
#include "common/launch.h"
#include "common/ptx_sm80.cuh"
#include "common/reduce.cuh"

namespace {

// out[b * 96 + t] = sum over the block of its thread numbers + 1000 * (votes) + ...
__global__ void reductions(int* out) {
    __shared__ float scratch[3];
    const int t = static_cast<int>(threadIdx.x);
    if (t < 32)  // one warp does extra warp barriers: the others must not be counted in
        for (int i = 0; i < 5; ++i) __syncwarp();
    const float sum = mdi::block_sum<96>(static_cast<float>(t), scratch);
    const int odd = __syncthreads_count(t % 2);
    const unsigned ballot = __ballot_sync(~0u, t % 3 == 0);
    const int up = __shfl_up_sync(~0u, t, 1), lanes = __popc(__match_any_sync(~0u, t % 4));
    out[(blockIdx.x * 96 + t) * 5 + 0] = static_cast<int>(sum);
    out[(blockIdx.x * 96 + t) * 5 + 1] = odd;
    out[(blockIdx.x * 96 + t) * 5 + 2] = static_cast<int>(ballot);
    out[(blockIdx.x * 96 + t) * 5 + 3] = up;
    out[(blockIdx.x * 96 + t) * 5 + 4] = lanes;
}

// d [16, 8] f32 = a [16, 16] bf16 * b [16, 8] bf16, both row-major in shared memory
__global__ void tile_product(const uint16_t* a, const uint16_t* b, float* d) {
    __shared__ __align__(16) uint16_t sA[16 * 16];
    __shared__ __align__(16) uint16_t sB[16 * 8];
    const unsigned lane = threadIdx.x;
    mdi::ptx::cp_async_16(mdi::ptx::smem_address(sA + lane * 8), a + lane * 8);
    if (lane < 16) mdi::ptx::cp_async_16(mdi::ptx::smem_address(sB + lane * 8), b + lane * 8);
    mdi::ptx::cp_async_commit();
    mdi::ptx::cp_async_wait<0>();
    __syncthreads();
    uint32_t fragment[4], b0, b1;
    mdi::ptx::ldmatrix_x4(fragment, mdi::ptx::smem_address(sA + lane % 16 * 16 + lane / 16 * 8));
    mdi::ptx::ldmatrix_x2_trans(b0, b1, mdi::ptx::smem_address(sB + lane % 16 * 8));
    float sum[4] = {};
    mdi::ptx::mma_bf16_m16n8k16(sum, fragment, b0, b1);
    for (int i = 0; i < 4; ++i) d[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = sum[i];
}

__global__ void stuck() {
    if (threadIdx.x == 0) __syncwarp();
    else __syncthreads();
}

}  // namespace

extern "C" void run_reductions(int blocks, int* out) { mdi::launch("reductions", reductions, {dim3(blocks), dim3(96)}, out); }
extern "C" void run_tile_product(const uint16_t* a, const uint16_t* b, float* d) {
    mdi::launch("tile_product", tile_product, {dim3(1), dim3(32)}, a, b, d);
}
extern "C" void run_stuck() { mdi::launch("stuck", stuck, {dim3(1), dim3(64)}); }
