// A GEMM of CUTLASS's collective builders, d = alpha * a @ b.T, by which ours are judged.
//
// Compiled once for each pair of formats, by oracles.py:
//   ORACLE_ARCH   90, 100 or 120
//   ELEMENT_A, ELEMENT_B   such as cutlass::float_e4m3_t, cutlass::mx_float8_t<cutlass::float_e4m3_t>
//   SCALED        1 where the elements have block scales, which the instruction reads
//   TILE_K        of a stage
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

using namespace cute;

using Arch = conditional_t<ORACLE_ARCH == 90, cutlass::arch::Sm90,
                           conditional_t<ORACLE_ARCH == 100, cutlass::arch::Sm100, cutlass::arch::Sm120>>;
using Class = conditional_t<SCALED, cutlass::arch::OpClassBlockScaledTensorOp, cutlass::arch::OpClassTensorOp>;
using TileShape = Shape<_128, _128, Int<TILE_K>>;
using ClusterShape = Shape<_1, _1, _1>;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

// Elements of 16 bytes.
template <class Element>
constexpr int kAlignment = 128 / sizeof_bits_v<Element>;

template <class Element>
struct Codes {
  using type = Element;
};
template <class Element>
struct Codes<cutlass::mx_float8_t<Element>> {
  using type = Element;
};
template <class Element>
struct Codes<cutlass::nv_float4_t<Element>> {
  using type = Element;
};
using A = typename Codes<ELEMENT_A>::type;
using B = typename Codes<ELEMENT_B>::type;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, Class, TileShape, ClusterShape, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 4, float,
    RowMajor, 4, cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, Class, ELEMENT_A, RowMajor, kAlignment<A>, ELEMENT_B, ColumnMajor, kAlignment<B>, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
// CUTLASS counts stages without some padding: only a check here tells before it is run.
static_assert(int(Kernel::SharedStorageSize) <= (ORACLE_ARCH == 120 ? 101376 : 232448));

// One GEMM; a, b [m, k] and [n, k], scales in atoms of 128 rows by 4 blocks, d [m, n] fp32, all packed.
struct Problem {
  const void *a, *b, *scale_a, *scale_b;
  float* d;
  void* workspace;  // of at least oracle_workspace(problem) bytes
  int m, n, k;
  float alpha;
};

static typename Gemm::Arguments arguments(const Problem& in) {
  typename Gemm::Arguments out{};
  out.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  out.problem_shape = {in.m, in.n, in.k, 1};
  auto& mainloop = out.mainloop;
  mainloop.ptr_A = reinterpret_cast<decltype(mainloop.ptr_A)>(in.a);
  mainloop.ptr_B = reinterpret_cast<decltype(mainloop.ptr_B)>(in.b);
  get<0>(mainloop.dA) = get<0>(mainloop.dB) = in.k;
#if SCALED
  using Config = typename Mainloop::Sm1xxBlkScaledConfig;
  mainloop.ptr_SFA = reinterpret_cast<decltype(mainloop.ptr_SFA)>(in.scale_a);
  mainloop.ptr_SFB = reinterpret_cast<decltype(mainloop.ptr_SFB)>(in.scale_b);
  mainloop.layout_SFA = Config::tile_atom_to_shape_SFA(make_shape(in.m, in.n, in.k, 1));
  mainloop.layout_SFB = Config::tile_atom_to_shape_SFB(make_shape(in.m, in.n, in.k, 1));
#endif
  out.epilogue.thread.alpha = in.alpha;
  out.epilogue.thread.beta = 0.f;
  out.epilogue.ptr_D = in.d;
  get<0>(out.epilogue.dD) = in.n;
  return out;
}

extern "C" size_t oracle_workspace(const Problem* in) { return Gemm::get_workspace_size(arguments(*in)); }

// 0, or a status of CUTLASS; waits for the result.
extern "C" int oracle(const Problem* in) {
  Gemm gemm;
  const auto args = arguments(*in);
  auto status = gemm.can_implement(args);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, in->workspace);
  if (status == cutlass::Status::kSuccess) status = gemm.run();
  if (status == cutlass::Status::kSuccess && cudaDeviceSynchronize() != cudaSuccess) return -1;
  return int(status);
}
