#pragma once

// Data about ops and tensors that is kept for error messages only. Recorded mostly under DetectAnomaly; otherwise free.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/detail/call_site.h>
#include <mica/autograd/detail/module_name.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

class Node;
struct Edge;

/// Where a history was cut: a detach(), an op while recording was off, an output without a derivative.
struct Cut {
  std::string what;
  std::shared_ptr<const ModuleName> module;
  CallSite call_site;
};

/// The leaves that were disconnected from a tensor, each with one cut. At most one entry per leaf, however often a
/// program detaches.
using Cuts = std::vector<std::pair<std::weak_ptr<Slot>, std::shared_ptr<const Cut>>>;

/// Data of an op recorded under DetectAnomaly.
struct Trace {
  CallSite call_site;
  Cuts cuts;                   // of its inputs
  std::vector<int> undefined;  // the inputs for which its last backward returned no gradient
};

/// Data of a tensor: a parameter's name, and the leaves disconnected from it under DetectAnomaly.
struct Notes {
  std::string name;
  std::shared_ptr<const ModuleName> module;  // the module that registered it
  Cuts cuts;
};

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
