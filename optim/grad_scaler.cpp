#include <cmath>

#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/optim/detail/grad_scaler_kernels.h>
#include <mica/optim/grad_scaler.h>

namespace mica::optim {

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  const GradScalerOptions& o = options_;
  check(o.init_scale > 0 && std::isfinite(o.init_scale), "GradScaler: expected init_scale > 0, got {}", o.init_scale);
  check(o.growth_factor > 1 && std::isfinite(o.growth_factor), "GradScaler: expected growth_factor > 1, got {}",
        o.growth_factor);
  check(o.backoff_factor > 0 && o.backoff_factor < 1, "GradScaler: expected backoff_factor in (0, 1), got {}",
        o.backoff_factor);
  check(o.growth_interval >= 1, "GradScaler: expected growth_interval >= 1, got {}", o.growth_interval);
  state_ = from_data<double>({o.init_scale, 0.0, 0.0});
}

Tensor GradScaler::scale(const Tensor& loss) {
  check(is_floating(loss.dtype()), "GradScaler: expected a floating loss, got one of {}", loss.dtype());
  state_ = state_.to(loss.device());
  const DType dtype = accumulate_dtype(loss.dtype());
  return loss.to(dtype) * as_strided(state_, {}, {}, 0).to(dtype);
}

void GradScaler::update() {
  const kernels::GradScalerUpdate args{.state = state_,
                                       .growth_factor = options_.growth_factor,
                                       .backoff_factor = options_.backoff_factor,
                                       .growth_interval = static_cast<double>(options_.growth_interval)};
  on_device(state_.device(), [&](auto device) { kernels::grad_scaler_update(device, args); });
}

double GradScaler::scale() const { return to_vector<double>(state_)[0]; }

StateDict GradScaler::state_dict() const {
  const std::vector<double> values = to_vector<double>(state_);
  StateDict result;
  result.emplace("scale", from_data<double>({values[0]}, Shape{}));
  result.emplace("growth_tracker", from_data({static_cast<std::int64_t>(values[1])}, Shape{}));
  return result;
}

void GradScaler::load_state_dict(const StateDict& state) {
  const auto value = [&](const char* name) {
    const auto at = state.find(name);
    check(at != state.end() && at->second.defined() && at->second.numel() == 1,
          "GradScaler: load_state_dict: expected a scalar \"{}\", got {}", name,
          at == state.end()      ? "none"
          : at->second.defined() ? to_string(at->second.shape())
                                 : "an undefined tensor");
    return at->second.item();
  };
  const double scale = value("scale");
  const double tracker = value("growth_tracker");
  check(scale > 0 && std::isfinite(scale), "GradScaler: load_state_dict: expected \"scale\" > 0, got {}", scale);
  check(tracker >= 0 && tracker == std::trunc(tracker),
        "GradScaler: load_state_dict: expected \"growth_tracker\" to be a whole number, got {}", tracker);
  for (const auto& [name, tensor] : state) {
    check(name == "scale" || name == "growth_tracker", "GradScaler: load_state_dict: \"{}\" is unexpected", name);
  }
  state_ = from_data<double>({scale, tracker, 0.0}, {3}, state_.device());
}

}  // namespace mica::optim
