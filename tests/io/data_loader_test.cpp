#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/support.h"
#include <mica/io/data_loader.h>
#include <mica/io/permutation.h>
#include <mica/io/sample_random.h>
#include <mica/io/token_windows.h>
#include <mica/ops/view/view.h>

#if MICA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

using namespace mica;
using namespace mica::testing_support;

namespace {

// Neither a loader nor a sample may refer to a temporary.
static_assert(std::is_constructible_v<io::DataLoader, const io::TokenWindows&> &&
              !std::is_constructible_v<io::DataLoader, io::TokenWindows> &&
              !std::is_constructible_v<io::DataLoader, io::TokenWindows, io::DataLoaderOptions>);
static_assert(std::is_constructible_v<io::Sample, const Tensors&, std::int64_t> &&
              !std::is_constructible_v<io::Sample, Tensors, std::int64_t>);

std::vector<std::int32_t> counting(int n) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

/// Sample i of epoch e: the numbers i + 1000 e and their opposites, and i.
struct Numbers : io::Dataset {
  explicit Numbers(std::int64_t count) : count(count) {}

  std::int64_t size() const override { return count; }
  std::vector<Field> fields() const override { return {{{2}, float32}, {{}, int64}}; }
  void read(std::int64_t index, std::int64_t epoch, const io::Sample& to) const override {
    if (index == fails_at) {
      throw std::runtime_error("sample " + std::to_string(index) + " is damaged");
    }
    ++reads;
    const auto value = static_cast<float>(index + 1000 * epoch);
    const std::span<float> x = to.field<float>(0);
    ASSERT_EQ(x.size(), 2u);
    x[0] = value;
    x[1] = -value;
    to.field<std::int64_t>(1)[0] = index;
  }

  std::int64_t count;
  std::int64_t fails_at = -1;
  mutable std::atomic<std::int64_t> reads{0};
};

std::vector<std::int64_t> indices(io::DataLoader& loader, int batches) {
  std::vector<std::int64_t> all;
  for (int i = 0; i < batches; ++i) {
    const std::vector<std::int64_t> batch = to_vector<std::int64_t>(loader.next()[1]);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

TEST(Permutation, HasEachNumberOnce) {
  for (std::int64_t size = 1; size <= 300; ++size) {
    const io::Permutation permutation(size, 7);
    std::vector<bool> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t to = permutation(i);
      ASSERT_TRUE(to >= 0 && to < size && !seen[static_cast<std::size_t>(to)]) << size << ": " << i << " to " << to;
      seen[static_cast<std::size_t>(to)] = true;
    }
  }
  const io::Permutation large(INT64_MAX, 1);
  std::set<std::int64_t> seen;
  for (std::int64_t i = 0; i < 1000; ++i) {
    seen.insert(large(INT64_MAX - 1 - i));
  }
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_GE(*seen.begin(), 0);
  EXPECT_GT(*seen.rbegin(), INT64_MAX / 2);
}

// Over the seeds, each index goes to each position equally often, and neighbors go to independent positions.
TEST(Permutation, IsUniformOverSeeds) {
  constexpr int size = 10, seeds = 20'000;
  std::vector<double> single(size * size), pair(size * size);
  for (int seed = 0; seed < seeds; ++seed) {
    const io::Permutation permutation(size, static_cast<std::uint64_t>(seed));
    for (int i = 0; i < size; ++i) {
      ++single[static_cast<std::size_t>(i * size + permutation(i))];
    }
    ++pair[static_cast<std::size_t>(permutation(3) * size + permutation(4))];
  }
  double chi_single = 0, chi_pair = 0;
  for (int i = 0; i < size * size; ++i) {
    const double expected = seeds / static_cast<double>(size);
    chi_single += std::pow(single[static_cast<std::size_t>(i)] - expected, 2) / expected;
    if (i / size != i % size) {
      const double each = seeds / static_cast<double>(size * (size - 1));
      chi_pair += std::pow(pair[static_cast<std::size_t>(i)] - each, 2) / each;
    }
  }
  // 81 and 89 degrees of freedom: a chance of 1e-6 each.
  EXPECT_LT(chi_single, 160);
  EXPECT_LT(chi_pair, 171);
}

TEST(Permutation, RefusesIndicesOutOfRange) {
  expect_error([] { io::Permutation(0, 1); }, "at least 1, got 0");
  expect_error([] { io::Permutation(5, 1)(5); }, "expected an index in [0, 5), got 5");
  expect_error([] { io::Permutation(5, 1)(-1); }, "got -1");
}

TEST(DataLoader, HasEachSampleOncePerEpochInANewOrder) {
  const Numbers data(10);
  io::DataLoader loader(data, {.batch = 4, .seed = 3});
  const std::vector<std::int64_t> all = indices(loader, 10);  // four epochs
  std::set<std::vector<std::int64_t>> orders;
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<std::int64_t> order(all.begin() + 10 * epoch, all.begin() + 10 * (epoch + 1));
    orders.insert(order);
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < 10; ++i) {
      EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
    }
  }
  EXPECT_EQ(orders.size(), 4u);
  EXPECT_EQ(loader.position(), (io::DataPosition{4, 0}));
  io::DataLoader in_order(data, {.batch = 4, .shuffle = false});
  EXPECT_EQ(indices(in_order, 3), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1}));
}

