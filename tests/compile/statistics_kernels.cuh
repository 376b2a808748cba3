// Every instantiation of the statistics kernels behind a C function, by the numbers that recipes
// have in quantize_kernels.cuh.
#include "fusegen/statistics.cuh"

using namespace fusegen;

namespace {

template <class Element, bool columnwise>
Status statistics(int config, const StatisticsArguments& in, Stream& stream) {
  using S = Scaling;
  const auto launch = [&](auto kind) { return launch_statistics<decltype(kind)>(in, stream); };
  switch (config) {
    case 0: return launch(StatisticsConfig<Element, E4M3, S::tensor, columnwise, false>());
    case 1: return launch(StatisticsConfig<Element, E5M2, S::tensor, columnwise, false>());
    case 2: return launch(StatisticsConfig<Element, E4M3, S::row, columnwise, false>());
    case 3: return launch(StatisticsConfig<Element, E4M3, S::block_1x128, columnwise, false>());
    case 4: return launch(StatisticsConfig<Element, E4M3, S::block_128x128, columnwise, false>());
    case 5: return launch(StatisticsConfig<Element, E4M3, S::mx_1x32, columnwise, false>());
    case 6: return launch(StatisticsConfig<Element, E5M2, S::mx_1x32, columnwise, false>());
    case 7: return launch(StatisticsConfig<Element, E4M3, S::mx_32x32, columnwise, false>());
    case 8:
    case 10: return launch(StatisticsConfig<Element, E2M1, S::nv_1x16, columnwise, false>());
    case 9: return launch(StatisticsConfig<Element, E2M1, S::nv_16x16, columnwise, false>());
    case 11:
    case 12: return launch(StatisticsConfig<Element, E2M1, S::nv_1x16, columnwise, columnwise>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

}  // namespace

extern "C" int run_statistics(int half, int columnwise, int config, const StatisticsArguments* in,
                              Stream* stream, const char** call) {
  const auto run = half         ? columnwise ? statistics<__half, true> : statistics<__half, false>
                   : columnwise ? statistics<__nv_bfloat16, true>
                                : statistics<__nv_bfloat16, false>;
  const Status status = run(config, *in, *stream);
  *call = status.call;
  return status.code;
}
