#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/timer.h"
#include <mica/core/tensor.h>

namespace benchmarks {

/// An op's (M, N).
struct Case {
  mica::DType dtype;
  std::int64_t m;
  std::int64_t n;

  friend bool operator==(const Case&, const Case&) = default;
};

/// Times kernels on a case, relative to a tensor copy.
class KernelTimes {
 public:
  /// Times the copy.
  KernelTimes(Report& report, const Case& c, int repeats, const mica::Tensor& to, const mica::Tensor& from);

  /// Times `work` and adds it to the report. Its minimum memory traffic is that of `tensors` tensors of this size.
  void add(const std::string& op, int tensors, const Work& work);

 private:
  Report& report_;
  Case case_;
  int repeats_;
  mica::Device device_;
  double bytes_;
  double copy_us_;
};

using DefaultCases = std::function<std::vector<Case>(mica::Device)>;
using Measure = std::function<void(const std::vector<Case>&, mica::Device, int repeats, Report&)>;

/// The main function of a benchmark of an op by shapes: parses --device, --dtype, --shapes, --threads, --repeats and
/// --json, and calls `measure` for each selected case. Returns the program's status.
int run(int argc, char** argv, const char* name, const char* description, const DefaultCases& default_cases,
        const Measure& measure);

}  // namespace benchmarks
