#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include <mica/core/detail/callable.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

struct GradcheckOptions {
  double step = 1e-6;  ///< of the central difference
  double atol = 1e-5;  ///< |analytic − numeric| ≤ atol + rtol · |numeric|
  double rtol = 1e-3;
  bool noncontiguous = true;  ///< also check with non-contiguous inputs and gradients
  bool raise = true;          ///< throw an Error that names the failing element, instead of returning false
};

namespace detail {
bool gradcheck(FunctionRef<Tensors(const Tensors&)> f, const Tensors& inputs, GradcheckOptions options);
bool gradgradcheck(FunctionRef<Tensors(const Tensors&)> f, const Tensors& inputs, GradcheckOptions options);

inline Tensors results(Tensor x) { return {std::move(x)}; }
inline Tensors results(Tensors x) { return x; }
template <std::size_t N>
Tensors results(std::array<Tensor, N> x) {
  return Tensors(x.begin(), x.end());
}

inline const Tensor& input(const Tensors& in, std::size_t i) {
  check(i < in.size(), "gradcheck: the function takes more than the {} inputs given", in.size());
  return in[i];
}

template <class F>
Tensors call_with(F& f, const Tensors& in) {
  if constexpr (std::is_invocable_v<F&, const Tensors&>) {
    return results(f(in));
  } else if constexpr (std::is_invocable_v<F&, const Tensor&>) {
    return results(f(input(in, 0)));
  } else if constexpr (std::is_invocable_v<F&, const Tensor&, const Tensor&>) {
    return results(f(input(in, 0), input(in, 1)));
  } else if constexpr (std::is_invocable_v<F&, const Tensor&, const Tensor&, const Tensor&>) {
    return results(f(input(in, 0), input(in, 1), input(in, 2)));
  } else {
    return results(f(input(in, 0), input(in, 1), input(in, 2), input(in, 3)));
  }
}
}  // namespace detail

/// Compares the gradients of `f` with central differences, in float64.
///
/// `f` takes the inputs as up to four Tensors, or as one Tensors, and returns a Tensor, an array or a list of them. All
/// floating inputs must be float64, on any device, and are differentiated; others are passed through. The gradient of
/// each output is random, so that errors do not cancel as in a plain sum. Backward runs twice and must give the same
/// bits.
///
/// Returns true, or throws Error naming input, element, analytic and numeric value (with options.raise false: returns
/// false).
template <class F>
bool gradcheck(F&& f, const Tensors& inputs, GradcheckOptions options = {}) {
  check_callable(f, "gradcheck");
  return detail::gradcheck([&f](const Tensors& in) { return detail::call_with(f, in); }, inputs, options);
}

/// Checks second derivatives: gradcheck of the gradients of `f`, as functions of the inputs and of the output
/// gradients. Arguments and result as for gradcheck.
template <class F>
bool gradgradcheck(F&& f, const Tensors& inputs, GradcheckOptions options = {}) {
  check_callable(f, "gradgradcheck");
  return detail::gradgradcheck([&f](const Tensors& in) { return detail::call_with(f, in); }, inputs, options);
}

}  // namespace mica::autograd
