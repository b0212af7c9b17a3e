#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tests/paths.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "examples/common/ranks.h"

namespace {

// The status of two ranks, started as by --gpus, that are shells.
int status_of_shells(std::string program, std::chrono::milliseconds patience = std::chrono::seconds(60)) {
  const pid_t process = fork();
  if (process == 0) {
    std::string shell = "sh", option = "-c";
    char* arguments[] = {shell.data(), option.data(), program.data(), nullptr};
    _exit(run_ranks(2, "/bin/sh", arguments, patience));
  }
  int status = 0;
  return waitpid(process, &status, 0) == process && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Launch, RunsRanksOfOneMachine) {
  EXPECT_EQ(status_of_shells("exit 0"), 0);
  EXPECT_EQ(status_of_shells("exit $RANK$LOCAL_RANK"), 11);
}

TEST(Launch, KillsStoppedRanksWhenAllOthersHaveEnded) {
  EXPECT_EQ(status_of_shells("test $RANK = 0 || kill -STOP $$; exit 3"), 3);
  EXPECT_EQ(status_of_shells("test $RANK = 1 || kill -STOP $$; exit 3"), 3);
}

TEST(Launch, KillsRanksThatHang) {
  EXPECT_EQ(status_of_shells("test $RANK = 0 || exec sleep 1000; exit 3", std::chrono::milliseconds(100)), 3);
}

// The exit status of scripts/ranks without MPI, for `ranks` shells that run `program`.
int status_of(int ranks, const std::string& program) {
  const std::string command = "MICA_RANKS_MPI=0 MICA_RANKS_GRACE=1 timeout -s KILL 60 " MICA_SCRIPTS "/ranks " +
                              std::to_string(ranks) + " sh -c '" + program + "' 2>/dev/null";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Launch, ReturnsTheStatusOfTheRankThatFails) {
  EXPECT_EQ(status_of(3, "exit 0"), 0);
  EXPECT_EQ(status_of(3, "test $RANK != 2 || exit 5"), 5);
  EXPECT_EQ(status_of(2, "test $LOCAL_RANK$WORLD_SIZE = ${RANK}2"), 0);
}

TEST(Launch, DoesNotWaitForAStoppedRankOnceAnotherHasFailed) {
  EXPECT_EQ(status_of(2, "test $RANK != 0 || kill -STOP $$; exit 3"), 3);
  EXPECT_EQ(status_of(2, "test $RANK != 1 || kill -STOP $$; exit 3"), 3);
}

}  // namespace
