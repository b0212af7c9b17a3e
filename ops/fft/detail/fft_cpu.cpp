#include <algorithm>
#include <cmath>
#include <complex>
#include <map>
#include <numbers>
#include <utility>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/fft/detail/fft_kernels.h>

namespace mica::kernels {

namespace {

// exp(2πi · k / n).
std::complex<double> root(std::int64_t k, std::int64_t n) {
  const double angle = 2 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(n);
  return {std::cos(angle), std::sin(angle)};
}

// A list of complex numbers.
template <class T>
struct Roots {
  std::vector<T> re, im;

  void push_back(std::complex<double> z) {
    re.push_back(static_cast<T>(z.real()));
    im.push_back(static_cast<T>(z.imag()));
  }
};

// Signals that are transformed at the same time, so that loops over them are vectorized: element j of signal l is at
// j · lanes + l. Steps read one pair of arrays and write the other.
template <class T>
struct Lanes {
  std::int64_t lanes;
  T *re, *im, *next_re, *next_im;

  Lanes(std::vector<T>& memory, std::int64_t length, std::int64_t count) : lanes(count) {
    // Gaps, since arrays a power of two apart would compete for the same places in the caches.
    const std::int64_t step = length * lanes + static_cast<std::int64_t>(5 * 64 / sizeof(T));
    memory.resize(std::max(memory.size(), static_cast<std::size_t>(4 * step)));
    re = memory.data();
    im = re + step;
    next_re = im + step;
    next_im = next_re + step;
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  void swap() {
    std::swap(re, next_re);
    std::swap(im, next_im);
  }

  // Multiplies elements [0, n) by these numbers.
  void multiply(const Roots<T>& by, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) {
      const T c = by.re[j], s = by.im[j];
      T* const x = re + j * lanes;
      T* const y = im + j * lanes;
      MICA_INDEPENDENT
      for (std::int64_t l = 0; l < lanes; ++l) {
        const T a = x[l], b = y[l];
        x[l] = a * c - b * s;
        y[l] = a * s + b * c;
      }
    }
  }
};

template <class T>
struct Number {
  T re, im;

  friend Number operator+(Number a, Number b) { return {a.re + b.re, a.im + b.im}; }
  friend Number operator-(Number a, Number b) { return {a.re - b.re, a.im - b.im}; }
  friend Number operator*(T a, Number b) { return {a * b.re, a * b.im}; }
};

// i · s · a.
template <class T>
Number<T> turned(Number<T> a, T s) {
  return {-s * a.im, s * a.re};
}

// A step of Stockham's algorithm: of transforms of length radix · m, of which there are s (lanes included), to `radix`
// times as many of length m. With w = exp(∓2πi / (radix · m)),
//
//   y[p, k, q] = wᵏᵖ · Σ x[j, p, q] · exp(∓2πi · jk / radix)     x: (radix, m, s), y: (m, radix, s)
template <class T>
struct Step {
  std::int64_t radix, m, s;
  T sign;                       // of the exponent
  std::vector<Roots<T>> turns;  // wᵏᵖ: [k][p]
  Roots<T> roots;               // exp(∓2πi · j / radix)

