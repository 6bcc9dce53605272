// Tensors -> checks -> Params -> launch for the attention ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "attention/attention.h"
#endif

namespace mdi::attention {

inline void define_attention(Library& m) { (void)m; }

#ifdef MDI_WITH_CUDA
inline void implement_attention(Library& m) { (void)m; }
#endif

}  // namespace mdi::attention
