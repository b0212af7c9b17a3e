#include <mutex>

#include <mica/autograd/detail/slot.h>
#include <mica/autograd/early_accumulation.h>

namespace mica::autograd {

namespace {

using Leaves = EarlyAccumulation::Leaves;

// A change creates a new set, since a backward on another thread may be reading the old one.
std::mutex mutex;
std::shared_ptr<const Leaves> all;

}  // namespace

EarlyAccumulation::EarlyAccumulation(const Tensors& leaves) {
  const std::lock_guard lock(mutex);
  auto more = all == nullptr ? std::make_shared<Leaves>() : std::make_shared<Leaves>(*all);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    check(leaves[i].defined() && leaves[i].is_leaf() && leaves[i].requires_grad(),
          "EarlyAccumulation: expected leaves that require gradients, but tensor {} is not one", i);
    check(more->insert(slots_.emplace_back(leaves[i].handle()->slot).get()).second,
          "EarlyAccumulation: tensor {}, {} {}, is already in an EarlyAccumulation, or was given twice", i,
          leaves[i].dtype(), leaves[i].shape());
  }
  if (!leaves.empty()) {
    all = std::move(more);
  }
}

EarlyAccumulation::~EarlyAccumulation() {
  if (slots_.empty()) {
    return;
  }
  const std::lock_guard lock(mutex);
  auto rest = std::make_shared<Leaves>(*all);
  for (const std::shared_ptr<Slot>& slot : slots_) {
    rest->erase(slot.get());
  }
  all = rest->empty() ? nullptr : std::move(rest);
}

std::shared_ptr<const Leaves> EarlyAccumulation::leaves() {
  const std::lock_guard lock(mutex);
  return all;
}

}  // namespace mica::autograd
