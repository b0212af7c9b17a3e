#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/ranks/rank_device.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/half.h>
#include <mica/distributed/group.h>

namespace mica::distributed {
namespace {

Tensor filled(const Shape& shape, double value, DType dtype = float32) {
  return full(shape, value, dtype, rank_device());
}

Tensor unwritten(const Shape& shape, DType dtype = float32) { return empty(shape, dtype, rank_device()); }

std::vector<double> values(const Tensor& x) { return to_vector<double>(x.to(float64)); }

// Elements i % 20 + rank, whose sums over up to ten ranks fit into uint8 and are exact in bfloat16.
Tensor numbered(std::int64_t count, DType dtype, const Group& group) {
  std::vector<double> data;
  for (std::int64_t i = 0; i < count; ++i) {
    data.push_back(static_cast<double>(i % 20 + group.rank()));
  }
  return here(from_data(data, {count}).to(dtype));
}

constexpr DType number_types[] = {float64, float32, float16, bfloat16, int64, int32, uint8};

TEST(GroupOfRanks, AllReduce) {
  const Group group = world();
  const int n = group.size();
  for (const DType dtype : number_types) {
    for (const std::int64_t count : {1, 2, 7, 1000, 100000}) {
      const Tensor sum = numbered(count, dtype, group), least = numbered(count, dtype, group),
                   greatest = numbered(count, dtype, group);
      group.all_reduce(sum);
      group.all_reduce(least, Reduction::min);
      group.all_reduce(greatest, Reduction::max);
      const std::vector<double> s = values(sum), l = values(least), g = values(greatest);
      for (std::int64_t i = 0; i < count; ++i) {
        const double own = static_cast<double>(i % 20);
        ASSERT_EQ(s[i], n * own + n * (n - 1) / 2) << name_of(dtype) << " " << i;
        ASSERT_EQ(l[i], own);
        ASSERT_EQ(g[i], own + n - 1);
      }
    }
  }
}

TEST(GroupOfRanks, MinAndMaxKeepNaN) {
  if (rank_device().is_cuda()) {
    GTEST_SKIP() << "NCCL promises no result";
  }
  const Group group = world();
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    for (int owner = 0; owner < group.size(); ++owner) {
      for (const Reduction reduction : {Reduction::min, Reduction::max}) {
        const double number = group.rank() % 2 == 0 ? -3 : 3;
        const Tensor x = filled({3}, group.rank() == owner ? std::nan("") : number, dtype);
        group.all_reduce(x, reduction);
        for (const double value : values(x)) {
          ASSERT_TRUE(std::isnan(value)) << name_of(dtype) << ", NaN on rank " << owner;
        }
      }
    }
  }
}

TEST(GroupOfRanks, Mean) {
  const Group group = world();
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    const Tensor x = filled({5}, 2.0 * group.rank(), dtype);
    group.all_reduce(x, Reduction::mean);
    EXPECT_EQ(values(x), std::vector<double>(5, group.size() - 1));
  }
  const Tensor flags = filled({3}, group.rank() == group.size() - 1, boolean);
  group.all_reduce(flags, Reduction::max);
  EXPECT_EQ(values(flags), std::vector<double>(3, 1));
}

TEST(GroupOfRanks, ReduceScatterAndAllGather) {
  const Group group = world();
  const int n = group.size();
  for (const DType dtype : number_types) {
    for (const std::int64_t part : {1, 3, 5000}) {
      const Tensor whole = numbered(n * part, dtype, group);
      const Tensor mine = unwritten({part}, dtype);
      group.reduce_scatter(whole, mine);
      const std::vector<double> shares = values(mine);
      for (std::int64_t i = 0; i < part; ++i) {
        const double own = static_cast<double>((group.rank() * part + i) % 20);
        ASSERT_EQ(shares[static_cast<std::size_t>(i)], n * own + n * (n - 1) / 2);
      }
      // In place.
      const Tensor inside = as_strided(whole, {part}, {1}, group.rank() * part);
      group.reduce_scatter(whole, inside);
      EXPECT_EQ(values(inside), values(mine));

      const Tensor gathered = unwritten({n, part}, dtype);
      group.all_gather(mine, gathered);
      group.all_gather(inside, whole);
      EXPECT_EQ(values(whole), values(gathered));
      const std::vector<double> all = values(gathered);
      for (std::int64_t i = 0; i < n * part; ++i) {
        ASSERT_EQ(all[static_cast<std::size_t>(i)], n * static_cast<double>(i % 20) + n * (n - 1) / 2);
      }
    }
  }
}

