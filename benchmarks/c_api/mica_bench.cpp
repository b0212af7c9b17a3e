#include "mica_bench.h"

#include <cuda_runtime_api.h>

#include <string>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/layer_norm/layer_norm_kernels.h>

using namespace mica;

namespace {

thread_local std::string last_error;

// Runs f on `stream`, and turns what it throws into a status.
template <class F>
int guarded(void* stream, F&& f) {
  try {
    const cuda::StreamGuard guard(static_cast<cudaStream_t>(stream));
    f();
    last_error.clear();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

Device current_device() {
  int index = 0;
  cuda::check(cudaGetDevice(&index), "cudaGetDevice");
  return Device::cuda(index);
}

DType dtype_from(int code) {
  check(code >= 0 && code <= 2, "expected a dtype of 0 (float32), 1 (float16) or 2 (bfloat16), got {}", code);
  constexpr DType kDtypes[] = {float32, float16, bfloat16};
  return kDtypes[code];
}

struct Dtypes {
  DType type;
  DType weight_type;
};

Dtypes checked_dtypes(int dtype, int weight_dtype) {
  const Dtypes result{dtype_from(dtype), dtype_from(weight_dtype)};
  check(result.weight_type == result.type || result.weight_type == float32, "expected weights of {} or float32, got {}",
        result.type, result.weight_type);
  return result;
}

void check_sizes(int64_t M, int64_t N) {
  check(M >= 0 && N >= 0, "expected sizes of at least 0, got M {}, N {}", M, N);
}

// What the kernels take as absent is an undefined tensor.
Tensor wrap(const void* data, const Shape& shape, DType dtype, Device device) {
  return data == nullptr ? Tensor{} : from_blob(const_cast<void*>(data), shape, dtype, device);
}

}  // namespace

const char* mica_bench_error(void) { return last_error.c_str(); }

int mica_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y, float* mean, float* rstd,
                            int64_t M, int64_t N, double eps, int dtype, int weight_dtype, void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check_sizes(M, N);
    check((mean == nullptr) == (rstd == nullptr), "expected mean and rstd, or neither");
    if (M == 0 || N == 0) {
      return;
    }
    check(x != nullptr && y != nullptr, "expected x and y, got a null pointer");
    const Device device = current_device();
    kernels::layer_norm_forward(Cuda{}, {.rows = M,
                                         .columns = N,
                                         .x = wrap(x, {M, N}, type, device),
                                         .weight = wrap(weight, {N}, weight_type, device),
                                         .bias = wrap(bias, {N}, weight_type, device),
                                         .eps = eps,
                                         .y = wrap(y, {M, N}, type, device),
                                         .mean = wrap(mean, {M}, float32, device),
                                         .rstd = wrap(rstd, {M}, float32, device)});
  });
}

int mica_layer_norm_backward(const void* dy, const void* x, const void* weight, const float* mean, const float* rstd,
                             void* dx, void* dweight, void* dbias, int64_t M, int64_t N, int dtype, int weight_dtype,
                             void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check_sizes(M, N);
    if (N == 0 || (dx == nullptr && dweight == nullptr && dbias == nullptr)) {
      return;
    }
    check(M == 0 || (dy != nullptr && x != nullptr && mean != nullptr && rstd != nullptr),
          "expected dy, x, mean and rstd, got a null pointer");
    const Device device = current_device();
    kernels::layer_norm_backward(Cuda{}, {.rows = M,
                                          .columns = N,
                                          .dy = wrap(dy, {M, N}, type, device),
                                          .x = wrap(x, {M, N}, type, device),
                                          .weight = wrap(weight, {N}, weight_type, device),
                                          .mean = wrap(mean, {M}, float32, device),
                                          .rstd = wrap(rstd, {M}, float32, device),
                                          .dx = wrap(dx, {M, N}, type, device),
                                          .dweight = wrap(dweight, {N}, weight_type, device),
                                          .dbias = wrap(dbias, {N}, weight_type, device)});
  });
}
