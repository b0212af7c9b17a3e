// The collectives of distributed::Group between GPUs: time and bus bandwidth by size, a linear fit of latency and
// bandwidth, and how much collectives and matrix products slow each other down. Start it as several ranks.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/distributed/group.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace {

struct Options {
  double least_kib = 4, most_mib = 512;
  double milliseconds = 20;  // approximate duration of a measurement
  std::string device = "auto", json;
};

struct Point {
  double bytes;
  double us;
};

// Fits us = latency + bytes / bandwidth by least squares of the relative errors.
std::array<double, 2> line_through(const std::vector<Point>& points) {
  double s = 0, sx = 0, sxx = 0, sy = 0, sxy = 0;
  for (const Point& p : points) {
    const double weight = 1 / (p.us * p.us);
    s += weight;
    sx += weight * p.bytes;
    sxx += weight * p.bytes * p.bytes;
    sy += weight * p.us;
    sxy += weight * p.bytes * p.us;
  }
  const double slope = (s * sxy - sx * sy) / (s * sxx - sx * sx);
  return {(sy - slope * sx) / s, slope};
}

class Benchmark {
 public:
  explicit Benchmark(const Options& options)
      : options_(options),
        group_(distributed::world()),
        device_(device_named(options.device)),
        timeline_(on_device(device_, [](auto on) { return benchmarks::timeline(on); })) {
    if (!options.json.empty() && group_.rank() == 0) {
      json_.open(options.json);
      check(json_.good(), "cannot write {}", options.json);
    }
  }

  void run() {
    const DeviceGuard guard(device_);
    write(fmt::format("{:15} {:>12} {:>10} {:>10}\n", "op", "bytes", "us", "bus GB/s"), "");
    const auto most = static_cast<std::int64_t>(options_.most_mib * (1 << 20));
    const Tensor whole = zeros({most / 2}, bfloat16, device_);
    const std::int64_t ranks = group_.size();
    const auto slice_of = [&](std::int64_t n, std::int64_t first = 0) { return as_strided(whole, {n}, {1}, first); };
    const auto n = static_cast<double>(ranks);
    sweep("all_reduce", 2 * (n - 1) / n,
          [&](std::int64_t count) { return group_.start_all_reduce(slice_of(count), distributed::Reduction::mean); });
    const Tensor part = zeros({most / 2 / ranks}, bfloat16, device_);
    const auto part_of = [&](std::int64_t count) { return as_strided(part, {count / ranks}, {1}, 0); };
    sweep("reduce_scatter", (n - 1) / n, [&](std::int64_t count) {
      return group_.start_reduce_scatter(slice_of(count), part_of(count), distributed::Reduction::mean);
    });
    sweep("all_gather", (n - 1) / n, [&](std::int64_t count) {
      return group_.start_all_gather(slice_of(count / ranks, group_.rank() * (count / ranks)), slice_of(count));
    });
    for (const double mib : {5.0, 25.0, 100.0}) {
      if (mib <= options_.most_mib) {
        overlap(mib, [&](std::int64_t count) {
          return group_.start_all_reduce(slice_of(count), distributed::Reduction::mean);
        });
      }
    }
  }

 private:
  using Start = std::function<distributed::Work(std::int64_t count)>;

  // Time per call of f in microseconds over `calls` calls; the mean over the ranks, so that all use the same number.
  double time_us(int calls, const std::function<void()>& f) {
    f();
    group_.barrier();
    timeline_->mark();
    for (int i = 0; i < calls; ++i) {
      f();
    }
    timeline_->mark();
    return agreed(timeline_->take_ms()[1] * 1e3 / calls);
  }

  double agreed(double value) const {
    const Tensor x = full({}, value, float64, device_);
    group_.all_reduce(x, distributed::Reduction::mean);
    return x.item();
  }

  int calls_for(double us) const {
    return static_cast<int>(std::clamp(options_.milliseconds * 1e3 / std::max(us, 1.0), 3.0, 500.0));
  }

  void sweep(const char* op, double moved, const Start& start) {
    std::vector<Point> points;
    for (double kib = options_.least_kib; kib <= options_.most_mib * 1024; kib *= 2) {
      const auto bytes = static_cast<std::int64_t>(kib * 1024);
      const auto call = [&] { start(bytes / 2).wait(); };
      const double us = time_us(calls_for(time_us(3, call)), call);
      points.push_back({static_cast<double>(bytes), us});
      const double rate = moved * static_cast<double>(bytes) / us / 1e3;
      write(fmt::format("{:15} {:12} {:10.2f} {:10.1f}\n", op, bytes, us, rate),
            fmt::format(R"({{"op": "{}", "ranks": {}, "bytes": {}, "us": {:.3f}, "bus_gb_per_s": {:.2f}}})", op,
                        group_.size(), bytes, us, rate));
    }
    if (points.size() > 2) {
      const auto [latency, slope] = line_through(points);
      write(fmt::format("{:15} latency {:.2f} us, bus bandwidth {:.1f} GB/s\n", op, latency, moved / slope / 1e3),
            fmt::format(R"({{"line": "{}", "ranks": {}, "latency_us": {:.3f}, "bus_gb_per_s": {:.2f}}})", op,
                        group_.size(), latency, moved / slope / 1e3));
    }
  }

