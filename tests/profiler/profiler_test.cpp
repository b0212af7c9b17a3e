#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support.h"
#include <mica/nn/containers.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/profiler/profiler.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

struct Mlp : nn::Module {
  nn::Linear first = child("first", nn::Linear{8, 16});
  nn::Linear second = child("second", nn::Linear{16, 4});
  Tensor operator()(const Tensor& x) const {
    const nn::Scope scope(*this);
    return second(tanh(first(x)));
  }
};

struct Stack : nn::Module {
  nn::ModuleList<Mlp> h = child("h", nn::ModuleList<Mlp>{});
  explicit Stack(int count) {
    for (int i = 0; i < count; ++i) {
      h.push_back(Mlp{});
    }
  }
  Tensor operator()(const Tensor& x) const {
    const nn::Scope scope(*this);
    Tensor sum = zeros({1});
    for (const Mlp& block : h) {
      sum = sum + block(x);
    }
    return sum;
  }
};

// The rows of one op and phase, all modules together.
ProfiledOp total(const Profiler& profiler, const std::string& op, const std::string& phase) {
  ProfiledOp sum;
  for (const ProfiledOp& row : profiler.ops()) {
    if (row.op == op && row.phase == phase) {
      sum.calls += row.calls;
      sum.launches += row.launches;
      sum.host_ms += row.host_ms;
      sum.device_ms += row.device_ms;
      sum.bytes_kept += row.bytes_kept;
    }
  }
  return sum;
}

TEST(Profiler, TableHasOneRowForTheSameModuleOfAllLayers) {
  Stack stack(12);
  Profiler profiler;
  sum(stack(randn({2, 8}))).backward();
  profiler.stop();
  const std::string table = profiler.table(100);
  for (const char* path : {"\nh.*.first ", "\nh.*.second ", "\nh.*.first backward "}) {
    EXPECT_NE(table.find(path), std::string::npos) << path << "\n" << table;
  }
  EXPECT_EQ(table.find("h.1"), std::string::npos) << table;
}

TEST(Profiler, CountsOpsForwardAndBackward) {
  for (const Device device : test_devices()) {
    Mlp mlp;
    mlp.to(device);
    const Tensor x = randn({32, 8}, float32, device);
    Profiler profiler({.device = device.is_cuda()});
    for (int step = 0; step < 3; ++step) {
      {
        const ProfileRange range("forward pass");
        mlp.zero_grad();
      }
      sum(mlp(x)).backward();
      profiler.step();
    }
    profiler.stop();
    EXPECT_EQ(profiler.steps(), 3);
    EXPECT_EQ(total(profiler, "Tanh", "forward").calls, 3);
    EXPECT_EQ(total(profiler, "Tanh", "backward").calls, 3);
    EXPECT_EQ(total(profiler, "forward pass", "").calls, 3);
    EXPECT_GT(total(profiler, "Tanh", "forward").host_ms, 0);
    EXPECT_GE(total(profiler, "Tanh", "forward").bytes_kept, 3 * 32 * 16 * 4);
    EXPECT_TRUE(std::any_of(profiler.ops().begin(), profiler.ops().end(), [](const ProfiledOp& row) {
      return row.module == "first" && row.phase == "backward" && row.calls == 3;
    }));
    double host = 0;
    for (const ProfiledOp& row : profiler.ops()) {
      host += row.host_ms;
    }
    EXPECT_LE(host, profiler.wall_ms());
    if (device.is_cuda()) {
      EXPECT_EQ(total(profiler, "Tanh", "forward").launches, 3);
      EXPECT_GT(total(profiler, "Tanh", "forward").device_ms, 0);
      EXPECT_GT(profiler.device_busy_ms(), 0);
      EXPECT_LE(profiler.device_busy_ms(), profiler.wall_ms());
      EXPECT_FALSE(profiler.device_source().empty());
    }
    const std::string table = profiler.table();
    EXPECT_NE(table.find("Tanh backward"), std::string::npos) << table;
    EXPECT_NE(table.find("first"), std::string::npos) << table;
  }
}

TEST(Profiler, WritesATrace) {
  const Tensor x = ones({4});
  Profiler profiler;
  const Tensor y = add(x, x);
  profiler.step();
  profiler.stop();
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "mica_profiler_test.json";
  profiler.write_trace(path);
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  int adds = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") == "Add") {
      ++adds;
      EXPECT_EQ(event.at("cat"), "forward");
      EXPECT_GE(event.at("ts").get<double>(), 0);
      EXPECT_GT(event.at("dur").get<double>(), 0);
    }
  }
  EXPECT_EQ(adds, 1);
  expect_error([&] { profiler.write_trace("/no/such/folder/trace.json"); }, "cannot write to");
}

TEST(Profiler, StopsAndNests) {
  const Tensor x = ones({4});
  Profiler outer;
  { const Profiler unused(ProfilerOptions{.device = false}); }
  add(x, x);
  outer.stop();
  add(x, x);
  EXPECT_EQ(total(outer, "Add", "forward").calls, 1);
  expect_error([] { Profiler().table(); }, "call stop before table");
  Profiler inside;
  {
    const ProfileRange range("a range");
    expect_error([&] { inside.stop(); }, "inside an op");
  }
  inside.stop();
  EXPECT_EQ(total(inside, "a range", "").calls, 1);
}