  template <int kRadix>
  void run_small(const Lanes<T>& x) const {
    const std::int64_t inner = s * x.lanes;
    const std::int64_t far = m * inner;
    // From x[j · far + from] to y[k · inner + to], where turn(k) is wᵏᵖ.
    const auto combine = [&](std::int64_t from, std::int64_t to, const auto& turn) {
      const auto load = [&](int j) { return Number<T>{x.re[j * far + from], x.im[j * far + from]}; };
      const auto store = [&](int k, Number<T> v) {
        const Number<T> w = k == 0 ? Number<T>{1, 0} : turn(k);
        x.next_re[k * inner + to] = k == 0 ? v.re : v.re * w.re - v.im * w.im;
        x.next_im[k * inner + to] = k == 0 ? v.im : v.re * w.im + v.im * w.re;
      };
      const Number<T> a = load(0), b = load(1);
      if constexpr (kRadix == 2) {
        store(0, a + b);
        store(1, a - b);
      } else if constexpr (kRadix == 3) {
        const Number<T> c = load(2), sum = b + c, middle = a - T(0.5) * sum;
        const Number<T> side = turned(b - c, sign * T(0.86602540378443864676));
        store(0, a + sum);
        store(1, middle + side);
        store(2, middle - side);
      } else if constexpr (kRadix == 4) {
        const Number<T> c = load(2), d = load(3);
        const Number<T> even = a + c, odd = b + d, difference = a - c, side = turned(b - d, sign);
        store(0, even + odd);
        store(1, difference + side);
        store(2, even - odd);
        store(3, difference - side);
      } else {
        constexpr T kCos1 = T(0.30901699437494742410), kCos2 = T(-0.80901699437494742410);
        constexpr T kSin1 = T(0.95105651629515357212), kSin2 = T(0.58778525229247312917);
        const Number<T> c = load(2), d = load(3), e = load(4);
        const Number<T> near = b + e, next = c + d, across = b - e, between = c - d;
        const Number<T> first = a + kCos1 * near + kCos2 * next, second = a + kCos2 * near + kCos1 * next;
        const Number<T> side1 = turned(kSin1 * across + kSin2 * between, sign);
        const Number<T> side2 = turned(kSin2 * across - kSin1 * between, sign);
        store(0, a + near + next);
        store(1, first + side1);
        store(2, second + side2);
        store(3, second - side2);
        store(4, first - side1);
      }
    };
    if (inner == 1) {
      const T *re[kRadix], *im[kRadix];
      for (int k = 0; k < kRadix; ++k) {
        re[k] = turns[k].re.data();
        im[k] = turns[k].im.data();
      }
      MICA_INDEPENDENT
      for (std::int64_t p = 0; p < m; ++p) {
        combine(p, p * kRadix, [&](int k) { return Number<T>{re[k][p], im[k][p]}; });
      }
      return;
    }
    for (std::int64_t p = 0; p < m; ++p) {
      Number<T> w[kRadix];
      for (int k = 0; k < kRadix; ++k) {
        w[k] = {turns[k].re[p], turns[k].im[p]};
      }
      MICA_INDEPENDENT
      for (std::int64_t q = 0; q < inner; ++q) {
        combine(p * inner + q, p * kRadix * inner + q, [&](int k) { return w[k]; });
      }
    }
  }

  void run_any(const Lanes<T>& x) const {
    const std::int64_t inner = s * x.lanes;
    for (std::int64_t p = 0; p < m; ++p) {
      for (std::int64_t k = 0; k < radix; ++k) {
        T* const yr = x.next_re + (p * radix + k) * inner;
        T* const yi = x.next_im + (p * radix + k) * inner;
        std::fill_n(yr, inner, T{0});
        std::fill_n(yi, inner, T{0});
        for (std::int64_t j = 0; j < radix; ++j) {
          const std::complex<T> w = std::complex<T>(roots.re[j * k % radix], roots.im[j * k % radix]) *
                                    std::complex<T>(turns[k].re[p], turns[k].im[p]);
          const T c = w.real(), d = w.imag();
          const T* const xr = x.re + (j * m + p) * inner;
          const T* const xi = x.im + (j * m + p) * inner;
          MICA_INDEPENDENT
          for (std::int64_t q = 0; q < inner; ++q) {
            yr[q] += xr[q] * c - xi[q] * d;
            yi[q] += xr[q] * d + xi[q] * c;
          }
        }
      }
    }
  }

