#include <unsupported/Eigen/FFT>

#include <algorithm>
#include <cmath>
#include <complex>
#include <map>
#include <numbers>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/fft/detail/fft_kernels.h>

namespace mica::kernels {

namespace {

template <class T>
using Complex = std::complex<T>;

// exp(2πi · k / n).
template <class T>
Complex<T> root(std::int64_t k, std::int64_t n) {
  const double angle = 2 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(n);
  return {static_cast<T>(std::cos(angle)), static_cast<T>(std::sin(angle))};
}

// a · b. The operator of std::complex checks for NaN.
template <class T>
Complex<T> times(Complex<T> a, Complex<T> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// Complex transforms of one length and direction, by Eigen's copy of kissfft. It takes n · p steps for a prime factor p
// of n; if there is a large one, Bluestein's algorithm writes the transform as a convolution,
//
//   y[k] = c[k] · Σ (x[j] · c[j]) · conj(c[k − j]) with c[j] = exp(∓πi · j²/n), since 2jk = j² + k² − (k − j)²,
//
// which two transforms of a power of two compute.
template <class T>
class ComplexFft {
 public:
  ComplexFft(std::int64_t n, bool inverse) : n_(n) {
    std::int64_t largest = 1;
    for (std::int64_t rest = n, p = 2; rest > 1; p = p * p > rest ? rest : p + 1) {
      for (; rest % p == 0; rest /= p) {
        largest = p;
      }
    }
    if (largest <= kLargestPrime) {
      start(forward_, n, inverse);
      return;
    }
    size_ = 1;
    for (; size_ < 2 * n - 1; size_ *= 2) {
    }
    start(forward_, size_, false);
    start(backward_, size_, true);
    for (std::int64_t j = 0; j < n; ++j) {
      // j² modulo 2n, so that the angle is exact.
      const std::int64_t square = j * j % (2 * n);
      chirp_.push_back(root<T>(inverse ? square : -square, 2 * n));
    }
    std::vector<Complex<T>> filter(size_);
    for (std::int64_t j = 0; j < n; ++j) {
      filter[j] = filter[(size_ - j) % size_] = std::conj(chirp_[j]) / static_cast<T>(size_);
    }
    filter_.resize(size_);
    forward_.work(0, filter_.data(), filter.data(), 1, 1);
    padded_.resize(size_);
    spectrum_.resize(size_);
  }

  void run(const Complex<T>* x, Complex<T>* y) {
    if (n_ == 1) {
      y[0] = x[0];
    } else if (chirp_.empty()) {
      forward_.work(0, y, x, 1, 1);
    } else {
      std::fill(padded_.begin() + n_, padded_.end(), Complex<T>{});
      for (std::int64_t j = 0; j < n_; ++j) {
        padded_[j] = times(x[j], chirp_[j]);
      }
      forward_.work(0, spectrum_.data(), padded_.data(), 1, 1);
      for (std::int64_t j = 0; j < size_; ++j) {
        spectrum_[j] = times(spectrum_[j], filter_[j]);
      }
      backward_.work(0, padded_.data(), spectrum_.data(), 1, 1);
      for (std::int64_t j = 0; j < n_; ++j) {
        y[j] = times(padded_[j], chirp_[j]);
      }
    }
  }

 private:
  using Plan = Eigen::internal::kiss_cpx_fft<T>;
  static constexpr std::int64_t kLargestPrime = 64;

  static void start(Plan& plan, std::int64_t n, bool inverse) {
    plan.make_twiddles(static_cast<int>(n), inverse);
    plan.factorize(static_cast<int>(n));
  }

  std::int64_t n_;
  std::int64_t size_ = 0;
  Plan forward_, backward_;
  std::vector<Complex<T>> chirp_, filter_, padded_, spectrum_;
};

// This thread's transform of length n.
template <class T>
ComplexFft<T>& complex_fft(std::int64_t n, bool inverse) {
  static thread_local std::map<std::pair<std::int64_t, bool>, ComplexFft<T>> transforms;
  const std::pair key(n, inverse);
  auto found = transforms.find(key);
  if (found == transforms.end()) {
    if (transforms.size() >= 64) {
      transforms.clear();
    }
    found = transforms.try_emplace(key, n, inverse).first;
  }
  return found->second;
}

// Transforms of a real signal of length n. For even n, the even elements are the real and the odd ones the imaginary
// part of a complex signal of half the length: its spectrum is e + i·o for the spectra e and o of the two, and that of
// the whole signal is e[k] + exp(−2πi·k/n) · o[k].
template <class T>
class RealFft {
 public:
  RealFft(std::int64_t n, bool inverse)
      : n_(n), half_(n / 2), transform_(complex_fft<T>(n % 2 == 0 ? half_ : n, inverse)) {
    from_.resize(n);
    to_.resize(n);
    for (std::int64_t k = 0; n % 2 == 0 && k <= half_; ++k) {
      roots_.push_back(root<T>(-k, n));
    }
  }

  void forward(const T* x, Complex<T>* y) {
    if (n_ % 2 != 0) {
      std::copy_n(x, n_, from_.begin());
      transform_.run(from_.data(), to_.data());
      std::copy_n(to_.begin(), half_ + 1, y);
      return;
    }
    transform_.run(reinterpret_cast<const Complex<T>*>(x), to_.data());
    to_[half_] = to_[0];
    for (std::int64_t k = 0; k <= half_; ++k) {
      const Complex<T> a = to_[k], b = std::conj(to_[half_ - k]);
      const Complex<T> odd = times(a - b, roots_[k]);
      y[k] = T(0.5) * Complex<T>(a.real() + b.real() + odd.imag(), a.imag() + b.imag() - odd.real());
    }
  }

  void inverse(const Complex<T>* x, T* y) {
    const Complex<T> first = x[0].real();
    if (n_ % 2 != 0) {
      from_[0] = first;
      for (std::int64_t k = 1; k <= half_; ++k) {
        from_[k] = x[k];
        from_[n_ - k] = std::conj(x[k]);
      }
      transform_.run(from_.data(), to_.data());
      std::transform(to_.begin(), to_.end(), y, [](Complex<T> z) { return z.real(); });
      return;
    }
    const Complex<T> last = x[half_].real();
    for (std::int64_t k = 0; k < half_; ++k) {
      const Complex<T> a = k == 0 ? first : x[k], b = std::conj(k == 0 ? last : x[half_ - k]);
      const Complex<T> odd = times(a - b, std::conj(roots_[k]));
      from_[k] = {a.real() + b.real() - odd.imag(), a.imag() + b.imag() + odd.real()};
    }
    transform_.run(from_.data(), reinterpret_cast<Complex<T>*>(y));
  }

 private:
  std::int64_t n_, half_;
  ComplexFft<T>& transform_;
  std::vector<Complex<T>> from_, to_, roots_;
};

// Calls transform(x, y) for each line along the middle axis of the arrays, in parallel, with a transform that
// make_transform() returns for a range of lines.
template <class In, class Out, class F>
void for_each_line(const Fft& args, std::int64_t x_length, std::int64_t y_length, const F& make_transform) {
  using Real = std::remove_cv_t<std::remove_reference_t<decltype(std::real(Out{}))>>;
  const std::int64_t inner = args.x.shape()[2];
  const auto* const x = reinterpret_cast<const In*>(args.x.raw_data());
  auto* const y = reinterpret_cast<Out*>(args.y.raw_data());
  const auto scale = static_cast<Real>(args.scale);
  // Adjacent lines are copied together, since their elements lie together.
  const std::int64_t width = std::min<std::int64_t>(inner, 8);
  const std::int64_t groups = (inner + width - 1) / width;
  const std::int64_t grain = 1 + 4096 / (x_length * width);
  parallel_for(args.x.shape()[0] * groups, grain, [&](std::int64_t begin, std::int64_t end) {
    auto transform = make_transform();
    std::vector<In> from(inner == 1 ? 0 : width * x_length);
    std::vector<Out> to(inner == 1 ? 0 : width * y_length);
    for (std::int64_t group = begin; group < end; ++group) {
      const std::int64_t outer = group / groups;
      const std::int64_t first = (group - outer * groups) * width;
      const In* const x_lines = x + outer * x_length * inner + first;
      Out* const y_lines = y + outer * y_length * inner + first;
      if (inner == 1) {
        transform(x_lines, y_lines);
        std::for_each(y_lines, y_lines + y_length, [&](Out& v) { v *= scale; });
        continue;
      }
      const std::int64_t count = std::min(width, inner - first);
      for (std::int64_t j = 0; j < x_length; ++j) {
        for (std::int64_t line = 0; line < count; ++line) {
          from[line * x_length + j] = x_lines[j * inner + line];
        }
      }
      for (std::int64_t line = 0; line < count; ++line) {
        transform(from.data() + line * x_length, to.data() + line * y_length);
      }
      for (std::int64_t j = 0; j < y_length; ++j) {
        for (std::int64_t line = 0; line < count; ++line) {
          y_lines[j * inner + line] = to[line * y_length + j] * scale;
        }
      }
    }
  });
}

}  // namespace

void fft(Cpu, const Fft& args) {
  const std::int64_t n = args.n;
  check(n <= INT32_MAX / 8, "fft: expected a length of at most {}, got {}", INT32_MAX / 8, n);
  on_dtype(Types<float, double>{}, args.x.dtype(), "fft", [&]<class T>() {
    if (args.kind == FftKind::complex) {
      for_each_line<Complex<T>, Complex<T>>(args, n, n, [&] {
        return [&transform = complex_fft<T>(n, args.inverse)](const auto* x, auto* y) { transform.run(x, y); };
      });
    } else if (args.kind == FftKind::real_to_complex) {
      for_each_line<T, Complex<T>>(args, n, n / 2 + 1, [&] {
        return [transform = RealFft<T>(n, false)](const auto* x, auto* y) mutable { transform.forward(x, y); };
      });
    } else {
      for_each_line<Complex<T>, T>(args, n / 2 + 1, n, [&] {
        return [transform = RealFft<T>(n, true)](const auto* x, auto* y) mutable { transform.inverse(x, y); };
      });
    }
  });
}

}  // namespace mica::kernels
