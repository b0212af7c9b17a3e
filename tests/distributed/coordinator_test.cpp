#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tests/distributed/support.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/network/rendezvous.h>
#include <mica/distributed/detail/transport/tcp.h>

namespace mica::distributed::detail {
namespace {

constexpr Call barrier{.kind = CallKind::barrier};

CoordinatorOptions patient() {
  return {.detector = {.heartbeat_interval = 0.05, .heartbeat_timeout = 30, .collective_timeout = 30},
          .start_timeout = 30};
}

// The ranks of a run, as threads of this process.
class Ranks {
 public:
  explicit Ranks(int size, const CoordinatorOptions& options = patient())
      : coordinators(static_cast<std::size_t>(size)) {
    Descriptor listener = std::move(*listen_on(0, true));
    port_ = port_of(listener);
    std::vector<std::thread> others;
    for (int rank = 1; rank < size; ++rank) {
      others.emplace_back([&, rank] {
        coordinators[rank] =
            std::make_unique<Coordinator>(std::vector<Address>{{"127.0.0.1", port_}}, rank, size, token, options);
      });
    }
    coordinators[0] = std::make_unique<Coordinator>(std::move(listener), size, token, options);
    for (std::thread& other : others) {
      other.join();
    }
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    for (const std::unique_ptr<Coordinator>& coordinator : coordinators) {
      logs.push_back(coordinator->open(0, all));
    }
  }

  ~Ranks() {
    for (const std::unique_ptr<Coordinator>& coordinator : coordinators) {
      coordinator->leave();
    }
    for (std::size_t rank = coordinators.size(); rank-- > 0;) {
      coordinators[rank]->close();
    }
  }

