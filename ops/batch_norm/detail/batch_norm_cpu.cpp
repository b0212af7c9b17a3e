// GCC 12 wrongly reports uses of uninitialized variables in its own AVX-512 intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/batch_norm/detail/batch_norm_kernels.h>
#include <mica/ops/rows/detail/rows_cpu.h>

// Tensors are read in runs of adjacent elements. If channels are innermost, a run is a row of all channels; else it
// belongs to one channel. S is the type of sums.

namespace mica::kernels {

namespace {

constexpr std::int64_t kMostParts = 32;    // of the batch
constexpr std::int64_t kLeastPart = 4096;  // elements
constexpr std::int64_t kRowsAtOnce = 128;  // rows that are summed in S

// The batch is divided into parts of whole outer elements, whatever the number of threads.
std::int64_t parts_of(const ChannelLayout& layout) {
  const std::int64_t fit = layout.outer * layout.channels * layout.inner / kLeastPart;
  return std::clamp<std::int64_t>(fit, 1, std::min(kMostParts, layout.outer));
}

struct ChannelMoments {
  double count = 0;
  double mean = 0;
  double rest = 0;  // Σ (x − mean)²

  void join(double other_count, double other_mean, double other_rest) {
    const double total = count + other_count;
    const double distance = other_mean - mean;
    mean += distance * (other_count / total);
    rest += other_rest + distance * distance * (count * other_count / total);
    count = total;
  }
};

template <class S>
[[gnu::flatten]] void join_run(ChannelMoments& moments, const S* x, std::int64_t n) {
  const S mean = sum_of<S>(n, [&]<class V>(std::int64_t i) -> V { return load<V>(x + i); }) / n;
  const double rest = sum_of<S>(n, [&]<class V>(std::int64_t i) -> V {
    const V d = load<V>(x + i) - mean;
    return d * d;
  });
  moments.join(n, mean, rest);
}

// The moments of rows [begin, end) of all channels: Σ (x − shift) and Σ (x − shift)², where the shift is the first row.
template <class T, class S>
[[gnu::flatten]] void join_rows(std::vector<ChannelMoments>& moments, const T* x, std::int64_t begin, std::int64_t end,
                                Buffer<S>& sums) {
  const auto n = static_cast<std::int64_t>(moments.size());
  sums.setZero(3 * n);
  S* const shift = sums.data();
  S* const first = shift + n;
  S* const second = first + n;
  widen(x + begin * n, n, shift);
  Buffer<S> buffer;
  for (std::int64_t row = begin; row < end; ++row) {
    const S* const from = as_sums<S>(x + row * n, n, buffer);
    for_packs<S>(0, n, [&]<class V, int>(std::int64_t i) {
      const V d = load<V>(from + i) - load<V>(shift + i);
      store<V>(first + i, load<V>(first + i) + d);
      store<V>(second + i, load<V>(second + i) + d * d);
    });
  }
  const auto count = static_cast<double>(end - begin);
  for (std::int64_t c = 0; c < n; ++c) {
    const double mean = first[c] / count;
    moments[c].join(count, shift[c] + mean, std::max(second[c] - first[c] * mean, 0.0));
  }
}

// Calls part(p, begin, end) for all parts and their outer elements.
template <class F>
void for_batch_parts(const ChannelLayout& layout, std::int64_t parts, const F& part) {
  parallel_for(parts, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t p = from; p < to; ++p) {
      part(p, layout.outer * p / parts, layout.outer * (p + 1) / parts);
    }
  });
}

// Calls f(p, channel, begin, end) for all channels of all parts.
template <class F>
void for_channels(const ChannelLayout& layout, std::int64_t parts, const F& f) {
  const std::int64_t grain = std::max<std::int64_t>(kRowGrain * parts / std::max<std::int64_t>(layout.count(), 1), 1);
  parallel_for(parts * layout.channels, grain, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      const std::int64_t p = i / layout.channels;
      f(p, i % layout.channels, layout.outer * p / parts, layout.outer * (p + 1) / parts);
    }
  });
}

