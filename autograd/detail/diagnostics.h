#pragma once

// What is recorded for error messages, and its text.

#include <cstddef>
#include <memory>
#include <string>

#include <mica/autograd/detail/slot.h>
#include <mica/autograd/detail/trace.h>
#include <mica/autograd/node.h>

namespace mica::autograd {

/// The notes of `x`, created if it has none.
Notes& notes_of(const Tensor& x);

/// A leaf's name for messages: "h.0.mlp.c_fc.weight", or "" if it has none.
std::string leaf_name(const Slot& leaf);

/// The end of a message about an op: its module and call stack, where known.
std::string where(const Node& node);
std::string where(const std::shared_ptr<const ModuleName>& module, const CallSite* call_site);

/// After an op was recorded as `node`, with DetectAnomaly on.
void trace_recorded(Node& node, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);
/// After an op that was not recorded, with DetectAnomaly on.
void trace_unrecorded(const std::string& op, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);
/// After result = x.detach(), with DetectAnomaly on.
void trace_detach(const Tensor& x, const Tensor& result);
/// After an in-place write to `x` that was not recorded; `written` is another handle to the same elements.
void trace_write(const Tensor& x, const Tensor& written);

}  // namespace mica::autograd
