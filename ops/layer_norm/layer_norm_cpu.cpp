// GCC 12 takes its own AVX-512 intrinsics for uses of uninitialized variables.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif
#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include <mica/core/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/layer_norm/layer_norm_kernels.h>

// S is the type of sums: float, or double for double.

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 16384;        // elements of work that pay for another thread
constexpr std::int64_t kMostBlocks = 64;      // of rows, in backward; bounds both threads and scratch
constexpr std::int64_t kRowsPerBlock = 8;     // at least
constexpr std::int64_t kSummedAtOnce = 4096;  // elements; more are summed piece by piece, in double

template <class T>
using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>
using ConstRow = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>
using Buffer = Eigen::Array<T, Eigen::Dynamic, 1>;

// n elements as S: in place where they are S already, else converted into `buffer`.
template <class S, class T>
ConstRow<S> as_sums(const T* data, std::int64_t n, Buffer<S>& buffer) {
  if constexpr (std::is_same_v<S, T>) {
    return {data, n};
  } else {
    buffer.resize(n);
    widen(data, n, buffer.data());
    return {buffer.data(), n};
  }
}

// Evaluates `values` into n elements at `data`, by way of `buffer` where those are not S.
template <class T, class S, class Values>
void store(T* data, const Values& values, Buffer<S>& buffer) {
  if constexpr (std::is_same_v<S, T>) {
    Row<S>(data, values.size()) = values;
  } else {
    buffer = values;
    narrow(buffer.data(), buffer.size(), data);
  }
}

// A parameter, of T or S, as S; empty if it is absent.
template <class T, class S = Accumulate<T>>
Buffer<S> parameter(const Tensor& x) {
  Buffer<S> result;
  if (x.defined()) {
    on_dtype(Types<S, T>{}, x.dtype(), "layer_norm", [&]<class W>() {
      Buffer<S> buffer;
      result = as_sums<S>(x.data<W>(), x.numel(), buffer);
    });
  }
  return result;
}

template <class S>
S* data_or_null(const Tensor& x) {
  return x.defined() ? x.data<S>() : nullptr;
}

// The sum over [0, n), where part(begin, count) sums a piece.
template <class Part>
double sum_of(std::int64_t n, const Part& part) {
  double sum = 0;
  for (std::int64_t begin = 0; begin < n; begin += kSummedAtOnce) {
    sum += part(begin, std::min(kSummedAtOnce, n - begin));
  }
  return sum;
}

template <class S>
struct Moments {
  S shift;  // the first element; the mean is kept relative to it, so that a constant row has exactly 0
  S mean;
  S variance;
};

template <class S>
Moments<S> moments(const ConstRow<S>& x) {
  const std::int64_t n = x.size();
  const S shift = x[0];
  const S mean = sum_of(n, [&](auto begin, auto count) { return (x.segment(begin, count) - shift).sum(); }) / n;
  const S variance =
      sum_of(n, [&](auto begin, auto count) { return ((x.segment(begin, count) - shift) - mean).square().sum(); }) / n;
  return {shift, mean, variance};
}

// Brings a row whose squares overflow into range; a power of 2, so that it rounds nothing.
template <class S>
constexpr S kShrink = std::is_same_v<S, double> ? S(0x1p-600) : S(0x1p-80);

template <class T, class S = Accumulate<T>>
void forward_rows(const LayerNormForward& args, std::int64_t begin, std::int64_t end, const Buffer<S>& weight,
                  const Buffer<S>& bias) {
  const std::int64_t n = args.columns;
  S* const means = data_or_null<S>(args.mean);
  S* const rstds = data_or_null<S>(args.rstd);
  Buffer<S> buffer;
  Buffer<S> shrunk;
  Buffer<S> y_buffer;
  for (std::int64_t row = begin; row < end; ++row) {
    const ConstRow<S> given = as_sums<S>(args.x.data<T>() + row * n, n, buffer);
    Moments<S> m = moments<S>(given);
    S scale = 1;
    if (!std::isfinite(m.variance)) [[unlikely]] {
      scale = kShrink<S>;
      shrunk = given * scale;
      m = moments<S>(ConstRow<S>(shrunk.data(), n));
    }
    const ConstRow<S> x(scale == 1 ? given.data() : shrunk.data(), n);
    const S rstd = 1 / std::sqrt(m.variance + static_cast<S>(args.eps) * scale * scale);
    const auto normalized = ((x - m.shift) - m.mean) * rstd;
    T* const y = args.y.data<T>() + row * n;
    if (weight.size() > 0 && bias.size() > 0) {
      store(y, normalized * weight + bias, y_buffer);
    } else if (weight.size() > 0) {
      store(y, normalized * weight, y_buffer);
    } else if (bias.size() > 0) {
      store(y, normalized + bias, y_buffer);
    } else {
      store(y, normalized, y_buffer);
    }
    if (means != nullptr) {
      means[row] = (m.shift + m.mean) / scale;
      rstds[row] = rstd * scale;
    }
  }
}

