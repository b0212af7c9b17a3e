#include <mica/autograd/grad_mode.h>
#include <mica/core/storage.h>

namespace mica::autograd {

thread_local constinit ThreadState thread_state;

bool inference_mode_enabled() { return !mica::detail::storages_count_writes(); }

InferenceMode::InferenceMode(bool on) : previous_inference_(inference_mode_enabled()), previous_grad_(grad_enabled()) {
  mica::detail::set_storages_count_writes(!on);
  thread_state.grad_enabled = !on;
}

InferenceMode::~InferenceMode() {
  mica::detail::set_storages_count_writes(!previous_inference_);
  thread_state.grad_enabled = previous_grad_;
}

}  // namespace mica::autograd
