#include <algorithm>
#include <unordered_set>

#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/node.h>

namespace mica::autograd {

namespace {

void add(Cuts& cuts, const std::weak_ptr<Slot>& leaf, const std::shared_ptr<const Cut>& cut) {
  const auto same = [&](const auto& entry) {
    return !entry.first.owner_before(leaf) && !leaf.owner_before(entry.first);
  };
  if (std::none_of(cuts.begin(), cuts.end(), same)) {
    cuts.emplace_back(leaf, cut);
  }
}

void add(Cuts& cuts, const Cuts& more) {
  for (const auto& [leaf, cut] : more) {
    if (!leaf.expired()) {
      add(cuts, leaf, cut);
    }
  }
}

// Adds the leaves in the history of a tensor that is about to lose it, as disconnected at `cut`, and the tensor's older
// cuts.
void add_cuts(Cuts& cuts, const Edge& edge, const std::shared_ptr<const Cut>& cut) {
  std::vector<const Node*> found{edge.node.get()};
  std::unordered_set<const Node*> seen{edge.node.get()};
  while (!found.empty()) {
    const Node* const node = found.back();
    found.pop_back();
    if (const std::shared_ptr<Slot> leaf = node->leaf()) {
      add(cuts, leaf, cut);
    }
    if (node->trace) {
      add(cuts, node->trace->cuts);
    }
    for (const Edge& next : node->edges) {
      if (next.node != nullptr && seen.insert(next.node.get()).second) {
        found.push_back(next.node.get());
      }
    }
  }
}

void add_notes(Cuts& cuts, const Tensor& x) {
  if (const Slot* const slot = find_slot(x); slot != nullptr && slot->notes) {
    add(cuts, slot->notes->cuts);
  }
}

Cuts cuts_of_inputs(const Tensor* const* inputs, std::size_t count, const std::string& what) {
  Cuts cuts;
  std::shared_ptr<const Cut> cut;
  for (std::size_t i = 0; i < count; ++i) {
    add_notes(cuts, *inputs[i]);
    if (const Edge edge = gradient_edge(*inputs[i]); edge.node != nullptr) {
      if (!cut) {
        cut = std::make_shared<Cut>(Cut{what, current_module(), CallSite::here()});
      }
      add_cuts(cuts, edge, cut);
    }
  }
  return cuts;
}

void note(const Tensor& result, const Cuts& cuts) {
  if (result.defined() && !cuts.empty()) {
    notes_of(result).cuts = cuts;
  }
}

}  // namespace

Notes& notes_of(const Tensor& x) {
  Slot& slot = slot_of(x);
  if (!slot.notes) {
    slot.notes = std::make_unique<Notes>();
  }
  return *slot.notes;
}

std::string leaf_name(const Slot& leaf) {
  if (!leaf.notes || leaf.notes->name.empty()) {
    return "";
  }
  const std::string module = leaf.notes->module ? path_of(*leaf.notes->module) : "";
  return module.empty() ? leaf.notes->name : module + "." + leaf.notes->name;
}

std::string where(const std::shared_ptr<const ModuleName>& module, const CallSite* call_site) {
  std::string text;
  if (module) {
    text += "\n  in module " + describe(*module);
  }
  if (call_site != nullptr) {
    for (const std::string& function : call_site->user_functions()) {
      text += "\n  called from " + function;
    }
  }
  return text;
}

std::string where(const Node& node) { return where(node.module, node.trace ? &node.trace->call_site : nullptr); }

void trace_recorded(Node& node, const Tensor* const* inputs, std::size_t count, const Tensors& outputs) {
  node.trace = std::make_unique<Trace>(Trace{CallSite::here(), {}, {}});
  for (std::size_t i = 0; i < count; ++i) {
    add_notes(node.trace->cuts, *inputs[i]);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (outputs[k].defined() && !outputs[k].requires_grad()) {
      note(outputs[k],
           cuts_of_inputs(inputs, count,
                          is_floating(outputs[k].dtype())
                              ? fmt::format("{}, whose output {} has no derivative", node.name(), k)
                              : fmt::format("{}, whose output {} is {}", node.name(), k, outputs[k].dtype())));
    }
  }
}

void trace_unrecorded(const std::string& op, const Tensor* const* inputs, std::size_t count, const Tensors& outputs) {
  const Cuts cuts = cuts_of_inputs(inputs, count, op + ", which ran while recording was off");
  for (const Tensor& output : outputs) {
    note(output, cuts);
  }
}

void trace_detach(const Tensor& x, const Tensor& result) {
  const Tensor* const input = &x;
  note(result, cuts_of_inputs(&input, 1, "detach()"));
}

void trace_write(const Tensor& x, const Tensor& written) {
  if (const Slot* const slot = find_slot(written); slot != nullptr && slot->notes) {
    add(notes_of(x).cuts, slot->notes->cuts);
  }
}

}  // namespace mica::autograd