  void run(Lanes<T>& x) const {
    switch (radix) {
      case 2: run_small<2>(x); break;
      case 3: run_small<3>(x); break;
      case 4: run_small<4>(x); break;
      case 5: run_small<5>(x); break;
      default: run_any(x);
    }
    x.swap();
  }
};

// The prime factors of n, with 4 for two twos.
std::vector<std::int64_t> factors_of(std::int64_t n) {
  std::vector<std::int64_t> factors;
  for (; n % 4 == 0; n /= 4) {
    factors.push_back(4);
  }
  for (std::int64_t p = 2; n > 1; p = p * p > n ? n : p + 1) {
    for (; n % p == 0; n /= p) {
      factors.push_back(p);
    }
  }
  return factors;
}

template <class T>
std::vector<Step<T>> steps_of(std::int64_t n, bool inverse) {
  std::vector<Step<T>> steps;
  std::int64_t s = 1;
  for (const std::int64_t radix : factors_of(n)) {
    const std::int64_t length = n / s;
    Step<T> step{.radix = radix, .m = length / radix, .s = s, .sign = T(inverse ? 1 : -1), .turns = {}, .roots = {}};
    step.turns.resize(static_cast<std::size_t>(radix));
    for (std::int64_t k = 0; k < radix; ++k) {
      step.roots.push_back(root(inverse ? k : -k, radix));
      for (std::int64_t p = 0; p < step.m; ++p) {
        step.turns[k].push_back(root(inverse ? k * p : -k * p, length));
      }
    }
    steps.push_back(std::move(step));
    s *= radix;
  }
  return steps;
}

// Complex transforms of one length and direction. A step takes radix² operations; if n has a large prime factor,
// Bluestein's algorithm writes the transform as a convolution,
//
//   y[k] = c[k] · Σ (x[j] · c[j]) · conj(c[k − j]) with c[j] = exp(∓πi · j²/n), since 2jk = j² + k² − (k − j)²,
//
// which two transforms of a power of two compute.
template <class T>
class ComplexFft {
 public:
  ComplexFft(std::int64_t n, bool inverse) : n_(n) {
    const std::vector<std::int64_t> factors = factors_of(n);
    if (factors.empty() || factors.back() <= kLargestPrime) {
      forward_ = steps_of<T>(n, inverse);
      return;
    }
    for (padded_ = 1; padded_ < 2 * n - 1; padded_ *= 2) {
    }
    forward_ = steps_of<T>(padded_, false);
    backward_ = steps_of<T>(padded_, true);
    std::vector<T> memory;
    Lanes<T> filter(memory, padded_, 1);
    for (std::int64_t j = 0; j < n; ++j) {
      const std::int64_t square = j * j % (2 * n);  // the angle modulo 2π
      const std::complex<double> c = root(inverse ? square : -square, 2 * n);
      chirp_.push_back(c);
      for (const std::int64_t at : {j, (padded_ - j) % padded_}) {
        filter.re[at] = static_cast<T>(c.real() / static_cast<double>(padded_));
        filter.im[at] = static_cast<T>(-c.imag() / static_cast<double>(padded_));
      }
    }
    run_steps(forward_, filter);
    filter_.re.assign(filter.re, filter.re + padded_);
    filter_.im.assign(filter.im, filter.im + padded_);
  }

  /// The length of the arrays that run() needs.
  std::int64_t capacity() const { return std::max(n_, padded_); }

  void run(Lanes<T>& x) const {
    if (padded_ == 0) {
      run_steps(forward_, x);
      return;
    }
    x.multiply(chirp_, n_);
    std::fill(x.re + n_ * x.lanes, x.re + padded_ * x.lanes, T{0});
    std::fill(x.im + n_ * x.lanes, x.im + padded_ * x.lanes, T{0});
    run_steps(forward_, x);
    x.multiply(filter_, padded_);
    run_steps(backward_, x);
    x.multiply(chirp_, n_);
  }

 private:
  static constexpr std::int64_t kLargestPrime = 64;

  static void run_steps(const std::vector<Step<T>>& steps, Lanes<T>& x) {
    for (const Step<T>& step : steps) {
      step.run(x);
    }
  }

  std::int64_t n_;
  std::int64_t padded_ = 0;
  std::vector<Step<T>> forward_, backward_;
  Roots<T> chirp_, filter_;
};

// Transforms of real signals. For even n, the even elements are the real and the odd ones the imaginary part of a
// complex signal of half the length: its spectrum is e + i·o for the spectra e and o of the two, and that of the whole
// signal is e[k] + exp(−2πi·k/n) · o[k].
template <class T>
class RealFft {
 public:
  RealFft(std::int64_t n, bool inverse)
      : half_(n / 2), is_even_(n % 2 == 0), transform_(is_even_ ? half_ : n, inverse) {
    for (std::int64_t k = 0; is_even_ && k <= half_; ++k) {
      roots_.push_back(root(-k, n));
    }
  }

  std::int64_t capacity() const { return std::max(transform_.capacity(), half_ + 1); }

