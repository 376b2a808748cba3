// Host side of GEMMs of 16-bit operands by TMA: all that a kernel is told in descriptors.
#pragma once

#include <cuda.h>

#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/operands.sm90.cuh"
#include "fusegen/sink/stored.cuh"

namespace fusegen {

template <class Change, Store store>
struct Encoded {
  CUtensorMap a, b, d;
  Epilogue<Change, store> epilogue;

  explicit Encoded(const Change& change) : epilogue{change} {}
};

// `Operand` are multiplied, of which results in `Element` come; `T` are the kernel's traits.
template <Gemm kind, class Operand, class Element, class T, class Change, Store store>
Status encode(const GemmArguments& in, Encoded<Change, store>* out) {
  using Result = Stored<Element, store>;
  Status status = encode_operands<kind, Operand, Result, T>(in, &out->a, &out->b, &out->d);
  if (!status.ok()) return status;
  return encode_epilogue<Element, T::kTileN>(in.epilogue, columns_of<kind>(in), &out->epilogue);
}

}  // namespace fusegen
