#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

enum class FftKind { complex, real_to_complex, complex_to_real };

/// Transforms of length n along the middle axis, times `scale`. All tensors are row-major, not empty, of float64 or
/// float32. Complex ones are (outer, length, inner, 2), real ones (outer, length, inner); the half of a complex signal
/// that belongs to a real one has length n / 2 + 1.
struct Fft {
  const Tensor& x;
  const Tensor& y;
  std::int64_t n;
  FftKind kind;
  bool inverse;  // with exp(+2πi…); complex_to_real always is
  double scale;
};
void fft(Cpu, const Fft& args);
void fft(Cuda, const Fft& args);

}  // namespace mica::kernels