template <class T>
Tensor moments_of(const ChannelLayout& layout, const T* x) {
  using S = Accumulate<T>;
  const std::int64_t parts = parts_of(layout);
  const std::int64_t n = layout.channels;
  const Tensor result = empty({parts, 3, n}, dtype_of<S>);
  S* const to = result.data<S>();
  const auto write = [&](std::int64_t p, std::int64_t channel, const ChannelMoments& moments) {
    to[(p * 3 + 0) * n + channel] = static_cast<S>(moments.count);
    to[(p * 3 + 1) * n + channel] = static_cast<S>(moments.mean);
    to[(p * 3 + 2) * n + channel] = static_cast<S>(moments.rest);
  };
  if (layout.inner == 1) {
    for_batch_parts(layout, parts, [&](std::int64_t p, std::int64_t begin, std::int64_t end) {
      std::vector<ChannelMoments> moments(n);
      Buffer<S> sums;
      for (std::int64_t row = begin; row < end; row += kRowsAtOnce) {
        join_rows<T, S>(moments, x, row, std::min(row + kRowsAtOnce, end), sums);
      }
      for (std::int64_t c = 0; c < n; ++c) {
        write(p, c, moments[c]);
      }
    });
  } else {
    for_channels(layout, parts, [&](std::int64_t p, std::int64_t channel, std::int64_t begin, std::int64_t end) {
      ChannelMoments moments;
      Buffer<S> buffer;
      for (std::int64_t o = begin; o < end; ++o) {
        const T* const run = x + (o * n + channel) * layout.inner;
        join_run<S>(moments, as_sums<S>(run, layout.inner, buffer), layout.inner);
      }
      write(p, channel, moments);
    });
  }
  return result;
}

template <class S, class R>
void combine_parts(const BatchStatistics& args, std::int64_t channels) {
  R* const running_mean = args.running_mean.data_or_null<R>();
  R* const running_var = args.running_var.data_or_null<R>();
  S* const means = args.merged.defined() ? nullptr : args.statistics.data<S>();
  const std::int64_t n = channels;
  const std::int64_t parts = args.parts.defined() ? args.parts.size(0) : 0;
  const S* const from = args.parts.data_or_null<S>();
  const double momentum = args.num_batches_tracked.defined()
                              ? 1.0 / static_cast<double>(*args.num_batches_tracked.data<std::int64_t>())
                              : args.momentum;
  for (std::int64_t c = 0; c < n; ++c) {
    if (parts == 0) {
      means[c] = static_cast<S>(running_mean[c]);
      means[n + c] = 1 / std::sqrt(static_cast<S>(running_var[c]) + static_cast<S>(args.eps));
      continue;
    }
    ChannelMoments all;
    for (std::int64_t p = 0; p < parts; ++p) {
      all.join(from[(p * 3 + 0) * n + c], from[(p * 3 + 1) * n + c], from[(p * 3 + 2) * n + c]);
    }
    if (args.merged.defined()) {
      S* const to = args.merged.data<S>();
      to[c] = static_cast<S>(all.count);
      to[n + c] = static_cast<S>(all.mean);
      to[2 * n + c] = static_cast<S>(all.rest);
      continue;
    }
    means[c] = static_cast<S>(all.mean);
    means[n + c] = static_cast<S>(1 / std::sqrt(all.rest / all.count + args.eps));
    if (running_mean != nullptr) {
      const auto moved = [&](R& estimate, double value) {
        estimate = static_cast<R>(static_cast<S>((1 - momentum) * static_cast<S>(estimate) + momentum * value));
      };
      moved(running_mean[c], all.mean);
      moved(running_var[c], all.rest / (all.count - 1));
    }
  }
}

// A parameter of each element of a run: one number per element if channels are innermost, else the channel's.
template <bool kRowOfChannels, class S>
struct RunParameter {
  const S* of_channels;

  template <class V>
  V at(std::int64_t i) const {
    if constexpr (kRowOfChannels) {
      return load<V>(of_channels + i);
    } else if constexpr (std::is_same_v<V, S>) {
      return *of_channels;
    } else {
      return filled_pack(*of_channels);
    }
  }
};

// y = (x − mean) · scale + shift
template <class S>
struct Coefficients {
  Buffer<S> mean;
  Buffer<S> scale;
  Buffer<S> shift;
  Buffer<S> rstd;
};

