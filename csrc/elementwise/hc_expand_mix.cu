// The hyper-connection work between two sublayers in one pass over the streams (model spec 3.2 to 3.5):
//     R'[i] = bf16( post[i] * y + sum_j comb[j, i] * R[j] )      expand the previous sublayer's output
//     x     = bf16( sum_s pre[s] * R'[s] )                       collapse with the previous sublayer's pre
//     raw   = fn . R',  sum of R'^2                              partial sums of the next coefficients
// The coefficients follow from the partial sums in a second kernel (hc_mix.cu); with a norm weight that kernel's other blocks
// do the norm and quantisation of x (the row pass of rmsnorm_quant.cu), which hides the latency of the sinkhorn. pre, post and comb of the previous sublayer are known before this pass,
// so the streams are read once and written once: (2n + 2) N * 2 bytes a token, against (4n + 2) N * 2 for the separate ops.
//
// Layout as in hc_mix.cu (fn's planes of a 320-column slice in shared memory, warps streaming tiles of tokens), with tiles of
// 16 tokens: a lane holds 8 columns of y and of all n streams for two tokens, expands them into the mma fragments of R',
// stores R' and x, and multiplies. Reads run one 32-column step ahead in registers. The token's 2n + n*n coefficients lie in
// shared memory, one row of T::kCoefficients floats a token of the warp's tile, padded so that eight rows hit eight banks.
// Every part does the arithmetic of its own op in the same order: R', x and the coefficients have the bits of hc_expand,
// hc_collapse and hc_mix. out may be streams: a lane reads its columns of a token before it writes them, and nobody else
// touches them. Shared memory at n = 4: 184.5 + 14 KiB. Limits: those of hc_mix. T-independent and deterministic as hc_mix.
// SASS: HMMA
#include "elementwise/hc_mix.cuh"
#include "elementwise/row_pass.cuh"

namespace mdi::elementwise {
namespace {

constexpr int kPassRowTiles = 1;
constexpr int kPassTokens = 16 * kPassRowTiles;
constexpr int kPassRows = 2 * kPassRowTiles;  // tokens of a lane: g and g + 8

template <int kStreams>
struct PassTraits : MixTraits<kStreams> {
    static constexpr int kPost = 0, kComb = kStreams, kPre = kStreams + kStreams * kStreams;
    static constexpr int kCoefficients = align_up(2 * kStreams + kStreams * kStreams, 4);
    // floats between tokens: 4 past a multiple of 8, so that the 16-byte reads of eight tokens fall on all 32 banks
    static constexpr int kTokenPitch = kCoefficients % 8 == 4 ? kCoefficients : kCoefficients + 4;
    static constexpr int kWarpFloats = kPassTokens * kTokenPitch;
    static constexpr int kPassSmemBytes = MixTraits<kStreams>::kSmemBytes + kMixWarps * kWarpFloats * 4;
    static_assert(kPassSmemBytes <= 227 * 1024, "shared memory of a block");
};

// Eight columns of a lane's tokens as read: y and the n streams.
template <int kStreams>
struct Read {
    uint4 y[kPassRows];
    uint4 stream[kStreams][kPassRows];
};

template <int kStreams>
MDI_DEVICE void read_row(const HcExpandMixParams& p, int64_t token, int column, int r, Read<kStreams>& read) {
    const HcMixParams& mix = p.mix;
    read.y[r] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) read.stream[s][r] = make_uint4(0, 0, 0, 0);
    if (column >= mix.width || token >= mix.num_tokens) return;
    read.y[r] = load_of_line(p.y + token * p.y_stride + column);
    const bf16* source = mix.streams + token * kStreams * mix.width + column;
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
        read.stream[s][r] = load_of_line(source + static_cast<int64_t>(s) * mix.width);
}

// The tile's coefficients into the warp's part of shared memory; zero for tokens past T.
template <int kStreams>
MDI_DEVICE void load_coefficients(const HcExpandMixParams& p, int64_t first_token, float* coefficients) {
    using T = PassTraits<kStreams>;
    __syncwarp();  // the last tile's reads are done
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kPassTokens * T::kCoefficients; i += 32) {
        const int k = i % T::kCoefficients;
        const int64_t token = first_token + i / T::kCoefficients;
        float value = 0.0f;
        if (token < p.mix.num_tokens) {
            if (k < T::kComb)
                value = p.post[token * kStreams + k];
            else if (k < T::kPre)
                value = p.comb[token * kStreams * kStreams + k - T::kComb];
            else if (k < T::kPre + kStreams)
                value = p.pre[token * kStreams + k - T::kPre];
        }
        coefficients[i / T::kCoefficients * T::kTokenPitch + k] = value;
    }
    __syncwarp();
}

