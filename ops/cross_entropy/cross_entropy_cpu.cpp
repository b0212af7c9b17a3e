#include <vector>

#include <mica/core/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/cross_entropy/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/cross_entropy_ops.h>
#include <mica/ops/softmax/row_cpu.h>

namespace mica::kernels {

namespace {

std::int64_t rows_per_thread(std::int64_t classes) {
  return std::max<std::int64_t>(4096 / std::max<std::int64_t>(classes, 1), 1);
}

/// Calls f.operator()<T, Index>(); Index is of no meaning where the targets are probabilities.
template <class F>
void for_types(const CrossEntropyTerms& terms, const F& f) {
  on_dtype(FloatTypes{}, terms.logits.dtype(), "cross_entropy", [&]<class T>() {
    if (target_of(terms) == CrossEntropyTarget::given) {
      f.template operator()<T, std::int64_t>();
    } else {
      on_dtype(IndexTypes{}, terms.targets.dtype(), "cross_entropy",
               [&]<class Index>() { f.template operator()<T, Index>(); });
    }
  });
}

/// The rows, and what is done to their logits. README.md names the numbers.
template <class T, class Index>
class Rows {
 public:
  using S = Accumulate<T>;

  explicit Rows(const CrossEntropyTerms& terms)
      : classes(terms.logits.size(1)),
        kind_(target_of(terms)),
        ignore_index_(terms.ignore_index),
        logits_(terms.logits.data<T>()),
        labels_(kind_ == CrossEntropyTarget::given ? nullptr : terms.targets.data<Index>()),
        given_(kind_ == CrossEntropyTarget::given ? terms.targets.data<T>() : nullptr),
        weight_(terms.weight.data_or_null<S>()),
        rows_(terms.logits.size(0)),
        even_(static_cast<S>(terms.label_smoothing / static_cast<double>(classes))),
        sharp_(static_cast<S>(1 - terms.label_smoothing)),
        scale_(static_cast<S>(terms.logit_scale)),
        cap_(static_cast<S>(terms.softcap)) {}

  /// Calls f(row) for all rows, z(row) and u(i) being those of that row in the thread that runs it.
  template <class F>
  void each(const F& f) const {
    parallel_for(rows_, rows_per_thread(classes), [&](std::int64_t begin, std::int64_t end) {
      std::vector<S> z(classes);
      for (std::int64_t row = begin; row < end; ++row) {
        f(row, z);
      }
    });
  }

  bool ignored(std::int64_t row) const { return labels_ != nullptr && labels_[row] == ignore_index_; }
  std::int64_t label(std::int64_t row) const { return labels_[row]; }
  CrossEntropyTarget kind() const { return kind_; }

  /// z of a row.
  void transform(std::int64_t row, std::vector<S>& z) const {
    const T* const x = logits_ + row * classes;
    S* const out = z.data();
    const std::int64_t n = classes;
    if constexpr (std::is_same_v<T, S>) {
      std::copy(x, x + n, out);
    } else {
      widen(x, n, out);
    }
    const S cap = cap_;
    if (cap != 0) {
      const S inner = scale_ / cap;
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] = cap * math::tanh(out[i] * inner);
      }
    } else if (scale_ != 1) {
      const S scale = scale_;
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] *= scale;
      }
    }
  }

  /// From z of a row to (total · softmax(z) − u) · dz/dx · scale, in the same place. share(i) is u.
  template <class Share>
  void gradient(std::vector<S>& z, S log_sum, S total, S scale, const Share& share) const {
    S* const out = z.data();
    const std::int64_t n = classes;
    const S factor = scale_ * scale;
    // One loop for both, as the compiler takes exp into a loop, which vectorizes it, only so often.
    const bool capped = cap_ != 0;
    const S inverse = capped ? 1 / cap_ : S{0};
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      const S part = capped ? out[i] * inverse : S{0};
      out[i] = (total * math::exp(out[i] - log_sum) - share(i)) * ((1 - part * part) * factor);
    }
  }
  /// dz/dx
  S slope(S z) const {
    const S part = cap_ != 0 ? z / cap_ : S{0};
    return scale_ * (1 - part * part);
  }

  S weight(std::int64_t i) const { return weight_ != nullptr ? weight_[i] : S{1}; }
  /// u of the label.
  S label_u(std::int64_t row) const { return sharp_ * weight(labels_[row]); }
  /// u of class i, without the label's part.
  S u(std::int64_t row, std::int64_t i) const {
    const S t = given_ != nullptr ? sharp_ * static_cast<S>(given_[row * classes + i]) + even_ : even_;
    return weight(i) * t;
  }

  const std::int64_t classes;

 private:
  CrossEntropyTarget kind_;
  std::int64_t ignore_index_;
  const T* logits_;
  const Index* labels_;
  const T* given_;
  const S* weight_;
  std::int64_t rows_;
  S even_;
  S sharp_;
  S scale_;
  S cap_;
};

