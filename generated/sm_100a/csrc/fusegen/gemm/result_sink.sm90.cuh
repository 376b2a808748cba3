// Which sink the results of a GEMM go to.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/sink/add.sm90.cuh"
#include "fusegen/sink/aux_store.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/gated_store.sm90.cuh"
#include "fusegen/sink/loaded.sm90.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"

namespace fusegen {

// That of one warp of a kernel with traits `T`, which has `Values` of every tile and stores `Result`.
template <class T, class Result, class Values, class Change>
struct ResultSinkOf {
  static constexpr Write kWrite = T::kKind == Gemm::wgrad ? Write::matrix : Write::rows;
  static constexpr Write kStores = adds(T::kStore) ? Write::add : kWrite;
  using Alone = TmaStore<Result, kStores, T::kBuffers, Change>;
  using Unary = std::conditional_t<has_aux(T::kStore), AuxStore<Result, T::kBuffers, Change>, Alone>;
  using Stores = std::conditional_t<Change::kLoads, LoadedSink<Result, Values, T::kBuffers, Change>,
                                    Unary>;
  using Added = std::conditional_t<adds(T::kStore), AddSink<Result, Values, T::kBuffers>, Stores>;
  using Sink = std::conditional_t<is_gated(T::kStore),
                                  GatedStore<Result, Values, T::kBuffers, Change>, Added>;
  static_assert(Change::kLoads == (T::kStore == Store::binary), "barriers are those of the store");

  // Of the `index`-th warp that stores, whose part of every tile begins with `row`.
  template <class Cta>
  __device__ static Sink make(const Cta& cta, const CUtensorMap* map,
                              const Epilogue<Change, T::kStore>& epilogue, int32_t columns,
                              int32_t row, uint32_t index) {
    const ChunkRing<T::kBuffers> ring(cta.buffers() + index * T::kBuffers * kChunkBytes);
    CopyBarrier* const loaded = cta.control().loaded[index];
    if constexpr (is_gated(T::kStore)) {
      const CUtensorMap* aux = nullptr;
      if constexpr (has_aux(T::kStore)) aux = epilogue.asked ? epilogue.aux : nullptr;
      return {{map, ring, cta.lane, {}}, epilogue.change, epilogue.row_values, aux, {}};
    } else if constexpr (adds(T::kStore)) {
      return Sink({map, ring, cta.lane, {}}, loaded, columns, row);
    } else if constexpr (Change::kLoads) {
      return {map, ring, {&epilogue.other, loaded, columns, row}, cta.lane, epilogue.change};
    } else if constexpr (has_aux(T::kStore)) {
      return {{map, ring, cta.lane, epilogue.change}, epilogue.asked ? &epilogue.aux : nullptr};
    } else {
      return {map, ring, cta.lane, epilogue.change};
    }
  }
};
template <class T, class Result, class Values, class Change>
using ResultSink = typename ResultSinkOf<T, Result, Values, Change>::Sink;

}  // namespace fusegen
