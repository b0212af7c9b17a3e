#include <mica/autograd/grad_mode.h>
#include <mica/core/storage.h>

namespace mica::autograd {

namespace {

thread_local constinit bool enabled = true;
thread_local constinit bool inside_op = false;

}  // namespace

bool grad_enabled() { return enabled; }

GradMode::GradMode(bool on) : previous_(enabled) { enabled = on && !inference_mode_enabled(); }

GradMode::~GradMode() { enabled = previous_; }

InsideOp::InsideOp(bool on) : GradMode(!on), previous_(inside_op) { inside_op = on; }

InsideOp::~InsideOp() { inside_op = previous_; }

bool grad_disabled_by_user() { return !enabled && !inside_op; }

bool inference_mode_enabled() { return !mica::detail::storages_count_writes(); }

InferenceMode::InferenceMode(bool on) : previous_inference_(inference_mode_enabled()), previous_grad_(enabled) {
  mica::detail::set_storages_count_writes(!on);
  enabled = !on;
}

InferenceMode::~InferenceMode() {
  mica::detail::set_storages_count_writes(!previous_inference_);
  enabled = previous_grad_;
}

}  // namespace mica::autograd
