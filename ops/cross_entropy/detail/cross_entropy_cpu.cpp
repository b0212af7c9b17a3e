#include <cstddef>
#include <vector>

#include <mica/core/detail/blocks_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_reductions.h>
#include <mica/ops/softmax/detail/row_cpu.h>

namespace mica::kernels {

namespace {

std::int64_t rows_per_thread(std::int64_t classes) {
  return std::max<std::int64_t>(4096 / std::max<std::int64_t>(classes, 1), 1);
}

/// Access to the rows, and the functions of their logits, which are computed in S, float or double. See README.md for
/// the notation.
template <class S>
class Rows {
 public:
  /// A thread's copy of one row.
  struct Row {
    explicit Row(std::int64_t classes) : z(classes) {}
    std::vector<S> z;
    std::vector<S> given;  // the targets, if they are probabilities
  };

  explicit Rows(const CrossEntropyTerms& terms)
      : classes(terms.logits.size(1)),
        kind_(target_of(terms)),
        ignore_index_(terms.ignore_index),
        format_(element_format(terms.logits.dtype())),
        logits_(terms.logits.raw_data()),
        given_(is_floating(terms.targets.dtype()) ? terms.targets.raw_data() : nullptr),
        wide_labels_(labeled() && terms.targets.dtype() == int64 ? terms.targets.data<std::int64_t>() : nullptr),
        labels_(labeled() && terms.targets.dtype() == int32 ? terms.targets.data<std::int32_t>() : nullptr),
        weight_(terms.weight.data_or_null<S>()),
        rows_(terms.logits.size(0)),
        even_(static_cast<S>(terms.label_smoothing / static_cast<double>(classes))),
        sharp_(static_cast<S>(1 - terms.label_smoothing)),
        scale_(static_cast<S>(terms.logit_scale)),
        cap_(static_cast<S>(terms.softcap)) {}

  /// Calls f(i, row) for all rows, in parallel. `row` is a buffer of the thread, for load().
  template <class F>
  void each(const F& f) const {
    parallel_for(rows_, rows_per_thread(classes), [&](std::int64_t begin, std::int64_t end) {
      Row row(classes);
      for (std::int64_t i = begin; i < end; ++i) {
        f(i, row);
      }
    });
  }

  bool labeled() const { return given_ == nullptr; }
  std::int64_t label(std::int64_t i) const { return wide_labels_ != nullptr ? wide_labels_[i] : labels_[i]; }
  bool ignored(std::int64_t i) const { return labeled() && label(i) == ignore_index_; }
  CrossEntropyTarget kind() const { return kind_; }
  std::int64_t row_bytes() const { return classes * format_.bytes; }

  /// Writes a row of the logits' dtype.
  void store(const std::vector<S>& values, std::byte* to) const {
    format_.scatter(reinterpret_cast<const std::byte*>(values.data()), {classes, 1, 1, 0}, to);
  }

