#include <cmath>
#include <optional>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/fft/detail/fft_kernels.h>
#include <mica/ops/fft/fft.h>
#include <mica/ops/join/join.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using kernels::FftKind;

// The factors that belong to the elements of half a spectrum: `ends` for the first and, if n is even, the last one,
// `middle` for the others, which stand for two. Shape (n / 2 + 1), and axes of length 1.
Tensor half_weights(std::int64_t n, double ends, double middle, const Tensor& like, int axes_after) {
  const std::int64_t half = n / 2;
  const Tensor k = arange(static_cast<double>(half + 1), int64, like.device());
  const Tensor is_end = logical_or(eq(k, 0), eq(2 * k, static_cast<double>(n)));
  Shape shape{half + 1};
  for (int i = 0; i < axes_after; ++i) {
    shape.push_back(1);
  }
  return reshape(where(is_end, full(k.shape(), ends, like.dtype(), like.device()), middle), shape);
}

// A transform of length n along an axis, times `scale`. With F the matrix of the transform, the gradient is that of a
// linear map: of complex tensors Fᴴ, the transform in the other direction. A real signal's half spectrum is that map
// without the other half, so its gradient sums over this half only, whereas complex_to_real counts all elements twice
// except the ends; and the other way round.
struct Fft {
  static constexpr bool composed = true;
  FftKind kind;
  std::int64_t n;
  int axis;
  bool inverse;
  double scale;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const bool from_complex = kind != FftKind::real_to_complex;
    const bool to_complex = kind != FftKind::complex_to_real;
    Shape shape = x.shape();
    shape[axis] = kind == FftKind::real_to_complex ? n / 2 + 1 : n;
    if (from_complex && !to_complex) {
      shape.pop_back();
    } else if (to_complex && !from_complex) {
      shape.push_back(2);
    }
    const Tensor y = empty(shape, x.dtype(), x.device());
    if (y.numel() > 0) {
      const kernels::Fft args{.x = lines_of(contiguous_data(x), from_complex),
                              .y = lines_of(y, to_complex),
                              .n = n,
                              .kind = kind,
                              .inverse = inverse,
                              .scale = scale};
      on_device(x.device(), [&](auto device) { kernels::fft(device, args); });
    }
    return y;
  }

  Tensor backward(autograd::Context&, const Tensor& dy) const {
    if (kind == FftKind::complex) {
      return autograd::apply(Fft{kind, n, axis, !inverse, scale}, dy);
    }
    if (kind == FftKind::real_to_complex) {
      const Tensor weights = half_weights(n, 1, 0.5, dy, dy.dim() - axis - 1);
      return autograd::apply(Fft{FftKind::complex_to_real, n, axis, true, scale}, dy * weights);
    }
    const Tensor half = autograd::apply(Fft{FftKind::real_to_complex, n, axis, false, scale}, dy);
    return half * half_weights(n, 1, 2, dy, half.dim() - axis - 1);
  }

  // (outer, length, inner), or with a last axis of 2.
  Tensor lines_of(const Tensor& x, bool is_complex) const {
    Shape shape{numel_of(x.shape().slice(0, axis)), x.size(axis),
                numel_of(x.shape().slice(axis + 1, x.dim() - (is_complex ? 1 : 0)))};
    if (is_complex) {
      shape.push_back(2);
    }
    return view(x, shape);
  }
};

void expect_signal(const Tensor& x, const char* op, bool is_complex) {
  check(x.dtype() == float64 || x.dtype() == float32, "{}: expected float64 or float32, got {}", op, x.dtype());
  if (is_complex) {
    check(x.dim() > 1 && x.size(-1) == 2, "{}: expected a complex tensor, with a last axis of length 2, got shape {}",
          op, x.shape());
  }
  check(x.dim() > 0, "{}: expected a tensor with at least one axis, got a scalar", op);
}

// The axis of x in place, cut or padded with zeros to this length.
Tensor resized(const Tensor& x, int axis, std::int64_t length) {
  const std::int64_t have = x.size(axis);
  return have < length ? pad(x, axis, 0, length - have) : have > length ? slice(x, axis, 0, length) : x;
}

double scale_of(FftNorm norm, bool inverse, std::int64_t n) {
  const auto length = static_cast<double>(n);
  if (norm == FftNorm::ortho) {
    return 1 / std::sqrt(length);
  }
  return (norm == FftNorm::backward) == inverse ? 1 / length : 1;
}

// One of the public functions: its kind along the last of its axes, complex transforms along the others.
struct Transform {
  const char* op;
  FftKind kind;
  bool inverse;

  Tensor operator()(const Tensor& x_in, const Dims& lengths, const Dims& axes_in, FftNorm norm) const {
    Tensor x = autograd::autocast_widens(x_in) ? autograd::widened(x_in) : x_in;
    const bool from_complex = kind != FftKind::real_to_complex;
    expect_signal(x, op, from_complex);
    check(!axes_in.empty() && (lengths.empty() || lengths.size() == axes_in.size()),
          "{}: expected at least one axis and a length for each, got axes {} and lengths {}", op, axes_in, lengths);
    Dims axes;
    for (const std::int64_t axis : axes_in) {
      axes.push_back(normalize_axis(axis, x.dim() - (from_complex ? 1 : 0), op));
      for (int i = 0; i + 1 < axes.size(); ++i) {
        check(axes[i] != axes.back(), "{}: expected different axes, got {}", op, axes_in);
      }
    }
    Dims n = lengths;
    for (int i = n.size(); i < axes.size(); ++i) {
      const std::int64_t length = x.size(axes[i]);
      n.push_back(kind == FftKind::complex_to_real && i + 1 == axes.size() ? 2 * (length - 1) : length);
    }
    for (const std::int64_t length : n) {
      check(length > 0, "{}: expected lengths of at least 1, got {}", op, n);
    }
    return along(x, axes, n, norm);
  }

