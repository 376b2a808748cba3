// Every instantiation of the quantise kernels behind C functions, for the CPU and for nvcc alike.
#include "fusegen/quantize/amax.cuh"
#include "fusegen/quantize/dequantize.cuh"
#include "fusegen/quantize/quantize.cuh"
#include "fusegen/quantize/several.cuh"
#include "fusegen/quantize/step.cuh"
#include "fusegen/quantize/state.cuh"
#include "fusegen/quantize/row_sums.cuh"
#include "fusegen/quantize/untransposed.cuh"
#include "fusegen/quantize/update_scale.cuh"
#include "scalings.cuh"

using namespace fusegen;

namespace {

int report(const Status& status, const char** call) {
  *call = status.call;
  return status.code;
}

// Calls `launch` with the config of a number.
template <class Element, class Launch>
Status with_config(int config, Launch launch) {
  switch (config) {
    case 0: return launch(QuantizeConfig<Element, E4M3, Tensor>());
    case 1: return launch(QuantizeConfig<Element, E5M2, Tensor>());
    case 2: return launch(QuantizeConfig<Element, E4M3, Row>());
    case 3: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 128>>());
    case 4: return launch(QuantizeConfig<Element, E4M3, Ratio<128, 128>>());
    case 5: return launch(QuantizeConfig<Element, E4M3, Mx<1, 32>>());
    case 6: return launch(QuantizeConfig<Element, E5M2, Mx<1, 32>>());
    case 7: return launch(QuantizeConfig<Element, E4M3, Mx<32, 32>>());
    case 8: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>>());
    case 9: return launch(QuantizeConfig<Element, E2M1, Nv<16, 16>>());
    case 10: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, true>());
    case 11: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, false, true>());
    case 12: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, true, true>());
    case 13: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 64>>());
    case 14: return launch(QuantizeConfig<Element, E4M3, Ratio<64, 64>>());
    case 15: return launch(QuantizeConfig<Element, E5M2, Ratio<1, 32>>());
    case 16: return launch(QuantizeConfig<Element, E5M2, Ratio<32, 32>>());
    case 17: return launch(QuantizeConfig<Element, E4M3, Ratio<1, 16>>());
    case 18: return launch(QuantizeConfig<Element, E2M1, Ratio<16, 16>>());
    case 19: return launch(QuantizeConfig<Element, E4M3, Mx<1, 64>>());
    case 20: return launch(QuantizeConfig<Element, E2M1, Mx<1, 128>>());
    case 21: return launch(QuantizeConfig<Element, E5M2, Mx<128, 128>>());
    case 22: return launch(QuantizeConfig<Element, E2M1, Nv<1, 64>, true>());
    case 23: return launch(QuantizeConfig<Element, E2M1, Nv<32, 32>>());
    case 30: return launch(QuantizeConfig<Element, E4M3, Mx<1, 32>, false, false, true>());
    case 31: return launch(QuantizeConfig<Element, E4M3, Mx<32, 32>, false, false, true>());
    case 32: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, false, false, true>());
    case 33: return launch(QuantizeConfig<Element, E2M1, Nv<16, 16>, false, false, true>());
    case 34: return launch(QuantizeConfig<Element, E2M1, Nv<1, 16>, true, true, true>());
    case 35: return launch(QuantizeConfig<Element, E4M3, Pow2<1, 128>, false, false, true>());
    case 36: return launch(QuantizeConfig<Element, E4M3, Pow2<128, 128>, false, false, true>());
    case 37: return launch(QuantizeConfig<Element, E5M2, Mx<1, 64>, false, false, true>());
    case 38: return launch(QuantizeConfig<Element, E5M2, Pow2<64, 64>, false, false, true>());
    case 39: return launch(QuantizeConfig<Element, E2M1, Nv<32, 32>, false, false, true>());
    case 40: return launch(Untransposed<QuantizeConfig<Element, E4M3, Tensor>>());
    case 41: return launch(Untransposed<QuantizeConfig<Element, E5M2, Row>>());
    case 42: return launch(Untransposed<QuantizeConfig<Element, E4M3, Ratio<1, 128>>>());
    case 43: return launch(Untransposed<QuantizeConfig<Element, E4M3, Ratio<128, 128>>>());
    case 44: return launch(Untransposed<QuantizeConfig<Element, E4M3, Ratio<1, 64>>>());
    case 45: return launch(Untransposed<QuantizeConfig<Element, E5M2, Mx<1, 32>>>());
    case 46: return launch(Untransposed<QuantizeConfig<Element, E4M3, Ratio<1, 16>>>());
    case 50: return launch(Untransposed<QuantizeConfig<Element, E4M3, Mx<1, 32>, false, false, true>>());
    case 51: return launch(Untransposed<QuantizeConfig<Element, E4M3, Mx<32, 32>, false, false, true>>());
    case 52: return launch(Untransposed<QuantizeConfig<Element, E4M3, Pow2<1, 128>, false, false, true>>());
    case 53: return launch(Untransposed<QuantizeConfig<Element, E4M3, Pow2<128, 128>, false, false, true>>());
    case 54: return launch(Untransposed<QuantizeConfig<Element, E5M2, Mx<1, 64>, false, false, true>>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

template <class Element>
Status quantize(int config, const QuantizeArguments& in, Stream& stream) {
  return with_config<Element>(
      config, [&](auto kind) { return launch_quantize<decltype(kind)>(in, stream); });
}

template <class Element>
Status step(int config, const QuantizeStepArguments& in, Stream& stream) {
  return with_config<Element>(
      config, [&](auto kind) { return launch_quantize_step<decltype(kind)>(in, stream); });
}

template <class Config>
Status quantize_several(const QuantizeSeveralArguments& in, Stream& stream) {
  if constexpr (Config::Scaling::kRow || Config::kRule == Rule::nvfp4) {
    return {cudaErrorInvalidValue, "amaxes come first"};
  } else {
    return launch_quantize_several<Config>(in, stream);
  }
}

template <class Element>
Status several(int config, const QuantizeSeveralArguments& in, Stream& stream) {
  return with_config<Element>(
      config, [&](auto kind) { return quantize_several<decltype(kind)>(in, stream); });
}

template <class Element>
Status amax(const AmaxArguments& in, Stream& stream) {
  return in.of_transformed_group != nullptr ? launch_amax<Element, true>(in, stream)
                                            : launch_amax<Element>(in, stream);
}

// Square blocks of rows in groups.
Status dequantize_by_group(int config, const DequantizeArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) { return launch_dequantize<decltype(kind)>(in, stream); };
  using Output = __nv_bfloat16;
  switch (config) {
    case 14: return launch(DequantizeConfig<E4M3, Ratio<64, 64>, false, Output, true>());
    case 16: return launch(DequantizeConfig<E5M2, Ratio<32, 32>, false, Output, true>());
    case 23: return launch(DequantizeConfig<E2M1, Nv<32, 32>, false, Output, true>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

// Blocks of columnwise copies that lie as the tensor does.
Status dequantize_untransposed(int config, const DequantizeArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) {
    return launch_dequantize_untransposed<decltype(kind)>(in, stream);
  };
  using Output = __nv_bfloat16;
  switch (config) {
    case 42: return launch(DequantizeConfig<E4M3, Ratio<1, 128>, false>());
    case 44: return launch(DequantizeConfig<E4M3, Ratio<1, 64>, false>());
    case 45: return launch(DequantizeConfig<E5M2, Mx<1, 32>, false>());
    case 46: return launch(DequantizeConfig<E4M3, Ratio<1, 16>, false>());
    case 50: return launch(DequantizeConfig<E4M3, Mx<1, 32>, false, Output, false, true>());
    case 52: return launch(DequantizeConfig<E4M3, Pow2<1, 128>, false, Output, false, true>());
    case 53: return launch(DequantizeConfig<E4M3, Pow2<128, 128>, false, Output, false, true>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

template <bool kTransposed>
Status dequantize(int config, const DequantizeArguments& in, Stream& stream) {
  if (in.group_sizes != nullptr && in.lines_per_scale > 1) {
    return dequantize_by_group(config, in, stream);
  }
  const auto launch = [&](auto kind) { return launch_dequantize<decltype(kind)>(in, stream); };
  switch (config) {
    case 0: return launch(DequantizeConfig<E4M3, Tensor, kTransposed>());
    case 2: return launch(DequantizeConfig<E4M3, Row, kTransposed>());
    case 3: return launch(DequantizeConfig<E4M3, Ratio<1, 128>, kTransposed>());
    case 5: return launch(DequantizeConfig<E4M3, Mx<1, 32>, kTransposed>());
    case 6: return launch(DequantizeConfig<E5M2, Mx<1, 32>, kTransposed>());
    case 7: return launch(DequantizeConfig<E4M3, Mx<32, 32>, kTransposed>());
    case 8: return launch(DequantizeConfig<E2M1, Nv<1, 16>, kTransposed>());
    case 9: return launch(DequantizeConfig<E2M1, Nv<16, 16>, kTransposed>());
    case 13: return launch(DequantizeConfig<E4M3, Ratio<1, 64>, kTransposed>());
    case 14: return launch(DequantizeConfig<E4M3, Ratio<64, 64>, kTransposed>());
    case 15: return launch(DequantizeConfig<E5M2, Ratio<1, 32>, kTransposed>());
    case 16: return launch(DequantizeConfig<E5M2, Ratio<32, 32>, kTransposed>());
    case 20: return launch(DequantizeConfig<E2M1, Mx<1, 128>, kTransposed>());
    case 23: return launch(DequantizeConfig<E2M1, Nv<32, 32>, kTransposed>());
    case 30: return launch(DequantizeConfig<E4M3, Mx<1, 32>, kTransposed, __nv_bfloat16, false, true>());
    case 31: return launch(DequantizeConfig<E4M3, Mx<32, 32>, kTransposed, __nv_bfloat16, false, true>());
    case 32:
    case 34: return launch(DequantizeConfig<E2M1, Nv<1, 16>, kTransposed, __nv_bfloat16, false, true>());
    case 36: return launch(DequantizeConfig<E4M3, Pow2<128, 128>, kTransposed, __nv_bfloat16, false, true>());
    case 24: return launch(DequantizeConfig<E4M3, Unscaled, kTransposed>());
    case 25: return launch(DequantizeConfig<E5M2, Unscaled, kTransposed>());
    case 26: return launch(DequantizeConfig<E2M1, Unscaled, kTransposed>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

Status dequantize_groups(int config, const DequantizeGroupsArguments& in, Stream& stream) {
  const auto launch = [&](auto kind) { return launch_dequantize_groups<decltype(kind)>(in, stream); };
  switch (config) {
    case 0: return launch(DequantizeConfig<E4M3, Tensor, true>());
    case 2: return launch(DequantizeConfig<E4M3, Row, true>());
    case 3: return launch(DequantizeConfig<E4M3, Ratio<1, 128>, true>());
    case 5: return launch(DequantizeConfig<E4M3, Mx<1, 32>, true>());
    case 7: return launch(DequantizeConfig<E4M3, Mx<32, 32>, true>());
    case 8:
    case 11: return launch(DequantizeConfig<E2M1, Nv<1, 16>, true>());
    case 13: return launch(DequantizeConfig<E4M3, Ratio<1, 64>, true>());
    case 14: return launch(DequantizeConfig<E4M3, Ratio<64, 64>, true>());
    case 16: return launch(DequantizeConfig<E5M2, Ratio<32, 32>, true>());
    case 20: return launch(DequantizeConfig<E2M1, Mx<1, 128>, true>());
    case 30: return launch(DequantizeConfig<E4M3, Mx<1, 32>, true, __nv_bfloat16, false, true>());
    case 31: return launch(DequantizeConfig<E4M3, Mx<32, 32>, true, __nv_bfloat16, false, true>());
    case 32:
    case 34: return launch(DequantizeConfig<E2M1, Nv<1, 16>, true, __nv_bfloat16, false, true>());
    case 36: return launch(DequantizeConfig<E4M3, Pow2<128, 128>, true, __nv_bfloat16, false, true>());
    case 24: return launch(DequantizeConfig<E4M3, Unscaled, true>());
    case 25: return launch(DequantizeConfig<E5M2, Unscaled, true>());
    case 26: return launch(DequantizeConfig<E2M1, Unscaled, true>());
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

}  // namespace

extern "C" {

int run_quantize(int half, int config, const QuantizeArguments* in, Stream* stream,
                 const char** call) {
  const auto run = half ? &quantize<__half> : &quantize<__nv_bfloat16>;
  return report(run(config, *in, *stream), call);
}

int run_step(int half, int config, const QuantizeStepArguments* in, Stream* stream,
             const char** call) {
  const auto run = half ? &step<__half> : &step<__nv_bfloat16>;
  return report(run(config, *in, *stream), call);
}

int run_several(int half, int config, const QuantizeSeveralArguments* in, Stream* stream,
                const char** call) {
  const auto run = half ? &several<__half> : &several<__nv_bfloat16>;
  return report(run(config, *in, *stream), call);
}

int run_amax(int half, const AmaxArguments* in, Stream* stream, const char** call) {
  const auto run = half ? &amax<__half> : &amax<__nv_bfloat16>;
  return report(run(*in, *stream), call);
}

int run_clear(const ClearArguments* in, Stream* stream, const char** call) {
  return report(launch_clear(*in, *stream), call);
}

int run_delayed(const DelayedArguments* in, Stream* stream, const char** call) {
  return report(launch_delayed(*in, *stream), call);
}

int run_update_scale(const UpdateScaleArguments* in, Stream* stream, const char** call) {
  return report(launch_update_scale<float>(*in, *stream), call);
}

int run_row_sums(const RowSumArguments* in, Stream* stream, const char** call) {
  return report(launch_row_sums<float>(*in, *stream), call);
}

int run_dequantize(int transposed, int config, const DequantizeArguments* in, Stream* stream,
                   const char** call) {
  const auto run = transposed ? &dequantize<true> : &dequantize<false>;
  return report(run(config, *in, *stream), call);
}

int run_dequantize_untransposed(int config, const DequantizeArguments* in, Stream* stream,
                                const char** call) {
  return report(dequantize_untransposed(config, *in, *stream), call);
}

int run_dequantize_groups(int config, const DequantizeGroupsArguments* in, Stream* stream,
                          const char** call) {
  return report(dequantize_groups(config, *in, *stream), call);
}

}  // extern "C"
