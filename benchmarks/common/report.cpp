#include "benchmarks/common/report.h"

#include <fmt/core.h>

#include "examples/common/program.h"

namespace benchmarks {

Report::Report(const std::string& json_path) : json_path_(json_path) {
  if (!json_path_.empty()) {
    json_.open(json_path_);
    check_file();
  }
  put(fmt::format("{:30} {:5} {:9} {:>7} {:>7} {:>11} {:>8} {:>9} {:>6}\n", "op", "on", "dtype", "M", "N", "us", "GB/s",
                  "copy GB/s", "ratio"));
}

void Report::add(const Measured& row) {
  const char* const device = row.device.is_cuda() ? "cuda" : "cpu";
  std::string line =
      fmt::format("{:30} {:5} {:9} {:7} {:7} {:11.2f}", row.op, device, mica::name_of(row.dtype), row.m, row.n, row.us);
  std::string json = fmt::format(R"({{"op": "{}", "device": "{}", "dtype": "{}", "M": {}, "N": {}, "us": {:.3f})",
                                 row.op, device, row.dtype, row.m, row.n, row.us);
  if (row.bytes > 0) {
    const double rate = row.bytes / row.us / 1e3;
    const double copy_rate = 2.0 * row.m * row.n * mica::size_of(row.dtype) / row.copy_us / 1e3;
    line += fmt::format(" {:8.1f} {:9.1f} {:6.3f}", rate, copy_rate, rate / copy_rate);
    json += fmt::format(R"(, "gb_per_s": {:.2f}, "copy_gb_per_s": {:.2f}, "ratio": {:.4f})", rate, copy_rate,
                        rate / copy_rate);
  }
  put(line + "\n");
  if (!json_path_.empty()) {
    json_ << json << "}\n" << std::flush;
    check_file();
  }
}

void Report::check_file() const { mica::check(json_.good(), "cannot write {}", json_path_); }

}  // namespace benchmarks
