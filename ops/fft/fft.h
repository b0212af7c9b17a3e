#pragma once

#include <cstdint>
#include <optional>

#include <mica/core/tensor.h>

namespace mica {

// Discrete Fourier transforms. A complex tensor is a real one whose last axis has two elements, the real and the
// imaginary part; `axis` and `axes` count the axes before it: a complex vector has the shape (n, 2) and the axis 0 or
// -1. float64 and float32, on the CPU and on GPUs; 16-bit floats throw, as on PyTorch's CPU: cast to float32. Under
// autograd::Autocast they are cast. Any length, also prime ones.
//
// A transform is linear, so its gradient is another transform. Differentiable any number of times. All functions throw
// Error if a shape, dtype or axis does not match, and for a length of 0.

/// Which direction is scaled: the inverse by 1/n, both by 1/√n, or the forward one by 1/n, where n is the length, for
/// several axes the product of the lengths.
enum class FftNorm { backward, ortho, forward };

struct FftOptions {
  /// The length of the signal: longer ones are cut at the end, shorter ones get zeros. Default: the axis's. For irfft,
  /// the length of the result; default: 2 · (m − 1) for an axis of length m.
  std::optional<std::int64_t> n = {};
  std::int64_t axis = -1;
  FftNorm norm = FftNorm::backward;
};

/// y[k] = Σ x[j] · exp(−2πi·jk/n) for complex x, and the inverse, with exp(2πi·jk/n).
Tensor fft(const Tensor& x, FftOptions options = {});
Tensor ifft(const Tensor& x, FftOptions options = {});

/// fft() of real x: the first n/2 + 1 elements, complex; the others are their conjugates.
Tensor rfft(const Tensor& x, FftOptions options = {});

/// The inverse of rfft(): complex to real. Ignores the imaginary parts of the first element and, for even n, of element
/// n/2, which are 0 in the transform of a real signal.
Tensor irfft(const Tensor& x, FftOptions options = {});

struct Fft2Options {
  Dims lengths = {};     ///< of the signal along each of the axes, as FftOptions::n; empty: those of x
  Dims axes = {-2, -1};  ///< for rfft2 and irfft2, the last one is that of the real signal
  FftNorm norm = FftNorm::backward;
};

/// The transforms along two axes, or any other number of different `axes`.
Tensor fft2(const Tensor& x, const Fft2Options& options = {});
Tensor ifft2(const Tensor& x, const Fft2Options& options = {});
Tensor rfft2(const Tensor& x, const Fft2Options& options = {});
Tensor irfft2(const Tensor& x, const Fft2Options& options = {});

/// The frequencies of fft()'s elements, in cycles per unit, for n samples that are `spacing` apart:
/// [0, 1, …, −2, −1] / (n · spacing).
Tensor fftfreq(std::int64_t n, double spacing = 1, DType dtype = float32, Device device = Device::cpu());
/// Those of rfft()'s elements: [0, 1, …, n/2] / (n · spacing).
Tensor rfftfreq(std::int64_t n, double spacing = 1, DType dtype = float32, Device device = Device::cpu());

/// Moves frequency 0 to the middle of each of the axes (none given: of all), or back to the front. These are the axes
/// of a plain tensor: for a complex one, name all but the last.
Tensor fftshift(const Tensor& x, const Dims& axes = {});
Tensor ifftshift(const Tensor& x, const Dims& axes = {});

/// (re, im) as one complex tensor, of two tensors of equal shape.
Tensor complex(const Tensor& re, const Tensor& im);
/// The product of complex tensors; their shapes broadcast.
Tensor complex_mul(const Tensor& a, const Tensor& b);
/// The conjugate.
Tensor complex_conj(const Tensor& x);
/// √(re² + im²), of the shape without the last axis. Where it is 0, the derivative is 0.
Tensor complex_abs(const Tensor& x);

}  // namespace mica
