// Kernels that quantise an expression, and those of the expression alone, behind C functions. KERNELS
// names their header, EXPRESSIONS a file of `struct Math` in namespaces math_0, math_1, ...
#include KERNELS
#include "scalings.cuh"

using namespace fusegen;

#include EXPRESSIONS

namespace {

using Element = __nv_bfloat16;

template <class Math>
Status merged(int config, const PointwiseQuantizeArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) {
    return launch_pointwise_quantize<decltype(kind), Math>(in, stream);
  };
  switch (config) {
    case 0: return launch(QuantizeConfig<Element, E4M3, Tensor>());
    case 2: return launch(QuantizeConfig<Element, E4M3, Row>());
    case 3: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 128>>());
    case 5: return launch(QuantizeConfig<Element, E4M3, Mx<1, 32>>());
    case 8: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>>());
    case 12: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, true, true>());
    case 13: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 64>>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

int report(const Status& status, const char** call) {
  *call = status.call;
  return status.code;
}

}  // namespace

extern "C" {

int run_expression(int math, const PointwiseArguments* in, Stream* stream, const char** call) {
  return report(with_math(math, [&](auto kind) {
                  return launch_pointwise<decltype(kind), Element>(*in, *stream);
                }), call);
}

int run_merged(int math, int config, const PointwiseQuantizeArguments* in, Stream* stream,
               const char** call) {
  return report(with_math(math, [&](auto kind) {
                  return merged<decltype(kind)>(config, *in, *stream);
                }), call);
}

}  // extern "C"
