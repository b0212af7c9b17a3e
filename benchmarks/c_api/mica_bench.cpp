#include "mica_bench.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <string>
#include <utility>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/attention/detail/fused_attention.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_steps.h>
#include <mica/ops/cross_entropy/linear_cross_entropy.h>
#include <mica/ops/gated/detail/gated_kernels.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/quantized/detail/quantized_functions.h>
#include <mica/ops/quantized/detail/quantized_kernels.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_kernels.h>

using namespace mica;

namespace {

thread_local std::string last_error;

// Runs f on `stream`, and converts exceptions into a status.
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

// Forward and backward drop the same weights.
WeightDropout weight_dropout(double p) {
  check(p >= 0 && p < 1, "expected dropout in [0, 1), got {}", p);
  return {.key = {.seed = 1, .offset = 0}, .threshold = WeightDropout::threshold_of(p)};
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

// Kernels represent an absent argument by an undefined tensor.
Tensor wrap(const void* data, const Shape& shape, DType dtype, Device device) {
  return data == nullptr ? Tensor{} : from_blob(const_cast<void*>(data), shape, dtype, device);
}

void check_stride(int64_t N, int64_t stride) {
  check(stride >= N, "expected a stride of at least {}, got {}", N, stride);
}

// Rows of a matrix with a row stride of `stride` elements.
Tensor wrap_rows(const void* data, int64_t M, int64_t N, int64_t stride, DType dtype, Device device) {
  return data == nullptr ? Tensor{}
                         : as_strided(wrap(data, {(M - 1) * stride + N}, dtype, device), {M, N}, {stride, 1}, 0);
}

int gated_forward(const kernels::GatedFunction& function, const void* gate, const void* up, void* y, int64_t M,
                  int64_t N, int64_t stride, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check_sizes(M, N);
    check_stride(N, stride);
    if (M == 0 || N == 0) {
      return;
    }
    check(gate != nullptr && up != nullptr && y != nullptr, "expected gate, up and y, got a null pointer");
    const Device device = current_device();
    kernels::gated_forward(Cuda{}, function, wrap(y, {M, N}, type, device), wrap_rows(gate, M, N, stride, type, device),
                           wrap_rows(up, M, N, stride, type, device));
  });
}

int gated_backward(const kernels::GatedFunction& function, const void* dy, const void* gate, const void* up,
                   void* dgate, void* dup, int64_t M, int64_t N, int64_t stride, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check_sizes(M, N);
    check_stride(N, stride);
    if (M == 0 || N == 0 || (dgate == nullptr && dup == nullptr)) {
      return;
    }
    check(dy != nullptr && gate != nullptr && up != nullptr, "expected dy, gate and up, got a null pointer");
    const Device device = current_device();
    kernels::gated_backward(Cuda{}, function, wrap_rows(dgate, M, N, stride, type, device),
                            wrap_rows(dup, M, N, stride, type, device), wrap(dy, {M, N}, type, device),
                            wrap_rows(gate, M, N, stride, type, device), wrap_rows(up, M, N, stride, type, device));
  });
}

kernels::GatedFunction gelu_function(int tanh) {
  if (tanh != 0) {
    return functions::GeluTanh{};
  }
  return functions::Gelu{};
}

// Part `part` of (B, T, 3 · H · D) as (B, H, T, D).
Tensor wrap_heads(const void* qkv, int64_t part, int64_t parts, int64_t B, int64_t H, int64_t T, int64_t D,
                  DType dtype) {
  const int64_t row = parts * H * D;
  const Tensor all = wrap(qkv, {B, T, row}, dtype, current_device());
  return as_strided(all, {B, H, T, D}, {T * row, D, row, 1}, part * H * D);
}

AttentionBackend backend_from(int code) {
  check(code == 0 || code == 1, "expected a backend of 0 (flash) or 1 (cuDNN), got {}", code);
  return code == 0 ? AttentionBackend::flash : AttentionBackend::cudnn;
}

