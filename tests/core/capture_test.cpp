#include <gtest/gtest.h>

#include <mica/core/capture.h>
#include <mica/core/check.h>

namespace mica {
namespace {

TEST(Capture, RunsImmediatelyOutsideACapture) {
  int calls = 0;
  on_each_replay([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(is_capturing());
  EXPECT_NO_THROW(check_not_capturing("item"));
}

TEST(Capture, RefusesEmptyFunctions) {
  detail::Capture capture;
  const auto refused = [] {
    try {
      on_each_replay(nullptr);
    } catch (const Error& error) {
      return std::string(error.what()) == "on_each_replay: expected a function to call, got an empty one";
    }
    return false;
  };
  EXPECT_TRUE(refused());
  const detail::Capturing capturing(capture);
  EXPECT_TRUE(refused());
}

TEST(Capture, KeepsCallsForReplays) {
  detail::Capture capture;
  std::vector<int> order;
  {
    const detail::Capturing capturing(capture);
    EXPECT_TRUE(is_capturing());
    on_each_replay([&] { order.push_back(1); });
    on_each_replay([&] { order.push_back(2); });
    EXPECT_TRUE(order.empty());
    try {
      check_not_capturing("item");
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("item: ", 0), 0u) << error.what();
    }
  }
  EXPECT_FALSE(is_capturing());
  ASSERT_EQ(capture.calls.size(), 2u);
  for (int replay = 0; replay < 2; ++replay) {
    for (const auto& call : capture.calls) {
      call();
    }
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 1, 2}));
}

}  // namespace
}  // namespace mica
