// csrc/indexer/topk.cu on the CPU: see cuda_on_cpu.h.
#include "indexer/indexer.h"

using namespace mdi::indexer;

// stride: of a row of scores, in elements; picks: ids [tokens, k] and count; blocks [tokens, num_blocks]; either may be null
extern "C" void topk(int tokens, int columns, int k, int is_float, const void* scores, int64_t stride, const int32_t* visible, int block_size,
                     const int32_t* candidates, int num_candidates, int32_t* ids, int32_t* count, int num_blocks, int32_t* blocks) {
    TopkParams p{};
    p.num_tokens = tokens, p.num_cols = columns, p.k = k, p.num_blocks = num_blocks;
    p.is_float = is_float != 0;
    p.scores = scores, p.stride = stride, p.visible = visible;
    p.block_size = block_size, p.candidates = candidates, p.num_candidates = num_candidates;
    p.ids = ids, p.count = count, p.blocks = blocks;
    if (ids != nullptr && blocks != nullptr) launch_topk_blocks(p);
    else if (blocks != nullptr) launch_candidate_blocks(p);
    else launch_topk(p);
}
