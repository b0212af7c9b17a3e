#include <mica/autograd/grad_mode.h>

namespace mica::autograd {

namespace {

thread_local bool enabled = true;

}  // namespace

bool grad_enabled() { return enabled; }

GradMode::GradMode(bool on) : previous_(enabled) { enabled = on; }

GradMode::~GradMode() { enabled = previous_; }

}  // namespace mica::autograd
