// csrc/indexer/topk.cu on the CPU: see cuda_on_cpu.h.
#include "indexer/indexer.h"

using namespace mdi::indexer;

extern "C" void topk(int tokens, int columns, int k, int is_float, const void* scores, const int32_t* visible, int block_size,
                     const int32_t* candidates, int num_candidates, int32_t* ids, int32_t* count, int blocks) {
    const TopkParams p{tokens, columns, k, is_float != 0, scores, columns, visible, block_size, candidates, num_candidates, ids, count,
                       nullptr};
    blocks != 0 ? launch_candidate_blocks(p) : launch_topk(p);
}