// One row's dx, and its share of dweight and dbias (null: not wanted).
template <class T, class S = Accumulate<T>>
class BackwardRow {
 public:
  BackwardRow(const LayerNormBackward& args, const Buffer<S>& weight) : args_(args), weight_(weight) {}

  void run(std::int64_t row, S* dweight, S* dbias) {
    const std::int64_t n = args_.columns;
    const ConstRow<S> dy = as_sums<S>(args_.dy.data<T>() + row * n, n, dy_buffer_);
    if (dbias != nullptr) {
      Row<S>(dbias, n) += dy;
    }
    if (dweight == nullptr && !args_.dx.defined()) {
      return;
    }
    const S rstd = args_.rstd.data<S>()[row];
    x_hat_ = (as_sums<S>(args_.x.data<T>() + row * n, n, x_buffer_) - args_.mean.data<S>()[row]) * rstd;
    if (dweight != nullptr) {
      Row<S>(dweight, n) += dy * x_hat_;
    }
    if (!args_.dx.defined()) {
      return;
    }
    if (weight_.size() > 0) {
      g_ = dy * weight_;
      write_dx(row, g_, rstd);
    } else {
      write_dx(row, dy, rstd);
    }
  }

 private:
  template <class G>
  void write_dx(std::int64_t row, const G& g, S rstd) {
    const std::int64_t n = args_.columns;
    const S g_mean = sum_of(n, [&](auto begin, auto count) { return g.segment(begin, count).sum(); }) / n;
    const S gx_mean =
        sum_of(n,
               [&](auto begin, auto count) { return (g.segment(begin, count) * x_hat_.segment(begin, count)).sum(); }) /
        n;
    store(args_.dx.data<T>() + row * n, (g - g_mean - x_hat_ * gx_mean) * rstd, x_buffer_);
  }

  const LayerNormBackward& args_;
  const Buffer<S>& weight_;
  Buffer<S> dy_buffer_, x_buffer_, x_hat_, g_;
};

// out[c] = Σ partials[b][c], over the blocks in order.
template <class T, class S>
void sum_partials(const Tensor& out, const std::vector<S>& partials, std::int64_t blocks) {
  if (!out.defined()) {
    return;
  }
  const std::int64_t n = out.numel();
  on_dtype(Types<S, T>{}, out.dtype(), "layer_norm", [&]<class W>() {
    parallel_for(n, kGrain / (blocks + 1), [&](std::int64_t begin, std::int64_t end) {
      Buffer<S> sum = Buffer<S>::Zero(end - begin);
      for (std::int64_t block = 0; block < blocks; ++block) {
        sum += ConstRow<S>(partials.data() + block * n + begin, end - begin);
      }
      Buffer<S> buffer;
      store(out.data<W>() + begin, sum, buffer);
    });
  });
}

}  // namespace

void layer_norm_forward(Cpu, const LayerNormForward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "layer_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const Buffer<S> weight = parameter<T>(args.weight);
    const Buffer<S> bias = parameter<T>(args.bias);
    parallel_for(args.rows, std::max<std::int64_t>(kGrain / args.columns, 1),
                 [&](std::int64_t begin, std::int64_t end) { forward_rows<T>(args, begin, end, weight, bias); });
  });
}

// Rows are cut into blocks by the shape alone, so that sums over rows do not depend on the number of threads.
void layer_norm_backward(Cpu, const LayerNormBackward& args) {
  const std::int64_t n = args.columns;
  const std::int64_t blocks = args.rows == 0 ? 0 : std::clamp<std::int64_t>(args.rows / kRowsPerBlock, 1, kMostBlocks);
  on_dtype(FloatTypes{}, args.x.dtype(), "layer_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const Buffer<S> weight = parameter<T>(args.weight);
    std::vector<S> dweights(args.dweight.defined() ? blocks * n : 0);
    std::vector<S> dbiases(args.dbias.defined() ? blocks * n : 0);
    const std::int64_t per_block = blocks == 0 ? 1 : args.rows * n / blocks;
    parallel_for(blocks, std::max<std::int64_t>(kGrain / per_block, 1), [&](std::int64_t begin, std::int64_t end) {
      BackwardRow<T> backward(args, weight);
      for (std::int64_t block = begin; block < end; ++block) {
        S* const dweight = args.dweight.defined() ? dweights.data() + block * n : nullptr;
        S* const dbias = args.dbias.defined() ? dbiases.data() + block * n : nullptr;
        for (std::int64_t row = args.rows * block / blocks; row < args.rows * (block + 1) / blocks; ++row) {
          backward.run(row, dweight, dbias);
        }
      }
    });
    sum_partials<T>(args.dweight, dweights, blocks);
    sum_partials<T>(args.dbias, dbiases, blocks);
  });
}

}  // namespace mica::kernels
