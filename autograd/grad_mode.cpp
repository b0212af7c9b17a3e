#include <mica/autograd/grad_mode.h>

namespace mica::autograd {

namespace {

thread_local bool enabled = true;
thread_local bool inside_op = false;

}  // namespace

bool grad_enabled() { return enabled; }

GradMode::GradMode(bool on) : previous_(enabled) { enabled = on; }

GradMode::~GradMode() { enabled = previous_; }

InsideOp::InsideOp(bool on) : GradMode(!on), previous_(inside_op) { inside_op = on; }

InsideOp::~InsideOp() { inside_op = previous_; }

bool grad_disabled_by_user() { return !enabled && !inside_op; }

}  // namespace mica::autograd
