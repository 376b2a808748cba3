// Every instantiation of the quantise kernels behind C functions, for the CPU and for nvcc alike.
#include "fusegen/amax_sm90.cuh"
#include "fusegen/dequantize.cuh"
#include "fusegen/quantize_sm90.cuh"
#include "fusegen/quantize_step.cuh"
#include "fusegen/quantize_state.cuh"
#include "fusegen/row_sums.cuh"

using namespace fusegen;

namespace {

int report(const Status& status, const char** call) {
  *call = status.call;
  return status.code;
}

// Calls `launch` with the config of a number.
template <class Element, class Launch>
Status with_config(int config, Launch launch) {
  using S = Scaling;
  switch (config) {
    case 0: return launch(QuantizeConfig<Element, E4M3, S::tensor>());
    case 1: return launch(QuantizeConfig<Element, E5M2, S::tensor>());
    case 2: return launch(QuantizeConfig<Element, E4M3, S::row>());
    case 3: return launch(QuantizeConfig<Element, E4M3, S::block_1x128>());
    case 4: return launch(QuantizeConfig<Element, E4M3, S::block_128x128>());
    case 5: return launch(QuantizeConfig<Element, E4M3, S::mx_1x32>());
    case 6: return launch(QuantizeConfig<Element, E5M2, S::mx_1x32>());
    case 7: return launch(QuantizeConfig<Element, E4M3, S::mx_32x32>());
    case 8: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16>());
    case 9: return launch(QuantizeConfig<Element, E2M1, S::nv_16x16>());
    case 10: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16, true>());
    case 11: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16, false, true>());
    case 12: return launch(QuantizeConfig<Element, E2M1, S::nv_1x16, true, true>());
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

template <class Element>
Status amax(const AmaxArguments& in, Stream& stream) {
  return in.of_transformed_group != nullptr ? launch_amax<Element, true>(in, stream)
                                            : launch_amax<Element>(in, stream);
}

template <bool kTurned>
Status dequantize(int config, const DequantizeArguments& in, Stream& stream) {
  using S = Scaling;
  switch (config) {
    case 0: return launch_dequantize<DequantizeConfig<E4M3, S::tensor, kTurned>>(in, stream);
    case 2: return launch_dequantize<DequantizeConfig<E4M3, S::row, kTurned>>(in, stream);
    case 3: return launch_dequantize<DequantizeConfig<E4M3, S::block_1x128, kTurned>>(in, stream);
    case 5: return launch_dequantize<DequantizeConfig<E4M3, S::mx_1x32, kTurned>>(in, stream);
    case 6: return launch_dequantize<DequantizeConfig<E5M2, S::mx_1x32, kTurned>>(in, stream);
    case 7: return launch_dequantize<DequantizeConfig<E4M3, S::mx_32x32, kTurned>>(in, stream);
    case 8: return launch_dequantize<DequantizeConfig<E2M1, S::nv_1x16, kTurned>>(in, stream);
    case 9: return launch_dequantize<DequantizeConfig<E2M1, S::nv_16x16, kTurned>>(in, stream);
    default: return {cudaErrorInvalidValue, "no such config"};
  }
}

Status dequantize_groups(int config, const DequantizeGroupsArguments& in, Stream& stream) {
  using S = Scaling;
  switch (config) {
    case 5: return launch_dequantize_groups<DequantizeConfig<E4M3, S::mx_1x32, true>>(in, stream);
    case 8:
    case 11: return launch_dequantize_groups<DequantizeConfig<E2M1, S::nv_1x16, true>>(in, stream);
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

int run_row_sums(const RowSumArguments* in, Stream* stream, const char** call) {
  return report(launch_row_sums<float>(*in, *stream), call);
}

int run_dequantize(int turned, int config, const DequantizeArguments* in, Stream* stream,
                   const char** call) {
  const auto run = turned ? &dequantize<true> : &dequantize<false>;
  return report(run(config, *in, *stream), call);
}

int run_dequantize_groups(int config, const DequantizeGroupsArguments* in, Stream* stream,
                          const char** call) {
  return report(dequantize_groups(config, *in, *stream), call);
}

}  // extern "C"