 private:
  Tensor along(Tensor x, const Dims& axes, const Dims& n, FftNorm norm) const {
    const int last = axes.size() - 1;
    const auto step = [&](int i, FftKind how) {
      const bool halves = how == FftKind::complex_to_real;
      const auto axis = static_cast<int>(axes[i]);
      x = resized(x, axis, halves ? n[i] / 2 + 1 : n[i]);
      x = autograd::apply(Fft{how, n[i], axis, inverse, scale_of(norm, inverse, n[i])}, x);
    };
    if (kind != FftKind::complex_to_real) {
      step(last, kind);
    }
    for (int i = 0; i < last; ++i) {
      step(i, FftKind::complex);
    }
    if (kind == FftKind::complex_to_real) {
      step(last, kind);
    }
    return x;
  }
};

constexpr Transform kFft{"fft", FftKind::complex, false}, kIfft{"ifft", FftKind::complex, true};
constexpr Transform kRfft{"rfft", FftKind::real_to_complex, false}, kIrfft{"irfft", FftKind::complex_to_real, true};
constexpr Transform kFft2{"fft2", FftKind::complex, false}, kIfft2{"ifft2", FftKind::complex, true};
constexpr Transform kRfft2{"rfft2", FftKind::real_to_complex, false};
constexpr Transform kIrfft2{"irfft2", FftKind::complex_to_real, true};

Tensor along_one(const Transform& transform, const Tensor& x, const FftOptions& options) {
  return transform(x, options.n ? Dims{*options.n} : Dims{}, {options.axis}, options.norm);
}

Tensor along_all(const Transform& transform, const Tensor& x, const Fft2Options& options) {
  return transform(x, options.lengths, options.axes, options.norm);
}

Tensor frequencies(const Tensor& numbers, std::int64_t n, double spacing, DType dtype, const char* op) {
  check(n > 0 && spacing != 0, "{}: expected n of at least 1 and a spacing other than 0, got {} and {}", op, n,
        spacing);
  check(is_floating(dtype), "{}: expected a floating dtype, got {}", op, dtype);
  return (numbers.to(float64) / (static_cast<double>(n) * spacing)).to(dtype);
}

Tensor rolled_half(const Tensor& x, const Dims& axes_in, bool back, const char* op) {
  Dims axes = axes_in;
  for (int axis = 0; axes_in.empty() && axis < x.dim(); ++axis) {
    axes.push_back(axis);
  }
  Tensor y = x;
  for (const std::int64_t axis : axes) {
    const int at = normalize_axis(axis, x.dim(), op);
    const std::int64_t half = x.size(at) / 2;
    y = roll(y, back ? -half : half, at);
  }
  return y;
}

void expect_complex(const Tensor& x, const char* op) {
  check(x.dim() > 0 && x.size(-1) == 2 && is_floating(x.dtype()),
        "{}: expected a complex tensor, floating with a last axis of length 2, got {} of shape {}", op, x.dtype(),
        x.shape());
}

}  // namespace

Tensor fft(const Tensor& x, FftOptions options) { return along_one(kFft, x, options); }
Tensor ifft(const Tensor& x, FftOptions options) { return along_one(kIfft, x, options); }
Tensor rfft(const Tensor& x, FftOptions options) { return along_one(kRfft, x, options); }
Tensor irfft(const Tensor& x, FftOptions options) { return along_one(kIrfft, x, options); }
Tensor fft2(const Tensor& x, const Fft2Options& options) { return along_all(kFft2, x, options); }
Tensor ifft2(const Tensor& x, const Fft2Options& options) { return along_all(kIfft2, x, options); }
Tensor rfft2(const Tensor& x, const Fft2Options& options) { return along_all(kRfft2, x, options); }
Tensor irfft2(const Tensor& x, const Fft2Options& options) { return along_all(kIrfft2, x, options); }

Tensor fftfreq(std::int64_t n, double spacing, DType dtype, Device device) {
  const std::int64_t half = n / 2;
  const Tensor numbers = arange(static_cast<double>(n), int64, device);
  return ifftshift(frequencies(numbers - static_cast<double>(half), n, spacing, dtype, "fftfreq"));
}

Tensor rfftfreq(std::int64_t n, double spacing, DType dtype, Device device) {
  const std::int64_t half = n / 2;
  return frequencies(arange(static_cast<double>(half + 1), int64, device), n, spacing, dtype, "rfftfreq");
}

Tensor fftshift(const Tensor& x, const Dims& axes) { return rolled_half(x, axes, false, "fftshift"); }
Tensor ifftshift(const Tensor& x, const Dims& axes) { return rolled_half(x, axes, true, "ifftshift"); }

Tensor complex(const Tensor& re, const Tensor& im) {
  check(re.shape() == im.shape(), "complex: expected equal shapes, got {} and {}", re.shape(), im.shape());
  return stack({re, im}, -1);
}

Tensor complex_mul(const Tensor& a, const Tensor& b) {
  expect_complex(a, "complex_mul");
  expect_complex(b, "complex_mul");
  const Tensor ar = select(a, -1, 0), ai = select(a, -1, 1), br = select(b, -1, 0), bi = select(b, -1, 1);
  return complex(ar * br - ai * bi, ar * bi + ai * br);
}

Tensor complex_conj(const Tensor& x) {
  expect_complex(x, "complex_conj");
  return complex(select(x, -1, 0), neg(select(x, -1, 1)));
}

Tensor complex_abs(const Tensor& x) {
  expect_complex(x, "complex_abs");
  return vector_norm(x, {-1});
}

}  // namespace mica
