// Kernels that quantise rows of tokens behind a C function.
#include "fusegen/routing/gather_quantize.cuh"
#include "fusegen/quantize/untransposed.cuh"
#include "scalings.cuh"

using namespace fusegen;

namespace {

using Element = __nv_bfloat16;

// Of so few tokens that rows of 264 columns are two panels.
constexpr int64_t kPanel = 128 * sizeof(Element) * 50;

Status merged(int config, const GatherQuantizeArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) {
    return launch_gather_quantize<decltype(kind), kPanel>(in, stream);
  };
  switch (config) {
    case 0: return launch(QuantizeConfig<Element, E4M3, Tensor>());
    case 2: return launch(QuantizeConfig<Element, E4M3, Row>());
    case 3: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 128>>());
    case 5: return launch(QuantizeConfig<Element, E4M3, Mx<1, 32>>());
    case 8: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>>());
    case 12: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, true, true>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

}  // namespace

extern "C" int run_merged(int config, const GatherQuantizeArguments* in, Stream* stream,
                          const char** call) {
  const Status status = merged(config, *in, *stream);
  *call = status.call;
  return status.code;
}