  // Calls f(rank) on a thread of each rank.
  void on_each(const std::function<void(int)>& f) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < coordinators.size(); ++rank) {
      threads.emplace_back(f, static_cast<int>(rank));
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  // What an exchange on this rank throws, after at most half a minute.
  std::string failure_of(int rank) {
    return message_of([&] { (void)coordinators[rank]->exchange(*logs[rank], {}); });
  }

  const Token token = random_token();
  std::vector<std::unique_ptr<Coordinator>> coordinators;
  std::vector<std::shared_ptr<CollectiveLog>> logs;

 private:
  int port_ = 0;
};

TEST(Coordinator, ExchangesBytesInTheOrderOfTheGroup) {
  Ranks ranks(3);
  std::vector<std::vector<Bytes>> last(3);
  ranks.on_each([&](int rank) {
    for (int i = 0; i < 20; ++i) {
      last[rank] = ranks.coordinators[rank]->exchange(
          *ranks.logs[rank], Bytes(static_cast<std::size_t>(rank) * 5000, static_cast<std::byte>(i)));
    }
    // Each group numbers its collectives separately.
    if (rank > 0) {
      const auto part = ranks.coordinators[rank]->open(5, {2, 1});
      const std::vector<Bytes> both = ranks.coordinators[rank]->exchange(*part, Bytes(1, static_cast<std::byte>(rank)));
      EXPECT_EQ(both, (std::vector<Bytes>{Bytes(1, std::byte{2}), Bytes(1, std::byte{1})}));
    }
  });
  for (const std::vector<Bytes>& got : last) {
    EXPECT_EQ(got, (std::vector<Bytes>{Bytes(), Bytes(5000, std::byte{19}), Bytes(10000, std::byte{19})}));
  }
  EXPECT_NE(message_of([&] { (void)ranks.coordinators[1]->exchange(*ranks.logs[1], Bytes(20000)); }).find("16384"),
            std::string::npos);
}

// The collectives of runs without MPI.
TEST(Coordinator, CarriesCollectivesOfTensors) {
  constexpr std::int64_t n = 50000;  // of 8 bytes: in two chunks
  Ranks ranks(3);
  ranks.on_each([&](int rank) {
    const std::shared_ptr<Collectives> tcp = tcp_collectives(
        std::shared_ptr<Coordinator>(ranks.coordinators[rank].get(), [](Coordinator*) {}), ranks.logs[rank], rank);
    std::vector<std::int64_t> own(n), whole;
    for (int of = 0; of < 3; ++of) {
      std::iota(own.begin(), own.end(), 10000 * of);
      whole.insert(whole.end(), own.begin(), own.end());
    }
    std::iota(own.begin(), own.end(), 10000 * rank);
    const Tensor x = from_data(own, {n}), into = zeros({3, n}, int64);
    tcp->all_gather(x, into)->wait();
    EXPECT_EQ(to_vector<std::int64_t>(into), whole);
    tcp->broadcast(x, 1)->wait();
    std::iota(own.begin(), own.end(), 10000);
    EXPECT_EQ(to_vector<std::int64_t>(x), own);
    tcp->all_reduce(into, Reduction::max)->wait();
    EXPECT_EQ(to_vector<std::int64_t>(into), whole);
    const Tensor part = zeros({n}, int64);
    tcp->reduce_scatter(into, part, Reduction::sum)->wait();
    std::iota(own.begin(), own.end(), 10000 * rank);
    std::transform(own.begin(), own.end(), own.begin(), [](std::int64_t value) { return 3 * value; });
    EXPECT_EQ(to_vector<std::int64_t>(part), own);
    // One collective without a wait, and others at the same time.
    (void)tcp->broadcast(x, 0);
    const auto first = tcp->broadcast(x, 2), second = tcp->all_gather(x, into);
    second->wait();
    EXPECT_TRUE(first->ended());
    first->wait();
  });
}

TEST(Coordinator, MinAndMaxKeepNaN) {
  Ranks ranks(3);
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    std::array<std::vector<double>, 3> least, greatest;
    ranks.on_each([&](int rank) {
      const std::shared_ptr<Collectives> tcp = tcp_collectives(
          std::shared_ptr<Coordinator>(ranks.coordinators[rank].get(), [](Coordinator*) {}), ranks.logs[rank], rank);
      // Element i is NaN on rank i only; the last two are zeros of both signs.
      std::vector<double> own{1, 1, 1, rank == 0 ? -0.0 : 0.0, rank == 2 ? -0.0 : 0.0};
      own[static_cast<std::size_t>(rank)] = std::nan("");
      for (const auto& [reduction, results] :
           {std::pair(Reduction::min, &least), std::pair(Reduction::max, &greatest)}) {
        const Tensor x = from_data(own, {5}).to(dtype);
        tcp->all_reduce(x, reduction)->wait();
        (*results)[static_cast<std::size_t>(rank)] = to_vector<double>(x.to(float64));
      }
    });
    for (const auto* const results : {&least, &greatest}) {
      for (const std::vector<double>& result : *results) {
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(std::isnan(result[i])) << name_of(dtype) << " " << i;
        }
        EXPECT_EQ(std::signbit(result[3]), results == &least);
        EXPECT_EQ(std::signbit(result[4]), results == &least);
      }
    }
  }
}

// No rank may get a result, since each would compute another one.
TEST(Coordinator, GivesNoResultsToRanksThatDiverge) {
  Ranks ranks(2);
  std::array<std::string, 2> failures;
  ranks.on_each([&](int rank) {
    const std::shared_ptr<Collectives> tcp = tcp_collectives(
        std::shared_ptr<Coordinator>(ranks.coordinators[rank].get(), [](Coordinator*) {}), ranks.logs[rank], rank);
    const Reduction reduction = rank == 0 ? Reduction::sum : Reduction::max;
    const Tensor x = full({2}, 1 + rank);
    const std::uint64_t number =
        ranks.logs[rank]->begin({.kind = CallKind::all_reduce, .reduction = reduction, .count = 2});
    const std::shared_ptr<Transfer> transfer = tcp->all_reduce(x, reduction);
    ranks.logs[rank]->attach(number, transfer);
    failures[static_cast<std::size_t>(rank)] = message_of([&] { transfer->wait(); });
    EXPECT_EQ(to_vector<float>(x), std::vector<float>(2, static_cast<float>(1 + rank)));
  });
  for (const std::string& failure : failures) {
    EXPECT_NE(failure.find("the ranks diverged: as collective 0, "), std::string::npos) << failure;
    EXPECT_NE(failure.find("rank 1 called all_reduce (max)"), std::string::npos) << failure;
  }
}