template <class T, class S = Accumulate<T>>
Coefficients<S> coefficients_of(std::int64_t channels, const Tensor& statistics, const Tensor& weight,
                                const Tensor& bias) {
  const S* const mean = statistics.data<S>();
  Coefficients<S> c{.mean = Eigen::Map<const Buffer<S>>(mean, channels),
                    .scale = {},
                    .shift = parameter<T>(bias, channels, 0, "batch_norm"),
                    .rstd = Eigen::Map<const Buffer<S>>(mean + channels, channels)};
  c.scale = parameter<T>(weight, channels, 1, "batch_norm") * c.rstd;
  return c;
}

// Calls run(channel, offset, n) for all runs of adjacent elements of the same kind of channel.
template <class F>
void for_runs(const ChannelLayout& layout, const F& run) {
  const bool rows = layout.inner == 1;
  const std::int64_t n = rows ? layout.channels : layout.inner;
  parallel_for(layout.outer * (rows ? 1 : layout.channels), std::max<std::int64_t>(kRowGrain / n, 1),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   run(rows ? 0 : i % layout.channels, i * n, n);
                 }
               });
}

// Calls f.operator()<kRowOfChannels>().
template <class F>
void by_kind_of_run(const ChannelLayout& layout, const F& f) {
  layout.inner == 1 ? f.template operator()<true>() : f.template operator()<false>();
}

template <class V>
V positive_or_zero(V x) {
  return x < V{} ? V{} : x;  // keeps NaN
}

template <bool kRowOfChannels, class S>
[[gnu::flatten]] void write_normalized(const Coefficients<S>& c, std::int64_t channel, std::int64_t n, const S* x,
                                       const S* residual, bool relu, S* y) {
  const RunParameter<kRowOfChannels, S> mean{c.mean.data() + channel};
  const RunParameter<kRowOfChannels, S> scale{c.scale.data() + channel};
  const RunParameter<kRowOfChannels, S> shift{c.shift.data() + channel};
  for_packs<S>(0, n, [&]<class V, int>(std::int64_t i) {
    V value = (load<V>(x + i) - mean.template at<V>(i)) * scale.template at<V>(i) + shift.template at<V>(i);
    value = residual != nullptr ? value + load<V>(residual + i) : value;
    store<V>(y + i, relu ? positive_or_zero(value) : value);
  });
}

// What backward reads of one run.
template <class S>
struct GradientRun {
  std::int64_t channel;
  std::int64_t n;
  const S* dy;
  const S* x;
  const S* y;  // null unless the relu's derivative depends on it
  bool relu;
};

template <class S>
struct GradientBuffers {
  Buffer<S> dy;
  Buffer<S> x;
  Buffer<S> y;
};

template <class T, class S = Accumulate<T>>
GradientRun<S> gradient_run(const BatchNormBackward& args, std::int64_t channel, std::int64_t offset, std::int64_t n,
                            GradientBuffers<S>& buffers) {
  return {.channel = channel,
          .n = n,
          .dy = as_sums<S>(args.dy.data<T>() + offset, n, buffers.dy),
          .x = as_sums<S>(args.x.data<T>() + offset, n, buffers.x),
          .y = args.y.defined() ? as_sums<S>(args.y.data<T>() + offset, n, buffers.y) : nullptr,
          .relu = args.relu};
}

// Calls use.operator()<V, k>(i, g, x̂) for a run.
template <bool kRowOfChannels, class S, class F>
void for_gradients(const GradientRun<S>& run, const Coefficients<S>& c, const F& use) {
  const RunParameter<kRowOfChannels, S> mean{c.mean.data() + run.channel};
  const RunParameter<kRowOfChannels, S> scale{c.scale.data() + run.channel};
  const RunParameter<kRowOfChannels, S> shift{c.shift.data() + run.channel};
  const RunParameter<kRowOfChannels, S> rstd{c.rstd.data() + run.channel};
  for_packs<S>(0, run.n, [&]<class V, int k>(std::int64_t i) {
    const V centered = load<V>(run.x + i) - mean.template at<V>(i);
    V g = load<V>(run.dy + i);
    if (run.relu) {
      const V y =
          run.y != nullptr ? load<V>(run.y + i) : V(centered * scale.template at<V>(i) + shift.template at<V>(i));
      g = y <= V{} ? V{} : g;
    }
    use.template operator()<V, k>(i, g, V(centered * rstd.template at<V>(i)));
  });
}

