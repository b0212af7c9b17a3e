#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>

namespace mica::autograd {

namespace {

using Call = FunctionRef<Tensors(const Tensors&)>;

// Floating inputs, and outputs that a gradient can flow into.
bool is_differentiated(const Tensor& x) { return x.defined() && is_floating(x.dtype()); }

// The same values laid out with the axes reversed and a gap after every element.
Tensor with_gaps(const Tensor& x) {
  Strides strides = x.shape();
  std::int64_t step = 2;
  for (int axis = 0; axis < x.dim(); ++axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(x.shape()[axis], 1);
  }
  const Tensor base = full({step}, NAN, x.dtype(), x.device());  // exposes kernels that read the gaps
  const Tensor result = as_strided(base, x.shape(), strides, 0);
  copy_into(result, x);
  return result;
}

Tensor copied(const Tensor& x) {
  const Tensor result = empty_like(x);
  copy_into(result, x);
  return result;
}

// New leaves with the values of the inputs.
Tensors leaves_of(const Tensors& inputs, bool gaps) {
  Tensors result;
  for (const Tensor& x : inputs) {
    if (!is_differentiated(x)) {
      result.push_back(x);
      continue;
    }
    result.push_back((gaps ? with_gaps(x) : copied(x)).requires_grad_());
  }
  return result;
}

class Checker {
 public:
  Checker(Call f, const Tensors& inputs, GradcheckOptions options)
      : f_(f), inputs_(inputs), options_(options), state_(rng_state()) {}

  void run() {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      check(!is_differentiated(inputs_[i]) || inputs_[i].dtype() == float64,
            "gradcheck: input {} is {}; differences need float64", i, inputs_[i].dtype());
    }
    make_output_gradients();
    const Tensors gradients = analytic(/*gaps=*/false);
    compare_bits(gradients, analytic(/*gaps=*/false));
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (is_differentiated(inputs_[i])) {
        compare(i, gradients[i], numeric(i), "");
      }
    }
    if (options_.noncontiguous) {
      const Tensors strided = analytic(/*gaps=*/true);
      for (std::size_t i = 0; i < inputs_.size(); ++i) {
        if (gradients[i].defined()) {
          compare(i, strided[i], to_vector<double>(gradients[i]), " with non-contiguous inputs");
        }
      }
    }
  }

 private:
  // Every call draws the same random numbers, so that random ops can be checked.
  Tensors call(const Tensors& in) const {
    set_rng_state(state_);
    return f_(in);
  }

  void make_output_gradients() {
    const NoGrad guard;
    bool any = false;
    for (const Tensor& y : call(leaves_of(inputs_, false))) {
      const bool floating = is_differentiated(y);
      check(!floating || y.dtype() == float64, "gradcheck: expected outputs of float64, got {}", y.dtype());
      output_gradients_.push_back(floating ? randn_like(y) : Tensor{});
      any = any || floating;
    }
    check(any, "gradcheck: the function has no floating output");
  }

  Tensors analytic(bool gaps) const {
    const Tensors leaves = leaves_of(inputs_, gaps);
    const Tensors outputs = call(leaves);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      const Tensor& dy = output_gradients_[k];
      if (dy.defined() && outputs[k].requires_grad()) {
        outputs[k].backward(gaps ? with_gaps(dy) : dy, {.retain_graph = true});
      }
    }
    Tensors gradients;
    for (const Tensor& leaf : leaves) {
      gradients.push_back(is_differentiated(leaf) && !leaf.grad().defined() ? zeros_like(leaf) : leaf.grad());
    }
    return gradients;
  }

  // Σ outputs · dy, the scalar whose differences are taken.
  double loss(const Tensors& inputs) const {
    const NoGrad guard;
    const Tensors outputs = call(inputs);
    double sum = 0;
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (output_gradients_[k].defined()) {
        const std::vector<double> y = to_vector<double>(outputs[k]);
        const std::vector<double> dy = to_vector<double>(output_gradients_[k]);
        for (std::size_t i = 0; i < y.size(); ++i) {
          sum += y[i] * dy[i];
        }
      }
    }
    return sum;
  }

  std::vector<double> numeric(std::size_t input) const {
    Tensors inputs = inputs_;
    const std::vector<double> values = to_vector<double>(inputs_[input]);
    const auto at = [&](std::size_t i, double change) {
      std::vector<double> moved = values;
      moved[i] += change;
      inputs[input] = from_data(moved, inputs_[input].shape(), inputs_[input].device());
      return loss(inputs);
    };
    std::vector<double> result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      result[i] = (at(i, options_.step) - at(i, -options_.step)) / (2 * options_.step);
    }
    return result;
  }

  void compare(std::size_t input, const Tensor& gradient, const std::vector<double>& expected,
               const char* where) const {
    const std::vector<double> got = to_vector<double>(gradient);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const bool close = std::abs(got[i] - expected[i]) <= options_.atol + options_.rtol * std::abs(expected[i]);
      check(close, "gradcheck: input {} of shape {}, element {}: the gradient is {}, but {} was expected{}", input,
            gradient.shape(), i, got[i], expected[i], where);
    }
  }

  static void compare_bits(const Tensors& first, const Tensors& second) {
    for (std::size_t i = 0; i < first.size(); ++i) {
      if (first[i].defined()) {
        const std::vector<double> a = to_vector<double>(first[i]);
        const std::vector<double> b = to_vector<double>(second[i]);
        check(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0,
              "gradcheck: input {}: two runs on the same values gave gradients that differ in their bits", i);
      }
    }
  }

  Call f_;
  const Tensors& inputs_;
  GradcheckOptions options_;
  PhiloxKey state_;
  Tensors output_gradients_;
};

}  // namespace

namespace detail {

bool gradcheck(Call f, const Tensors& inputs, GradcheckOptions options) {
  try {
    Checker(f, inputs, options).run();
  } catch (const Error&) {
    if (options.raise) {
      throw;
    }
    return false;
  }
  return true;
}

bool gradgradcheck(Call f, const Tensors& inputs, GradcheckOptions options) {
  Tensors all = inputs;
  const PhiloxKey state = rng_state();
  for (const Tensor& y : f(leaves_of(inputs, /*gaps=*/false))) {
    if (is_differentiated(y) && y.requires_grad()) {
      all.push_back(randn_like(y.detach()));
    }
  }
  check(all.size() > inputs.size(), "gradgradcheck: no output of the function requires a gradient");
  const auto gradients = [&](const Tensors& in) {
    const EnableGrad recorded;  // also during finite differences
    Tensors leaves;
    for (const Tensor& x : in) {
      leaves.push_back(is_differentiated(x) && !x.requires_grad() ? x.detach().requires_grad_() : x);
    }
    const auto first_gradient = leaves.begin() + static_cast<std::ptrdiff_t>(inputs.size());
    Tensors outputs;
    for (const Tensor& y : f(Tensors(leaves.begin(), first_gradient))) {
      if (is_differentiated(y) && y.requires_grad()) {
        outputs.push_back(y);
      }
    }
    Tensors wanted;
    std::copy_if(leaves.begin(), first_gradient, std::back_inserter(wanted), is_differentiated);
    Tensors results =
        grad(outputs, wanted, Tensors(first_gradient, leaves.end()), {.create_graph = true, .allow_unused = true});
    std::erase_if(results, [](const Tensor& x) { return !x.defined(); });
    return results;
  };
  set_rng_state(state);
  return gradcheck(gradients, all, options);
}

}  // namespace detail

}  // namespace mica::autograd
