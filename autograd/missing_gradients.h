#pragma once

#include <string>
#include <utility>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Why a parameter gets no gradient from a loss.
enum class Missing {
  frozen,     ///< it does not require a gradient
  unused,     ///< nothing that led to the loss and was recorded used it
  cut,        ///< it was used, but the way to the loss was cut: by detach(), no_grad, or an op without a derivative
  undefined,  ///< the loss leads to it, but no gradient arrived
};

struct MissingGradient {
  std::string name;
  Missing reason;
  std::string text;  ///< the reason in words, with names of ops and modules and call sites as far as they are known
};

/// Those of the parameters (as Module::named_parameters() gives them) that get no gradient from `loss`, in order, and
/// why. For after loss.backward(), while `loss` is alive, with gradients that were zeroed before: one that is left over
/// from an earlier backward is taken for one that arrived.
///
/// Which of them are frozen and to which the loss leads is always known. What else is known depends on DetectAnomaly:
/// - If it was on in forward, the place of a cut is known: detach(), an op under no_grad, an output that has no
///   derivative. Not known are values that left mica's ops on the way (item(), to_vector(), data()): such a parameter
///   counts as unused. Without it, so does every parameter that was cut off.
/// - If it was on in backward too, the op that returned no gradient is known. Without it, `undefined` may also mean
///   that backward() has not run.
///
/// Throws if `loss` or a parameter is an undefined tensor.
std::vector<MissingGradient> explain_missing_gradients(const Tensor& loss,
                                                       const std::vector<std::pair<std::string, Tensor>>& parameters);

/// One line for each, "name: text"; those that go on are indented. Empty if none is missing.
std::string to_string(const std::vector<MissingGradient>& missing);

}  // namespace mica::autograd