  void forward(Lanes<T>& x) const {
    transform_.run(x);
    if (!is_even_) {
      return;
    }
    for (std::int64_t k = 0; k <= half_; ++k) {
      const T c = roots_.re[k], s = roots_.im[k];
      const std::int64_t a = k % half_ * x.lanes, b = (half_ - k) % half_ * x.lanes, to = k * x.lanes;
      MICA_INDEPENDENT
      for (std::int64_t l = 0; l < x.lanes; ++l) {
        const T ar = x.re[a + l], ai = x.im[a + l], br = x.re[b + l], bi = -x.im[b + l];
        const T dr = ar - br, di = ai - bi;
        x.next_re[to + l] = T(0.5) * (ar + br + (dr * s + di * c));
        x.next_im[to + l] = T(0.5) * (ai + bi - (dr * c - di * s));
      }
    }
    x.swap();
  }

  void inverse(Lanes<T>& x) const {
    std::fill_n(x.im, x.lanes, T{0});
    if (is_even_) {
      std::fill_n(x.im + half_ * x.lanes, x.lanes, T{0});
      for (std::int64_t k = 0; k < half_; ++k) {
        const T c = roots_.re[k], s = -roots_.im[k];
        const std::int64_t a = k * x.lanes, b = (half_ - k) * x.lanes;
        MICA_INDEPENDENT
        for (std::int64_t l = 0; l < x.lanes; ++l) {
          const T ar = x.re[a + l], ai = x.im[a + l], br = x.re[b + l], bi = -x.im[b + l];
          const T dr = ar - br, di = ai - bi;
          x.next_re[a + l] = ar + br - (dr * s + di * c);
          x.next_im[a + l] = ai + bi + (dr * c - di * s);
        }
      }
      x.swap();
    } else {
      for (std::int64_t k = 1; k <= half_; ++k) {
        const std::int64_t from = k * x.lanes, to = (2 * half_ + 1 - k) * x.lanes;
        for (std::int64_t l = 0; l < x.lanes; ++l) {
          x.re[to + l] = x.re[from + l];
          x.im[to + l] = -x.im[from + l];
        }
      }
    }
    transform_.run(x);
  }

 private:
  std::int64_t half_;
  bool is_even_;
  ComplexFft<T> transform_;
  Roots<T> roots_;
};

// This thread's transform of length n. It keeps the last ones.
template <class Transform>
const Transform& transform_of(std::int64_t n, bool inverse) {
  static thread_local std::map<std::pair<std::int64_t, bool>, Transform> transforms;
  const std::pair key(n, inverse);
  auto found = transforms.find(key);
  if (found == transforms.end()) {
    if (transforms.size() >= 32) {
      transforms.clear();
    }
    found = transforms.try_emplace(key, n, inverse).first;
  }
  return found->second;
}

// A group of lines: element j of line l is at first + j · step + l · line_step, in units of elements.
template <class T>
struct Lines {
  T* first;
  std::int64_t step, line_step, length;

