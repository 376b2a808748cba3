// Host side of gemm/gemm.sm90.cuh: its launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/encoded.sm90.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/common/status.h"
#include "fusegen/launch/stream.h"
#include "fusegen/sink/stored.cuh"

namespace fusegen {

// Internal linkage, as of the kernel: the static below would otherwise be one object for every
// shared library of the process that was built from this header (STB_GNU_UNIQUE), while each
// library has kernels of its own to configure.
template <Gemm kind, class Element, class Config, Store store = Store::io, class Change = Keep>
static Status launch_gemm(const GemmArguments& in, Stream& stream, const Change& change = {}) {
  using T = Traits<kind, Element, Config, store>;
  if (Status status = check_arguments(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (in.tokens == 0) return multiply_nothing<kind, Result, store>(in, stream);
  Encoded<Change, store> told(change);
  if (Status status = encode<kind, Element, Element, T>(in, &told); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Bias<Element>,
                    Epilogue<Change, store>>(
      &ragged_gemm<kind, Element, Config, store, Change>, shared_memory_allowed, in, stream,
      told.a, told.b, told.d, bias_of<Element>(in), told.epilogue);
}

}  // namespace fusegen
