// Tensors -> checks -> Params -> launch for the elementwise ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#include "elementwise/expand_api.h"
#ifdef MDI_WITH_CUDA
#include "elementwise/elementwise.h"
#endif

namespace mdi::elementwise {

inline void define_elementwise(Library& m) { define_expand(m); }

#ifdef MDI_WITH_CUDA
inline void implement_elementwise(Library& m) { implement_expand(m); }
#endif

}  // namespace mdi::elementwise
