#include <mica/ops/cross_entropy/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/cross_entropy_ops.h>
#include <mica/ops/softmax/row_cpu.h>

namespace mica::kernels {

namespace {

std::int64_t rows_per_thread(std::int64_t classes) {
  return std::max<std::int64_t>(4096 / std::max<std::int64_t>(classes, 1), 1);
}

template <class Index>
void check_targets(const CrossEntropyForward& args) {
  const std::int64_t classes = args.logits.size(1);
  const Index* targets = args.targets.data<Index>();
  for (std::int64_t row = 0; row < args.targets.numel(); ++row) {
    const std::int64_t target = targets[row];
    check(target == args.ignore_index || (target >= 0 && target < classes),
          "cross_entropy: expected targets in [0, {}) or ignore_index {}, got {} in row {}", classes, args.ignore_index,
          target, row);
  }
}

template <class T, class Index>
void forward(const CrossEntropyForward& args) {
  using V = Accumulate<T>;
  check_targets<Index>(args);
  const std::int64_t classes = args.logits.size(1);
  const T* logits = args.logits.data<T>();
  const Index* targets = args.targets.data<Index>();
  V* logsumexp = args.logsumexp.data<V>();
  V* losses = args.losses.data<V>();
  parallel_for(args.targets.numel(), rows_per_thread(classes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (targets[row] == args.ignore_index) {
        logsumexp[row] = 0;
        losses[row] = 0;
        continue;
      }
      const T* x = logits + row * classes;
      const V largest = row_max(x, classes);
      const V log_sum = math::log(row_sum_exp(x, classes, largest));
      logsumexp[row] = largest + log_sum;
      // In this order nothing is lost where the logits are large.
      losses[row] = largest - static_cast<V>(x[targets[row]]) + log_sum;
    }
  });
}

template <class T, class Index>
void backward(const CrossEntropyBackward& args) {
  using V = Accumulate<T>;
  const std::int64_t classes = args.logits.size(1);
  const T* logits = args.logits.data<T>();
  const Index* targets = args.targets.data<Index>();
  const V* logsumexp = args.logsumexp.data<V>();
  const T* dloss = args.dloss.data<T>();
  const V divisor = args.count.defined() ? *args.count.data<V>() : V{1};
  T* dlogits = args.dlogits.data<T>();
  parallel_for(args.targets.numel(), rows_per_thread(classes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* x = logits + row * classes;
      T* dx = dlogits + row * classes;
      if (targets[row] == args.ignore_index) {
        std::fill(dx, dx + classes, static_cast<T>(V{0}));
        continue;
      }
      const V scale = static_cast<V>(dloss[args.per_row ? row : 0]) / divisor;
      const V log_sum = logsumexp[row];
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < classes; ++i) {
        dx[i] = static_cast<T>(math::exp(static_cast<V>(x[i]) - log_sum) * scale);
      }
      const std::int64_t target = targets[row];
      dx[target] = static_cast<T>((math::exp(static_cast<V>(x[target]) - log_sum) - 1) * scale);
    }
  });
}

}  // namespace

void cross_entropy_forward(Cpu, const CrossEntropyForward& args) {
  on_dtype(FloatTypes{}, args.logits.dtype(), "cross_entropy", [&]<class T>() {
    on_dtype(IndexTypes{}, args.targets.dtype(), "cross_entropy", [&]<class Index>() { forward<T, Index>(args); });
  });
}

void cross_entropy_reduce(Cpu device, const CrossEntropyReduce& args) {
  on_dtype(FloatTypes{}, args.loss.dtype(), "cross_entropy", [&]<class T>() {
    using V = Accumulate<T>;
    if (!args.count.defined()) {
      reduce<V>(device, SumLossOp<V, T>{}, args.losses, args.loss);
      return;
    }
    on_dtype(IndexTypes{}, args.targets.dtype(), "cross_entropy", [&]<class Index>() {
      reduce<Index>(device, CountValidOp<Index, V>{args.ignore_index}, args.targets, args.count);
    });
    reduce<V>(device, MeanLossOp<V, T>{}, args.losses, args.loss, args.count.data<V>());
  });
}

void cross_entropy_backward(Cpu, const CrossEntropyBackward& args) {
  on_dtype(FloatTypes{}, args.logits.dtype(), "cross_entropy", [&]<class T>() {
    on_dtype(IndexTypes{}, args.targets.dtype(), "cross_entropy", [&]<class Index>() { backward<T, Index>(args); });
  });
}

}  // namespace mica::kernels
