#include <gtest/gtest.h>

#include <csignal>
#include <optional>

#include <mica/train/stop_signals.h>

using mica::train::StopSignals;

namespace {

volatile std::sig_atomic_t handled = 0;

TEST(StopSignals, AskToStopOnceAndAreRestored) {
  const auto before = std::signal(SIGUSR1, [](int) { handled = 1; });
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const StopSignals outer;
    EXPECT_FALSE(StopSignals::requested());
    {
      const StopSignals inner;
      std::raise(signal);
      EXPECT_TRUE(StopSignals::requested());
    }
    EXPECT_TRUE(StopSignals::requested());
    const StopSignals another;
    EXPECT_TRUE(StopSignals::requested()) << "the first one still exists";
  }
  EXPECT_EQ(handled, 0);
  std::raise(SIGUSR1);
  EXPECT_EQ(handled, 1);
  std::signal(SIGUSR1, before);
}

TEST(StopSignalsDeathTest, TheSecondSignalEndsTheProgram) {
  const auto twice = [] {
    const StopSignals guard;
    std::raise(SIGTERM);
    std::raise(SIGTERM);
  };
  EXPECT_EXIT(twice(), testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
