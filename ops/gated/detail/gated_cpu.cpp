#include <algorithm>
#include <type_traits>

#include <mica/core/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/gated/detail/gated_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kRun = 1024;     // elements per piece; 16-bit ones are converted piece by piece
constexpr std::int64_t kGrain = 16384;  // minimum elements per thread

// Calls run(begin, n, strided begin) for pieces of rows, of at most kRun elements. Their boundaries do not depend on
// the number of threads, so neither do the bits of an element.
template <class Run>
void for_runs(std::int64_t rows, std::int64_t columns, std::int64_t stride, const Run& run) {
  const std::int64_t in_row = (columns + kRun - 1) / kRun;
  const std::int64_t grain = std::max<std::int64_t>(kGrain / std::min(columns, kRun), 1);
  parallel_for(rows * in_row, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i / in_row;
      const std::int64_t column = i % in_row * kRun;
      run(row * columns + column, std::min(kRun, columns - column), row * stride + column);
    }
  });
}

// n elements as S: in place if they have type S, else converted into `buffer`.
template <class T, class S>
const S* as_sums(const T* data, std::int64_t n, S* buffer) {
  if constexpr (std::is_same_v<T, S>) {
    return data;
  } else {
    widen(data, n, buffer);
    return buffer;
  }
}

// A place for n results of type S, which store_results() then stores to `data`.
template <class T, class S>
S* result_buffer(T* data, S* buffer) {
  if constexpr (std::is_same_v<T, S>) {
    return data;
  } else {
    return buffer;
  }
}
template <class T, class S>
void store_results([[maybe_unused]] const S* values, [[maybe_unused]] std::int64_t n, [[maybe_unused]] T* data) {
  if constexpr (!std::is_same_v<T, S>) {
    narrow(values, n, data);
  }
}

template <class F, class T, class S>
[[gnu::flatten]] void forward_run(std::int64_t n, const S* gate, const S* up, S* y) {
  MICA_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = F::template at<T>(gate[i]).value * up[i];
  }
}

template <class F, class T, class S>
[[gnu::flatten]] void backward_run(std::int64_t n, const S* dy, const S* gate, const S* up, S* dgate, S* dup) {
  MICA_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const functions::gated::Activation<S> f = F::template at<T>(gate[i]);
    const S gradient = dy[i];
    dgate[i] = gradient * up[i] * f.slope;
    dup[i] = gradient * f.value;
  }
}

template <class F, class T, class S = Accumulate<T>>
void forward(const GatedForward& args) {
  const T* const gate = args.gate.data<T>();
  const T* const up = args.up.data<T>();
  T* const y = args.y.data<T>();
  for_runs(args.rows, args.columns, args.stride, [=](std::int64_t at, std::int64_t n, std::int64_t strided) {
    S buffers[3][kRun];
    const S* const gates = as_sums(gate + strided, n, buffers[0]);
    const S* const ups = as_sums(up + strided, n, buffers[1]);
    S* const ys = result_buffer(y + at, buffers[2]);
    forward_run<F, T>(n, gates, ups, ys);
    store_results(ys, n, y + at);
  });
}

template <class F, class T, class S = Accumulate<T>>
void backward(const GatedBackward& args) {
  const T* const dy = args.dy.data<T>();
  const T* const gate = args.gate.data<T>();
  const T* const up = args.up.data<T>();
  T* const dgate = args.dgate.data_or_null<T>();
  T* const dup = args.dup.data_or_null<T>();
  for_runs(args.rows, args.columns, args.stride, [=](std::int64_t at, std::int64_t n, std::int64_t strided) {
    S buffers[5][kRun];
    const S* const dys = as_sums(dy + at, n, buffers[0]);
    const S* const gates = as_sums(gate + strided, n, buffers[1]);
    const S* const ups = as_sums(up + strided, n, buffers[2]);
    // A gradient that is not needed is computed into a buffer, since usually both are needed.
    S* const dgates = dgate == nullptr ? buffers[3] : result_buffer(dgate + strided, buffers[3]);
    S* const dups = dup == nullptr ? buffers[4] : result_buffer(dup + strided, buffers[4]);
    backward_run<F, T>(n, dys, gates, ups, dgates, dups);
    if (dgate != nullptr) {
      store_results(dgates, n, dgate + strided);
    }
    if (dup != nullptr) {
      store_results(dups, n, dup + strided);
    }
  });
}

}  // namespace

void gated_forward(Cpu, const GatedForward& args) {
  std::visit(
      [&]<class F>(F) { on_dtype(FloatTypes{}, args.y.dtype(), F::name, [&]<class T>() { forward<F, T>(args); }); },
      args.function);
}

void gated_backward(Cpu, const GatedBackward& args) {
  std::visit(
      [&]<class F>(F) { on_dtype(FloatTypes{}, args.dy.dtype(), F::name, [&]<class T>() { backward<F, T>(args); }); },
      args.function);
}

}  // namespace mica::kernels