// Logits and labels of cross entropy without further options.
struct Rows {
  Tensor logits;
  Tensor labels;
  Tensor unweighted{};
  double softcap;

  Rows(const void* logits, const int64_t* labels, int64_t M, int64_t V, double softcap, int dtype)
      : logits(wrap(logits, {M, V}, dtype_from(dtype), current_device())),
        labels(wrap(labels, {M}, int64, current_device())),
        softcap(softcap) {
    check(M >= 1 && V >= 1, "expected sizes of at least 1, got M {}, V {}", M, V);
    check(logits != nullptr && labels != nullptr, "expected logits and labels, got a null pointer");
  }

  kernels::CrossEntropyTerms terms() const {
    return detail::terms_of({.softcap = softcap}, logits, labels, unweighted);
  }
  Tensor numbers() const { return empty({labels.numel()}, float32, logits.device()); }
  void count(const Tensor& denominator) const {
    kernels::cross_entropy_denominator(
        Cuda{}, {.targets = labels, .weight = unweighted, .ignore_index = -100, .denominator = denominator});
  }
};

// Until the end of scope.
class Precision {
 public:
  explicit Precision(int tf32) : previous_(float32_matmul_precision()) {
    set_float32_matmul_precision(tf32 != 0 ? MatmulPrecision::tf32 : MatmulPrecision::float32);
  }
  ~Precision() { set_float32_matmul_precision(previous_); }
  Precision(const Precision&) = delete;
  Precision& operator=(const Precision&) = delete;

 private:
  MatmulPrecision previous_;
};

Activation activation_from(int code) {
  check(code >= 0 && code <= 4, "expected an activation of 0 to 4, got {}", code);
  return static_cast<Activation>(code);
}

void check_products(int64_t M, int64_t K, int64_t N) {
  check(M >= 1 && K >= 1 && N >= 1, "expected sizes of at least 1, got M {}, K {}, N {}", M, K, N);
}

Tensor transposed(const Tensor& x) {
  return as_strided(x, {x.size(1), x.size(0)}, {x.strides()[1], x.strides()[0]}, x.handle()->offset);
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
    kernels::norm_forward(Cuda{}, {.rows = M,
                                   .columns = N,
                                   .centered = true,
                                   .eps = eps,
                                   .x = wrap(x, {M, N}, type, device),
                                   .weight = wrap(weight, {N}, weight_type, device),
                                   .bias = wrap(bias, {N}, weight_type, device),
                                   .y = wrap(y, {M, N}, type, device),
                                   .mean = wrap(mean, {kernels::mean_parts(type), M}, float32, device),
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
    kernels::norm_backward(Cuda{}, {.rows = M,
                                    .columns = N,
                                    .centered = true,
                                    .dy = wrap(dy, {M, N}, type, device),
                                    .x = wrap(x, {M, N}, type, device),
                                    .weight = wrap(weight, {N}, weight_type, device),
                                    .mean = wrap(mean, {kernels::mean_parts(type), M}, float32, device),
                                    .rstd = wrap(rstd, {M}, float32, device),
                                    .dx = wrap(dx, {M, N}, type, device),
                                    .dweight = wrap(dweight, {N}, weight_type, device),
                                    .dbias = wrap(dbias, {N}, weight_type, device)});
  });
}

int mica_swiglu_forward(const void* gate, const void* up, void* y, int64_t M, int64_t N, int64_t stride, int dtype,
                        void* stream) {
  return gated_forward(functions::Silu{}, gate, up, y, M, N, stride, dtype, stream);
}

int mica_geglu_forward(const void* gate, const void* up, void* y, int64_t M, int64_t N, int64_t stride, int tanh,
                       int dtype, void* stream) {
  return gated_forward(gelu_function(tanh), gate, up, y, M, N, stride, dtype, stream);
}

