#include <gtest/gtest.h>

#include <vector>

#include "tests/support.h"
#include "tests/train/toy.h"
#include <mica/core/copy.h>
#include <mica/train/batches.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

std::vector<float> points(const train::Batch& batch) { return to_vector<float>(batch.fields.at(0)); }

TEST(DatasetBatches, ContinueAtAPosition) {
  const ToyData data(10);
  train::DatasetBatches batches(data, {.batch = 4, .seed = 2}, {}, 3);
  const train::Batch first = batches.next();
  EXPECT_EQ(first.weight, 1);
  EXPECT_EQ(first.units, 12);
  batches.next();
  const io::DataPosition position = batches.position();
  EXPECT_EQ(position.index, 8);
  const train::Batch third = batches.next(), fourth = batches.next();
  EXPECT_NE(points(third), points(fourth));
  batches.seek(position);
  EXPECT_EQ(points(batches.next()), points(third));
  EXPECT_EQ(points(batches.next()), points(fourth));
  expect_error([&] { batches.seek({.epoch = 0, .index = 11}); }, "11");
}

TEST(Validation, HasEachSampleOnce) {
  const ToyData data(10);
  for (const bool keep : {false, true}) {
    const train::Validation validation(data, {.batch = 4, .keep = keep});
    ASSERT_TRUE(validation);
    ASSERT_EQ(validation.size(), 3);
    std::vector<train::Batch> first, second;
    validation.each([&](const train::Batch& batch) { first.push_back(batch); });
    validation.each([&](const train::Batch& batch) { second.push_back(batch); });
    ASSERT_EQ(first.size(), 3u);
    for (std::int64_t i = 0; i < 3; ++i) {
      const train::Batch& batch = first[static_cast<std::size_t>(i)];
      EXPECT_EQ(batch.weight, i < 2 ? 4 : 2);
      EXPECT_EQ(batch.fields.at(0).shape(), (Shape{i < 2 ? 4 : 2, 2}));
      EXPECT_EQ(points(batch)[2], static_cast<float>((4 * i + 1) % 7) / 7);
      // Only those that are kept are the same tensors again.
      EXPECT_EQ(second[static_cast<std::size_t>(i)].fields[0].is_same(batch.fields[0]), keep);
    }
  }
}

TEST(Validation, MayBeAbsentOrAList) {
  EXPECT_FALSE(train::Validation());
  EXPECT_EQ(train::Validation().size(), 0);
  train::Validation().each([](const train::Batch&) { ADD_FAILURE(); });
  // A rank without batches still takes part.
  EXPECT_TRUE(train::Validation(std::vector<train::Batch>()));
  const train::Validation list({{.fields = {ones({2})}, .weight = 5}});
  ASSERT_EQ(list.size(), 1);
  list.each([](const train::Batch& batch) { EXPECT_EQ(batch.weight, 5); });
  const ToyData none(0);
  expect_error([&] { train::Validation{none}; }, "Validation: expected samples");
  const ToyData some(1);
  expect_error([&] { train::Validation(some, {.batch = 0}); }, "got 1 samples and a batch of 0");
}

}  // namespace