TEST(DataLoader, BatchesDoNotDependOnWorkersNorOnTheDevice) {
  const Numbers data(37);
  io::DataLoader alone(data, {.batch = 5, .seed = 9, .workers = 0});
  std::vector<std::vector<float>> expected;
  std::vector<std::vector<std::int64_t>> expected_indices;
  for (int i = 0; i < 40; ++i) {
    const Tensors batch = alone.next();
    ASSERT_EQ(batch.size(), 2u);
    EXPECT_EQ(batch[0].shape(), (Shape{5, 2}));
    EXPECT_EQ(batch[1].shape(), (Shape{5}));
    expected.push_back(to_vector<float>(batch[0]));
    expected_indices.push_back(to_vector<std::int64_t>(batch[1]));
  }
  for (const Device device : test_devices()) {
    for (const int workers : {0, 1, 2, 7}) {
      io::DataLoader loader(data, {.batch = 5, .seed = 9, .workers = workers, .device = device});
      std::vector<Tensors> kept;  // batches belong to the caller: later ones do not overwrite them
      for (int i = 0; i < 40; ++i) {
        kept.push_back(loader.next());
        EXPECT_EQ(kept.back()[0].device(), device);
      }
      for (std::size_t i = 0; i < kept.size(); ++i) {
        EXPECT_EQ(to_vector<float>(kept[i][0]), expected[i]) << workers << " workers, batch " << i;
        EXPECT_EQ(to_vector<std::int64_t>(kept[i][1]), expected_indices[i]);
      }
    }
  }
}

#if MICA_WITH_CUDA
/// Sample i is the number i. Records the memory that samples are written to.
struct Placed : io::Dataset {
  std::int64_t size() const override { return 64; }
  std::vector<Field> fields() const override { return {{{256}, float32}, {{}, int64}}; }
  void read(std::int64_t index, std::int64_t, const io::Sample& to) const override {
    const std::span<float> x = to.field<float>(0);
    std::fill(x.begin(), x.end(), static_cast<float>(index));
    to.field<std::int64_t>(1)[0] = index;
    const std::lock_guard lock(mutex);
    places.insert({x.data(), to.field<std::int64_t>(1).data()});
  }

  mutable std::mutex mutex;
  mutable std::set<const void*> places;
};
#endif

