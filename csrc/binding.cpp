// The torch side of the extension: every op of every stage, registered through torch's stable ABI, so that one binary
// loads beside every torch >= 2.11, CPU or CUDA, and every Python. All tensor code is in the *_api.h files.
// Outputs and workspaces are arguments (the Python wrappers allocate them); an op returns nothing.
#ifdef MDI_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "attention/attention_api.h"
#include "elementwise/elementwise_api.h"
#include "indexer/indexer_api.h"
#include "linear/linear_api.h"
#include "moe/moe_api.h"

#include "build_record.h"  // written by setup.py: MDI_BUILD_RECORD, a JSON string

// Read by ops/_extension.py from the file itself, so that a library that does not load can still be diagnosed.
extern "C" __attribute__((used, visibility("default"))) const char mdi_build_record[] =
    "MDI_BUILD_RECORD=" MDI_BUILD_RECORD;

STABLE_TORCH_LIBRARY(mini_deepinfer, m) {
    mdi::elementwise::define_elementwise(m);
    mdi::attention::define_attention(m);
    mdi::indexer::define_indexer(m);
    mdi::linear::define_linear(m);
    mdi::moe::define_moe(m);
}

#ifdef MDI_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mini_deepinfer, CUDA, m) {
    mdi::elementwise::implement_elementwise(m);
    mdi::attention::implement_attention(m);
    mdi::indexer::implement_indexer(m);
    mdi::linear::implement_linear(m);
    mdi::moe::implement_moe(m);
}
#endif
