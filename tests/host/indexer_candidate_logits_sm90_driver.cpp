// csrc/indexer/candidate_logits_sm90.cu on the CPU: see cuda_on_cpu.h.
#include <vector>

#include "indexer/indexer.h"

using namespace mdi::indexer;

extern "C" void logits(int tokens, int heads, int head_dim, int columns, int entries_per_page, int pages, int seqs,
                       const uint8_t* q_codes, const uint8_t* q_scale, const uint16_t* weights, const uint8_t* keys,
                       const int32_t* page_table, const int32_t* seq_of_token, const int32_t* visible, const int32_t* candidates,
                       int num_candidates, int block_size, uint16_t* out) {
    LogitsParams p = {};
    p.num_tokens = tokens, p.num_heads = heads, p.head_dim = head_dim, p.num_cols = columns;
    p.entries_per_page = entries_per_page, p.pages_per_seq = pages, p.num_seqs = seqs;
    p.q_codes = q_codes, p.q_scale = q_scale, p.weights = weights, p.keys = keys, p.page_table = page_table;
    p.seq_of_token = seq_of_token, p.visible = visible, p.candidates = candidates, p.num_candidates = num_candidates;
    p.block_size = block_size, p.out = out, p.out_stride = columns;
    std::vector<uint8_t> workspace(candidate_workspace_bytes(tokens, seqs, int64_t{pages} * entries_per_page, num_candidates) + 1024);
    p.workspace = workspace.data() + (1024 - reinterpret_cast<uintptr_t>(workspace.data()) % 1024);
    launch_candidate_logits_sm90(p);
}
