#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <mica/core/device.h>
#include <mica/core/dtype.h>

namespace benchmarks {

/// A timed case: an op on (M, N).
struct Measured {
  std::string op;
  mica::Device device;
  mica::DType dtype;
  std::int64_t m;
  std::int64_t n;
  double us;
  double bytes = 0;    // minimum memory traffic; 0: no rates are reported
  double copy_us = 0;  // time of a copy of the same tensor, which moves 2·M·N elements
};

/// Writes results as a table to stdout and, if a path is given, as lines of JSON to that file.
class Report {
 public:
  /// Throws if the file cannot be written.
  explicit Report(const std::string& json_path);

  void add(const Measured& row);

 private:
  void check_file() const;

  std::string json_path_;
  std::ofstream json_;
};

}  // namespace benchmarks