// One token's eight columns: R' of every stream into `rows` and to memory, and x to memory. `c`: the token's coefficients.
template <int kStreams>
MDI_DEVICE void expand_row(const HcExpandMixParams& p, int64_t token, int column, int r, const Read<kStreams>& read,
                           const float* coefficients, Rows<kPassRowTiles> (&rows)[kStreams]) {
    using T = PassTraits<kStreams>;
    float c[T::kCoefficients];
#pragma unroll
    for (int k = 0; k < T::kCoefficients; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(coefficients + k);
        c[k] = four.x, c[k + 1] = four.y, c[k + 2] = four.z, c[k + 3] = four.w;
    }
    float sum[kStreams][kVector], value[kVector];
    unpack(read.y[r], value);
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum[i][e] = c[T::kPost + i] * value[e];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
        unpack(read.stream[j][r], value);
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum[i][e] = fmaf(c[T::kComb + j * kStreams + i], value[e], sum[i][e]);
    }
    const bool live = column < p.mix.width && token < p.mix.num_tokens;
    bf16* out = p.out + token * kStreams * p.mix.width + column;
    float x[kVector];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        rows[s][r] = pack(sum[s]);
        if (live) *reinterpret_cast<uint4*>(out + static_cast<int64_t>(s) * p.mix.width) = rows[s][r];
        unpack(rows[s][r], value);  // the collapse reads the rounded streams
#pragma unroll
        for (int e = 0; e < kVector; ++e)
            x[e] = s == 0 ? c[T::kPre] * value[e] : fmaf(c[T::kPre + s], value[e], x[e]);
    }
    if (live) *reinterpret_cast<uint4*>(p.x + token * p.mix.width + column) = pack(x);
}

template <int kStreams>
__global__ void __launch_bounds__(kMixThreads, 1) hc_expand_mix_kernel(HcExpandMixParams p, int block_tiles) {
    using T = PassTraits<kStreams>;
    bf16* planes = reinterpret_cast<bf16*>(dynamic_smem());
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
    float* coefficients = reinterpret_cast<float*>(dynamic_smem() + T::kSmemBytes) + warp * T::kWarpFloats;
    const int first_column = static_cast<int>(blockIdx.y) * kSlice;
    const int steps = ceil_div(min_of(kSlice, p.mix.width - first_column), kStep);
    const int64_t num_tiles = ceil_div<int64_t>(p.mix.num_tokens, kPassTokens);
    const int64_t end_tile = min_of<int64_t>(num_tiles, (static_cast<int64_t>(blockIdx.x) + 1) * block_tiles);
    int64_t tile = static_cast<int64_t>(blockIdx.x) * block_tiles + warp;
    const int lane_column = first_column + lane % 4 * kVector;

    Read<kStreams> read;  // in flight: one step; the first one overlaps the splitting of fn
    if (tile < end_tile)
#pragma unroll
        for (int r = 0; r < kPassRows; ++r) read_row(p, tile * kPassTokens + g + 8 * r, lane_column, r, read);
    load_planes<kStreams>(p.mix, first_column, planes);
    __syncthreads();

    const bf16* fragment = planes + g * T::kPitch + lane % 4 * kVector;
    while (tile < end_tile) {
        const int64_t next_tile = tile + kMixWarps;
        load_coefficients<kStreams>(p, tile * kPassTokens, coefficients);
        Accumulators<kStreams, kPassRowTiles> acc = {};
        for (int step = 0; step < steps; ++step) {
            const bool last = step + 1 == steps;
            const int column = lane_column + step * kStep;
            Rows<kPassRowTiles> rows[kStreams];
#pragma unroll
            for (int r = 0; r < kPassRows; ++r) {
                const int64_t token = tile * kPassTokens + g + 8 * r;
                expand_row<kStreams>(p, token, column, r, read, coefficients + (g + 8 * r) * T::kTokenPitch, rows);
                if (!last)
                    read_row(p, token, column + kStep, r, read);
                else if (next_tile < end_tile)
                    read_row(p, next_tile * kPassTokens + g + 8 * r, lane_column, r, read);
            }
#pragma unroll
            for (int s = 0; s < kStreams; ++s) add_step(rows[s], fragment + s * kSlice + step * kStep, acc);
            promote(acc);
        }
        store_partial(p.mix, tile * kPassTokens, acc);
        tile = next_tile;
    }
}