int mica_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t M, int64_t N,
                         int64_t stride, int dtype, void* stream) {
  return gated_backward(functions::Silu{}, dy, gate, up, dgate, dup, M, N, stride, dtype, stream);
}

int mica_geglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t M, int64_t N,
                        int64_t stride, int tanh, int dtype, void* stream) {
  return gated_backward(gelu_function(tanh), dy, gate, up, dgate, dup, M, N, stride, dtype, stream);
}

int mica_rms_norm_forward(const void* x, const void* weight, void* y, float* rstd, int64_t M, int64_t N, double eps,
                          int dtype, int weight_dtype, void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check_sizes(M, N);
    if (M == 0 || N == 0) {
      return;
    }
    check(x != nullptr && y != nullptr, "expected x and y, got a null pointer");
    const Device device = current_device();
    kernels::norm_forward(Cuda{}, {.rows = M,
                                   .columns = N,
                                   .centered = false,
                                   .eps = eps,
                                   .x = wrap(x, {M, N}, type, device),
                                   .weight = wrap(weight, {N}, weight_type, device),
                                   .y = wrap(y, {M, N}, type, device),
                                   .rstd = wrap(rstd, {M}, float32, device)});
  });
}

int mica_rms_norm_backward(const void* dy, const void* x, const void* weight, const float* rstd, void* dx,
                           void* dweight, int64_t M, int64_t N, int dtype, int weight_dtype, void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check(M >= 1 && N >= 1, "expected sizes of at least 1, got M {}, N {}", M, N);
    if (dx == nullptr && dweight == nullptr) {
      return;
    }
    check(dy != nullptr && x != nullptr && rstd != nullptr, "expected dy, x and rstd, got a null pointer");
    const Device device = current_device();
    kernels::norm_backward(Cuda{}, {.rows = M,
                                    .columns = N,
                                    .centered = false,
                                    .dy = wrap(dy, {M, N}, type, device),
                                    .x = wrap(x, {M, N}, type, device),
                                    .weight = wrap(weight, {N}, weight_type, device),
                                    .rstd = wrap(rstd, {M}, float32, device),
                                    .dx = wrap(dx, {M, N}, type, device),
                                    .dweight = wrap(dweight, {N}, weight_type, device)});
  });
}

int mica_softmax_forward(const void* x, void* y, int64_t M, int64_t N, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(M >= 1 && N >= 1, "expected sizes of at least 1, got M {}, N {}", M, N);
    check(x != nullptr && y != nullptr, "expected x and y, got a null pointer");
    const Device device = current_device();
    const Tensor in = wrap(x, {M, N}, type, device);
    const Tensor out = wrap(y, {M, N}, type, device);
    kernels::softmax(Cuda{}, {.x = in, .axis = 1, .y = out});
  });
}

int mica_softmax_backward(const void* dy, const void* y, void* dx, int64_t M, int64_t N, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(M >= 1 && N >= 1, "expected sizes of at least 1, got M {}, N {}", M, N);
    check(dy != nullptr && y != nullptr && dx != nullptr, "expected dy, y and dx, got a null pointer");
    const Device device = current_device();
    const Tensor out = wrap(y, {M, N}, type, device);
    const Tensor gradient = wrap(dy, {M, N}, type, device);
    const Tensor result = wrap(dx, {M, N}, type, device);
    kernels::softmax_backward(Cuda{}, {.y = out, .dy = gradient, .axis = 1, .dx = result});
  });
}