TEST(Profiler, StopsInReverseOrderOnItsOwnThread) {
  const Tensor x = ones({4});
  auto outer = std::make_unique<Profiler>(ProfilerOptions{.device = false});
  auto inner = std::make_unique<Profiler>(ProfilerOptions{.device = false});
  expect_error([&] { outer->stop(); }, "before a profiler that was started later was stopped");
  add(x, x);
  std::thread([&] { expect_error([&] { inner->stop(); }, "profiler: stop was called on another thread"); }).join();
  add(x, x);
  inner->stop();
  add(x, x);
  outer->stop();
  EXPECT_EQ(total(*inner, "Add", "forward").calls, 2);
  EXPECT_EQ(total(*outer, "Add", "forward").calls, 1);
  // Stopped profilers only hold results.
  outer.reset();
  std::thread([&] { inner.reset(); }).join();
  add(x, x);
}

TEST(Profiler, EndsTheProgramIfARangeOutlivesIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto profiler = std::make_unique<Profiler>();
        const ProfileRange range("a range");
        profiler.reset();
      },
      testing::KilledBySignal(SIGABRT), "Profiler: expected guards to end in the reverse order");
}

TEST(Profiler, NeedsNamesAndAStop) {
  expect_error([] { const ProfileRange range(nullptr); }, "ProfileRange: expected a name, got a null pointer");
  const Profiler profiler;
  expect_error([] { const ProfileRange range(nullptr); }, "ProfileRange: expected a name, got a null pointer");
  expect_error([&] { profiler.ops(); }, "profiler: call stop before ops");
  expect_error([&] { profiler.kernels(); }, "profiler: call stop before kernels");
  expect_error([&] { profiler.wall_ms(); }, "profiler: call stop before wall_ms");
  expect_error([&] { profiler.device_busy_ms(); }, "profiler: call stop before device_busy_ms");
}

TEST(Profiler, TableIsPerStep) {
  const Tensor x = ones({4});
  const auto before = std::chrono::steady_clock::now();
  Profiler profiler(ProfilerOptions{.device = false});
  for (int step = 0; step < 4; ++step) {
    for (int call = 0; call < 3; ++call) {
      add(x, x);
    }
    profiler.step();
  }
  profiler.stop();
  const std::chrono::duration<double, std::milli> around = std::chrono::steady_clock::now() - before;
  EXPECT_GT(profiler.wall_ms(), 0);
  EXPECT_LT(profiler.wall_ms(), 2 * around.count() + 1000);  // by another clock
  const std::string table = profiler.table();
  EXPECT_TRUE(table.starts_with(fmt::format("4 steps, {:.3f} ms each\n\nop ", profiler.wall_ms() / 4))) << table;
  const std::size_t row = table.find("\nAdd ");
  ASSERT_NE(row, std::string::npos) << table;
  EXPECT_NE(table.substr(row, 60).find(" 3.0 "), std::string::npos) << table;  // calls of one step
  EXPECT_EQ(profiler.table(0).find("\nAdd "), std::string::npos);
  EXPECT_EQ(ProfiledOp{}.bytes_kept, 0);
}

TEST(Profiler, TableAddsUpModules) {
  const Mlp mlp;
  const Tensor x = randn({4096, 8});
  Profiler profiler(ProfilerOptions{.device = false});
  const Tensor y = mlp(x);
  profiler.stop();
  const std::vector<ProfiledOp>& ops = profiler.ops();
  ASSERT_EQ(std::count_if(ops.begin(), ops.end(), [](const ProfiledOp& row) { return row.op == "Linear"; }), 2);
  const ProfiledOp both = total(profiler, "Linear", "forward");
  EXPECT_EQ(both.bytes_kept, 4096 * (16 + 4) * 4);
  const std::string table = profiler.table();
  const std::size_t row = table.find("\nLinear ") + 1;
  ASSERT_NE(row, 0u) << table;
  const std::string line = table.substr(row, table.find('\n', row) - row);
  EXPECT_TRUE(line.ends_with(fmt::format(" {:.2f}", 4096 * (16 + 4) * 4 / 0x1p20))) << line;
  EXPECT_NE(line.find(fmt::format(" {:.3f} ", both.host_ms)), std::string::npos) << line;
}

TEST(Profiler, TableShowsThirtyRowsOfEach) {
  std::vector<std::string> names;
  for (int i = 0; i < 32; ++i) {
    names.push_back(fmt::format("range {}", i));
  }
  Profiler profiler(ProfilerOptions{.device = false});
  for (const std::string& name : names) {
    const ProfileRange range(name.c_str());
  }
  profiler.stop();
  const auto lines = [](const std::string& table) { return std::count(table.begin(), table.end(), '\n'); };
  EXPECT_EQ(profiler.table(), profiler.table(30));
  EXPECT_EQ(lines(profiler.table(31)), lines(profiler.table()) + 1);
  EXPECT_EQ(lines(profiler.table(29)), lines(profiler.table()) - 1);
}

}  // namespace
