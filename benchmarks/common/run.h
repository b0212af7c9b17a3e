#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "benchmarks/common/report.h"
#include <mica/core/device.h>
#include <mica/core/dtype.h>

namespace benchmarks {

/// An op's (M, N).
struct Case {
  mica::DType dtype;
  std::int64_t m;
  std::int64_t n;

  friend bool operator==(const Case&, const Case&) = default;
};

using DefaultCases = std::function<std::vector<Case>(mica::Device)>;
using Measure = std::function<void(const std::vector<Case>&, mica::Device, int repeats, Report&)>;

/// A benchmark of an op by shapes, as a program: parses --device, --dtype, --shapes, --threads, --repeats and --json,
/// and calls `measure` with what they choose. Returns the program's status.
int run(int argc, char** argv, const char* name, const char* description, const DefaultCases& default_cases,
        const Measure& measure);

}  // namespace benchmarks