  // Matrix products of GPT-2's size while reductions run, and vice versa.
  void overlap(double mib, const Start& start) {
    const auto count = static_cast<std::int64_t>(mib * (1 << 20)) / 2;
    const Tensor x = randn({16384, 768}, bfloat16, device_), w = randn({3072, 768}, bfloat16, device_);
    constexpr int kProducts = 60;
    const auto products = [&](int times) {
      for (int i = 0; i < times; ++i) {
        (void)matmul(x, transpose(w, 0, 1));
      }
    };
    const double alone_us = time_us(3, [&] { products(kProducts); });
    const double reduction_us = time_us(20, [&] { start(count).wait(); });
    // Reductions that take half as long as the products.
    const int short_calls = std::max(1, static_cast<int>(alone_us / 2 / reduction_us));
    const auto both = [&](int reductions, int times) {
      std::vector<distributed::Work> works;
      for (int i = 0; i < reductions; ++i) {
        works.push_back(start(count));
      }
      products(times);
      return works;
    };
    const auto wait_all = [](const std::vector<distributed::Work>& works) {
      for (const distributed::Work& work : works) {
        work.wait();
      }
    };
    std::vector<double> compute, communicate;
    for (int repeat = 0; repeat < 5; ++repeat) {
      group_.barrier();
      timeline_->mark();
      auto works = both(short_calls, kProducts);
      timeline_->mark();
      wait_all(works);
      compute.push_back(timeline_->take_ms()[1] * 1e3);
      // Three times as many, so that they take longer than the products.
      group_.barrier();
      timeline_->mark();
      works = both(6 * short_calls, kProducts);
      wait_all(works);
      timeline_->mark();
      communicate.push_back(timeline_->take_ms()[1] * 1e3);
    }
    const double with_us = agreed(benchmarks::median(compute)), all_us = agreed(benchmarks::median(communicate));
    const double busy = short_calls * reduction_us;
    const double slowdown = (with_us - alone_us) / busy;
    // The reductions that ran concurrently with the products took longer than alone.
    const double stretch = (all_us - 6 * busy) / std::min(alone_us, all_us);
    write(
        fmt::format("{:g} MiB concurrently with matrix products: they take {:.1f} us instead of {:.1f} while {:.1f} us "
                    "of reductions run: "
                    "{:.3f} us more for each; {:.1f} us of reductions take {:.1f}: {:.3f} more for each of products\n",
                    mib, with_us, alone_us, busy, slowdown, 6 * busy, all_us, stretch),
        fmt::format(R"({{"overlap_mib": {:g}, "ranks": {}, "products_us": {:.2f}, "products_with_us": {:.2f}, )"
                    R"("reductions_us": {:.2f}, "slowdown": {:.4f}, "many_us": {:.2f}, "many_with_us": {:.2f}, )"
                    R"("stretch": {:.4f}}})",
                    mib, group_.size(), alone_us, with_us, busy, slowdown, 6 * busy, all_us, stretch));
  }

  void write(const std::string& text, const std::string& line) {
    if (group_.rank() != 0) {
      return;
    }
    put(text);
    if (json_.is_open() && !line.empty()) {
      json_ << line << "\n" << std::flush;
      check(json_.good(), "cannot write {}", options_.json);
    }
  }

  Options options_;
  distributed::Group group_;
  Device device_;
  std::unique_ptr<benchmarks::Timeline> timeline_;
  std::ofstream json_;
};

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times collectives of bfloat16 between ranks.", "bench_collectives");
  Options o;
  command_line.add_option("--device", o.device).one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--from-kib", o.least_kib, "The smallest size of the whole tensor")
      .at_least(1)
      .show_default();
  command_line.add_option("--to-mib", o.most_mib, "The largest size").positive().show_default();
  command_line.add_option("--ms", o.milliseconds, "Approximate time of a measurement, in milliseconds")
      .positive()
      .show_default();
  command_line.add_option("--json", o.json, "File for the results as lines of JSON");
  return command_line.run(argc, argv, [&] {
    check(distributed::world().size() > 1, "expected several ranks: start it with mpirun, srun or torchrun");
    Benchmark(o).run();
  });
}
