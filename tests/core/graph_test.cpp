#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/memory_stats.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/matmul.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

constexpr Device gpu = Device::cuda();

#define NEEDS_GPU()           \
  if (!cuda_available()) {    \
    GTEST_SKIP() << "no GPU"; \
  }

TEST(Graph, NeedsACudaDevice) {
  expect_error([] { cuda::capture([] {}, Device::cpu()); }, "capture: ");
  expect_error([] { cuda::Graph().replay(); }, "replay: the graph is empty");
  EXPECT_EQ(cuda::Graph().node_count(), 0);
  EXPECT_EQ(cuda::Graph().reserved_bytes(), 0);
  EXPECT_TRUE(cuda::Graph().empty());
}

TEST(Graph, ReplaysOnNewInputs) {
  NEEDS_GPU();
  const Tensor x = full({3, 5}, 1, float32, gpu);
  Tensor y;
  const cuda::Graph graph = cuda::capture([&] {
    const Tensor doubled = add(x, x);
    y = mul(doubled, add(doubled, x));
  });
  EXPECT_GT(graph.node_count(), 2u);
  for (const double value : {1.0, 2.0, -3.0}) {
    fill_data(x, value);
    graph.replay();
    expect_close(y, std::vector<double>(15, 6 * value * value), 0, 0);
  }
}

TEST(Graph, CapturingRunsNothing) {
  NEEDS_GPU();
  const Tensor x = full({8}, 1, float32, gpu);
  const cuda::Graph graph = cuda::capture([&] { fill_data(x, 2); });
  expect_close(x, std::vector<double>(8, 1), 0, 0);
  graph.replay();
  expect_close(x, std::vector<double>(8, 2), 0, 0);
}

TEST(Graph, MemoryIsItsOwn) {
  NEEDS_GPU();
  const Tensor x = full({1 << 20}, 3, float32, gpu);
  Tensor y;
  const cuda::Graph graph = cuda::capture([&] {
    const Tensor temporary = add(x, x);
    y = add(temporary, x);
  });
  // Other tensors are allocated, written and freed in between, possibly in memory freed by the graph.
  std::vector<Tensor> others;
  for (int i = 0; i < 20; ++i) {
    others.push_back(full({1 << 20}, -1, float32, gpu));
  }
  graph.replay();
  for (const Tensor& other : others) {
    expect_close(other, std::vector<double>(1 << 20, -1), 0, 0);
  }
  expect_close(y, std::vector<double>(1 << 20, 9), 0, 0);
}

TEST(Graph, RecyclesMemoryWithinTheCapture) {
  NEEDS_GPU();
  const Tensor x = full({1 << 20}, 1, float32, gpu);
  const cuda::Graph graph = cuda::capture([&] {
    Tensor y = x;
    for (int i = 0; i < 50; ++i) {
      y = add(y, x);
    }
  });
  EXPECT_LE(graph.reserved_bytes(), std::size_t{128} << 20);  // 50 of 4 MiB and a workspace would be more
}

TEST(Graph, TensorsOutliveTheGraph) {
  NEEDS_GPU();
  cuda::capture([] {});  // creates this thread's cached resources
  const std::size_t before = memory_stats(gpu).allocated;
  {
    Tensor y;
    {
      const cuda::Graph graph = cuda::capture([&] { y = full({1000}, 7, float32, gpu); });
      graph.replay();
    }
    expect_close(y, std::vector<double>(1000, 7), 0, 0);
    expect_close(add(y, y), std::vector<double>(1000, 14), 0, 0);
  }
  EXPECT_EQ(memory_stats(gpu).allocated, before);
}

TEST(Graph, DrawsTheSameNumbersAsWithoutIt) {
  NEEDS_GPU();
  constexpr int rounds = 4;
  const auto draw = [] { return std::pair{rand({1000}, float32, gpu), randn({333}, float64, gpu)}; };
  manual_seed(11);
  std::vector<std::vector<double>> expected;
  for (int round = 0; round < rounds; ++round) {
    const auto [a, b] = draw();
    expected.push_back(to_vector<double>(a));
    expected.push_back(to_vector<double>(b));
  }
  const PhiloxKey after = rng_state();

  manual_seed(11);
  std::pair<Tensor, Tensor> drawn;
  drawn = draw();
  EXPECT_EQ(to_vector<double>(drawn.first), expected[0]);
  const cuda::Graph graph = cuda::capture([&] { drawn = draw(); });
  for (int round = 1; round < rounds; ++round) {
    graph.replay();
    EXPECT_EQ(to_vector<double>(drawn.first), expected[2 * round]);
    EXPECT_EQ(to_vector<double>(drawn.second), expected[2 * round + 1]);
  }
  EXPECT_EQ(rng_state().offset, after.offset);

  manual_seed(12);
  const std::vector<double> other = to_vector<double>(draw().first);
  manual_seed(12);
  graph.replay();
  EXPECT_EQ(to_vector<double>(drawn.first), other);
}

