// The type in which a result lies in memory.
#pragma once

#include <type_traits>

#include "fusegen/gemm/gemm.h"

namespace fusegen {

template <class Element, Store store>
using Stored = std::conditional_t<is_wide(store), float, Element>;

}  // namespace fusegen
