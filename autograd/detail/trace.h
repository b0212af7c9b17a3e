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

}  // namespace mica::autograd