template <class T, class Index>
void forward(const CrossEntropyForward& args) {
  using S = Accumulate<T>;
  const Rows<T, Index> rows(args.terms);
  S* const logsumexp = args.logsumexp.data<S>();
  S* const mass = args.mass.data<S>();
  S* const losses = args.losses.data<S>();
  rows.each([&](std::int64_t row, std::vector<S>& z) {
    if (rows.ignored(row)) {
      logsumexp[row] = 0;
      mass[row] = 0;
      losses[row] = 0;
      return;
    }
    rows.transform(row, z);
    const S largest = row_max(z.data(), rows.classes);
    const S log_sum = math::log(row_sum_exp(z.data(), rows.classes, largest));
    logsumexp[row] = largest + log_sum;
    // Each class's distance from the largest first: so nothing is lost where the logits are large.
    S distance = 0;
    S total = 0;
    if (rows.kind() != CrossEntropyTarget::given) {
      total = rows.label_u(row);
      distance = weighed(total, largest - z[rows.label(row)]);
    }
    if (rows.kind() != CrossEntropyTarget::label) {
      total += row_sum<S>(rows.classes, [&](std::int64_t i) { return rows.u(row, i); });
      distance += row_sum<S>(rows.classes, [&](std::int64_t i) { return weighed(rows.u(row, i), largest - z[i]); });
    }
    mass[row] = total;
    losses[row] = distance + total * log_sum;
  });
}

template <class T, class Index>
void backward(const CrossEntropyBackward& args) {
  using S = Accumulate<T>;
  const Rows<T, Index> rows(args.terms);
  const S* const logsumexp = args.logsumexp.data<S>();
  const S* const mass = args.mass.data<S>();
  const S* const dloss = args.dloss.data_or_null<S>();
  const bool one = dloss != nullptr && args.dloss.numel() == 1;
  const S denominator = args.denominator.defined() ? *args.denominator.data<S>() : S{1};
  T* const dlogits = args.dlogits.data<T>();
  rows.each([&](std::int64_t row, std::vector<S>& z) {
    T* const dx = dlogits + row * rows.classes;
    if (rows.ignored(row)) {
      std::fill(dx, dx + rows.classes, static_cast<T>(S{0}));
      return;
    }
    rows.transform(row, z);
    const S scale = (dloss != nullptr ? dloss[one ? 0 : row] : S{1}) / denominator;
    const S log_sum = logsumexp[row];
    const S total = mass[row];
    const bool labeled = rows.kind() != CrossEntropyTarget::given;
    const S z_label = labeled ? z[rows.label(row)] : S{0};
    if (rows.kind() == CrossEntropyTarget::label) {
      rows.gradient(z, log_sum, total, scale, [](std::int64_t) { return S{0}; });
    } else {
      rows.gradient(z, log_sum, total, scale, [&](std::int64_t i) { return rows.u(row, i); });
    }
    if (labeled) {
      z[rows.label(row)] -= rows.label_u(row) * rows.slope(z_label) * scale;
    }
    if constexpr (std::is_same_v<T, S>) {
      std::copy(z.begin(), z.end(), dx);
    } else {
      narrow(z.data(), rows.classes, dx);
    }
  });
}

}  // namespace

void cross_entropy_forward(Cpu, const CrossEntropyForward& args) {
  for_types(args.terms, [&]<class T, class Index>() { forward<T, Index>(args); });
}

void cross_entropy_backward(Cpu, const CrossEntropyBackward& args) {
  for_types(args.terms, [&]<class T, class Index>() { backward<T, Index>(args); });
}

void cross_entropy_in_place(Cpu device, const CrossEntropyInPlace& args) {
  const Tensor logsumexp = empty(args.losses.shape(), args.losses.dtype());
  const Tensor mass = empty(args.losses.shape(), args.losses.dtype());
  cross_entropy_forward(device, {.terms = args.terms, .logsumexp = logsumexp, .mass = mass, .losses = args.losses});
  cross_entropy_backward(device, {.terms = args.terms,
                                  .logsumexp = logsumexp,
                                  .mass = mass,
                                  .dloss = args.dloss,
                                  .denominator = args.denominator,
                                  .dlogits = args.terms.logits});
}

void cross_entropy_denominator(Cpu device, const CrossEntropyDenominator& args) { sum_label_weights(device, args); }
void cross_entropy_reduce(Cpu device, const CrossEntropyReduce& args) { reduce_losses(device, args); }

void cross_entropy_scale(Cpu, const CrossEntropyScale& args) {
  on_dtype(FloatTypes{}, args.gradient.dtype(), "cross_entropy", [&]<class T>() {
    using S = Accumulate<T>;
    const std::int64_t classes = args.gradient.size(1);
    const bool one = args.factor.numel() == 1;
    const S* const factors = args.factor.data<S>();
    T* const gradient = args.gradient.data<T>();
    parallel_for(args.gradient.size(0), rows_per_thread(classes), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const S factor = factors[one ? 0 : row];
        T* const g = gradient + row * classes;
        for (std::int64_t i = 0; factor != 1 && i < classes; ++i) {
          g[i] = static_cast<T>(static_cast<S>(g[i]) * factor);
        }
      }
    });
  });
}

}  // namespace mica::kernels