  /// Loads row i: z, and the targets if they are probabilities.
  void load(std::int64_t i, Row& row) const {
    const std::int64_t n = classes;
    S* const out = row.z.data();
    gather(logits_, i, out);
    if (given_ != nullptr) {
      row.given.resize(n);
      gather(given_, i, row.given.data());
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

  /// Replaces z of a row by (total · softmax(z) − u) · dz/dx · scale. target_term(i) is u of class i.
  template <class TargetTerm>
  void gradient(std::vector<S>& z, S log_sum, S total, S scale, const TargetTerm& target_term) const {
    S* const out = z.data();
    const std::int64_t n = classes;
    const S factor = scale_ * scale;
    // One loop for both cases, since the compiler inlines and vectorizes exp only a limited number of times.
    const bool capped = cap_ != 0;
    const S inverse = capped ? 1 / cap_ : S{0};
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      const S part = capped ? out[i] * inverse : S{0};
      out[i] = (total * math::exp(out[i] - log_sum) - target_term(i)) * ((1 - part * part) * factor);
    }
  }
  /// dz/dx
  S slope(S z) const {
    const S part = cap_ != 0 ? z / cap_ : S{0};
    return scale_ * (1 - part * part);
  }

  S weight(std::int64_t i) const { return weight_ != nullptr ? weight_[i] : S{1}; }
  /// The part of u that only the label's class has.
  S label_u(std::int64_t i) const { return sharp_ * weight(label(i)); }
  /// u of class i, without label_u(). `given` is null unless the targets are probabilities.
  S u(const S* given, std::int64_t i) const {
    return weight(i) * (given != nullptr ? sharp_ * given[i] + even_ : even_);
  }

  const std::int64_t classes;

 private:
  void gather(const std::byte* rows, std::int64_t i, S* to) const {
    format_.gather(rows + i * row_bytes(), {classes, 1, 1, 0}, reinterpret_cast<std::byte*>(to));
  }

  CrossEntropyTarget kind_;
  std::int64_t ignore_index_;
  const ElementFormat& format_;
  const std::byte* logits_;
  const std::byte* given_;
  const std::int64_t* wide_labels_;
  const std::int32_t* labels_;
  const S* weight_;
  std::int64_t rows_;
  S even_;
  S sharp_;
  S scale_;
  S cap_;
};

template <class S>
void forward(const CrossEntropyForward& args) {
  const Rows<S> rows(args.terms);
  S* const logsumexp = args.logsumexp.data<S>();
  S* const mass = args.mass.data<S>();
  S* const losses = args.losses.data<S>();
  rows.each([&](std::int64_t i, typename Rows<S>::Row& row) {
    if (rows.ignored(i)) {
      logsumexp[i] = 0;
      mass[i] = 0;
      losses[i] = 0;
      return;
    }
    rows.load(i, row);
    const S* const z = row.z.data();
    const S largest = row_max(z, rows.classes);
    const S log_sum = math::log(row_sum_exp(z, rows.classes, largest));
    logsumexp[i] = largest + log_sum;
    // Each logit is subtracted from the maximum first, which is more accurate for large logits.
    S distance = 0;
    S total = 0;
    if (rows.labeled()) {
      total = rows.label_u(i);
      distance = weighed(total, largest - z[rows.label(i)]);
    }
    if (rows.kind() != CrossEntropyTarget::label) {
      const S* const given = rows.labeled() ? nullptr : row.given.data();
      total += row_sum<S>(rows.classes, [&](std::int64_t c) { return rows.u(given, c); });
      distance += row_sum<S>(rows.classes, [&](std::int64_t c) { return weighed(rows.u(given, c), largest - z[c]); });
    }
    mass[i] = total;
    losses[i] = distance + total * log_sum;
  });
}

template <class S>
void backward(const CrossEntropyBackward& args) {
  const Rows<S> rows(args.terms);
  const S* const logsumexp = args.logsumexp.data<S>();
  const S* const mass = args.mass.data<S>();
  const S* const dloss = args.dloss.data_or_null<S>();
  const bool one = dloss != nullptr && args.dloss.numel() == 1;
  const S denominator = args.denominator.defined() ? *args.denominator.data<S>() : S{1};
  std::byte* const dlogits = args.dlogits.raw_data();
  rows.each([&](std::int64_t i, typename Rows<S>::Row& row) {
    std::vector<S>& z = row.z;
    std::byte* const dx = dlogits + i * rows.row_bytes();
    if (rows.ignored(i)) {
      std::fill(dx, dx + rows.row_bytes(), std::byte{0});
      return;
    }
    rows.load(i, row);
    const S scale = (dloss != nullptr ? dloss[one ? 0 : i] : S{1}) / denominator;
    const S log_sum = logsumexp[i];
    const S total = mass[i];
    const S z_label = rows.labeled() ? z[rows.label(i)] : S{0};
    if (rows.kind() == CrossEntropyTarget::label) {
      rows.gradient(z, log_sum, total, scale, [](std::int64_t) { return S{0}; });
    } else {
      const S* const given = rows.labeled() ? nullptr : row.given.data();
      rows.gradient(z, log_sum, total, scale, [&](std::int64_t c) { return rows.u(given, c); });
    }
    if (rows.labeled()) {
      z[rows.label(i)] -= rows.label_u(i) * rows.slope(z_label) * scale;
    }
    rows.store(z, dx);
  });
}

}  // namespace

void cross_entropy_forward(Cpu, const CrossEntropyForward& args) {
  on_dtype(FloatTypes{}, args.terms.logits.dtype(), "cross_entropy", [&]<class T>() { forward<Accumulate<T>>(args); });
}

void cross_entropy_backward(Cpu, const CrossEntropyBackward& args) {
  on_dtype(FloatTypes{}, args.terms.logits.dtype(), "cross_entropy", [&]<class T>() { backward<Accumulate<T>>(args); });
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
