#include "benchmarks/common/run.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>

#include "examples/common/command_line.h"
#include <mica/core/copy.h>
#include <mica/core/parallel.h>

using namespace mica;

namespace benchmarks {

namespace {

DType dtype_named(std::string_view name) {
  for (const DType dtype : {float32, float64, float16, bfloat16}) {
    if (name == name_of(dtype)) {
      return dtype;
    }
  }
  throw UsageError(fmt::format("--dtype: expected float32, float64, float16 or bfloat16, got {}", name));
}

// "4096x1024,768x128"
std::vector<Case> parse_shapes(std::string_view text) {
  std::vector<Case> cases;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto size = [&](std::int64_t& value, char after) {
    const auto [next, error] = std::from_chars(at, end, value);
    const bool good = error == std::errc{} && value >= 1 && value <= INT32_MAX && (next == end || *next == after);
    if (!good || (next == end && after == 'x')) {
      throw UsageError(fmt::format("--shapes: expected MxN,MxN,… of sizes from 1, got \"{}\"", text));
    }
    at = next + (next != end);
  };
  do {
    Case c{float32, 0, 0};
    size(c.m, 'x');
    size(c.n, ',');
    cases.push_back(c);
  } while (at != end || text.back() == ',');
  return cases;
}

// Converts the cases to one dtype and removes duplicates.
std::vector<Case> in_dtype(const std::vector<Case>& cases, DType dtype) {
  std::vector<Case> result;
  for (const Case& c : cases) {
    const Case converted{dtype, c.m, c.n};
    if (std::find(result.begin(), result.end(), converted) == result.end()) {
      result.push_back(converted);
    }
  }
  return result;
}

}  // namespace

KernelTimes::KernelTimes(Report& report, const Case& c, int repeats, const Tensor& to, const Tensor& from)
    : report_(report),
      case_(c),
      repeats_(repeats),
      device_(from.device()),
      bytes_(static_cast<double>(from.bytes())),
      copy_us_(median_us(device_, repeats, [&] { copy_into(to, from); })) {}

void KernelTimes::add(const std::string& op, int tensors, const Work& work) {
  report_.add({.op = op,
               .device = device_,
               .dtype = case_.dtype,
               .m = case_.m,
               .n = case_.n,
               .us = median_us(device_, repeats_, work),
               .bytes = tensors * bytes_,
               .copy_us = copy_us_});
}

int run(int argc, char** argv, const char* name, const char* description, const DefaultCases& default_cases,
        const Measure& measure) {
  CommandLine command_line(description, name);
  std::string device_name = "auto", dtype_name, shapes, json;
  int threads = 0, repeats = 50;
  command_line.add_option("--device", device_name, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--dtype", dtype_name,
                          "float32, float64, float16 or bfloat16; without it, what the shapes come with");
  command_line.add_option("--shapes", shapes, "MxN,MxN,… (default: a list for the device)");
  command_line.add_option("--threads", threads, "CPU threads; 0 uses every core").between(0, 1024);
  command_line.add_option("--repeats", repeats, "Number of runs per median").at_least(1).show_default();
  command_line.add_option("--json", json, "File for the results as lines of JSON");

  return command_line.run(argc, argv, [&] {
    if (threads > 0) {
      set_num_threads(threads);
    }
    const Device device = device_named(device_name);
    std::vector<Case> cases = command_line.given("--shapes") ? parse_shapes(shapes) : default_cases(device);
    if (command_line.given("--dtype")) {
      cases = in_dtype(cases, dtype_named(dtype_name));
    }
    Report report(json);
    measure(cases, device, repeats, report);
  });
}

}  // namespace benchmarks
