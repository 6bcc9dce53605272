// Tensors -> checks -> Params -> launch for the indexer ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "indexer/indexer.h"
#endif

namespace mdi::indexer {

inline void define_indexer(Library& m) { (void)m; }

#ifdef MDI_WITH_CUDA
inline void implement_indexer(Library& m) { (void)m; }
#endif

}  // namespace mdi::indexer
