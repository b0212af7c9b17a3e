// The speed of cross entropy's kernels, compared with a copy of the logits, and of linear_cross_entropy, compared with
// a separate linear layer and loss.

#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/run.h"
#include "benchmarks/common/timer.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_steps.h>
#include <mica/ops/cross_entropy/linear_cross_entropy.h>
#include <mica/ops/matmul/matmul.h>

using namespace mica;
using benchmarks::Case;

namespace {

constexpr std::int64_t kInner = 768;  // of the linear layer

std::vector<Case> default_cases(Device device) {
  if (device.is_cpu()) {
    return {{float32, 128, 1024}, {float32, 64, 50'304}, {bfloat16, 64, 50'304}};
  }
  return {{bfloat16, 8192, 50'304}, {bfloat16, 8192, 50'257}, {bfloat16, 4096, 128'256}, {bfloat16, 16'384, 32'000},
          {bfloat16, 65'536, 1000}, {float16, 8192, 50'304},  {float32, 4096, 50'304}};
}

struct Rows {
  Tensor logits;
  Tensor labels;
  Tensor unweighted{};
  Tensor losses;
  Tensor logsumexp;
  Tensor mass;
  Tensor denominator;
  Tensor loss;

  Rows(const Case& c, Device device)
      : logits(randn({c.m, c.n}, c.dtype, device)),
        labels(randint(0, c.n, {c.m}, int64, device)),
        losses(empty({c.m}, accumulate_dtype(c.dtype), device)),
        logsumexp(empty_like(losses)),
        mass(empty_like(losses)),
        denominator(empty({1}, losses.dtype(), device)),
        loss(ones({1}, losses.dtype(), device)) {}

  kernels::CrossEntropyTerms terms(double softcap) const {
    return detail::terms_of({.softcap = softcap}, logits, labels, unweighted);
  }

  // The steps of the ops, in order.
  void forward(auto device, double softcap) const {
    kernels::cross_entropy_forward(device,
                                   {.terms = terms(softcap), .logsumexp = logsumexp, .mass = mass, .losses = losses});
    count(device);
    kernels::cross_entropy_reduce(device, {.losses = losses, .denominator = denominator, .loss = loss});
  }
  void backward(auto device, double softcap, const Tensor& dloss, const Tensor& dlogits) const {
    kernels::cross_entropy_backward(device, {.terms = terms(softcap),
                                             .logsumexp = logsumexp,
                                             .mass = mass,
                                             .dloss = dloss,
                                             .denominator = denominator,
                                             .dlogits = dlogits});
  }
  void in_place(auto device, double softcap, const Tensor& dloss) const {
    count(device);
    kernels::cross_entropy_in_place(
        device, {.terms = terms(softcap), .dloss = unweighted, .denominator = denominator, .losses = losses});
    kernels::cross_entropy_reduce(device, {.losses = losses, .denominator = denominator, .loss = loss});
    kernels::cross_entropy_scale(device, {.gradient = logits, .factor = dloss});
  }
  void count(auto device) const {
    kernels::cross_entropy_denominator(
        device, {.targets = labels, .weight = unweighted, .ignore_index = -100, .denominator = denominator});
  }
};

void measure(const Case& c, Device device, int repeats, benchmarks::Report& report) {
  const Rows rows(c, device);
  const Tensor dlogits = empty_like(rows.logits);
  const Tensor dloss = ones({1}, rows.loss.dtype(), device);
  const double copy_us = benchmarks::median_us(device, repeats, [&] { copy_into(dlogits, rows.logits); });
  const auto add = [&](const std::string& op, int passes, const auto& work) {
    report.add({.op = op,
                .device = device,
                .dtype = c.dtype,
                .m = c.m,
                .n = c.n,
                .us = benchmarks::median_us(device, repeats, [&] { on_device(device, work); }),
                .bytes = static_cast<double>(passes) * rows.logits.bytes(),
                .copy_us = copy_us});
  };
  for (const double softcap : {0.0, 30.0}) {
    const std::string what = softcap == 0 ? "cross_entropy" : "cross_entropy_capped";
    add(what + "_forward", 1, [&](auto tag) { rows.forward(tag, softcap); });
    add(what + "_both", 3, [&](auto tag) {
      rows.forward(tag, softcap);
      rows.backward(tag, softcap, dloss, dlogits);
    });
    // Each run reads the results of the previous one; the time does not depend on the values.
    add(what + "_in_place", 2, [&](auto tag) { rows.in_place(tag, softcap, dloss); });
  }
}

void measure_linear(const Case& c, Device device, int repeats, benchmarks::Report& report) {
  const Tensor x = randn({c.m, kInner}, c.dtype, device).requires_grad_();
  const Tensor weight = randn({c.n, kInner}, c.dtype, device).requires_grad_();
  const Tensor labels = randint(0, c.n, {c.m}, int64, device);
  const auto add = [&](const char* op, const auto& loss) {
    const auto work = [&] {
      loss().backward();
      x.set_grad({});
      weight.set_grad({});
    };
    report.add({.op = op,
                .device = device,
                .dtype = c.dtype,
                .m = c.m,
                .n = c.n,
                .us = benchmarks::median_us(device, repeats, work)});
  };
  add("linear_then_cross_entropy", [&] { return cross_entropy(linear(x, weight), labels); });
  add("linear_then_cross_entropy_in_place",
      [&] { return cross_entropy(linear(x, weight), labels, {.in_place = true}); });
  add("linear_cross_entropy", [&] { return linear_cross_entropy(x, weight, labels); });
}

}  // namespace

int main(int argc, char** argv) {
  return benchmarks::run(argc, argv, "bench_cross_entropy",
                         "Times cross entropy's kernels, compared with a copy of the logits, and linear_cross_entropy, "
                         "compared with two ops.",
                         default_cases,
                         [](const std::vector<Case>& cases, Device device, int repeats, benchmarks::Report& report) {
                           for (const Case& c : cases) {
                             measure(c, device, repeats, report);
                           }
                           measure_linear(device.is_cpu() ? Case{float32, 64, 5000} : Case{bfloat16, 32'768, 50'304},
                                          device, repeats, report);
                         });
}
