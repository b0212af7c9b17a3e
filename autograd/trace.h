#pragma once

// What is remembered of ops and tensors only to explain things later. The first part of it costs nothing unless
// DetectAnomaly is on.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/call_site.h>
#include <mica/autograd/module_name.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

class Node;
struct Edge;

/// Where history ended: a detach(), an op while recording was off, an output that has no derivative.
struct Cut {
  std::string what;
  std::shared_ptr<const ModuleName> module;
  CallSite call_site;
};

/// The leaves whose way to a tensor was cut, each with one place where. No more entries than leaves, however long a
/// program keeps detaching.
using Cuts = std::vector<std::pair<std::weak_ptr<Slot>, std::shared_ptr<const Cut>>>;

/// Of a recorded op, while DetectAnomaly is on.
struct Trace {
  CallSite call_site;
  Cuts cuts;                   // that its inputs came with
  std::vector<int> undefined;  // the inputs to which its last backward gave no gradient
};

/// Of a tensor: a parameter's name, and what was cut off it while DetectAnomaly was on.
struct Notes {
  std::string name;
  std::shared_ptr<const ModuleName> module;  // that registered it
  Cuts cuts;
};

/// The notes of `x`, made if it has none.
Notes& notes_of(const Tensor& x);

/// A leaf as messages call it: "h.0.mlp.c_fc.weight", or "" for one without a name.
std::string leaf_name(const Slot& leaf);

/// Ends the message about an op: in which module it ran and from where it was called, as far as that is known.
std::string where(const Node& node);
std::string where(const std::shared_ptr<const ModuleName>& module, const CallSite* call_site);

/// After an op was recorded as `node`, with DetectAnomaly on.
void trace_recorded(Node& node, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);
/// After an op that was not recorded, with DetectAnomaly on.
void trace_unrecorded(const std::string& op, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);
/// After result = x.detach(), with DetectAnomaly on.
void trace_detach(const Tensor& x, const Tensor& result);
/// After a write in place to `x` that was not recorded: what was cut off `written`, another handle to its elements.
void trace_write(const Tensor& x, const Tensor& written);

}  // namespace mica::autograd
