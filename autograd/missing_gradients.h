#pragma once

#include <string>
#include <utility>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Why a parameter gets no gradient from a loss.
enum class Missing {
  frozen,     ///< it does not require a gradient
  unused,     ///< no recorded op that leads to the loss used it
  cut,        ///< it was used, but disconnected from the loss: by detach(), no_grad, or an op without a derivative
  undefined,  ///< the loss depends on it, but no gradient arrived
};

struct MissingGradient {
  std::string name;
  Missing reason;
  std::string text;  ///< the reason in words, with ops, modules and call sites where known
};

/// Lists the parameters (as returned by Module::named_parameters()) that get no gradient from `loss`, in order, with
/// the reason. Call it after loss.backward(), while `loss` is alive, with gradients zeroed before: a gradient left over
/// from an earlier backward counts as one that arrived.
///
/// Frozen parameters, and those that the loss depends on, are always recognized. The rest depends on DetectAnomaly:
/// - If it was on in forward, what cut the history off is known: detach(), an op under no_grad, or an output without a
///   derivative. Values that leave mica's ops (item(), to_vector(), data()) are not tracked: such a parameter counts as
///   unused. Without DetectAnomaly every disconnected parameter counts as unused.
/// - If it was also on in backward, the op that returned no gradient is known. Without it, `undefined` may also mean
///   that backward() has not run.
///
/// Throws if `loss` or a parameter is an undefined tensor.
std::vector<MissingGradient> explain_missing_gradients(const Tensor& loss,
                                                       const std::vector<std::pair<std::string, Tensor>>& parameters);

/// One entry per line, "name: text", with continuation lines indented. Empty if no gradient is missing.
std::string to_string(const std::vector<MissingGradient>& missing);

}  // namespace mica::autograd
