#include <gtest/gtest.h>

#include <numeric>

#include <mica/core/check.h>
#include <mica/distributed/detail/health/failure_detector.h>

namespace mica::distributed::detail {
namespace {

constexpr Call sum_of_10{.kind = CallKind::all_reduce, .count = 10};
constexpr Call sum_of_20{.kind = CallKind::all_reduce, .count = 20};
constexpr Call barrier_of_4{.kind = CallKind::barrier};

// Four ranks in one group, 7.
class FailureDetectorOfFour : public testing::Test {
 protected:
  FailureDetectorOfFour() {
    for (int rank = 0; rank < 4; ++rank) {
      detector.join(rank, 7, {0, 1, 2, 3}, 0);
    }
  }

  // `rank` reports `calls`, numbered from `first`. It has waited in the last one for `waits` seconds; negative: it is
  // not waiting.
  void report(int rank, std::uint64_t first, std::vector<Call> calls, double waits, double now,
              std::uint64_t group = 7) {
    Heartbeat heartbeat{.group = group, .started = first + calls.size(), .first = first, .calls = calls};
    if (waits >= 0) {
      const std::uint64_t last = heartbeat.started - 1;
      heartbeat.pending = {.number = last, .call = calls.empty() ? sum_of_10 : calls.back(), .seconds = waits};
    }
    detector.heartbeat(rank, heartbeat, now);
  }

  std::string failure(double now) { return detector.failure(now).value_or(""); }