int mica_add_layer_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, void* sum,
                                void* y, float* mean, float* rstd, int64_t M, int64_t N, double eps, int dtype,
                                int weight_dtype, void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check_sizes(M, N);
    check((mean == nullptr) == (rstd == nullptr), "expected mean and rstd, or neither");
    if (M == 0 || N == 0) {
      return;
    }
    check(x != nullptr && residual != nullptr && sum != nullptr && y != nullptr,
          "expected x, residual, sum and y, got a null pointer");
    const Device device = current_device();
    const bool done =
        kernels::add_norm_forward(Cuda{}, {.rows = M,
                                           .columns = N,
                                           .centered = true,
                                           .eps = eps,
                                           .x = wrap(x, {M, N}, type, device),
                                           .weight = wrap(weight, {N}, weight_type, device),
                                           .bias = wrap(bias, {N}, weight_type, device),
                                           .y = wrap(y, {M, N}, type, device),
                                           .mean = wrap(mean, {kernels::mean_parts(type), M}, float32, device),
                                           .rstd = wrap(rstd, {M}, float32, device),
                                           .residual = wrap(residual, {M, N}, type, device),
                                           .sum = wrap(sum, {M, N}, type, device)});
    check(done, "there is no kernel for rows of {}, or for pointers that are not aligned", N);
  });
}

int mica_add_layer_norm_backward(const void* dsum, const void* dy, const void* sum, const void* weight,
                                 const float* mean, const float* rstd, void* dx, void* dweight, void* dbias, int64_t M,
                                 int64_t N, int dtype, int weight_dtype, void* stream) {
  return guarded(stream, [&] {
    const auto [type, weight_type] = checked_dtypes(dtype, weight_dtype);
    check(M >= 1 && N >= 1, "expected sizes of at least 1, got M {}, N {}", M, N);
    if (dx == nullptr && dweight == nullptr && dbias == nullptr) {
      return;
    }
    check(dsum != nullptr && dy != nullptr && sum != nullptr && mean != nullptr && rstd != nullptr,
          "expected dsum, dy, sum, mean and rstd, got a null pointer");
    const Device device = current_device();
    const bool done =
        kernels::add_norm_backward(Cuda{}, {.rows = M,
                                            .columns = N,
                                            .centered = true,
                                            .dy = wrap(dy, {M, N}, type, device),
                                            .x = wrap(sum, {M, N}, type, device),
                                            .weight = wrap(weight, {N}, weight_type, device),
                                            .mean = wrap(mean, {kernels::mean_parts(type), M}, float32, device),
                                            .rstd = wrap(rstd, {M}, float32, device),
                                            .dx = wrap(dx, {M, N}, type, device),
                                            .dweight = wrap(dweight, {N}, weight_type, device),
                                            .dbias = wrap(dbias, {N}, weight_type, device),
                                            .dsum = wrap(dsum, {M, N}, type, device)});
    check(done, "there is no kernel for rows of {}, or for pointers that are not aligned", N);
  });
}

int mica_cross_entropy_forward(const void* logits, const int64_t* labels, float* loss, float* logsumexp, float* mass,
                               float* denominator, int64_t M, int64_t V, double softcap, int dtype, void* stream) {
  return guarded(stream, [&] {
    const Rows rows(logits, labels, M, V, softcap, dtype);
    check(loss != nullptr && logsumexp != nullptr && mass != nullptr && denominator != nullptr,
          "expected all outputs, got a null pointer");
    const Device device = rows.logits.device();
    const Tensor losses = rows.numbers();
    const Tensor divisor = wrap(denominator, {1}, float32, device);
    kernels::cross_entropy_forward(Cuda{}, {.terms = rows.terms(),
                                            .logsumexp = wrap(logsumexp, {M}, float32, device),
                                            .mass = wrap(mass, {M}, float32, device),
                                            .losses = losses});
    rows.count(divisor);
    kernels::cross_entropy_reduce(Cuda{},
                                  {.losses = losses, .denominator = divisor, .loss = wrap(loss, {1}, float32, device)});
  });
}

