// The type in which results are stored.
#pragma once

#include <type_traits>

#include "fusegen/gemm/gemm.h"

namespace fusegen {

// `Element` is the module's own.
template <class Element, Store store>
using Stored = std::conditional_t<is_wide(store), float, Element>;

}  // namespace fusegen
