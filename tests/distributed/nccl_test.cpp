// NCCL with one rank, on the first GPU: checks that each collective is called with the right type, function and size,
// in the order of the stream. tests/ranks/ tests several ranks.

#include <tests/paths.h>

#include <mica/core/device.h>

#if MICA_WITH_NCCL

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/distributed/detail/transport/nccl.h>
#include <mica/ops/elementwise/binary.h>

namespace mica::distributed::detail {
namespace {

constexpr DType all_types[] = {float64, float32, float16, bfloat16, int64, int32, uint8, boolean};
constexpr Reduction all_reductions[] = {Reduction::sum, Reduction::mean, Reduction::min, Reduction::max};

class NcclOfOneRank : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU";
    }
    nccl = nccl_collectives(0, 1, nullptr, [this](const Tensor& bytes) {
      ++exchanged;
      EXPECT_EQ(bytes.device(), Device::cpu());
    });
  }

  static Tensor numbered(std::int64_t count, DType dtype) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) {
      values.push_back(static_cast<double>(dtype == boolean ? i % 2 : i % 100));
    }
    return from_data(values, {count}, Device::cuda()).to(dtype);
  }
  static std::vector<double> values(const Tensor& x) { return to_vector<double>(x.to(float64)); }

  std::shared_ptr<Collectives> nccl;
  int exchanged = 0;
};

TEST_F(NcclOfOneRank, EachCollectiveDtypeAndReduction) {
  for (const DType dtype : all_types) {
    for (const std::int64_t count : {1, 3, 1000, 1 << 20}) {
      const Tensor x = numbered(count, dtype);
      const std::vector<double> expected = values(x);
      const Tensor into = empty({count}, dtype, x.device());
      for (const Reduction reduction : all_reductions) {
        if ((reduction == Reduction::mean && !is_floating(dtype)) ||
            (reduction == Reduction::sum && dtype == boolean)) {
          continue;
        }
        nccl->all_reduce(x, reduction)->wait();
        ASSERT_EQ(values(x), expected) << name_of(dtype);
        fill_data(into, 1);
        nccl->reduce_scatter(x, into, reduction)->wait();
        ASSERT_EQ(values(into), expected) << name_of(dtype);
        nccl->reduce_scatter(x, x, reduction)->wait();
        ASSERT_EQ(values(x), expected) << name_of(dtype);
      }
      fill_data(into, 1);
      nccl->all_gather(x, into)->wait();
      ASSERT_EQ(values(into), expected) << name_of(dtype);
      nccl->broadcast(x, 0)->wait();
      ASSERT_EQ(values(x), expected) << name_of(dtype);
    }
  }
  EXPECT_EQ(exchanged, 1) << "the first collective connects";
}

// Collectives run between kernels of the current stream without waiting on the host, even if their tensors have no
// other owner.
TEST_F(NcclOfOneRank, IsOrderedWithTheCurrentStream) {
  const std::int64_t count = 1 << 22;
  const Tensor into = empty({count}, float32, Device::cuda());
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (int i = 0; i < 20; ++i) {
    const auto transfer = nccl->all_gather(full({count}, i, float32, Device::cuda()), into);
    transfer->wait();
    transfers.push_back(transfer);
  }
  ASSERT_EQ(values(into), std::vector<double>(count, 19));
  for (const auto& transfer : transfers) {
    EXPECT_TRUE(transfer->ended());
  }
}

TEST_F(NcclOfOneRank, IsCaptured) {
  const std::int64_t count = 1000;
  const Tensor x = full({count}, 1, float32, Device::cuda()), into = zeros({count}, float32, Device::cuda());
  const auto gather = [&] { nccl->all_gather(x, into)->wait(); };
  testing_support::expect_error([&] { (void)cuda::capture(gather); },
                                "all_gather: a group's first collective on a GPU cannot be captured");
  nccl->all_reduce(x, Reduction::sum)->wait();
  std::shared_ptr<Transfer> gathered;
  const cuda::Graph graph = cuda::capture([&] {
    const Tensor twice = x * 2;
    const std::shared_ptr<Transfer> reduced = nccl->all_reduce(twice, Reduction::mean);
    reduced->wait();
    gathered = nccl->all_gather(twice + 1, into);
    gathered->wait();
  });
  gathered->wait();  // outside of the capture, does nothing
  for (int i = 0; i < 20; ++i) {
    fill_data(x, i);
    graph.replay();
    const std::shared_ptr<Transfer> replayed = gathered->replayed();
    ASSERT_EQ(values(into), std::vector<double>(count, 2 * i + 1));
    EXPECT_TRUE(replayed->ended());
    gather();
    ASSERT_EQ(values(into), std::vector<double>(count, i));
  }
}

}  // namespace
}  // namespace mica::distributed::detail

#endif
