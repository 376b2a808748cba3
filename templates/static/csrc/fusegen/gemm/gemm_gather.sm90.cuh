// Grouped GEMM for sm_90a one of whose operands is gathered: the kernel of gemm/gemm.sm90.cuh with a
// loader beside TMA's.
#pragma once

#include <atomic>
#include <cstdint>

#include "fusegen/common/divisor.h"
#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/gathered.h"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/gemm/launch.sm90.cuh"
#include "fusegen/load/gathered.sm90.cuh"

namespace fusegen {

// What is left for TMA: the traits without the boxes of the operand that is gathered.
template <class T>
struct OtherBoxes : T {
  static constexpr int kBoxesA = T::kGather == Gather::a ? 0 : T::kBoxesA;
  static constexpr int kBoxesB = T::kGather == Gather::b ? 0 : T::kBoxesB;
};

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store, Gather gather, class Change>
static __global__ void
__launch_bounds__(Traits<kind, Element, Config, store, gather>::kThreads, 1)
    gathering_gemm(const __grid_constant__ CUtensorMap map,
                   const __grid_constant__ GatheredRows rows,
                   const __grid_constant__ CUtensorMap map_d, const Bias<Element> bias,
                   const __grid_constant__ Epilogue<Change, store> epilogue,
                   const __grid_constant__ Shape shape) {
  using T = Traits<kind, Element, Config, store, gather>;
  const PlainLoader<OtherBoxes<T>> loader{&map, &map, {}};
  run_cta<T, Stored<Element, store>, RunningSums<T>>(
      loader, nullptr, gemm_visitors<kind, store>(bias, shape), &map_d, epilogue, shape,
      Gathered{rows});
}

inline Status check_arguments(const GatheredGemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const GemmArguments& gemm = in.gemm;
  if (Status status = check_arguments(gemm); !status.ok()) return status;
  if (in.row_slot == nullptr && gemm.tokens > 0) return {kInvalid, "gathered rows: their slots"};
  if (in.choices < 1 || in.choices > kMostTokens) {
    return {kInvalid, "gathered rows: 1 <= choices <= 2^30"};
  }
  if (in.arriving != nullptr && !in.arriving->is_all()) {
    const int64_t first = in.arriving->first, end = in.arriving->end;
    if (first < 0 || end < first || end > gemm.tokens / in.choices) {
      return {kInvalid, "arriving rows: 0 <= first <= end <= tokens"};
    }
  }
  constexpr int64_t kMostPlaces = (int64_t(1) << 32) - 1;
  const int64_t longest = gemm.n > gemm.k ? gemm.n : gemm.k;
  if (gemm.tokens / in.choices * (longest / kRowAlignment) >= kMostPlaces) {
    return {kInvalid, "gathered rows: less than 64 GiB of tokens"};
  }
  return {};
}

// Launches a GEMM for the rows of all slots. Where tokens arrive, `stream` has the row blocks of those that
// are there, and the stream that brings the others has the rest: as no tile is of both, the second launch
// need not wait for the first one, and takes its multiprocessors one after the other.
template <class Launch>
Status launch_as_they_arrive(const GatheredGemmArguments& in, Stream& stream, const Launch& launch) {
  Arriving& arriving = *in.arriving;
  SlotRange there{uint32_t(arriving.first * in.choices), uint32_t(arriving.end * in.choices), true};
  Stream bringing{arriving.bringing};
  Status status = go_behind(bringing.handle, stream.handle);
  if (status.ok()) status = launch(there, stream);
  there.inside = false;
  if (status.ok()) status = launch(there, bringing);
  if (status.ok()) status = arriving.wait(stream);
  return status;
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class Element, class Config, Store store, Gather gather, class Change = Keep>
static Status launch_gathered_gemm(const GatheredGemmArguments& in, Stream& stream,
                                   const Change& change = {}) {
  using T = Traits<kind, Element, Config, store, gather>;
  const GemmArguments& gemm = in.gemm;
  if (Status status = check_arguments(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  Encoded<Change, store> told(change);  // of a and b the one is dropped that is gathered
  if (Status status = encode<kind, Element, Element, T>(gemm, &told); !status.ok()) return status;
  constexpr bool kIsX = gather == Gather::b || kind == Gemm::fprop;
  constexpr bool kIsA = gather == Gather::a;
  GatheredRows rows{static_cast<const uint8_t*>(kIsA ? gemm.a : gemm.b),
                    static_cast<const int32_t*>(in.row_slot), uint32_t(gemm.tokens),
                    uint32_t(kIsX ? gemm.k : gemm.n), Divisor(uint32_t(in.choices))};
  static std::atomic<uint64_t> shared_memory_allowed{0};
  const auto launch = [&](const SlotRange& of, Stream& into) {
    rows.of = of;
    return launch_cta<kind, T, Tiles<Config, gather>, CUtensorMap, GatheredRows, CUtensorMap,
                      Bias<Element>, Epilogue<Change, store>>(
        &gathering_gemm<kind, Element, Config, store, gather, Change>, shared_memory_allowed, gemm,
        into, kIsA ? told.b : told.a, rows, told.d, bias_of<Element>(gemm), told.epilogue);
  };
  if (in.arriving == nullptr || in.arriving->is_all()) return launch({}, stream);
  if (kind != Gemm::wgrad) return launch_as_they_arrive(in, stream, launch);
  if (Status status = in.arriving->wait(stream); !status.ok()) return status;
  return launch({}, stream);
}

}  // namespace fusegen
