// Every instantiation of the statistics kernels behind a C function, by the numbers that recipes
// have in quantize_kernels.cuh.
#include "fusegen/quantize/statistics.cuh"
#include "scalings.cuh"

using namespace fusegen;

namespace {

template <class Config>
Status untransposed(const StatisticsArguments& in, Stream& stream) {
  if constexpr (Config::kColumnwise) {
    return launch_statistics<OfUntransposed<Config>>(in, stream);
  } else {
    return {cudaErrorInvalidValue, "rowwise copies are as they are"};
  }
}

template <class Element, bool columnwise>
Status statistics(int config, const StatisticsArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) { return launch_statistics<decltype(kind)>(in, stream); };
  switch (config) {
    case 0: return launch(StatisticsConfig<Element, E4M3, Tensor, columnwise, false>());
    case 1: return launch(StatisticsConfig<Element, E5M2, Tensor, columnwise, false>());
    case 2: return launch(StatisticsConfig<Element, E4M3, Row, columnwise, false>());
    case 3: return launch(StatisticsConfig<Element, E4M3, Ratio<1, 128>, columnwise, false>());
    case 4: return launch(StatisticsConfig<Element, E4M3, Ratio<128, 128>, columnwise, false>());
    case 5: return launch(StatisticsConfig<Element, E4M3, Mx<1, 32>, columnwise, false>());
    case 6: return launch(StatisticsConfig<Element, E5M2, Mx<1, 32>, columnwise, false>());
    case 7: return launch(StatisticsConfig<Element, E4M3, Mx<32, 32>, columnwise, false>());
    case 8:
    case 10: return launch(StatisticsConfig<Element, E2M1, Nv<1, 16>, columnwise, false>());
    case 9: return launch(StatisticsConfig<Element, E2M1, Nv<16, 16>, columnwise, false>());
    case 11:
    case 12: return launch(StatisticsConfig<Element, E2M1, Nv<1, 16>, columnwise, columnwise>());
    case 13: return launch(StatisticsConfig<Element, E4M3, Ratio<1, 64>, columnwise, false>());
    case 14: return launch(StatisticsConfig<Element, E4M3, Ratio<64, 64>, columnwise, false>());
    case 15: return launch(StatisticsConfig<Element, E5M2, Ratio<1, 32>, columnwise, false>());
    case 16: return launch(StatisticsConfig<Element, E5M2, Ratio<32, 32>, columnwise, false>());
    case 17: return launch(StatisticsConfig<Element, E4M3, Ratio<1, 16>, columnwise, false>());
    case 18: return launch(StatisticsConfig<Element, E2M1, Ratio<16, 16>, columnwise, false>());
    case 19: return launch(StatisticsConfig<Element, E4M3, Mx<1, 64>, columnwise, false>());
    case 20: return launch(StatisticsConfig<Element, E2M1, Mx<1, 128>, columnwise, false>());
    case 21: return launch(StatisticsConfig<Element, E5M2, Mx<128, 128>, columnwise, false>());
    case 22: return launch(StatisticsConfig<Element, E2M1, Nv<1, 64>, columnwise, false>());
    case 23: return launch(StatisticsConfig<Element, E2M1, Nv<32, 32>, columnwise, false>());
    case 30: return launch(StatisticsConfig<Element, E4M3, Mx<1, 32>, columnwise, false, true>());
    case 33: return launch(StatisticsConfig<Element, E2M1, Nv<16, 16>, columnwise, false, true>());
    case 34: return launch(StatisticsConfig<Element, E2M1, Nv<1, 16>, columnwise, columnwise, true>());
    case 35: return launch(StatisticsConfig<Element, E4M3, Pow2<1, 128>, columnwise, false, true>());
    case 41: return untransposed<StatisticsConfig<Element, E5M2, Row, columnwise, false>>(in, stream);
    case 42: return untransposed<StatisticsConfig<Element, E4M3, Ratio<1, 128>, columnwise, false>>(in, stream);
    case 50: return untransposed<StatisticsConfig<Element, E4M3, Mx<1, 32>, columnwise, false, true>>(in, stream);
    case 53: return untransposed<StatisticsConfig<Element, E4M3, Pow2<128, 128>, columnwise, false, true>>(in, stream);
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
