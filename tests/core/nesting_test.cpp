#include <tests/support.h>

#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include <mica/autograd/anomaly.h>
#include <mica/autograd/autocast.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/nn/dropout.h>
#include <mica/nn/evaluation.h>
#include <mica/nn/init.h>
#include <mica/profiler/profiler.h>

using namespace mica;

namespace {

// `make` returns a new guard. The program must end if the outer of two ends first, or one on another thread.
template <class Make>
void expect_order(const Make& make, const std::string& name) {
  const std::string message =
      name + ": expected guards to end in the reverse order of their construction, on the thread";
  EXPECT_EXIT(
      {
        auto outer = make();
        const auto inner = make();
        outer.reset();
      },
      testing::KilledBySignal(SIGABRT), message);
  EXPECT_EXIT(
      {
        auto guard = make();
        std::thread([&guard] { guard.reset(); }).join();
      },
      testing::KilledBySignal(SIGABRT), message);
  auto outer = make();
  auto inner = make();
  inner.reset();
  outer.reset();
}

template <class Guard>
void expect_order_of(const std::string& name) {
  expect_order([] { return std::make_unique<Guard>(); }, name);
}

TEST(Nesting, GuardsThatEndOutOfOrderOrOnAnotherThreadEndTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  expect_order_of<autograd::NoGrad>("NoGrad or EnableGrad");
  expect_order_of<autograd::EnableGrad>("NoGrad or EnableGrad");
  expect_order_of<autograd::InferenceMode>("InferenceMode");
  expect_order_of<nn::Evaluation>("NoGrad or EnableGrad");
  expect_order_of<autograd::DetectAnomaly>("DetectAnomaly");
  expect_order_of<autograd::Autocast>("Autocast");
  expect_order_of<cuda::LaunchRecord>("LaunchObserver");
  // Only one profiler at a time can measure a GPU.
  expect_order([] { return std::make_unique<Profiler>(ProfilerOptions{.device = false}); }, "Profiler");
  expect_order_of<nn::init::Skip>("Skip");
  expect_order([] { return std::make_unique<ProfileRange>("a range"); }, "ProfileRange");
  expect_order([] { return std::make_unique<ProgressObserver>(nullptr); }, "ProgressObserver");
  expect_order([] { return std::make_unique<nn::init::Progress>(1); }, "Progress");
  const nn::Dropout module(0.5);
  expect_order([&] { return std::make_unique<nn::Scope>(module); }, "Scope");
  std::vector<PhiloxKey> keys;
  expect_order([&] { return std::make_unique<RecordPhiloxKeys>(keys); }, "RecordPhiloxKeys");
  expect_order([&] { return std::make_unique<ReplayPhiloxKeys>(keys); }, "ReplayPhiloxKeys");
}

TEST(Nesting, ProgressTasksEndBeforeTheirObserver) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto observer = std::make_unique<ProgressObserver>([](const ProgressReport&) {});
        const ProgressTask task("a task", 1);
        observer.reset();
      },
      testing::KilledBySignal(SIGABRT), "ProgressObserver: expected guards to end in the reverse order");
}

TEST(Nesting, GuardsOfOneStateAreOfOneKind) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto outer = std::make_unique<autograd::InferenceMode>();
        const autograd::EnableGrad inner;
        outer.reset();
      },
      testing::KilledBySignal(SIGABRT), "InferenceMode: expected guards to end in the reverse order");
  // Those of different states may end in any order.
  auto outer = std::make_unique<autograd::NoGrad>();
  const autograd::DetectAnomaly inner;
  outer.reset();
  EXPECT_TRUE(autograd::grad_enabled());
}

}  // namespace
