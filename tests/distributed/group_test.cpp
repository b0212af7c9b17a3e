#include <gtest/gtest.h>
#include <tests/distributed/support.h>

#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/distributed/group.h>

namespace mica::distributed {
namespace {

// The collectives among several ranks are tested in tests/ranks/.

TEST(Group, OfOneChangesNothing) {
  const Group group;
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  const Tensor x = from_data<float>({1, 2, 3}, {3});
  group.all_reduce(x, Reduction::mean);
  group.broadcast(x);
  group.barrier();
  EXPECT_EQ(to_vector<float>(x), (std::vector<float>{1, 2, 3}));
  const Tensor y = zeros({3, 1});
  group.all_gather(x, y);
  EXPECT_EQ(to_vector<float>(y), (std::vector<float>{1, 2, 3}));
  const Tensor z = zeros({3});
  group.start_reduce_scatter(x, z).wait();
  EXPECT_EQ(to_vector<float>(z), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(group.split(7).size(), 1);
}

TEST(Group, ThrowsAfterAMove) {
  Group from;
  const Group to = std::move(from);
  const std::string message = "Group: used after it was moved from";
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_EQ(message_of([&] { (void)from.size(); }), message);
  EXPECT_EQ(message_of([&] { from.all_reduce(zeros({2})); }), message);
  EXPECT_EQ(message_of([&] { from.barrier(); }), message);
  EXPECT_EQ(message_of([&] { (void)from.split(0); }), message);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(to.size(), 1);
}

TEST(Group, WorldOfAProcessStartedAlone) {
  EXPECT_EQ(world().size(), 1);
  EXPECT_EQ(local_rank(), 0);
}

TEST(Group, RefusesTensorsThatItCannotUse) {
  const Group group;
  EXPECT_EQ(message_of([&] { group.all_reduce({}); }), "all_reduce: expected a tensor, got an undefined one");
  const Tensor matrix = zeros({2, 3});
  EXPECT_EQ(message_of([&] {
              group.all_reduce(as_strided(matrix, {3, 2}, {1, 3}, 0));
            }),
            "all_reduce: expected a contiguous tensor, got one of shape [3, 2] and strides [1, 3]");
  EXPECT_EQ(message_of([&] { group.all_reduce(zeros({2}, int64), Reduction::mean); }),
            "all_reduce: expected a floating dtype for a mean, got int64");
  EXPECT_EQ(message_of([&] { group.all_reduce(zeros({2}, boolean)); }),
            "all_reduce: expected numbers for a sum, got bool");
  for (const int reduction : {-1, 4, 77}) {
    const std::string expected = fmt::format("expected sum, mean, min or max, got Reduction({})", reduction);
    EXPECT_EQ(message_of([&] { group.all_reduce(matrix, static_cast<Reduction>(reduction)); }),
              "all_reduce: " + expected);
    EXPECT_EQ(message_of([&] { group.reduce_scatter(matrix, zeros({6}), static_cast<Reduction>(reduction)); }),
              "reduce_scatter: " + expected);
  }
  EXPECT_EQ(
      message_of([&] { group.all_gather(zeros({2}), zeros({3})); }),
      "all_gather: expected tensors of one dtype and device, one with 1 times the elements of the other, as there "
      "are 1 ranks; got [3] of float32 on cpu and [2] of float32 on cpu");
  EXPECT_EQ(message_of([&] { group.broadcast(matrix, 1); }), "broadcast: expected a root in [0, 1), got 1");
  EXPECT_EQ(message_of([&] { group.split(-1); }), "split: expected color >= 0, got -1");
  matrix.requires_grad_();
  EXPECT_NE(message_of([&] { group.broadcast(matrix); }).find("requires a gradient"), std::string::npos);
  const autograd::NoGrad guard;
  group.broadcast(matrix);
}

}  // namespace
}  // namespace mica::distributed
