// Kernels that quantise an expression, and those of the expression alone, behind C functions. KERNELS
// names their header, EXPRESSIONS a file of `struct Math` in namespaces math_0, math_1, ...
#include KERNELS

using namespace fusegen;

#include EXPRESSIONS

namespace {

using Element = __nv_bfloat16;

template <class Math>
Status merged(int config, const PointwiseQuantizeArguments& in, Stream& stream) {
  using S = Scaling;
  const auto launch = [&](auto kind) {
    return launch_pointwise_quantize<decltype(kind), Math>(in, stream);
  };
  switch (config) {
    case 0: return launch(QuantizeConfig<Element, E4M3, S::tensor>());
    case 2: return launch(QuantizeConfig<Element, E4M3, S::row>());
    case 3: return launch(QuantizeConfig<Element, E4M3, S::block_1x128>());
    case 5: return launch(QuantizeConfig<Element, E4M3, S::mx_1x32>());
    case 8: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16>());
    case 12: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16, true, true>());
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