TEST(Graph, CallsTheHostBeforeEachReplay) {
  NEEDS_GPU();
  const Tensor counted = zeros({1}, float32, gpu);
  int count = 0;
  Tensor seen;
  const cuda::Graph graph = cuda::capture([&] {
    on_each_replay([&] { fill_data(counted, ++count); });
    seen = add(counted, counted);
  });
  EXPECT_EQ(count, 0);
  for (int replay = 1; replay <= 3; ++replay) {
    graph.replay();
    expect_close(seen, {2.0 * replay}, 0, 0);
  }
}

TEST(Graph, NamesWhatCannotBeCaptured) {
  NEEDS_GPU();
  const Tensor x = full({1}, 4, float32, gpu);
  const auto fails = [&](const std::function<void()>& f, const std::string& text) {
    expect_error([&] { cuda::capture(f); }, text);
    EXPECT_FALSE(is_capturing());
    // The device and the next capture still work.
    expect_close(add(x, x), {8.0}, 0, 0);
    Tensor y;
    const cuda::Graph graph = cuda::capture([&] { y = mul(x, x); });
    graph.replay();
    expect_close(y, {16.0}, 0, 0);
  };
  fails([&] { add(x, x).item(); }, "item: cannot be captured");
  fails([&] { to_vector<float>(add(x, x)); }, "to_vector: cannot be captured");
  fails([&] { add(x, x).to(Device::cpu()); }, "copy from cuda:0 to cpu: cannot be captured");
  fails([&] { from_data({1.f, 2.f}, gpu); }, "copy from cpu to cuda:0: cannot be captured");
  fails([&] { synchronize(gpu); }, "synchronize: cannot be captured");
  fails([&] { manual_seed(3); }, "set_rng_state: cannot be captured");
  fails([&] { rand({3}); }, "random: a tensor on the cpu");
  fails([&] { cuda::capture([] {}); }, "capture: this thread already captures");
  fails([&] { throw Error("the caller's own"); }, "the caller's own");
}

TEST(Graph, ProductsHaveTheSameBits) {
  NEEDS_GPU();
  manual_seed(5);
  const Tensor a = randn({257, 129}, float32, gpu), b = randn({129, 65}, float32, gpu);
  const Tensor expected = matmul(a, b);
  Tensor first, second;
  const cuda::Graph one = cuda::capture([&] { first = matmul(a, b); });
  const cuda::Graph two = cuda::capture([&] { second = matmul(a, b); });
  one.replay();
  two.replay();
  EXPECT_EQ(to_vector<float>(first), to_vector<float>(expected));
  EXPECT_EQ(to_vector<float>(second), to_vector<float>(expected));
}

TEST(MemoryStats, CountWhatTensorsHold) {
  for (const Device device : test_devices()) {
    const MemoryStats before = memory_stats(device);
    reset_peak_memory(device);
    {
      const Tensor x = empty({1000}, float32, device);
      EXPECT_EQ(memory_stats(device).allocated, before.allocated + 4000);
      { const Tensor y = empty({500}, float64, device); }
      EXPECT_EQ(memory_stats(device).allocated, before.allocated + 4000);
      EXPECT_EQ(memory_stats(device).peak, before.allocated + 8000);
    }
    EXPECT_EQ(memory_stats(device).allocated, before.allocated);
    reset_peak_memory(device);
    EXPECT_EQ(memory_stats(device).peak, before.allocated);
  }
}

TEST(MemoryStats, CountTheWorkspaceOfProducts) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({4, 4}, float32, device);
    (void)matmul(x, x);
    const MemoryStats stats = memory_stats(device);
    EXPECT_EQ(stats.workspace > 0, device.is_cuda());
    EXPECT_LE(stats.workspace, stats.allocated);
  }
}

TEST(Copies, FromTheHostAreInStreamOrder) {
  NEEDS_GPU();
  // Copies of many sizes, more than the staging memory; the source is overwritten right after each call.
  const Tensor host = empty({1 + (1 << 23)});
  std::vector<Tensor> landed;
  for (int i = 0; i < 48; ++i) {
    const Tensor part = as_strided(host, {1 + (1 << (i % 24))}, {1}, 0);
    fill_data(part, i);
    landed.push_back(empty(part.shape(), float32, gpu));
    copy_into(landed.back(), part);
  }
  for (std::size_t i = 0; i < landed.size(); ++i) {
    expect_close(landed[i], std::vector<double>(landed[i].numel(), static_cast<double>(i)), 0, 0);
  }
}

}  // namespace