  FailureDetector detector{
      {"a", "b", "c", "d"}, {.heartbeat_interval = 1, .heartbeat_timeout = 10, .collective_timeout = 20}, 0};
};

TEST_F(FailureDetectorOfFour, FindsNothingWhileRanksAreHealthy) {
  for (int second = 1; second < 100; ++second) {
    for (int rank = 0; rank < 4; ++rank) {
      detector.alive(rank, second, "", second);
      report(rank, static_cast<std::uint64_t>(second - 1), {sum_of_10}, second % 3 == rank ? 0.5 : -1, second);
    }
    EXPECT_EQ(failure(second), "");
  }
  EXPECT_FALSE(detector.all_left());
  for (int rank = 0; rank < 4; ++rank) {
    detector.leave(rank, false, "", 100);
    detector.closed(rank, "", 100);
  }
  EXPECT_TRUE(detector.all_left());
  EXPECT_EQ(failure(200), "");
}

TEST_F(FailureDetectorOfFour, NamesRanksThatDie) {
  detector.closed(2, "", 5);
  EXPECT_EQ(failure(5.1), "");
  detector.closed(3, "", 5.1);
  // A failure on another rank that is only a consequence must not be blamed.
  detector.leave(1, true, "connection reset", 5.1);
  EXPECT_EQ(failure(5.3),
            "rank 2 (c) died: its connection was closed without a goodbye; rank 3 (d) died: its connection was closed "
            "without a goodbye");
  detector.closed(1, "", 5.4);
  EXPECT_NE(failure(6).find("rank 2 (c)"), std::string::npos) << "the first decision stands";
}

TEST_F(FailureDetectorOfFour, NamesTheRankThatFailsAndItsReason) {
  detector.leave(1, true, "out of memory: asked for 8 bytes", 5);
  detector.closed(1, "", 5);
  EXPECT_EQ(failure(5.3), "rank 1 (b) failed: out of memory: asked for 8 bytes");
}

TEST_F(FailureDetectorOfFour, NamesARankThatSendsNonsense) {
  detector.closed(1, "a message that is too short", 5);
  EXPECT_EQ(failure(5.3), "rank 1 (b) failed: it sent a message that is too short");
}

TEST_F(FailureDetectorOfFour, NamesARankThatIsSilent) {
  const FailureDetector fresh = detector;
  for (int silent = 0; silent < 4; ++silent) {
    detector = fresh;
    for (int second = 1; second <= 12; ++second) {
      EXPECT_EQ(failure(second - 1), "") << second;
      for (int rank = 0; rank < 4; ++rank) {
        if (rank != silent) {
          detector.alive(rank, 0, "", second);
        }
      }
    }
    EXPECT_EQ(failure(12), fmt::format("rank {} ({}) has not been heard of for 10 s: it hangs, or has lost its link",
                                       silent, "abcd"[silent]));
  }
}

TEST_F(FailureDetectorOfFour, NamesARankThatIsSilentWhileItLeaves) {
  detector.leave(2, false, "", 1);
  for (const int rank : {0, 1, 3}) {
    detector.alive(rank, 0, "", 12);
  }
  EXPECT_EQ(failure(12), "");
  EXPECT_EQ(failure(12.3), "rank 2 (c) has not been heard of for 10 s: it hangs, or has lost its link");
}

TEST_F(FailureDetectorOfFour, ExcusesSilenceIfItWasStoppedItself) {
  detector.restart_silence(1000);
  EXPECT_EQ(failure(1001), "");
  EXPECT_EQ(failure(1009), "");
}

// All ranks except `late` are waiting.
#define WAIT_FOR(late, seconds, now)                                  \
  for (int rank = 0; rank < 4; ++rank) {                              \
    detector.alive(rank, rank == (late) ? 3.5 : 0, "", now);          \
    if (rank != (late)) {                                             \
      report(rank, (seconds) > 0 ? 1 : 0, {sum_of_10}, seconds, now); \
    }                                                                 \
  }

TEST_F(FailureDetectorOfFour, NamesARankThatDoesNotCome) {
  WAIT_FOR(1, 0, 1);
  for (const int rank : {0, 2, 3}) {
    detector.heartbeat(rank, {.group = 7, .started = 1, .first = 1, .pending = Heartbeat::Pending{0, sum_of_10, 19.5}},
                       20);
  }
  detector.alive(1, 3.5, "", 20);
  EXPECT_EQ(failure(20), "");
  for (const int rank : {0, 2, 3}) {
    detector.heartbeat(rank, {.group = 7, .started = 1, .first = 1, .pending = Heartbeat::Pending{0, sum_of_10, 20.5}},
                       21);
  }
  EXPECT_EQ(failure(21), "");
  EXPECT_EQ(failure(21.3),
            "rank 1 (b) has not come to all_reduce (sum) of 10 float32 on the CPU, collective 0; it used 3.5 s of "
            "processor time since its last collective, and ranks 0, 2 and 3 waited for 20 s. If that is no fault, set "
            "MICA_DIST_TIMEOUT to more seconds");
}

// Progress is that a collective starts, or that the one that was waited for ends.
TEST_F(FailureDetectorOfFour, CountsProcessorTimeSinceTheLastProgress) {
  const auto report_at = [&](double used, bool starts, bool waits, double now) {
    detector.alive(1, used, "", now);
    report(1, starts ? 0 : 1, starts ? std::vector<Call>{sum_of_10} : std::vector<Call>{}, waits ? 0.5 : -1, now);
  };
  const auto blame = [&](double used, double now) {
    for (const int rank : {0, 2, 3}) {
      report(rank, 0, {sum_of_10, sum_of_10}, 20.5, now);
    }
    detector.alive(1, used, "", now);
    (void)failure(now);
    return failure(now + 0.3);
  };
  const FailureDetector fresh = detector;
  report_at(10, true, true, 1);
  report_at(11, false, false, 2);  // it has ended
  report_at(12, false, false, 3);
  const std::string after_an_end = blame(13.5, 4);
  EXPECT_NE(after_an_end.find("collective 1; it used 2.5 s of processor time since"), std::string::npos)
      << after_an_end;

  detector = fresh;
  report_at(10, true, false, 1);
  report_at(12, false, false, 2);
  const std::string after_a_start = blame(13.5, 4);
  EXPECT_NE(after_a_start.find("collective 1; it used 3.5 s of processor time since"), std::string::npos)
      << after_a_start;
}

TEST_F(FailureDetectorOfFour, WaitsForARankWithATask) {
  for (const double seconds : {21.0, 500.0}) {
    for (const int rank : {0, 2, 3}) {
      detector.heartbeat(rank, {.group = 7, .started = 0, .first = 0}, seconds);
    }
    detector.alive(1, 0, "checkpoint", seconds);
    for (const int rank : {0, 2, 3}) {
      detector.heartbeat(rank,
                         {.group = 7,
                          .started = 1,
                          .first = 0,
                          .calls = {barrier_of_4},
                          .pending = Heartbeat::Pending{0, barrier_of_4, seconds}},
                         seconds);
    }
    EXPECT_EQ(failure(seconds + 1), "");
  }
  detector.alive(1, 0, "", 501);
  EXPECT_EQ(failure(501), "");
  EXPECT_NE(failure(501.3).find("rank 1 (b) has not come to barrier"), std::string::npos);
}

TEST_F(FailureDetectorOfFour, WithoutTimeoutWaitsForever) {
  detector.set_collective_timeout(0);
  WAIT_FOR(1, 0, 1);
  for (int rank = 0; rank < 4; ++rank) {
    detector.alive(rank, 0, "", 1e6);
  }
  for (const int rank : {0, 2, 3}) {
    detector.heartbeat(rank, {.group = 7, .started = 1, .first = 1, .pending = Heartbeat::Pending{0, sum_of_10, 1e6}},
                       1e6);
  }
  EXPECT_EQ(failure(1e6), "");
  EXPECT_EQ(failure(1e6 + 1), "");
}

// Rank 3 hangs, rank 2 waits for it in a group of the two, the others for rank 2.
TEST_F(FailureDetectorOfFour, BlamesTheRankAtTheEndOfTheChain) {
  detector.join(2, 9, {2, 3}, 0);
  detector.join(3, 9, {2, 3}, 0);
  report(0, 0, {sum_of_10}, 25, 25);
  report(1, 0, {sum_of_10}, 25, 25);
  report(2, 0, {barrier_of_4}, 24, 25, 9);
  detector.alive(3, 0, "", 25);
  (void)failure(25);
  const std::string text = failure(25.3);
  EXPECT_NE(text.find("rank 3 (d) has not come to"), std::string::npos) << text;
  EXPECT_NE(text.find("of the group of ranks 2 and 3"), std::string::npos) << text;
  EXPECT_EQ(text.find("rank 2 (c)"), std::string::npos) << text;
}

TEST_F(FailureDetectorOfFour, NamesAllInADeadlock) {
  for (const int rank : {2, 3}) {
    detector.join(rank, 9, {2, 3}, 0);
  }
  report(0, 0, {sum_of_10}, 25, 25);
  report(1, 0, {sum_of_10}, 25, 25);
  report(3, 0, {sum_of_10}, 25, 25);
  report(2, 0, {barrier_of_4}, 25, 25, 9);
  (void)failure(25);
  const std::string text = failure(25.3);
  EXPECT_NE(text.find("rank 2 (c) waits in another collective and has not come to all_reduce"), std::string::npos)
      << text;
  EXPECT_NE(text.find("rank 3 (d) waits in another collective and has not come to barrier"), std::string::npos) << text;
}

TEST_F(FailureDetectorOfFour, NamesATransferThatDoesNotEnd) {
  for (int rank = 0; rank < 4; ++rank) {
    report(rank, 0, {sum_of_10}, rank == 1 ? 21 : -1, 21);
  }
  (void)failure(21);
  EXPECT_NE(failure(21.3).find("collective 0 did not end on rank 1, though all of its ranks have started it"),
            std::string::npos);
}

TEST_F(FailureDetectorOfFour, LetsTheReplayOfAGraphTakeLongOnceAllHaveLaunchedIt) {
  const Heartbeat replay{.group = 7,
                         .started = 1,
                         .first = 0,
                         .calls = {sum_of_10},
                         .pending = Heartbeat::Pending{.number = 0, .call = sum_of_10, .seconds = 100, .replay = true}};
  const Bytes bytes = pack(replay);
  Reader reader(bytes);
  const Heartbeat received = unpack_heartbeat(reader);
  for (const int rank : {0, 1, 3}) {
    detector.heartbeat(rank, received, 100);
  }
  report(2, 0, {}, -1, 100);
  FailureDetector before = detector;
  (void)before.failure(100);
  EXPECT_NE(before.failure(100.3).value_or("").find("rank 2 (c) has not come to all_reduce"), std::string::npos);
  detector.heartbeat(2, received, 100);
  (void)detector.failure(100);
  EXPECT_EQ(failure(100.3), "");
}

TEST_F(FailureDetectorOfFour, NamesRanksThatDiverge) {
  for (const int rank : {0, 1, 3}) {
    report(rank, 0, {barrier_of_4, sum_of_10}, 0, 1);
    EXPECT_EQ(failure(1), "");
  }
  report(2, 0, {barrier_of_4, sum_of_20, sum_of_10}, 0, 1.5);
  // The report of a consequence arrives first.
  detector.error(0, "message truncated", 1.6);
  EXPECT_EQ(failure(2), "");
  EXPECT_EQ(failure(3.2),
            "the ranks diverged: as collective 1, rank 2 called all_reduce (sum) of 20 float32 on the CPU, ranks 0, 1 "
            "and 3 called all_reduce (sum) of 10 float32 on the CPU");
}

TEST_F(FailureDetectorOfFour, ComparesOnlyWhatItRemembers) {
  const std::vector<Call> many(FailureDetector::remembered, sum_of_10);
  report(0, 0, {barrier_of_4}, -1, 1);
  report(0, 1, many, -1, 1);
  report(1, 0, {sum_of_20}, -1, 1);  // no longer remembered
  report(1, 1, many, -1, 2);
  EXPECT_EQ(failure(3), "");
  EXPECT_EQ(failure(5), "");
}

TEST_F(FailureDetectorOfFour, NamesAnErrorIfNothingExplainsIt) {
  detector.error(1, "all_reduce: MPI_ERR_INTERN", 1);
  EXPECT_EQ(failure(2), "");
  EXPECT_EQ(failure(2.6), "rank 1 (b) failed: all_reduce: MPI_ERR_INTERN");
}

TEST_F(FailureDetectorOfFour, NamesARankThatLeavesOthersWaiting) {
  detector.leave(3, false, "", 1);
  detector.closed(3, "", 1);
  EXPECT_EQ(failure(2), "");
  report(0, 0, {sum_of_10}, 0, 3);
  EXPECT_EQ(failure(3), "");
  EXPECT_EQ(failure(3.3),
            "rank 3 (d) has left: its program ended before all_reduce (sum) of 10 float32 on the CPU, collective 0, in "
            "which others wait for it");
}

TEST_F(FailureDetectorOfFour, ConfirmsRanksOnceAllHaveReportedTheirCalls) {
  detector.join(0, 9, {0, 1}, 1);
  detector.join(1, 9, {0, 1}, 1);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(detector.has_confirmed(rank));
  }
  report(0, 0, {barrier_of_4, sum_of_10}, -1, 1);
  report(0, 0, {sum_of_20}, -1, 1, 9);
  EXPECT_FALSE(detector.has_confirmed(0));
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_TRUE(detector.has_confirmed(rank)) << "it has called nothing";
    report(rank, 0, {barrier_of_4, sum_of_10}, -1, 1);
    EXPECT_FALSE(detector.has_confirmed(0)) << "rank 1 has not reported its call in group 9";
  }
  report(1, 0, {sum_of_20}, -1, 1, 9);
  EXPECT_TRUE(detector.has_confirmed(0));
  report(3, 2, {barrier_of_4, barrier_of_4}, -1, 2);
  EXPECT_FALSE(detector.has_confirmed(3));
  for (const int rank : {0, 1}) {
    detector.leave(rank, false, "", 2);
  }
  detector.leave(2, false, "", 2);
  detector.closed(2, "", 2);
  EXPECT_TRUE(detector.has_confirmed(3)) << "the others have left";
  EXPECT_FALSE(detector.has_suspicion());
  detector.error(3, "", 2);
  EXPECT_TRUE(detector.has_suspicion());
  EXPECT_FALSE(detector.has_confirmed(0)) << "a failure follows";
}