int mica_cross_entropy_backward(const float* dloss, const void* logits, const int64_t* labels, const float* logsumexp,
                                const float* mass, const float* denominator, void* dlogits, int64_t M, int64_t V,
                                double softcap, int dtype, void* stream) {
  return guarded(stream, [&] {
    const Rows rows(logits, labels, M, V, softcap, dtype);
    check(dloss != nullptr && logsumexp != nullptr && mass != nullptr && denominator != nullptr && dlogits != nullptr,
          "expected all arguments, got a null pointer");
    const Device device = rows.logits.device();
    kernels::cross_entropy_backward(Cuda{}, {.terms = rows.terms(),
                                             .logsumexp = wrap(logsumexp, {M}, float32, device),
                                             .mass = wrap(mass, {M}, float32, device),
                                             .dloss = wrap(dloss, {1}, float32, device),
                                             .denominator = wrap(denominator, {1}, float32, device),
                                             .dlogits = wrap(dlogits, {M, V}, rows.logits.dtype(), device)});
  });
}

int mica_cross_entropy_in_place_forward(void* logits, const int64_t* labels, float* loss, int64_t M, int64_t V,
                                        double softcap, int dtype, void* stream) {
  return guarded(stream, [&] {
    const Rows rows(logits, labels, M, V, softcap, dtype);
    check(loss != nullptr, "expected loss, got a null pointer");
    const Device device = rows.logits.device();
    const Tensor losses = rows.numbers();
    const Tensor divisor = empty({1}, float32, device);
    rows.count(divisor);
    kernels::cross_entropy_in_place(
        Cuda{}, {.terms = rows.terms(), .dloss = rows.unweighted, .denominator = divisor, .losses = losses});
    kernels::cross_entropy_reduce(Cuda{},
                                  {.losses = losses, .denominator = divisor, .loss = wrap(loss, {1}, float32, device)});
  });
}

int mica_cross_entropy_in_place_backward(const float* dloss, void* dlogits, int64_t M, int64_t V, int dtype,
                                         void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(M >= 1 && V >= 1, "expected sizes of at least 1, got M {}, V {}", M, V);
    check(dloss != nullptr && dlogits != nullptr, "expected dloss and dlogits, got a null pointer");
    const Device device = current_device();
    kernels::cross_entropy_scale(
        Cuda{}, {.gradient = wrap(dlogits, {M, V}, type, device), .factor = wrap(dloss, {1}, float32, device)});
  });
}

int mica_linear_cross_entropy(const void* x, const void* weight, const int64_t* labels, float* loss, void* dx,
                              void* dweight, int64_t M, int64_t K, int64_t V, int64_t chunk_bytes, int dtype,
                              void* stream) {
  return guarded(stream, [&] {
    check(M >= 1 && K >= 1 && V >= 1, "expected sizes of at least 1, got M {}, K {}, V {}", M, K, V);
    check(x != nullptr && weight != nullptr && labels != nullptr && loss != nullptr && dx != nullptr &&
              dweight != nullptr,
          "expected all arguments, got a null pointer");
    const DType type = dtype_from(dtype);
    const Device device = current_device();
    const Tensor leaf = wrap(x, {M, K}, type, device).requires_grad_();
    const Tensor matrix = wrap(weight, {V, K}, type, device).requires_grad_();
    const Tensor result = linear_cross_entropy(leaf, matrix, wrap(labels, {M}, int64, device), {}, chunk_bytes);
    result.backward();
    copy_into(wrap(loss, {}, float32, device), result.detach());
    copy_into(wrap(dx, {M, K}, type, device), leaf.grad());
    copy_into(wrap(dweight, {V, K}, type, device), matrix.grad());
  });
}

