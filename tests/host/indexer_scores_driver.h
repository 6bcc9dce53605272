// What the drivers of the score kernels share: each defines `launch`.
#pragma once
#include "indexer/indexer.h"

void launch(mdi::indexer::LogitsParams& p);

extern "C" void logits(int tokens, int heads, int head_dim, int columns, int entries_per_page, int pages, int seqs,
                       const uint8_t* q_codes, const uint8_t* q_scale, const uint16_t* weights, const uint8_t* keys,
                       const int32_t* page_table, const int32_t* seq_of_token, const int32_t* visible, const int32_t* candidates,
                       int num_candidates, int block_size, uint16_t* out) {
    mdi::indexer::LogitsParams p = {};
    p.num_tokens = tokens, p.num_heads = heads, p.head_dim = head_dim, p.num_cols = columns;
    p.entries_per_page = entries_per_page, p.pages_per_seq = pages, p.num_seqs = seqs;
    p.q_codes = q_codes, p.q_scale = q_scale, p.weights = weights, p.keys = keys, p.page_table = page_table;
    p.seq_of_token = seq_of_token, p.visible = visible, p.candidates = candidates, p.num_candidates = num_candidates;
    p.block_size = block_size, p.out = out, p.out_stride = columns;
    launch(p);
}