// From other memory, a copy to the GPU would make the host wait.
TEST(DataLoader, WritesSamplesToPageLockedMemory) {
#if MICA_WITH_CUDA
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const auto kind_of = [](const void* data) {
    cudaPointerAttributes attributes{};
    EXPECT_EQ(cudaPointerGetAttributes(&attributes, data), cudaSuccess);
    return attributes.type;
  };
  EXPECT_NE(kind_of(empty({256}).raw_data()), cudaMemoryTypeHost);
  for (const int workers : {0, 2}) {
    const Placed data;
    io::DataLoader loader(data, {.batch = 4, .workers = workers, .device = Device::cuda()});
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(kind_of(loader.next()[0].raw_data()), cudaMemoryTypeDevice);
    }
    const std::lock_guard lock(data.mutex);
    EXPECT_GE(data.places.size(), 8u);
    for (const void* const place : data.places) {
      EXPECT_EQ(kind_of(place), cudaMemoryTypeHost) << workers << " workers";
    }
  }
#else
  GTEST_SKIP() << "mica was built without CUDA";
#endif
}

TEST(DataLoader, ContinuesFromAPosition) {
  const Numbers data(11);
  io::DataLoader whole(data, {.batch = 3, .seed = 2, .workers = 2});
  const std::vector<std::int64_t> all = indices(whole, 12);
  for (int before = 0; before < 12; ++before) {
    io::DataLoader first(data, {.batch = 3, .seed = 2, .workers = 2});
    (void)indices(first, before);
    const io::DataPosition at = first.position();
    EXPECT_EQ(at.epoch * 11 + at.index, 3 * before);
    io::DataLoader second(data, {.batch = 3, .seed = 2, .workers = 1, .start = at});
    EXPECT_EQ(second.position(), at);
    EXPECT_EQ(indices(second, 12 - before), std::vector<std::int64_t>(all.begin() + 3 * before, all.end()));
  }
}