int mica_quantized_matmul(const void* x, const int32_t* packed, const void* scale, const void* zero, void* y, int64_t M,
                          int64_t N, int64_t K, int bits, int64_t group, int mode, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(M >= 1 && N >= 1 && K >= 1, "expected sizes of at least 1, got M {}, N {}, K {}", M, N, K);
    check(x != nullptr && packed != nullptr && y != nullptr, "expected x, packed and y, got a null pointer");
    check(mode >= 0 && mode <= 4, "expected a mode from 0 to 4, got {}", mode);
    quantized::check_bits("mica_quantized_matmul", bits);
    quantized::check_group_size("mica_quantized_matmul", group, bits);
    const Device device = current_device();
    const Shape groups{quantized::groups_of(K, group), N};
    const QuantizedWeight weight{.packed = wrap(packed, {quantized::words_of(K, bits), N}, int32, device),
                                 .scale = wrap(scale, groups, type, device),
                                 .zero = wrap(zero, groups, type, device),
                                 .rows = K,
                                 .bits = bits,
                                 .group_size = group,
                                 .mode = static_cast<QuantizationMode>(mode)};
    check_weight("mica_quantized_matmul", weight);
    kernels::quantized_matmul_forward(Cuda{}, {.weight = weight,
                                               .x = wrap(x, {M, K}, type, device),
                                               .columns = {},
                                               .rows = {},
                                               .y = wrap(y, {M, N}, type, device)});
  });
}

int64_t mica_bench_peak_bytes(void) {
  std::uint64_t most = 0;
  const int status = guarded(nullptr, [&] {
    cudaMemPool_t pool = nullptr;
    cuda::check(cudaDeviceGetDefaultMemPool(&pool, current_device().index), "cudaDeviceGetDefaultMemPool");
    cuda::check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &most), "cudaMemPoolGetAttribute");
    std::uint64_t none = 0;  // from here on
    cuda::check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &none), "cudaMemPoolSetAttribute");
  });
  return status == 0 ? static_cast<int64_t>(most) : -1;
}

int mica_linear_forward(const void* x, const void* weight, const void* bias, void* y, void* saved, int64_t M, int64_t K,
                        int64_t N, int activation, int tf32, int dtype, void* stream) {
  return guarded(stream, [&] {
    check_products(M, K, N);
    check(x != nullptr && weight != nullptr && y != nullptr, "expected x, weight and y, got a null pointer");
    const DType type = dtype_from(dtype);
    const Device device = current_device();
    const Precision precision(tf32);
    kernels::matmul(Cuda{}, {.a = wrap(x, {M, K}, type, device),
                             .b = transposed(wrap(weight, {N, K}, type, device)),
                             .bias = wrap(bias, {N}, type, device),
                             .out = wrap(y, {M, N}, type, device),
                             .activation = activation_from(activation),
                             .sums = wrap(saved, {M, N}, type, device)});
  });
}

int mica_linear_backward(const void* dy, const void* x, const void* weight, const void* y_or_saved, void* dz, void* dx,
                         void* dweight, void* dbias, int64_t M, int64_t K, int64_t N, int activation, int tf32,
                         int dtype, void* stream) {
  return guarded(stream, [&] {
    check_products(M, K, N);
    check(dy != nullptr && x != nullptr && weight != nullptr && dx != nullptr && dweight != nullptr && dbias != nullptr,
          "expected all arguments, got a null pointer");
    const DType type = dtype_from(dtype);
    const Activation function = activation_from(activation);
    const Device device = current_device();
    const Precision precision(tf32);
    const Tensor gradient = wrap(dy, {M, N}, type, device);
    const bool has_function = function != Activation::none;
    check(!has_function || (y_or_saved != nullptr && dz != nullptr),
          "expected what forward saved and dz, got a null pointer");
    const Tensor dsums = has_function ? wrap(dz, {M, N}, type, device) : gradient;
    kernels::activation_backward(Cuda{}, {.activation = function,
                                          .dy = gradient,
                                          .v = wrap(y_or_saved, {M, N}, type, device),
                                          .dz = dsums,
                                          .dbias = wrap(dbias, {N}, type, device)});
    kernels::matmul(
        Cuda{},
        {.a = dsums, .b = wrap(weight, {N, K}, type, device), .bias = {}, .out = wrap(dx, {M, K}, type, device)});
    kernels::matmul(Cuda{}, {.a = transposed(dsums),
                             .b = wrap(x, {M, K}, type, device),
                             .bias = {},
                             .out = wrap(dweight, {N, K}, type, device)});
  });
}