constexpr int kFinishChunks = 2;  // as in launch_row up to kMaxCollapseWidth columns
constexpr int kFinishMaxThreads = kMaxCollapseWidth / kVector / kFinishChunks;

// Every stride-th block makes coefficients, a warp a token, so that they run beside the rows from the first to the last wave;
// the other blocks norm and quantise rows.
template <int kStreams>
__global__ void __launch_bounds__(kFinishMaxThreads)
hc_finish_kernel(HcMixParams mix, RowParams row, int num_slices, int coefficient_blocks, int stride) {
    __shared__ float sum_scratch[kMaxRowWarps];
    __shared__ uint32_t max_scratch[kMaxRowWarps];
    const int block = static_cast<int>(blockIdx.x);
    if (block % stride != 0 || block / stride >= coefficient_blocks) {
        const int before = min_of(coefficient_blocks, ceil_div(block, stride));  // coefficient blocks before this one
        return row_pass<kFinishChunks, false>(row, block - before, sum_scratch, max_scratch);
    }
    const int warps = static_cast<int>(blockDim.x * blockDim.y) / 32;
    const int64_t token = static_cast<int64_t>(block / stride) * warps + (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    if (token < mix.num_tokens) make_coefficients<kStreams>(mix, num_slices, token);  // whole warps
}

template <int kStreams>
void launch_streams(const HcExpandMixParams& p, const RowParams* row) {
    const int num_slices = ceil_div(p.mix.width, kSlice);
    const int64_t num_tiles = ceil_div<int64_t>(p.mix.num_tokens, kPassTokens);
    const int block_tiles = tiles_per_block(num_tiles, num_slices);
    const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(num_tiles, block_tiles));
    launch("elementwise.hc_expand_mix", hc_expand_mix_kernel<kStreams>,
           {dim3(blocks, static_cast<unsigned>(num_slices)), dim3(kMixThreads), PassTraits<kStreams>::kPassSmemBytes,
            p.mix.stream},
           p, block_tiles);
    if (p.mix.num_tokens == 0) return;
    if (row == nullptr) return launch_hc_coefficients(p.mix);
    const int threads = row_threads<kFinishChunks>(row->width), rows = rows_per_block(threads);
    const auto coefficient_blocks = static_cast<int>(ceil_div<int64_t>(p.mix.num_tokens, threads * rows / 32));
    const auto num_blocks = static_cast<int>(coefficient_blocks + ceil_div<int64_t>(p.mix.num_tokens, rows));
    launch("elementwise.hc_expand_mix finish", hc_finish_kernel<kStreams>,
           {dim3(static_cast<unsigned>(num_blocks)), dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), 0,
            p.mix.stream},
           p.mix, *row, num_slices, coefficient_blocks, num_blocks / coefficient_blocks);
}

}  // namespace

void launch_hc_expand_mix(const HcExpandMixParams& p, const RowParams* row) {
    switch (p.mix.num_streams) {
        case 1: return launch_streams<1>(p, row);
        case 2: return launch_streams<2>(p, row);
        case 3: return launch_streams<3>(p, row);
        default: return launch_streams<4>(p, row);
    }
}

}  // namespace mdi::elementwise