// The next batch of each rank, concatenated.
std::vector<std::int64_t> joined(const std::vector<std::unique_ptr<io::DataLoader>>& ranks) {
  std::vector<std::int64_t> all;
  for (const auto& loader : ranks) {
    const Tensors batch = loader->next();
    const std::vector<std::int64_t> rows = to_vector<std::int64_t>(batch[1]);
    const std::vector<float> values = to_vector<float>(batch[0]);
    EXPECT_EQ(values.size(), 2 * rows.size());
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

std::vector<std::unique_ptr<io::DataLoader>> loaders_of(const io::Dataset& data, int ranks,
                                                        io::DataLoaderOptions options) {
  std::vector<std::unique_ptr<io::DataLoader>> loaders;
  options.ranks = ranks;
  for (options.rank = 0; options.rank < ranks; ++options.rank) {
    loaders.push_back(std::make_unique<io::DataLoader>(data, options));
  }
  return loaders;
}

TEST(DataLoader, RanksTogetherHaveTheBatchesOfOne) {
  // More samples than a batch, and fewer, so that a batch contains some twice.
  for (const std::int64_t size : {37, 5}) {
    const Numbers data(size);
    for (const bool shuffle : {true, false}) {
      const io::DataLoaderOptions options{.batch = 12, .shuffle = shuffle, .seed = 9, .workers = 0};
      io::DataLoader alone(data, options);
      std::vector<std::vector<std::int64_t>> expected;
      for (int i = 0; i < 10; ++i) {
        expected.push_back(to_vector<std::int64_t>(alone.next()[1]));
      }
      for (const int ranks : {1, 2, 3, 4, 6, 12}) {
        const auto loaders = loaders_of(data, ranks, options);
        for (std::int64_t i = 0; i < 10; ++i) {
          const io::DataPosition at{12 * i / size, 12 * i % size};
          for (const auto& loader : loaders) {
            ASSERT_EQ(loader->position(), at);
          }
          ASSERT_EQ(joined(loaders), expected[static_cast<std::size_t>(i)]) << ranks << " ranks, batch " << i;
        }
      }
    }
  }
}

TEST(DataLoader, AnotherNumberOfRanksContinuesWithTheNextSample) {
  const Numbers data(37);
  const io::DataLoaderOptions options{.batch = 12, .seed = 9};
  io::DataLoader alone(data, options);
  const std::vector<std::int64_t> expected = indices(alone, 6);
  std::vector<std::int64_t> seen;
  io::DataLoaderOptions resumed = options;
  for (const int ranks : {4, 1, 3, 12, 2, 6}) {
    const auto loaders = loaders_of(data, ranks, resumed);
    const std::vector<std::int64_t> batch = joined(loaders);
    seen.insert(seen.end(), batch.begin(), batch.end());
    resumed.start = loaders.back()->position();
  }
  EXPECT_EQ(seen, expected);
}

TEST(DataLoader, RanksReadOnlyTheirOwnRows) {
  const Numbers data(100);
  io::DataLoader loader(data, {.batch = 20, .workers = 0, .rank = 3, .ranks = 5});
  (void)indices(loader, 3);
  EXPECT_EQ(data.reads, 12);
}

TEST(DataLoader, AnEpochIsOnePassWithAShorterLastBatch) {
  const Numbers data(11);
  for (const Device device : test_devices()) {
    for (const int workers : {0, 1, 3}) {
      for (const bool drop_last : {false, true}) {
        io::DataLoader loader(data,
                              {.batch = 4, .seed = 5, .workers = workers, .device = device, .drop_last = drop_last});
        ASSERT_EQ(loader.batches_per_epoch(), drop_last ? 2 : 3);
        std::set<std::vector<std::int64_t>> orders;
        for (const std::int64_t epoch : {0, 1, 7, 1}) {
          std::vector<std::int64_t> order;
          std::vector<std::int64_t> rows;
          for (const Tensors& batch : loader.epoch(epoch)) {
            rows.push_back(batch[0].size(0));
            const std::vector<std::int64_t> part = to_vector<std::int64_t>(batch[1]);
            EXPECT_EQ(to_vector<float>(batch[0])[0], static_cast<float>(part[0] + 1000 * epoch));
            order.insert(order.end(), part.begin(), part.end());
          }
          EXPECT_EQ(rows, drop_last ? (std::vector<std::int64_t>{4, 4}) : (std::vector<std::int64_t>{4, 4, 3}));
          // The order of next(), which continues with the following epoch.
          io::DataLoader endless(data, {.batch = 1, .seed = 5, .workers = 0, .start = {epoch, 0}});
          EXPECT_EQ(order, indices(endless, static_cast<int>(order.size())));
          orders.insert(order);
        }
        EXPECT_EQ(orders.size(), 3u);
      }
    }
  }
  const io::DataLoader loader(data, {.batch = 4});
  expect_error([&] { (void)loader.epoch(-1); }, "got epoch -1");
  for (const Tensors& batch : loader.epoch(0)) {
    EXPECT_EQ(batch.size(), 2u);
    break;  // the workers stop
  }
  const io::DataLoader none(data, {.batch = 12, .drop_last = true});
  for (const Tensors& batch : none.epoch(0)) {
    ADD_FAILURE() << batch[0];
  }
}

TEST(DataLoader, RanksShareTheLastBatchOfAnEpoch) {
  const Numbers data(21);
  std::vector<std::vector<std::int64_t>> expected;
  const io::DataLoader alone(data, {.batch = 6, .seed = 5});
  for (const Tensors& batch : alone.epoch(2)) {
    expected.push_back(to_vector<std::int64_t>(batch[1]));
  }
  for (const int ranks : {2, 3, 6}) {
    std::vector<std::vector<std::int64_t>> joined(4);
    for (int rank = 0; rank < ranks; ++rank) {
      const Device device = test_devices().back();
      const io::DataLoader loader(data, {.batch = 6, .seed = 5, .device = device, .rank = rank, .ranks = ranks});
      std::size_t i = 0;
      for (const Tensors& batch : loader.epoch(2)) {
        const std::vector<std::int64_t> part = to_vector<std::int64_t>(batch[1]);
        joined.at(i).insert(joined.at(i).end(), part.begin(), part.end());
        ++i;
      }
      EXPECT_EQ(i, 4u);  // for each rank, even those without a part of the last batch
    }
    EXPECT_EQ(joined, expected) << ranks;
  }
}

TEST(DataLoader, EpochsRethrowErrors) {
  Numbers data(20);
  data.fails_at = 13;
  for (const int workers : {0, 2}) {
    const io::DataLoader loader(data, {.batch = 4, .shuffle = false, .workers = workers});
    std::int64_t batches = 0;
    try {
      for (const Tensors& batch : loader.epoch(0)) {
        batches += batch[1].size(0) / 4;
      }
      ADD_FAILURE() << "expected an exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "sample 13 is damaged");
    }
    EXPECT_EQ(batches, 3);
  }
}

TEST(DataLoader, GoesOnAtAnyPosition) {
  const Numbers data(10);
  io::DataLoader loader(data, {.batch = 3, .seed = 1});
  const std::vector<std::int64_t> all = indices(loader, 6);
  EXPECT_EQ(loader.position(), (io::DataPosition{1, 8}));
  loader.seek({0, 9});
  EXPECT_EQ(loader.position(), (io::DataPosition{0, 9}));
  EXPECT_EQ(indices(loader, 3), std::vector<std::int64_t>(all.begin() + 9, all.end()));
  expect_error([&] { loader.seek({0, 10}); }, "index 10");
  EXPECT_EQ(loader.position(), (io::DataPosition{1, 8}));
}

/// Draws from the generator that all threads share.
struct Noise : Numbers {
  using Numbers::Numbers;
  void read(std::int64_t index, std::int64_t epoch, const io::Sample& to) const override {
    Numbers::read(index, epoch, to);
    if (index == 6) {
      to.field<float>(0)[0] += static_cast<float>(rand({}).item());
    }
  }
};

TEST(DataLoader, RefusesNumbersOfTheGlobalGenerator) {
  const Noise data(8);
  for (const int workers : {0, 2}) {
    io::DataLoader loader(data, {.batch = 4, .shuffle = false, .workers = workers});
    EXPECT_EQ(indices(loader, 1), (std::vector<std::int64_t>{0, 1, 2, 3}));
    expect_error([&] { (void)loader.next(); }, "use io::SampleRandom(seed, epoch, index)");
  }
}

/// Sample i is i; finish() adds the position's epoch and index.
struct Finished : io::Dataset {
  std::int64_t size() const override { return 5; }
  std::vector<Field> fields() const override { return {{{}, int64}}; }
  void read(std::int64_t index, std::int64_t, const io::Sample& to) const override {
    to.field<std::int64_t>(0)[0] = index;
  }
  void finish(const Tensors& batch, const io::DataPosition& at) const override {
    for (std::int64_t i = 0; i < batch[0].size(0); ++i) {
      batch[0].data<std::int64_t>()[i] += 100 * at.epoch + 10 * at.index;
    }
  }
};

TEST(DataLoader, LetsTheDataSetFinishEachBatch) {
  const Finished data;
  for (const int workers : {0, 2}) {
    io::DataLoader loader(data, {.batch = 2, .shuffle = false, .workers = workers});
    std::vector<std::int64_t> all;
    for (const Tensors& batch : loader.epoch(1)) {
      const std::vector<std::int64_t> rows = to_vector<std::int64_t>(batch[0]);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    EXPECT_EQ(all, (std::vector<std::int64_t>{100, 101, 122, 123, 144}));
  }
}

TEST(TensorDataset, HasARowOfEachTensor) {
  const Tensor x = from_data({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {2, 3}), labels = from_data({7, 8, 9}, Shape{3});
  const io::TensorDataset data({transpose(x, 0, 1), labels});
  ASSERT_EQ(data.size(), 3);
  io::DataLoader loader(data, {.batch = 3, .shuffle = false});
  const Tensors batch = loader.next();
  EXPECT_EQ(to_vector<float>(batch[0]), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(batch[0].shape(), (Shape{3, 2}));
  EXPECT_EQ(batch[1].dtype(), int32);
  EXPECT_EQ(to_vector<std::int32_t>(batch[1]), (std::vector<std::int32_t>{7, 8, 9}));
  expect_error([&] { data.read(3, 0, io::Sample(batch, 0)); }, "an index in [0, 3), got 3");
  expect_error([] { io::TensorDataset({}); }, "at least one tensor");
  expect_error([&] { io::TensorDataset({x, labels}); }, "the same number of rows, 2, got one of shape [3]");
  expect_error([] { io::TensorDataset({zeros({})}); }, "got one of shape []");
}

TEST(SampleRandom, IsAFunctionOfSeedEpochAndIndex) {
  const auto first = [](std::uint64_t seed, std::int64_t epoch, std::int64_t index) {
    io::SampleRandom random(seed, epoch, index);
    std::vector<double> numbers(5);
    for (double& x : numbers) {
      x = random.uniform();
    }
    return numbers;
  };
  EXPECT_EQ(first(1, 2, 3), first(1, 2, 3));
  std::set<double> all;
  for (std::int64_t i = 0; i < 64; ++i) {
    for (const double x : first(static_cast<std::uint64_t>(i & 3), i >> 2 & 3, i >> 4)) {
      all.insert(x);
    }
  }
  EXPECT_EQ(all.size(), 64u * 5);
}

TEST(SampleRandom, HasTheMomentsOfItsDistributions) {
  io::SampleRandom random(3, 0, 0);
  constexpr int n = 20'000;
  const auto moments = [](auto draw) {
    double sum = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
      const double x = draw();
      sum += x;
      squares += x * x;
    }
    return std::pair(sum / n, squares / n - sum / n * sum / n);
  };
  const auto near = [](std::pair<double, double> got, double mean, double variance) {
    EXPECT_NEAR(got.first, mean, 6 * std::sqrt(variance / n));
    EXPECT_NEAR(got.second, variance, 0.06 * variance);
  };
  near(moments([&] { return random.uniform(2, 4); }), 3, 4 / 12.0);
  near(moments([&] { return static_cast<double>(random.below(6)); }), 2.5, 35 / 12.0);
  near(moments([&] { return random.chance(0.3) ? 1.0 : 0.0; }), 0.3, 0.21);
  near(moments([&] { return random.normal(); }), 0, 1);
  for (const double a : {0.2, 1.0, 3.0}) {
    near(moments([&] { return random.beta(a); }), 0.5, 0.25 / (2 * a + 1));
  }
  expect_error([&] { (void)random.below(0); }, "at least 1, got 0");
  expect_error([&] { (void)random.beta(0); }, "a positive parameter, got 0");
}

TEST(DataLoader, RethrowsErrorsAtTheirBatch) {
  for (const Device device : test_devices()) {
    for (const int workers : {0, 1, 3}) {
      Numbers data(20);
      data.fails_at = 13;
      io::DataLoader loader(data, {.batch = 4, .shuffle = false, .workers = workers, .device = device});
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(to_vector<std::int64_t>(loader.next()[1])[0], 4 * i);
      }
      for (int i = 0; i < 2; ++i) {
        try {
          (void)loader.next();
          ADD_FAILURE() << "expected an exception";
        } catch (const std::runtime_error& error) {
          EXPECT_STREQ(error.what(), "sample 13 is damaged");
        }
        EXPECT_EQ(loader.position(), (io::DataPosition{0, 12}));
      }
    }
  }
}

TEST(DataLoader, WorksOnlyAFewBatchesAhead) {
  const Numbers data(1000);
  {
    io::DataLoader loader(data, {.batch = 1, .workers = 3});
    (void)indices(loader, 10);
  }
  EXPECT_GE(data.reads, 10);
  EXPECT_LE(data.reads, 10 + 3 + 2);
}

TEST(DataLoader, RefusesBadOptions) {
  const Numbers data(5), none(0);
  const auto refuses = [&](const io::DataLoaderOptions& options, const std::string& text) {
    expect_error([&] { io::DataLoader(data, options); }, text);
  };
  refuses({.batch = 0}, "a batch of at least 1, got 0");
  refuses({.workers = -1}, "workers in [0, 256], got -1");
  refuses({.workers = 1000}, "got 1000");
  refuses({.start = {.epoch = -1}}, "got epoch -1");
  refuses({.start = {.index = 5}}, "expected a position in data of 5 samples, got epoch 0, index 5");
  refuses({.start = {.index = -1}}, "index -1");
  refuses({.start = {.epoch = INT64_MAX}}, "expected a position");
  refuses({.batch = 10, .ranks = 4}, "a batch that 4 ranks can share equally, got one of 10 samples");
  refuses({.batch = 4, .rank = 4, .ranks = 4}, "a rank in [0, ranks), got rank 4 of 4");
  refuses({.batch = 4, .rank = -1, .ranks = 4}, "got rank -1 of 4");
  refuses({.ranks = 0}, "got rank 0 of 0");
  expect_error([&] { io::DataLoader(none, {}); }, "at least one sample, got one with 0");
  for (const int workers : {0, 2}) {
    io::DataLoader huge(data, {.batch = std::int64_t{1} << 57, .workers = workers});
    EXPECT_THROW((void)huge.next(), OutOfMemory);
    io::DataLoader larger(data, {.batch = INT64_MAX, .workers = workers});
    expect_error([&] { (void)larger.next(); }, "too many elements");
  }
}

TEST(DataLoader, SamplesHaveTheFieldsAndRowsOfTheirBatch) {
  const Tensors batch{zeros({3, 2}), zeros({3}, int64)};
  EXPECT_EQ(io::Sample(batch, 2).field<float>(0).data(), batch[0].data<float>() + 4);
  expect_error([&] { (void)io::Sample(batch, 0).field<float>(7); }, "expected one of 2 fields, got field 7");
  expect_error([&] { (void)io::Sample(batch, 3).field<float>(0); }, "expected one of 3 rows, got row 3");
  expect_error([&] { (void)io::Sample(batch, -1).field<float>(0); }, "got row -1");
  const Tensors none{zeros({0, 2})};
  expect_error([&] { (void)io::Sample(none, 0).field<float>(0); }, "expected one of 0 rows, got row 0");
}

TEST(TokenWindows, AreShiftedByOneAndCoverEverythingInEachEpoch) {
  const std::vector<std::int32_t> tokens = counting(101);
  const io::TokenWindows windows(tokens, {.context = 10, .seed = 3});
  ASSERT_EQ(windows.size(), 9);
  std::set<std::int64_t> offsets;
  io::DataLoader loader(windows, {.batch = 9, .seed = 5});
  for (int epoch = 0; epoch < 8; ++epoch) {
    const Tensors batch = loader.next();
    const std::vector<std::int64_t> inputs = to_vector<std::int64_t>(batch[0]),
                                    targets = to_vector<std::int64_t>(batch[1]);
    std::vector<std::int64_t> starts;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(inputs[i], inputs[i / 10 * 10] + static_cast<std::int64_t>(i % 10));
      EXPECT_EQ(targets[i], inputs[i] + 1);
      if (i % 10 == 0) {
        starts.push_back(inputs[i]);
      }
    }
    std::sort(starts.begin(), starts.end());
    EXPECT_LT(starts[0], 10);
    offsets.insert(starts[0]);
    for (std::size_t i = 1; i < starts.size(); ++i) {
      EXPECT_EQ(starts[i], starts[i - 1] + 10);
    }
  }
  EXPECT_GE(offsets.size(), 4u);
}

TEST(TokenWindows, ReachBothEnds) {
  const auto six = counting(6);
  const io::TokenWindows windows(six, {.context = 4});
  EXPECT_EQ(windows.size(), 1);
  io::DataLoader loader(windows);
  std::set<std::int64_t> starts;
  for (int k = 0; k < 40; ++k) {
    starts.insert(to_vector<std::int64_t>(loader.next()[0])[0]);
  }
  EXPECT_EQ(starts, (std::set<std::int64_t>{0, 1}));
  const auto five = counting(5);
  const io::TokenWindows only(five, {.context = 4});
  io::DataLoader one(only);
  EXPECT_EQ(to_vector<std::int64_t>(one.next()[1]), (std::vector<std::int64_t>{1, 2, 3, 4}));
  expect_error([&] { io::TokenWindows(five, {.context = 5}); }, "expected more tokens than the context of 5, got 5");
  expect_error([&] { io::TokenWindows(five, {.context = 0}); }, "at least 1, got 0");
  const io::TokenWindows checked(io::TokenView(five).below(3), {.context = 4});
  io::DataLoader bad(checked);
  expect_error([&] { (void)bad.next(); }, "expected tokens below 3");
}

TEST(TokenWindows, KnowTheirDocuments) {
  const std::vector<std::int32_t> tokens{9, 1, 2, 9, 3, 9, 9, 4, 5};  // 9 separates
  const auto fields = [&](bool begins) {
    const io::TokenWindows windows(tokens, {.context = 8, .separator = 9, .separator_begins = begins});
    io::DataLoader loader(windows, {.workers = 0});
    std::vector<std::vector<std::int64_t>> lists;
    for (const Tensor& field : loader.next()) {
      lists.push_back(to_vector<std::int64_t>(field));
    }
    return lists;
  };
  using Lists = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(
      fields(true),
      (Lists{{9, 1, 2, 9, 3, 9, 9, 4}, {1, 2, 9, 3, 9, 9, 4, 5}, {0, 1, 2, 0, 1, 0, 0, 1}, {0, 0, 0, 1, 1, 2, 3, 3}}));
  EXPECT_EQ(fields(false), (Lists{{9, 1, 2, 9, 3, 9, 9, 4},
                                  {-100, 2, 9, -100, 9, -100, -100, 5},
                                  {0, 0, 1, 2, 0, 1, 0, 0},
                                  {0, 1, 1, 1, 2, 2, 3, 4}}));
}

// Fields of all windows, in order.
std::vector<std::vector<std::int64_t>> fields_of(const io::EvenWindows& windows) {
  io::DataLoader loader(windows, {.batch = windows.size(), .shuffle = false, .workers = 0});
  std::vector<std::vector<std::int64_t>> lists;
  for (const Tensor& field : loader.next()) {
    lists.push_back(to_vector<std::int64_t>(field));
  }
  return lists;
}

TEST(EvenWindows, CoverTheSequence) {
  const auto tokens = counting(13), fewer = counting(12);
  const io::EvenWindows windows(tokens, {.context = 4});
  ASSERT_EQ(windows.size(), 3);
  EXPECT_EQ(fields_of(windows)[0], (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(fields_of(windows)[1], (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  // One token fewer, and the last window has no last target.
  EXPECT_EQ(io::EvenWindows(fewer, {.context = 4}).size(), 2);
}

TEST(EvenWindows, AreSpreadWhereFewAreWanted) {
  const auto tokens = counting(81);
  const std::vector<std::int64_t> inputs = fields_of(io::EvenWindows(tokens, {.context = 4}, 5))[0];
  std::vector<std::int64_t> starts;
  for (std::size_t i = 0; i < inputs.size(); i += 4) {
    starts.push_back(inputs[i]);
  }
  EXPECT_EQ(starts, (std::vector<std::int64_t>{0, 16, 32, 48, 64}));
}

TEST(EvenWindows, NeedMoreThanAContext) {
  const auto tokens = counting(4);
  expect_error([&] { io::EvenWindows(tokens, {.context = 4}); }, "expected more tokens than the context of 4, got 4");
  expect_error([&] { io::EvenWindows(tokens, {.context = 0}); }, "at least 1, got 0");
  expect_error([&] { io::EvenWindows(tokens, {.context = 3}, 0); }, "expected at least 1 window, got 0");
}

TEST(EvenWindows, KnowTheirDocuments) {
  const std::vector<std::int32_t> tokens{9, 1, 2, 9, 3, 9, 9, 4, 5};
  using Lists = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(fields_of(io::EvenWindows(tokens, {.context = 4, .separator = 9, .separator_begins = false})),
            (Lists{{9, 1, 2, 9, 3, 9, 9, 4},
                   {-100, 2, 9, -100, 9, -100, -100, 5},
                   {0, 0, 1, 2, 0, 1, 0, 0},
                   {0, 1, 1, 1, 0, 0, 1, 2}}));
}

}  // namespace
