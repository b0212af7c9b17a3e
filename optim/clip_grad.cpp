#include <cmath>
#include <deque>
#include <set>
#include <unordered_set>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/detail/grad_norm.h>
#include <mica/optim/detail/grad_norm_kernels.h>
#include <mica/optim/detail/writers.h>

namespace mica::optim {

namespace {

// The gradients of one device to measure and to scale.
struct Clipped {
  DeviceGradients counted;
  kernels::MultiTensorList scaled{};
  Tensors keep{};                                   // row-major copies, kept until the work is queued
  std::vector<std::pair<Tensor, Tensor>> copies{};  // … and their destinations
};

}  // namespace

Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, bool error_if_nonfinite) {
  check(max_norm >= 0, "clip_grad_norm_: expected max_norm >= 0, got {}", max_norm);
  std::deque<Clipped> works;
  std::unordered_set<const void*> seen;
  std::set<std::pair<const Storage*, std::int64_t>> scaled;  // by the gradient's start
  Tensors grads;
  for (const Tensor& parameter : parameters) {
    check(parameter.defined(), "clip_grad_norm_: expected defined parameters, got an undefined one");
    const Tensor grad = parameter.grad();
    if (!grad.defined() || !seen.insert(parameter.handle().get()).second) {
      continue;
    }
    auto at = works.begin();
    while (at != works.end() && at->counted.device != grad.device()) {
      ++at;
    }
    if (at == works.end()) {
      at = works.insert(at, Clipped{.counted = {.device = grad.device()}});
    }
    const Tensor row_major = at->keep.emplace_back(contiguous_data(grad));
    const kernels::MultiTensorEntry entry{
        .param = row_major.raw_data(), .grad = row_major.raw_data(), .numel = grad.numel()};
    at->counted.list.add({.dtype = grad.dtype()}, entry);
    if (scaled.emplace(grad.handle()->storage.get(), grad.handle()->offset).second) {
      at->scaled.add({.dtype = grad.dtype()}, entry);
      grads.push_back(grad);
      if (!row_major.is_same(grad)) {
        at->copies.emplace_back(grad, row_major);
      }
    }
  }
  if (works.empty()) {
    return zeros({}, float64);
  }
  std::vector<DeviceGradients*> counted;
  for (Clipped& work : works) {
    work.counted.list.finish(work.counted.device);
    work.scaled.finish(work.counted.device);
    counted.push_back(&work.counted);
  }
  start_norm(counted, max_norm);
  for (const DeviceGradients* work : counted) {
    on_device(work->device, [&](auto d) { kernels::grad_norm(d, work->norm); });
  }
  const Tensor norm = works.front().counted.norm.norm;
  if (error_if_nonfinite) {
    const double value = norm.item();
    check(std::isfinite(value), "clip_grad_norm_: the norm of the gradients is {}", value);
  }
  for (const Clipped& work : works) {
    on_device(work.counted.device,
              [&](auto d) { kernels::scale_gradients(d, work.scaled, work.counted.norm.control); });
    for (const auto& [to, from] : work.copies) {
      copy_into(to, from);
    }
  }
  for (const Tensor& grad : grads) {
    grad.bump_version(std::isinf(max_norm) ? "clip_grad_norm_ without a limit" : kClipped);
  }
  return norm;
}

}  // namespace mica::optim