TEST(GroupOfRanks, Broadcast) {
  const Group group = world();
  for (int root = 0; root < group.size(); ++root) {
    for (const DType dtype : {float32, bfloat16, int64, boolean}) {
      const Tensor x = filled({100}, group.rank() == root ? 1 : 0, dtype);
      group.broadcast(x, root);
      EXPECT_EQ(values(x), std::vector<double>(100, 1));
    }
  }
}

TEST(GroupOfRanks, ManyAtOnceAndWorkThatNobodyWaitsFor) {
  const Group group = world();
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 50; ++i) {
    tensors.push_back(filled({1 + 317 * i}, i + group.rank()));
    works.push_back(group.start_all_reduce(tensors.back()));
    group.start_all_reduce(filled({64}, 1.0));
  }
  const int n = group.size();
  for (int i = 49; i >= 0; --i) {
    works[i].wait();
    works[i].wait();
    EXPECT_EQ(values(tensors[i]), std::vector<double>(1 + 317 * i, n * i + n * (n - 1) / 2));
  }
}

TEST(GroupOfRanks, SameBitsOnEachRankAndEachTime) {
  const Group group = world();
  for (const DType dtype : {float32, bfloat16}) {
    for (const std::int64_t count : {3, 1000, 300000}) {
      std::vector<double> data;
      for (std::int64_t i = 0; i < count; ++i) {
        data.push_back(1 / static_cast<double>(1 + (i * 7919 + 104729 * group.rank()) % 10007));
      }
      const Tensor first = here(from_data(data, {count}).to(dtype)), second = here(from_data(data, {count}).to(dtype));
      group.all_reduce(first);
      group.all_reduce(second);
      ASSERT_EQ(values(first), values(second));
      const Tensor least = first.to(float64), greatest = first.to(float64);
      group.all_reduce(least, Reduction::min);
      group.all_reduce(greatest, Reduction::max);
      ASSERT_EQ(values(least), values(greatest));
    }
  }
}

TEST(GroupOfRanks, Split) {
  const Group group = world();
  const int n = group.size();
  const Group half = group.split(group.rank() % 2, -group.rank());
  const int members = n / 2 + (group.rank() % 2 == 0 ? n % 2 : 0);
  EXPECT_EQ(half.size(), members);
  EXPECT_EQ(half.rank(), members - 1 - group.rank() / 2);
  const Tensor x = filled({4}, group.rank());
  half.all_reduce(x, Reduction::min);
  EXPECT_EQ(values(x), std::vector<double>(4, group.rank() % 2));
  // Groups do not wait for each other: ranks may use them in different orders.
  const Group other = group.split(0);
  const Tensor a = filled({4}, 1.0), b = filled({4}, 1.0);
  Work first, second;
  if (group.rank() % 2 == 0) {
    first = half.start_all_reduce(a);
    second = other.start_all_reduce(b);
  } else {
    second = other.start_all_reduce(b);
    first = half.start_all_reduce(a);
  }
  first.wait();
  second.wait();
  EXPECT_EQ(values(a), std::vector<double>(4, members));
  EXPECT_EQ(values(b), std::vector<double>(4, n));
}

TEST(GroupOfRanks, BarrierWaitsForTheLast) {
  const Group group = world();
  const auto start = std::chrono::steady_clock::now();
  if (group.rank() == group.size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  group.barrier();
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(group.size() > 1 ? 40 : 0));
  group.barrier();
}

TEST(GroupOfRanks, EmptyTensors) {
  const Group group = world();
  const Tensor nothing = unwritten({0});
  group.all_reduce(nothing);
  group.all_gather(nothing, nothing);
  group.reduce_scatter(nothing, nothing);
  group.broadcast(nothing);
}

}  // namespace
}  // namespace mica::distributed