template <class T, class S>
[[gnu::flatten]] void sum_rows(const BatchNormBackward& args, const Coefficients<S>& c, std::int64_t begin,
                               std::int64_t end, T* masked, S* sums) {
  const std::int64_t n = args.layout.channels;
  GradientBuffers<S> buffers;
  Buffer<S> rounded;
  Buffer<double> totals = Buffer<double>::Zero(2 * n);
  Buffer<S> some(2 * n);
  for (std::int64_t first = begin; first < end; first += kRowsAtOnce) {
    some.setZero();
    for (std::int64_t row = first; row < std::min(first + kRowsAtOnce, end); ++row) {
      const GradientRun<S> run = gradient_run<T>(args, 0, row * n, n, buffers);
      const auto add = [&](S* stored) {
        for_gradients<true>(run, c, [&]<class V, int>(std::int64_t i, V g, V x_hat) {
          store<V>(some.data() + i, load<V>(some.data() + i) + g);
          store<V>(some.data() + n + i, load<V>(some.data() + n + i) + g * x_hat);
          if (stored != nullptr) {
            store<V>(stored + i, g);
          }
        });
      };
      masked != nullptr ? write_as<S>(masked + row * n, n, rounded, add) : add(nullptr);
    }
    totals += some.template cast<double>();
  }
  Eigen::Map<Buffer<S>>(sums, 2 * n) = totals.template cast<S>();
}

template <class T, class S>
[[gnu::flatten]] void sum_channel(const BatchNormBackward& args, const Coefficients<S>& c, std::int64_t channel,
                                  std::int64_t begin, std::int64_t end, T* masked, S* sums) {
  const ChannelLayout& layout = args.layout;
  GradientBuffers<S> buffers;
  Buffer<S> rounded;
  double g_total = 0;
  double gx_total = 0;
  for (std::int64_t o = begin; o < end; ++o) {
    for_parts(layout.inner, [&](std::int64_t from, std::int64_t to) {
      const std::int64_t offset = (o * layout.channels + channel) * layout.inner + from;
      const GradientRun<S> run = gradient_run<T>(args, channel, offset, to - from, buffers);
      Sum<S> g_sum;
      Sum<S> gx_sum;
      const auto add = [&](S* stored) {
        for_gradients<false>(run, c, [&]<class V, int k>(std::int64_t i, V g, V x_hat) {
          g_sum.template add<k, V>(g);
          gx_sum.template add<k, V>(g * x_hat);
          if (stored != nullptr) {
            store<V>(stored + i, g);
          }
        });
      };
      masked != nullptr ? write_as<S>(masked + offset, to - from, rounded, add) : add(nullptr);
      g_total += g_sum.total();
      gx_total += gx_sum.total();
    });
  }
  sums[channel] = static_cast<S>(g_total);
  sums[layout.channels + channel] = static_cast<S>(gx_total);
}

template <bool kRowOfChannels, class S>
[[gnu::flatten]] void write_input_gradient(const GradientRun<S>& run, const Coefficients<S>& c, const S* g_means,
                                           const S* gx_means, S* dx) {
  const RunParameter<kRowOfChannels, S> scale{c.scale.data() + run.channel};
  const RunParameter<kRowOfChannels, S> g_mean{g_means + run.channel};
  const RunParameter<kRowOfChannels, S> gx_mean{gx_means + run.channel};
  for_gradients<kRowOfChannels>(run, c, [&]<class V, int>(std::int64_t i, V g, V x_hat) {
    store<V>(dx + i, scale.template at<V>(i) * (g - g_mean.template at<V>(i) - x_hat * gx_mean.template at<V>(i)));
  });
}

}  // namespace

