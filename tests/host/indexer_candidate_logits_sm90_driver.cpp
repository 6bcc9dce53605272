// csrc/indexer/candidate_logits_sm90.cu on the CPU: see cuda_on_cpu.h.
#include <vector>

#include "indexer_scores_driver.h"

void launch(mdi::indexer::LogitsParams& p) {
    const int64_t entries = int64_t{p.pages_per_seq} * p.entries_per_page;
    const int64_t bytes = mdi::indexer::candidate_workspace_bytes(p.num_tokens, p.num_seqs, entries, p.num_candidates);
    std::vector<uint8_t> workspace(bytes + 1024);
    p.workspace = workspace.data() + (1024 - reinterpret_cast<uintptr_t>(workspace.data()) % 1024);
    mdi::indexer::launch_candidate_logits_sm90(p);
}
