// csrc/indexer/logits.cu on the CPU: see cuda_on_cpu.h.
#include "indexer_scores_driver.h"

void launch(mdi::indexer::LogitsParams& p) { mdi::indexer::launch_logits(p); }