Tensor batch_moments(Cpu, const ChannelLayout& layout, const Tensor& x, const Tensor& num_batches_tracked) {
  if (num_batches_tracked.defined()) {
    ++*num_batches_tracked.data<std::int64_t>();
  }
  Tensor result;
  on_dtype(FloatTypes{}, x.dtype(), "batch_norm", [&]<class T>() { result = moments_of<T>(layout, x.data<T>()); });
  return result;
}

void batch_statistics(Cpu, const BatchStatistics& args) {
  const Tensor& some = args.statistics;
  on_dtype(Types<float, double>{}, some.dtype(), "batch_norm", [&]<class S>() {
    const DType running = args.running_mean.defined() ? args.running_mean.dtype() : some.dtype();
    using Running = std::conditional_t<sizeof(S) == 8, Types<double>, Types<float, Float16, BFloat16>>;
    on_dtype(Running{}, running, "batch_norm", [&]<class R>() { combine_parts<S, R>(args, some.size(1)); });
  });
}

void batch_norm_forward(Cpu, const BatchNormForward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "batch_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const Coefficients<S> c = coefficients_of<T>(args.layout.channels, args.statistics, args.weight, args.bias);
    const T* const residual = args.residual.data_or_null<T>();
    by_kind_of_run(args.layout, [&]<bool kRowOfChannels>() {
      for_runs(args.layout, [&](std::int64_t channel, std::int64_t offset, std::int64_t n) {
        Buffer<S> x_buffer;
        Buffer<S> residual_buffer;
        const S* const x = as_sums<S>(args.x.data<T>() + offset, n, x_buffer);
        const S* const added = residual == nullptr ? nullptr : as_sums<S>(residual + offset, n, residual_buffer);
        write_as<S>(args.y.data<T>() + offset, n, x_buffer,
                    [&](S* y) { write_normalized<kRowOfChannels>(c, channel, n, x, added, args.relu, y); });
      });
    });
  });
}

Tensor batch_norm_sums(Cpu, const BatchNormBackward& args, const Tensor& dresidual) {
  Tensor result;
  on_dtype(FloatTypes{}, args.x.dtype(), "batch_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const ChannelLayout& layout = args.layout;
    const std::int64_t parts = parts_of(layout);
    const Coefficients<S> c = coefficients_of<T>(layout.channels, args.statistics, args.weight, args.bias);
    result = empty({parts, 2, layout.channels}, dtype_of<S>);
    S* const sums = result.data<S>();
    T* const masked = dresidual.data_or_null<T>();
    if (layout.inner == 1) {
      for_batch_parts(layout, parts, [&](std::int64_t p, std::int64_t begin, std::int64_t end) {
        sum_rows<T, S>(args, c, begin, end, masked, sums + p * 2 * layout.channels);
      });
    } else {
      for_channels(layout, parts, [&](std::int64_t p, std::int64_t channel, std::int64_t begin, std::int64_t end) {
        sum_channel<T, S>(args, c, channel, begin, end, masked, sums + p * 2 * layout.channels);
      });
    }
  });
  return result;
}

void batch_norm_dx(Cpu, const BatchNormBackward& args, const Tensor& sums, double factor, const Tensor& dx) {
  on_dtype(FloatTypes{}, args.x.dtype(), "batch_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const std::int64_t channels = args.layout.channels;
    const Coefficients<S> c = coefficients_of<T>(channels, args.statistics, args.weight, args.bias);
    Buffer<S> means = Buffer<S>::Zero(2 * channels);
    if (sums.defined()) {
      means = Eigen::Map<const Buffer<S>>(sums.data<S>(), 2 * channels) * static_cast<S>(factor);
    }
    by_kind_of_run(args.layout, [&]<bool kRowOfChannels>() {
      for_runs(args.layout, [&](std::int64_t channel, std::int64_t offset, std::int64_t n) {
        GradientBuffers<S> buffers;
        Buffer<S> rounded;
        const GradientRun<S> run = gradient_run<T>(args, channel, offset, n, buffers);
        write_as<S>(dx.data<T>() + offset, n, rounded, [&](S* to) {
          write_input_gradient<kRowOfChannels>(run, c, means.data(), means.data() + channels, to);
        });
      });
    });
  });
}

}  // namespace mica::kernels
