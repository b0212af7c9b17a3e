#include <tests/support.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/storage.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

namespace mica {
namespace {

using testing_support::expect_error;

// A storage with a pending transfer: its elements become 1 when they are waited for.
struct Late {
  Tensor x = zeros({4});
  float* const before = x.data<float>();
  int waits = 0;

  Late() {
    Storage::arrive_later(x.handle()->storage, [this] {
      ++waits;
      std::fill(before, before + 4, 1.0F);
    });
  }
  ~Late() { x.handle()->storage->arrive(); }
  Late(const Late&) = delete;
  Late& operator=(const Late&) = delete;
};

TEST(Storage, WaitsForElementsThatAreOnTheirWay) {
  Late late;
  const Tensor view = slice(late.x, 0, 1, 3), detached = late.x.detach();
  EXPECT_TRUE(late.x.handle()->storage->is_on_its_way());
  EXPECT_EQ(view.shape(), Shape{2});
  EXPECT_EQ(late.x.version(), detached.version());
  EXPECT_EQ(late.waits, 0) << "only elements are waited for";
  EXPECT_EQ(late.before[0], 0.0F);
  EXPECT_EQ(to_vector<float>(view), (std::vector<float>{1, 1}));
  EXPECT_FALSE(late.x.handle()->storage->is_on_its_way());
  EXPECT_EQ(to_vector<float>(detached + late.x), std::vector<float>(4, 2));
  EXPECT_EQ(late.waits, 1) << "once";
}

TEST(Storage, WaitsOnceForAllThreads) {
  Late late;
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { right += late.x.data<float>()[3] == 1 ? 1 : 0; });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(right, 4);
  EXPECT_EQ(late.waits, 1);
}

TEST(Storage, WaitsForAllStorages) {
  Storage::arrive_all();
  Late a, b;
  Storage::arrive_all();
  EXPECT_EQ(a.waits, 1);
  EXPECT_EQ(b.waits, 1);
  EXPECT_FALSE(a.x.handle()->storage->is_on_its_way());
}

TEST(Storage, ThrowsUntilWaitingSucceeds) {
  const Tensor x = zeros({1});
  bool fails = true;
  Storage::arrive_later(x.handle()->storage, [&] { check(!fails, "rank 1 has failed"); });
  expect_error([&] { Storage::arrive_later(x.handle()->storage, [] {}); },
               "storage: a transfer into it is already pending");
  expect_error([&] { to_vector<float>(x); }, "rank 1 has failed");
  expect_error([&] { (void)(x + x); }, "rank 1 has failed");
  EXPECT_TRUE(x.handle()->storage->is_on_its_way());
  fails = false;
  EXPECT_EQ(x.item(), 0);
}

TEST(Storage, LivesUntilItsElementsHaveArrived) {
  std::weak_ptr<Storage> storage;
  {
    const Tensor x = zeros({1});
    storage = x.handle()->storage;
    Storage::arrive_later(x.handle()->storage, [] {});
  }
  EXPECT_FALSE(storage.expired());
  Storage::arrive_all();
  EXPECT_TRUE(storage.expired());
}

}  // namespace
}  // namespace mica