TEST(FailureDetector, ListsRanks) {
  EXPECT_EQ(list_ranks({3}), "rank 3");
  EXPECT_EQ(list_ranks({1, 0}), "ranks 0 and 1");
  EXPECT_EQ(list_ranks({3, 1, 0}), "ranks 0, 1 and 3");
  std::vector<int> many(20);
  std::iota(many.begin(), many.end(), 0);
  EXPECT_EQ(list_ranks(many), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 and 19");
  many.push_back(20);
  EXPECT_EQ(list_ranks(many), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, … (21 ranks)");
}

TEST_F(FailureDetectorOfFour, RefusesReportsThatContradictThemselves) {
  EXPECT_THROW(detector.join(0, 7, {0, 1, 2, 3}, 1), Error) << "twice";
  EXPECT_THROW(detector.join(0, 8, {1, 2}, 1), Error) << "not a member";
  EXPECT_THROW(detector.join(0, 8, {0, 4}, 1), Error) << "no such rank";
  detector.join(0, 8, {0, 1}, 1);
  EXPECT_THROW(detector.join(1, 8, {1, 0}, 1), Error) << "other members";
  EXPECT_THROW(detector.heartbeat(2, {.group = 8}, 1), Error) << "not a member";
  EXPECT_THROW(detector.heartbeat(1, {.group = 8}, 1), Error) << "did not join";
  EXPECT_THROW(detector.heartbeat(0, {.group = 8, .started = 3, .first = 1}, 1), Error) << "calls are missing";
  EXPECT_THROW(detector.drop(3, 8, 1), Error);
  detector.drop(0, 8, 1);
  EXPECT_EQ(detector.members(8), nullptr);
  EXPECT_THROW(detector.drop(0, 8, 1), Error);
}

}  // namespace
}  // namespace mica::distributed::detail