  // Calls f(element, lane · its place in the lanes' arrays) for all elements, in the order of memory.
  template <class F>
  void for_each(std::int64_t lanes, const F& f) const {
    if (line_step == 1) {
      for (std::int64_t j = 0; j < length; ++j) {
        for (std::int64_t l = 0; l < lanes; ++l) {
          f(first[j * step + l], j * lanes + l);
        }
      }
      return;
    }
    // In blocks, whose places in the lanes' arrays stay in the first-level cache.
    constexpr std::int64_t kBlock = 32;
    for (std::int64_t begin = 0; begin < length; begin += kBlock) {
      const std::int64_t end = std::min(begin + kBlock, length);
      for (std::int64_t l = 0; l < lanes; ++l) {
        for (std::int64_t j = begin; j < end; ++j) {
          f(first[j * step + l * line_step], j * lanes + l);
        }
      }
    }
  }
};

// Calls work(x_lines, y_lines, lanes) for groups of lines along the middle axis, in parallel.
template <class T, class In, class Out, class Transform, class F>
void for_each_group(const Fft& args, std::int64_t x_length, std::int64_t y_length, const F& work) {
  const std::int64_t outer = args.x.shape()[0], inner = args.x.shape()[2];
  const auto* const x = reinterpret_cast<const In*>(args.x.raw_data());
  auto* const y = reinterpret_cast<Out*>(args.y.raw_data());
  // Lanes for a vector of 64 bytes; fewer if the arrays would not fit in the second-level cache.
  const std::int64_t lines = inner == 1 ? outer : inner;
  const std::int64_t fitting = std::max<std::int64_t>((1 << 18) / (args.n * static_cast<std::int64_t>(sizeof(T))), 1);
  const std::int64_t width = std::min({lines, static_cast<std::int64_t>(64 / sizeof(T)), fitting});
  const std::int64_t groups = (lines + width - 1) / width;
  const std::int64_t blocks = inner == 1 ? 1 : outer;
  const std::int64_t grain = 1 + 4096 / (args.n * width);
  parallel_for(blocks * groups, grain, [&](std::int64_t begin, std::int64_t end) {
    const Transform& transform = transform_of<Transform>(args.n, args.inverse);
    static thread_local std::vector<T> memory;  // the largest so far, since fresh memory costs a page fault per 4 KiB
    Lanes<T> full(memory, transform.capacity(), width);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t block = i / groups, first = i % groups * width;
      const std::int64_t lanes = std::min(width, lines - first);
      full.lanes = lanes;
      const std::int64_t x_start = inner == 1 ? first * x_length : block * x_length * inner + first;
      const std::int64_t y_start = inner == 1 ? first * y_length : block * y_length * inner + first;
      work(transform, Lines<const In>{x + x_start, inner, inner == 1 ? x_length : 1, x_length},
           Lines<Out>{y + y_start, inner, inner == 1 ? y_length : 1, y_length}, full);
    }
  });
}

template <class T>
void load(const Lines<const std::complex<T>>& from, Lanes<T>& to) {
  from.for_each(to.lanes, [&](std::complex<T> z, std::int64_t at) {
    to.re[at] = z.real();
    to.im[at] = z.imag();
  });
}

template <class T>
void store(const Lanes<T>& from, const Lines<std::complex<T>>& to, T scale) {
  to.for_each(from.lanes, [&](std::complex<T>& z, std::int64_t at) { z = {scale * from.re[at], scale * from.im[at]}; });
}

// A real signal of even length, as half as many complex elements.
template <class T, class E>
Lines<T> in_pairs(const Lines<E>& x, std::int64_t odd) {
  return {x.first + odd * x.step, 2 * x.step, x.line_step, x.length / 2};
}

}  // namespace

void fft(Cpu, const Fft& args) {
  const std::int64_t n = args.n;
  const bool is_even = n % 2 == 0;
  check(n <= (std::int64_t{1} << 31), "fft: expected a length of at most 2^31, got {}", n);
  on_dtype(Types<float, double>{}, args.x.dtype(), "fft", [&]<class T>() {
    using C = std::complex<T>;
    const auto scale = static_cast<T>(args.scale);
    if (args.kind == FftKind::complex) {
      for_each_group<T, C, C, ComplexFft<T>>(args, n, n, [&](const auto& transform, auto x, auto y, Lanes<T>& lanes) {
        load(x, lanes);
        transform.run(lanes);
        store(lanes, y, scale);
      });
    } else if (args.kind == FftKind::real_to_complex) {
      for_each_group<T, T, C, RealFft<T>>(
          args, n, n / 2 + 1, [&](const auto& transform, auto x, auto y, Lanes<T>& lanes) {
            if (is_even) {
              in_pairs<const T>(x, 0).for_each(lanes.lanes, [&](T v, std::int64_t at) { lanes.re[at] = v; });
              in_pairs<const T>(x, 1).for_each(lanes.lanes, [&](T v, std::int64_t at) { lanes.im[at] = v; });
            } else {
              x.for_each(lanes.lanes, [&](T v, std::int64_t at) {
                lanes.re[at] = v;
                lanes.im[at] = 0;
              });
            }
            transform.forward(lanes);
            store(lanes, y, scale);
          });
    } else {
      for_each_group<T, C, T, RealFft<T>>(
          args, n / 2 + 1, n, [&](const auto& transform, auto x, auto y, Lanes<T>& lanes) {
            load(x, lanes);
            transform.inverse(lanes);
            if (is_even) {
              in_pairs<T>(y, 0).for_each(lanes.lanes, [&](T& v, std::int64_t at) { v = scale * lanes.re[at]; });
              in_pairs<T>(y, 1).for_each(lanes.lanes, [&](T& v, std::int64_t at) { v = scale * lanes.im[at]; });
            } else {
              y.for_each(lanes.lanes, [&](T& v, std::int64_t at) { v = scale * lanes.re[at]; });
            }
          });
    }
  });
}

}  // namespace mica::kernels