// Collectives that MPI or NCCL ran, with results, and after which the programs end.
TEST(Coordinator, RanksThatDivergeDoNotLeaveUnnoticed) {
  for (const bool diverge : {true, false}) {
    Ranks ranks(3);
    ranks.on_each([&](int rank) {
      const bool other = diverge && rank == 2;
      {
        const LoggedCall call(
            *ranks.logs[rank],
            {.kind = CallKind::all_reduce, .reduction = other ? Reduction::max : Reduction::sum, .count = 2});
      }
      ranks.coordinators[rank]->leave();
      EXPECT_EQ(ranks.coordinators[rank]->failed(), diverge) << rank;
    });
    if (diverge) {
      EXPECT_NE(ranks.coordinators[1]->failure().find("rank 2 called all_reduce (max)"), std::string::npos);
    }
  }
}

// Rank 1 has left before rank 2 reports that it called something else.
TEST(Coordinator, ARankThatLeavesWaitsForTheReportsOfOthers) {
  Ranks ranks(3);
  for (const int rank : {0, 1}) {
    const LoggedCall call(*ranks.logs[rank], barrier);
  }
  std::thread leaving([&] {
    ranks.coordinators[1]->leave();
    EXPECT_TRUE(ranks.coordinators[1]->failed());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  { const LoggedCall call(*ranks.logs[2], {.kind = CallKind::broadcast, .root = 1, .count = 3}); }
  leaving.join();
}

#if !defined(MICA_THREAD_SANITIZER)  // It ends processes that start threads after fork().

// Two ranks in a process that is stopped for longer than they may be silent. The second part of each pair reports once
// an hour, so that no message comes after the stop that would excuse the silence.
TEST(Coordinator, ARankThatWasStoppedBlamesNoOther) {
  std::array<int, 2> ready{}, go{};
  ASSERT_TRUE(pipe(ready.data()) == 0 && pipe(go.data()) == 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);
    CoordinatorOptions quick = patient(), slow = patient();
    quick.detector.heartbeat_timeout = 4;
    slow.detector.heartbeat_interval = 3600;
    std::vector<std::unique_ptr<Coordinator>> coordinators;
    for (const bool rank_0_is_quick : {true, false}) {
      Descriptor listener = std::move(*listen_on(0, true));
      const int port = port_of(listener);
      std::unique_ptr<Coordinator> other;
      std::thread rank_1([&] {
        other = std::make_unique<Coordinator>(std::vector<Address>{{"127.0.0.1", port}}, 1, 2, Token{},
                                              rank_0_is_quick ? slow : quick);
      });
      coordinators.push_back(
          std::make_unique<Coordinator>(std::move(listener), 2, Token{}, rank_0_is_quick ? quick : slow));
      rank_1.join();
      coordinators.push_back(std::move(other));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for the first reports
    char byte = 0;
    (void)!write(ready[1], &byte, 1);
    (void)!read(go[0], &byte, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(700));  // for a decision
    int failed = 0;
    for (std::size_t i = 0; i < coordinators.size(); ++i) {
      failed |= coordinators[i]->failed() ? 1 << i : 0;
    }
    _exit(failed);
  }
  (void)close(ready[1]);  // so that the read ends if the child fails
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  ASSERT_EQ(kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(std::chrono::seconds(6));
  ASSERT_EQ(kill(child, SIGCONT), 0);
  ASSERT_EQ(write(go[1], &byte, 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "exit status " << WEXITSTATUS(status) << ": a bit for each rank that sees a failure";
  for (const int end : {ready[0], go[0], go[1]}) {
    (void)close(end);
  }
}

#endif

TEST(Coordinator, TellsAllRanksWhichOneDied) {
  Ranks ranks(3);
  std::vector<std::string> failures(3);
  std::atomic<int> told{0};
  for (const int rank : {0, 2}) {
    ranks.coordinators[rank]->on_failure([&told] { ++told; });
  }
  ranks.coordinators[1]->cut();
  ranks.on_each([&](int rank) { failures[rank] = ranks.failure_of(rank); });
  const std::string expected = "exchange: rank 1 (process";
  EXPECT_EQ(failures[0].substr(0, expected.size()), expected) << failures[0];
  EXPECT_EQ(failures[2], failures[0]);
  EXPECT_NE(failures[1].find("rank 0 died, or the link to it broke"), std::string::npos) << failures[1];
  EXPECT_EQ(told, 2);
  // All later calls fail, too.
  EXPECT_EQ("exchange: " + message_of([&] { ranks.coordinators[0]->check("all_reduce"); }).substr(12), failures[0]);
  ranks.coordinators[0]->on_failure([&told] { ++told; });
  EXPECT_EQ(told, 3);
}

TEST(Coordinator, TellsAllRanksThatRank0Failed) {
  Ranks ranks(3);
  std::vector<std::string> failures(3);
  ranks.on_each([&](int rank) {
    if (rank == 0) {
      ranks.coordinators[0]->report_failure("no space left");
      EXPECT_TRUE(ranks.coordinators[0]->failed()) << "the process may end now, so the others must have been told";
    } else {
      failures[rank] = ranks.failure_of(rank);
    }
  });
  EXPECT_NE(failures[1].find("rank 0 (process"), std::string::npos) << failures[1];
  EXPECT_NE(failures[1].find("failed: no space left"), std::string::npos) << failures[1];
  EXPECT_EQ(failures[1], failures[2]);
}

TEST(Coordinator, NamesTheRankThatLeftAndTheOneThatDoesNotCome) {
  {
    Ranks ranks(3);
    ranks.coordinators[2]->leave();
    EXPECT_NE(ranks.failure_of(1).find("rank 2 ("), std::string::npos);
    EXPECT_NE(ranks.failure_of(0).find("has left: its program ended before"), std::string::npos);
  }
  Ranks ranks(3, {.detector = {.heartbeat_interval = 0.05, .heartbeat_timeout = 30, .collective_timeout = 0.5},
                  .start_timeout = 30});
  std::thread other([&] { (void)ranks.failure_of(1); });
  const std::string failure = ranks.failure_of(0);
  other.join();
  EXPECT_NE(failure.find("rank 2 ("), std::string::npos) << failure;
  EXPECT_NE(failure.find("has not come to exchange"), std::string::npos) << failure;
}

TEST(Coordinator, WaitsForARankWithATask) {
  Ranks ranks(2, {.detector = {.heartbeat_interval = 0.02, .heartbeat_timeout = 30, .collective_timeout = 0.1},
                  .start_timeout = 30});
  ranks.coordinators[1]->begin_task("validation");
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until rank 0 knows
  std::string failure = "none";
  std::thread waiting([&] { failure = ranks.failure_of(0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(ranks.failure_of(1), "");
  waiting.join();
  EXPECT_EQ(failure, "");
  ranks.coordinators[1]->end_task();
}

TEST(Coordinator, NamesRanksThatDiverge) {
  Ranks ranks(2);
  { const LoggedCall call(*ranks.logs[0], barrier); }
  { const LoggedCall call(*ranks.logs[1], {.kind = CallKind::broadcast, .dtype = int64, .root = 1, .count = 3}); }
  const std::string failure = ranks.failure_of(0);
  EXPECT_NE(failure.find("as collective 0, "), std::string::npos) << failure;
  EXPECT_NE(failure.find("rank 0 called barrier"), std::string::npos) << failure;
  EXPECT_NE(failure.find("rank 1 called broadcast from 1 of 3 int64 on the CPU"), std::string::npos) << failure;
}

// ---- Connections from outside the run.

Descriptor connected_to(int port) {
  Descriptor client(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  EXPECT_EQ(connect(client.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return client;
}

void write_to(const Descriptor& client, const std::string& text) {
  EXPECT_EQ(send(client.number(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
}

TEST(Coordinator, RefusesOtherConnections) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  const Token token = random_token();
  std::vector<Descriptor> strangers;
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(3, '\0'), std::string(8, '\0'), std::string(100000, '\xff'),
        std::string("\x04\0\0\0\x01"
                    "abcd",
                    9),
        std::string("\0\0\0\0\x01", 5), std::string()}) {
    strangers.push_back(connected_to(port));
    write_to(strangers.back(), text);
  }
  // A process of another run.
  std::string refused;
  std::thread other([&] {
    CoordinatorOptions short_start = patient();
    short_start.start_timeout = 0.5;
    refused = message_of([&] { Coordinator({{"127.0.0.1", port}}, 1, 2, random_token(), short_start); });
  });
  std::unique_ptr<Coordinator> first;
  std::thread rank_1;
  std::thread rank_0([&] { first = std::make_unique<Coordinator>(std::move(listener), 2, token, patient()); });
  other.join();
  EXPECT_NE(refused.find("rank 1 could not connect to rank 0 within 0.5 s"), std::string::npos) << refused;
  Coordinator second({{"127.0.0.1", port}}, 1, 2, token, patient());
  rank_0.join();
  const auto a = first->open(0, {0, 1}), b = second.open(0, {0, 1});
  std::thread exchange([&] { (void)second.exchange(*b, {}); });
  EXPECT_EQ(first->exchange(*a, {}).size(), 2U);
  exchange.join();
  first->leave();
  second.leave();
}

TEST(Coordinator, NamesRanksThatDoNotConnect) {
  CoordinatorOptions options = patient();
  options.start_timeout = 0.3;
  EXPECT_EQ(message_of([&] { Coordinator(std::move(*listen_on(0, true)), 3, Token{}, options); }),
            "world: ranks 1 and 2 did not connect to rank 0 within 0.3 s. If the ranks need longer to start, set "
            "MICA_DIST_START_TIMEOUT to more seconds");
  // Nobody listens at this port.
  int port = 0;
  {
    const Descriptor listener = std::move(*listen_on(0, true));
    port = port_of(listener);
  }
  EXPECT_EQ(message_of([&] {
              Coordinator({{"127.0.0.1", port}}, 1, 3, Token{}, options);
            }),
            fmt::format("world: rank 1 could not connect to rank 0 within 0.3 s; tried 127.0.0.1 port {}", port));
}

TEST(Coordinator, RefusesARankOfARunOfAnotherSize) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  std::string failure;
  std::thread rank_0([&] {
    CoordinatorOptions options = patient();
    options.start_timeout = 1;
    failure = message_of([&] { Coordinator(std::move(listener), 2, Token{}, options); });
  });
  const std::string refused = message_of([&] { Coordinator({{"127.0.0.1", port}}, 1, 4, Token{}, patient()); });
  EXPECT_NE(refused.find("says that it is rank 1 of 4, and rank 0 is one of 2"), std::string::npos) << refused;
  rank_0.join();
  EXPECT_NE(failure.find("rank 1 did not connect to rank 0 within 1 s; refused: process"), std::string::npos)
      << failure;
}

std::string framed(std::uint8_t type, const Bytes& payload) {
  Bytes message = Writer().value(static_cast<std::uint32_t>(payload.size())).value(type).take();
  message.insert(message.end(), payload.begin(), payload.end());
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// These have a token of zeros.
std::string hello_of_rank_1(int size) {
  return framed(1, Writer()
                       .value(std::uint64_t{0x31306163696d00ffU})
                       .bytes(Bytes(16))
                       .value(1)
                       .value(size)
                       .text("process 77")
                       .take());
}

std::string welcome_of_rank_0() {
  return framed(2, Writer().value(std::uint64_t{0x31306163696d00ffU}).bytes(Bytes(16)).take());
}

Descriptor accepted_from(const Descriptor& listener) {
  for (;;) {
    if (std::optional<Descriptor> accepted = accept_from(listener)) {
      return std::move(*accepted);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST(Coordinator, WaitsForAHelloThatComesInPartsAndLate) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  std::string failure;
  std::thread rank_0([&] { failure = message_of([&] { Coordinator(std::move(listener), 2, Token{}, patient()); }); });
  {
    const Descriptor rank_1 = connected_to(port);
    const std::string hello = hello_of_rank_1(2);
    for (const std::string& part : {hello.substr(0, 20), hello.substr(20)}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      write_to(rank_1, part);
    }
    std::byte answer{};
    EXPECT_EQ(recv(rank_1.number(), &answer, 1, 0), 1) << "welcome";
  }
  rank_0.join();
  EXPECT_EQ(failure, "");
}

// Rank 3 never connects, so the others wait.
TEST(Coordinator, NamesARankThatDiesWhileOthersStart) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  CoordinatorOptions options = patient();
  options.detector.heartbeat_timeout = 2;
  std::string failure, failure_of_2;
  std::thread rank_0([&] { failure = message_of([&] { Coordinator(std::move(listener), 4, Token{}, options); }); });
  std::thread rank_2([&] {
    failure_of_2 = message_of([&] { Coordinator({{"127.0.0.1", port}}, 2, 4, Token{}, options); });
  });
  {
    const Descriptor rank_1 = connected_to(port);
    write_to(rank_1, hello_of_rank_1(4));
    std::byte answer{};
    EXPECT_EQ(recv(rank_1.number(), &answer, 1, 0), 1) << "welcome";
  }
  rank_0.join();
  rank_2.join();
  EXPECT_EQ(failure, "world: rank 1 (process 77) died: its connection was closed before all ranks had come");
  EXPECT_EQ(failure_of_2, failure);
}

TEST(Coordinator, NamesRank0IfItIsSilentWhileOthersStart) {
  const Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  CoordinatorOptions options = patient();
  options.detector.heartbeat_timeout = 0.3;
  std::string failure;
  std::thread rank_1([&] {
    failure = message_of([&] { Coordinator({{"127.0.0.1", port}}, 1, 3, Token{}, options); });
  });
  const Descriptor accepted = accepted_from(listener);
  write_to(accepted, welcome_of_rank_0());  // and then nothing
  rank_1.join();
  EXPECT_EQ(failure, "world: rank 0 has not been heard of for 0.3 s: it hangs, or the link to it is lost");
}

TEST(Coordinator, StartsIfAllMessagesOfRank0ArriveAtOnce) {
  const Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  CoordinatorOptions options = patient();
  options.detector.heartbeat_timeout = 0.3;
  std::string failure;
  std::promise<void> started;
  std::thread rank_1([&] {
    std::unique_ptr<Coordinator> coordinator;
    failure = message_of([&] {
      coordinator = std::make_unique<Coordinator>(std::vector<Address>{{"127.0.0.1", port}}, 1, 2, Token{}, options);
    });
    started.set_value();
  });
  {
    const Descriptor accepted = accepted_from(listener);
    write_to(accepted, welcome_of_rank_0() + framed(4, {}));
    started.get_future().wait();
  }
  rank_1.join();
  EXPECT_EQ(failure, "");
}

TEST(Coordinator, ReadsTimeouts) {
  const CoordinatorOptions defaults = coordinator_options_from_environment();
  EXPECT_EQ(defaults.detector.collective_timeout, 20);
  EXPECT_EQ(defaults.detector.heartbeat_timeout, 10);
  EXPECT_EQ(defaults.start_timeout, 25);
  {
    const Variables variables({{"MICA_DIST_TIMEOUT", "0"}, {"MICA_DIST_HEARTBEAT_TIMEOUT", "2.5"}});
    const CoordinatorOptions options = coordinator_options_from_environment();
    EXPECT_EQ(options.detector.collective_timeout, 0);
    EXPECT_EQ(options.detector.heartbeat_timeout, 2.5);
    EXPECT_EQ(options.detector.heartbeat_interval, 0.5);
  }
  for (const char* const name : {"MICA_DIST_TIMEOUT", "MICA_DIST_HEARTBEAT_TIMEOUT", "MICA_DIST_START_TIMEOUT"}) {
    for (const char* const value : {"soon", "-1", "nan", "inf", "3s", "1e300", "2e9"}) {
      const Variables variables(std::vector<std::pair<const char*, const char*>>{{name, value}});
      EXPECT_EQ(message_of([] { (void)coordinator_options_from_environment(); }),
                fmt::format("world: expected the variable {} to be a number of seconds up to 1e+09, got \"{}\"", name,
                            value));
    }
  }
}

}  // namespace
}  // namespace mica::distributed::detail
