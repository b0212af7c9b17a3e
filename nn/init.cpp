#include <utility>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/number.h>
#include <mica/core/dispatch.h>
#include <mica/nn/init.h>

namespace mica::nn::init {

namespace {

thread_local bool skips = false;
thread_local constinit ProgressTask* progress = nullptr;

// x = scale · random + shift, where random is on the CPU and may be overwritten.
Tensor fill_scaled(const char* name, const Tensor& x, const Tensor& random, double scale, double shift) {
  on_dtype(Types<float, double>{}, random.dtype(), "init", [&]<class T>() {
    T* const data = random.data<T>();
    for (std::int64_t i = 0; i < random.numel(); ++i) {
      data[i] = static_cast<T>(scale) * data[i] + static_cast<T>(shift);
    }
  });
  copy_into(x, random);
  x.bump_version(name);
  if (progress != nullptr) {
    progress->advance(x.numel());
  }
  return x;
}

}  // namespace

Tensor uniform_(const Tensor& x, double low, double high) {
  check(low <= high, "uniform_: expected low <= high, got {} and {}", low, high);
  if (skips) {
    return x;
  }
  return fill_scaled("uniform_", x, rand(x.shape(), accumulate_dtype(x.dtype())), high - low, low);
}

Tensor normal_(const Tensor& x, double mean, double std) {
  check(std >= 0, "normal_: expected std >= 0, got {}", std);
  if (skips) {
    return x;
  }
  return fill_scaled("normal_", x, randn(x.shape(), accumulate_dtype(x.dtype())), std, mean);
}

Tensor constant_(const Tensor& x, double value) {
  mica::detail::check_number(value, x.dtype(), "constant_");
  if (skips) {
    return x;
  }
  fill_data(x, value);
  x.bump_version("constant_");
  return x;
}

Progress::Progress(std::int64_t elements)
    : task_("initializing the model", elements), before_(std::exchange(progress, &task_)) {}
Progress::~Progress() { progress = before_; }

Skip::Skip() : before_(std::exchange(skips, true)) {}
Skip::~Skip() { skips = before_; }

}  // namespace mica::nn::init
