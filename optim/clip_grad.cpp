#include <cmath>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/clip_grad_kernels.h>

namespace mica::optim {

namespace {

// The sums of squares of all tensors on `device`, which the host waits for once.
std::vector<double> sums_of_squares(const Tensors& tensors, Device device) {
  const Tensor sums = empty({static_cast<std::int64_t>(tensors.size())}, float64, device);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor sum = as_strided(sums, {}, {}, static_cast<std::int64_t>(i));
    on_device(device, [&](auto d) { kernels::sum_of_squares(d, contiguous_data(tensors[i]), sum); });
  }
  return to_vector<double>(sums);
}

}  // namespace

double clip_grad_norm_(const Tensors& parameters, double max_norm, bool error_if_nonfinite) {
  check(max_norm >= 0, "clip_grad_norm_: expected max_norm >= 0, got {}", max_norm);
  std::vector<std::pair<Device, Tensors>> by_device;
  for (const Tensor& parameter : parameters) {
    const Tensor grad = parameter.grad();
    if (!grad.defined()) {
      continue;
    }
    auto at = by_device.begin();
    while (at != by_device.end() && at->first != grad.device()) {
      ++at;
    }
    if (at == by_device.end()) {
      at = by_device.insert(at, {grad.device(), {}});
    }
    at->second.push_back(grad);
  }

  double total = 0;
  for (const auto& [device, grads] : by_device) {
    for (const double sum : sums_of_squares(grads, device)) {
      total += sum;
    }
  }
  const double norm = std::sqrt(total);
  check(!error_if_nonfinite || std::isfinite(norm), "clip_grad_norm_: the norm of the gradients is {}", norm);

  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) {
    return norm;
  }
  for (const auto& [device, grads] : by_device) {
    for (const Tensor& grad : grads) {
      const Tensor row_major = contiguous_data(grad);
      on_device(grad.device(), [&](auto d) { kernels::scale(d, row_major, factor); });
      if (!row_major.is_same(grad)) {
        copy_into(grad, row_major);
      }
      grad.bump_version("clip_grad_norm_");
    }
  }
  return norm;
}

}  // namespace mica::optim