int mica_tiled_matmul(const void* a, const void* b, void* c, int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb,
                      int transpose_a, int transpose_b, int activation, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(M >= 1 && N >= 1 && K >= 1, "expected sizes of at least 1, got M {}, N {}, K {}", M, N, K);
    check(a != nullptr && b != nullptr && c != nullptr, "expected a, b and c, got a null pointer");
    const Device device = current_device();
    const auto matrix = [&](const void* data, int64_t rows, int64_t columns, int64_t leading, bool transposed) {
      if (transposed) {
        std::swap(rows, columns);
      }
      check_stride(columns, leading);
      const Tensor lines = wrap_rows(data, rows, columns, leading, type, device);
      return transposed ? as_strided(lines, {columns, rows}, {1, leading}, 0) : lines;
    };
    kernels::tiled_matmul(Cuda{}, {.a = matrix(a, M, K, lda, transpose_a != 0),
                                   .b = matrix(b, K, N, ldb, transpose_b != 0),
                                   .activation = activation != 0 ? Activation::leaky_relu : Activation::none,
                                   .y = wrap(c, {M, N}, type, device)});
  });
}

int mica_attention_forward(const void* qkv, void* y, float* lse, int64_t B, int64_t H, int64_t T, int64_t D, int causal,
                           double dropout, int backend, int dtype, void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(B >= 1 && H >= 1 && T >= 1 && D >= 1, "expected sizes of at least 1");
    check(qkv != nullptr && y != nullptr && lse != nullptr, "expected qkv, y and lse, got a null pointer");
    const auto part = [&](int64_t i) { return wrap_heads(qkv, i, 3, B, H, T, D, type); };
    detail::run_fused_attention({.backend = backend_from(backend),
                                 .args = {.q = part(0),
                                          .k = part(1),
                                          .v = part(2),
                                          .out = wrap_heads(y, 0, 1, B, H, T, D, type),
                                          .lse = wrap(lse, {B, H, T}, float32, current_device()),
                                          .scale = 1 / std::sqrt(static_cast<double>(D)),
                                          .causal = causal != 0,
                                          .dropout = weight_dropout(dropout)}});
  });
}

int mica_attention_backward(const void* qkv, const void* y, const float* lse, const void* dy, void* dqkv, int64_t B,
                            int64_t H, int64_t T, int64_t D, int causal, double dropout, int backend, int dtype,
                            void* stream) {
  return guarded(stream, [&] {
    const DType type = dtype_from(dtype);
    check(B >= 1 && H >= 1 && T >= 1 && D >= 1, "expected sizes of at least 1");
    check(qkv != nullptr && y != nullptr && lse != nullptr && dy != nullptr && dqkv != nullptr,
          "expected qkv, y, lse, dy and dqkv, got a null pointer");
    const auto part = [&](const void* data, int64_t i) { return wrap_heads(data, i, 3, B, H, T, D, type); };
    detail::run_fused_attention_backward(backend_from(backend), {.q = part(qkv, 0),
                                                                 .k = part(qkv, 1),
                                                                 .v = part(qkv, 2),
                                                                 .out = wrap_heads(y, 0, 1, B, H, T, D, type),
                                                                 .lse = wrap(lse, {B, H, T}, float32, current_device()),
                                                                 .dout = wrap_heads(dy, 0, 1, B, H, T, D, type),
                                                                 .dq = part(dqkv, 0),
                                                                 .dk = part(dqkv, 1),
                                                                 .dv = part(dqkv, 2),
                                                                 .scale = 1 / std::sqrt(static_cast<double>(D)),
                                                                 .causal = causal != 0,
                                                                 .dropout = weight_dropout(dropout)});
  });
}
