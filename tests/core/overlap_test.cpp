#include <tests/support.h>

#include <mica/core/detail/overlap.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Pair = std::pair<std::size_t, std::size_t>;

TEST(Overlap, OfRanges) {
  for (const Device device : test_devices()) {
    const Tensor x = empty({10}, float32, device);
    const auto part = [&](std::int64_t size, std::int64_t stride, std::int64_t offset) {
      return as_strided(x, {size}, {stride}, offset);
    };
    EXPECT_TRUE(may_overlap(x, x));
    EXPECT_TRUE(may_overlap(part(5, 1, 0), part(5, 1, 4)));
    EXPECT_FALSE(may_overlap(part(5, 1, 0), part(5, 1, 5)));
    EXPECT_TRUE(may_overlap(part(5, 2, 0), part(5, 2, 1)));  // they interleave
    EXPECT_TRUE(may_overlap(part(3, -1, 5), part(2, 1, 2)));
    EXPECT_FALSE(may_overlap(part(3, -1, 5), part(3, 1, 0)));
    EXPECT_FALSE(may_overlap(part(0, 1, 3), x));
    EXPECT_FALSE(may_overlap(x, empty({10}, float32, device)));
  }
}

TEST(Overlap, OfElements) {
  for (const Device device : test_devices()) {
    const Tensor x = empty({12}, float32, device);
    const auto part = [&](const Shape& shape, const Strides& strides, std::int64_t offset) {
      return as_strided(x, shape, strides, offset);
    };
    EXPECT_EQ(find_overlap({}), std::nullopt);
    EXPECT_EQ(find_overlap({x, empty({12}, float32, device)}), std::nullopt);
    EXPECT_EQ(find_overlap({part({6}, {2}, 0), part({6}, {2}, 1)}), std::nullopt);
    EXPECT_EQ(find_overlap({part({4}, {3}, 0), part({4}, {3}, 1), part({4}, {3}, 2)}), std::nullopt);
    EXPECT_EQ(find_overlap({part({4, 2}, {3, 1}, 0), part({4}, {3}, 2)}), std::nullopt);
    EXPECT_EQ(find_overlap({part({4}, {3}, 2), x, part({0}, {1}, 0)}), Pair(0, 1));
    EXPECT_EQ(find_overlap({empty({3}), part({6}, {2}, 0), part({4}, {3}, 1)}), Pair(1, 2));  // element 4
    EXPECT_EQ(find_overlap({part({2}, {2}, 0), part({2}, {3}, 1)}), std::nullopt);            // 0, 2 and 1, 4
    EXPECT_EQ(find_overlap({part({3}, {-2}, 4), part({2}, {2}, 4)}), Pair(0, 1));
    // A tensor whose range contains several others overlaps the last of them.
    EXPECT_EQ(find_overlap({part({2}, {11}, 0), part({3}, {1}, 1), part({3}, {1}, 4), part({1}, {1}, 11)}), Pair(0, 3));
  }
}

TEST(Overlap, OfOneTensorWithItself) {
  const Tensor x = empty({30});
  const auto alone = [&](const Shape& shape, const Strides& strides) {
    return !find_overlap({empty({1}), as_strided(x, shape, strides, 0)}).has_value();
  };
  EXPECT_TRUE(alone({2, 3, 4}, {12, 4, 1}));
  EXPECT_TRUE(alone({4, 3, 2}, {1, 4, 12}));
  EXPECT_TRUE(alone({1, 3}, {0, 1}));
  EXPECT_TRUE(alone({2, 3}, {3, 2}));  // 0, 2, 4 and 3, 5, 7: strides smaller than the other's extent
  EXPECT_FALSE(alone({2, 3}, {4, 2}));
  EXPECT_FALSE(alone({3, 2}, {0, 1}));
  EXPECT_FALSE(alone({3, 3}, {1, 1}));
  EXPECT_EQ(find_overlap({as_strided(x, {2}, {0}, 3)}), Pair(0, 0));
}

TEST(Overlap, OfOtherDtypesAndStorages) {
  std::vector<std::int32_t> memory(4);
  const Tensor words = from_blob(memory.data(), {4}, int32);
  const Tensor bytes = from_blob(memory.data(), {16}, uint8);
  EXPECT_TRUE(may_overlap(words, bytes));
  EXPECT_EQ(find_overlap({as_strided(words, {2}, {2}, 0), as_strided(bytes, {2}, {8}, 4)}), std::nullopt);
  EXPECT_EQ(find_overlap({as_strided(words, {2}, {2}, 0), as_strided(bytes, {2}, {8}, 3)}), Pair(0, 1));
}

}  // namespace
