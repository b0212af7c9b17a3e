#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
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

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

constexpr Call barrier{.kind = CallKind::barrier};

ControlOptions patient() { return {.judge = {.beat = 0.05, .silence = 30, .collective = 30}, .start = 30}; }

// The ranks of a run, as threads of this process.
class Ranks {
 public:
  explicit Ranks(int size, const ControlOptions& options = patient()) : controls(static_cast<std::size_t>(size)) {
    Descriptor listener = std::move(*listen_on(0, true));
    port_ = port_of(listener);
    std::vector<std::thread> others;
    for (int rank = 1; rank < size; ++rank) {
      others.emplace_back([&, rank] {
        controls[rank] =
            std::make_unique<Control>(std::vector<Address>{{"127.0.0.1", port_}}, rank, size, token, options);
      });
    }
    controls[0] = std::make_unique<Control>(std::move(listener), size, token, options);
    for (std::thread& other : others) {
      other.join();
    }
    std::vector<int> all;
    for (int rank = 0; rank < size; ++rank) {
      all.push_back(rank);
    }
    for (const std::unique_ptr<Control>& control : controls) {
      journals.push_back(control->open(0, all));
    }
  }

  ~Ranks() {
    for (const std::unique_ptr<Control>& control : controls) {
      control->leave();
    }
    for (std::size_t rank = controls.size(); rank-- > 0;) {
      controls[rank]->close();
    }
  }

  // Calls f(rank) on a thread of each rank.
  void on_each(const std::function<void(int)>& f) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < controls.size(); ++rank) {
      threads.emplace_back(f, static_cast<int>(rank));
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  // What an exchange on this rank throws, after at most half a minute.
  std::string failure_of(int rank) {
    return message_of([&] { (void)controls[rank]->exchange(*journals[rank], {}); });
  }

  const Token token = random_token();
  std::vector<std::unique_ptr<Control>> controls;
  std::vector<std::shared_ptr<Journal>> journals;

 private:
  int port_ = 0;
};

TEST(Control, ExchangesBytesInTheOrderOfTheGroup) {
  Ranks ranks(3);
  std::vector<std::vector<Bytes>> last(3);
  ranks.on_each([&](int rank) {
    for (int i = 0; i < 20; ++i) {
      last[rank] = ranks.controls[rank]->exchange(
          *ranks.journals[rank], Bytes(static_cast<std::size_t>(rank) * 5000, static_cast<std::byte>(i)));
    }
    // Each group numbers its collectives separately.
    if (rank > 0) {
      const auto part = ranks.controls[rank]->open(5, {2, 1});
      const std::vector<Bytes> both = ranks.controls[rank]->exchange(*part, Bytes(1, static_cast<std::byte>(rank)));
      EXPECT_EQ(both, (std::vector<Bytes>{Bytes(1, std::byte{2}), Bytes(1, std::byte{1})}));
    }
  });
  for (const std::vector<Bytes>& got : last) {
    EXPECT_EQ(got, (std::vector<Bytes>{Bytes(), Bytes(5000, std::byte{19}), Bytes(10000, std::byte{19})}));
  }
  EXPECT_NE(message_of([&] { (void)ranks.controls[1]->exchange(*ranks.journals[1], Bytes(20000)); }).find("16384"),
            std::string::npos);
}

// The collectives of runs without MPI.
TEST(Control, CarriesCollectivesOfTensors) {
  constexpr std::int64_t n = 50000;  // of 8 bytes: in two pieces
  Ranks ranks(3);
  ranks.on_each([&](int rank) {
    const std::shared_ptr<Collectives> host = host_collectives(
        std::shared_ptr<Control>(ranks.controls[rank].get(), [](Control*) {}), ranks.journals[rank], rank);
    std::vector<std::int64_t> own(n), whole;
    for (int of = 0; of < 3; ++of) {
      std::iota(own.begin(), own.end(), 10000 * of);
      whole.insert(whole.end(), own.begin(), own.end());
    }
    std::iota(own.begin(), own.end(), 10000 * rank);
    const Tensor x = from_data(own, {n}), into = zeros({3, n}, int64);
    host->all_gather(x, into)->wait();
    EXPECT_EQ(to_vector<std::int64_t>(into), whole);
    host->broadcast(x, 1)->wait();
    std::iota(own.begin(), own.end(), 10000);
    EXPECT_EQ(to_vector<std::int64_t>(x), own);
    host->all_reduce(into, Reduction::max)->wait();
    EXPECT_EQ(to_vector<std::int64_t>(into), whole);
    const Tensor part = zeros({n}, int64);
    host->reduce_scatter(into, part, Reduction::sum)->wait();
    std::iota(own.begin(), own.end(), 10000 * rank);
    std::transform(own.begin(), own.end(), own.begin(), [](std::int64_t value) { return 3 * value; });
    EXPECT_EQ(to_vector<std::int64_t>(part), own);
    // One collective without a wait, and others at the same time.
    (void)host->broadcast(x, 0);
    const auto first = host->broadcast(x, 2), second = host->all_gather(x, into);
    second->wait();
    EXPECT_TRUE(first->ended());
    first->wait();
  });
}

TEST(Control, MinAndMaxKeepNaN) {
  Ranks ranks(3);
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    std::array<std::vector<double>, 3> least, greatest;
    ranks.on_each([&](int rank) {
      const std::shared_ptr<Collectives> host = host_collectives(
          std::shared_ptr<Control>(ranks.controls[rank].get(), [](Control*) {}), ranks.journals[rank], rank);
      // Element i is NaN on rank i only; the last two are zeros of both signs.
      std::vector<double> own{1, 1, 1, rank == 0 ? -0.0 : 0.0, rank == 2 ? -0.0 : 0.0};
      own[static_cast<std::size_t>(rank)] = std::nan("");
      for (const auto& [reduction, results] :
           {std::pair(Reduction::min, &least), std::pair(Reduction::max, &greatest)}) {
        const Tensor x = from_data(own, {5}).to(dtype);
        host->all_reduce(x, reduction)->wait();
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
TEST(Control, GivesNoResultsToRanksThatDiverge) {
  Ranks ranks(2);
  std::array<std::string, 2> failures;
  ranks.on_each([&](int rank) {
    const std::shared_ptr<Collectives> host = host_collectives(
        std::shared_ptr<Control>(ranks.controls[rank].get(), [](Control*) {}), ranks.journals[rank], rank);
    const Reduction reduction = rank == 0 ? Reduction::sum : Reduction::max;
    const Tensor x = full({2}, 1 + rank);
    const std::uint64_t number =
        ranks.journals[rank]->begin({.kind = CallKind::all_reduce, .reduction = reduction, .count = 2});
    const std::shared_ptr<Transfer> transfer = host->all_reduce(x, reduction);
    ranks.journals[rank]->attach(number, transfer);
    failures[static_cast<std::size_t>(rank)] = message_of([&] { transfer->wait(); });
    EXPECT_EQ(to_vector<float>(x), std::vector<float>(2, static_cast<float>(1 + rank)));
  });
  for (const std::string& failure : failures) {
    EXPECT_NE(failure.find("the ranks diverged: as collective 0, "), std::string::npos) << failure;
    EXPECT_NE(failure.find("rank 1 called all_reduce (max)"), std::string::npos) << failure;
  }
}

// Collectives that MPI or NCCL ran, with results, and after which the programs end.
TEST(Control, RanksThatDivergeDoNotLeaveUnnoticed) {
  for (const bool diverge : {true, false}) {
    Ranks ranks(3);
    ranks.on_each([&](int rank) {
      const bool other = diverge && rank == 2;
      {
        const Entered call(
            *ranks.journals[rank],
            {.kind = CallKind::all_reduce, .reduction = other ? Reduction::max : Reduction::sum, .count = 2});
      }
      ranks.controls[rank]->leave();
      EXPECT_EQ(ranks.controls[rank]->failed(), diverge) << rank;
    });
    if (diverge) {
      EXPECT_NE(ranks.controls[1]->verdict().find("rank 2 called all_reduce (max)"), std::string::npos);
    }
  }
}

// Rank 1 has left before rank 2 reports that it called something else.
TEST(Control, ARankThatLeavesWaitsForTheReportsOfOthers) {
  Ranks ranks(3);
  for (const int rank : {0, 1}) {
    const Entered call(*ranks.journals[rank], barrier);
  }
  std::thread leaving([&] {
    ranks.controls[1]->leave();
    EXPECT_TRUE(ranks.controls[1]->failed());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  { const Entered call(*ranks.journals[2], {.kind = CallKind::broadcast, .root = 1, .count = 3}); }
  leaving.join();
}

#if !defined(MICA_THREAD_SANITIZER)  // It ends processes that start threads after fork().

// Two ranks in a process that is stopped for longer than they may be silent. The second part of each pair reports once
// an hour, so that no message comes after the stop that would excuse the silence.
TEST(Control, ARankThatWasStoppedBlamesNoOther) {
  std::array<int, 2> ready{}, go{};
  ASSERT_TRUE(pipe(ready.data()) == 0 && pipe(go.data()) == 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);
    ControlOptions quick = patient(), slow = patient();
    quick.judge.silence = 4;
    slow.judge.beat = 3600;
    std::vector<std::unique_ptr<Control>> controls;
    for (const bool hub_is_quick : {true, false}) {
      Descriptor listener = std::move(*listen_on(0, true));
      const int port = port_of(listener);
      std::unique_ptr<Control> other;
      std::thread rank_1([&] {
        other = std::make_unique<Control>(std::vector<Address>{{"127.0.0.1", port}}, 1, 2, Token{},
                                          hub_is_quick ? slow : quick);
      });
      controls.push_back(std::make_unique<Control>(std::move(listener), 2, Token{}, hub_is_quick ? quick : slow));
      rank_1.join();
      controls.push_back(std::move(other));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for the first reports
    char byte = 0;
    (void)!write(ready[1], &byte, 1);
    (void)!read(go[0], &byte, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(700));  // for a verdict
    int failed = 0;
    for (std::size_t i = 0; i < controls.size(); ++i) {
      failed |= controls[i]->failed() ? 1 << i : 0;
    }
    _exit(failed);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  ASSERT_EQ(kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(std::chrono::seconds(6));
  ASSERT_EQ(kill(child, SIGCONT), 0);
  ASSERT_EQ(write(go[1], &byte, 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "exit status " << WEXITSTATUS(status) << ": a bit for each rank with a verdict";
  for (const int end : {ready[0], ready[1], go[0], go[1]}) {
    (void)close(end);
  }
}

#endif

TEST(Control, TellsAllRanksWhichOneDied) {
  Ranks ranks(3);
  std::vector<std::string> failures(3);
  std::atomic<int> told{0};
  for (const int rank : {0, 2}) {
    ranks.controls[rank]->on_verdict([&told] { ++told; });
  }
  ranks.controls[1]->cut();
  ranks.on_each([&](int rank) { failures[rank] = ranks.failure_of(rank); });
  const std::string expected = "exchange: rank 1 (process";
  EXPECT_EQ(failures[0].substr(0, expected.size()), expected) << failures[0];
  EXPECT_EQ(failures[2], failures[0]);
  EXPECT_NE(failures[1].find("rank 0 died, or the link to it broke"), std::string::npos) << failures[1];
  EXPECT_EQ(told, 2);
  // All later calls fail, too.
  EXPECT_EQ("exchange: " + message_of([&] { ranks.controls[0]->check("all_reduce"); }).substr(12), failures[0]);
  ranks.controls[0]->on_verdict([&told] { ++told; });
  EXPECT_EQ(told, 3);
}

TEST(Control, TellsAllRanksThatRank0Failed) {
  Ranks ranks(3);
  std::vector<std::string> failures(3);
  ranks.on_each([&](int rank) {
    if (rank == 0) {
      ranks.controls[0]->report_failure("no space left");
      EXPECT_TRUE(ranks.controls[0]->failed()) << "the process may end now, so the others must have been told";
    } else {
      failures[rank] = ranks.failure_of(rank);
    }
  });
  EXPECT_NE(failures[1].find("rank 0 (process"), std::string::npos) << failures[1];
  EXPECT_NE(failures[1].find("failed: no space left"), std::string::npos) << failures[1];
  EXPECT_EQ(failures[1], failures[2]);
}

TEST(Control, NamesTheRankThatLeftAndTheOneThatDoesNotCome) {
  {
    Ranks ranks(3);
    ranks.controls[2]->leave();
    EXPECT_NE(ranks.failure_of(1).find("rank 2 ("), std::string::npos);
    EXPECT_NE(ranks.failure_of(0).find("has left: its program ended before"), std::string::npos);
  }
  Ranks ranks(3, {.judge = {.beat = 0.05, .silence = 30, .collective = 0.5}, .start = 30});
  std::thread other([&] { (void)ranks.failure_of(1); });
  const std::string failure = ranks.failure_of(0);
  other.join();
  EXPECT_NE(failure.find("rank 2 ("), std::string::npos) << failure;
  EXPECT_NE(failure.find("has not come to exchange"), std::string::npos) << failure;
}

TEST(Control, WaitsForARankWithATask) {
  Ranks ranks(2, {.judge = {.beat = 0.02, .silence = 30, .collective = 0.1}, .start = 30});
  ranks.controls[1]->begin_task("validation");
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until rank 0 knows
  std::string failure = "none";
  std::thread waiting([&] { failure = ranks.failure_of(0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(ranks.failure_of(1), "");
  waiting.join();
  EXPECT_EQ(failure, "");
  ranks.controls[1]->end_task();
}

TEST(Control, NamesRanksThatDiverge) {
  Ranks ranks(2);
  { const Entered call(*ranks.journals[0], barrier); }
  { const Entered call(*ranks.journals[1], {.kind = CallKind::broadcast, .dtype = int64, .root = 1, .count = 3}); }
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

TEST(Control, RefusesOtherConnections) {
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
    ControlOptions short_start = patient();
    short_start.start = 0.5;
    refused = message_of([&] { Control({{"127.0.0.1", port}}, 1, 2, random_token(), short_start); });
  });
  std::unique_ptr<Control> first;
  std::thread rank_1;
  std::thread hub([&] { first = std::make_unique<Control>(std::move(listener), 2, token, patient()); });
  other.join();
  EXPECT_NE(refused.find("rank 1 could not connect to rank 0 within 0.5 s"), std::string::npos) << refused;
  Control second({{"127.0.0.1", port}}, 1, 2, token, patient());
  hub.join();
  const auto a = first->open(0, {0, 1}), b = second.open(0, {0, 1});
  std::thread exchange([&] { (void)second.exchange(*b, {}); });
  EXPECT_EQ(first->exchange(*a, {}).size(), 2U);
  exchange.join();
  first->leave();
  second.leave();
}

TEST(Control, NamesRanksThatDoNotConnect) {
  ControlOptions options = patient();
  options.start = 0.3;
  EXPECT_EQ(message_of([&] { Control(std::move(*listen_on(0, true)), 3, Token{}, options); }),
            "world: ranks 1 and 2 did not connect to rank 0 within 0.3 s. If the ranks need longer to start, set "
            "MICA_DIST_START_TIMEOUT to more seconds");
  // Nobody listens at this port.
  int port = 0;
  {
    const Descriptor listener = std::move(*listen_on(0, true));
    port = port_of(listener);
  }
  EXPECT_EQ(message_of([&] {
              Control({{"127.0.0.1", port}}, 1, 3, Token{}, options);
            }),
            fmt::format("world: rank 1 could not connect to rank 0 within 0.3 s; tried 127.0.0.1 port {}", port));
}

TEST(Control, RefusesARankOfARunOfAnotherSize) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  std::string failure;
  std::thread hub([&] {
    ControlOptions options = patient();
    options.start = 1;
    failure = message_of([&] { Control(std::move(listener), 2, Token{}, options); });
  });
  const std::string refused = message_of([&] { Control({{"127.0.0.1", port}}, 1, 4, Token{}, patient()); });
  EXPECT_NE(refused.find("says that it is rank 1 of 4, and rank 0 is one of 2"), std::string::npos) << refused;
  hub.join();
  EXPECT_NE(failure.find("rank 1 did not connect to rank 0 within 1 s; refused: process"), std::string::npos)
      << failure;
}

// With a token of zeros, from "process 77".
std::string hello_of_rank_1(int size) {
  const Bytes payload = Writer()
                            .value(std::uint64_t{0x31306163696d00ffU})
                            .bytes(Bytes(16))
                            .value(1)
                            .value(size)
                            .text("process 77")
                            .take();
  Bytes message = Writer().value(static_cast<std::uint32_t>(payload.size())).value(std::uint8_t{1}).take();
  message.insert(message.end(), payload.begin(), payload.end());
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

TEST(Control, WaitsForAHelloThatComesInPartsAndLate) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  std::string failure;
  std::thread hub([&] { failure = message_of([&] { Control(std::move(listener), 2, Token{}, patient()); }); });
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
  hub.join();
  EXPECT_EQ(failure, "");
}

// Rank 3 never connects, so the others wait.
TEST(Control, NamesARankThatDiesWhileOthersStart) {
  Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  ControlOptions options = patient();
  options.judge.silence = 2;
  std::string failure, failure_of_2;
  std::thread hub([&] { failure = message_of([&] { Control(std::move(listener), 4, Token{}, options); }); });
  std::thread rank_2([&] {
    failure_of_2 = message_of([&] { Control({{"127.0.0.1", port}}, 2, 4, Token{}, options); });
  });
  {
    const Descriptor rank_1 = connected_to(port);
    write_to(rank_1, hello_of_rank_1(4));
    std::byte answer{};
    EXPECT_EQ(recv(rank_1.number(), &answer, 1, 0), 1) << "welcome";
  }
  hub.join();
  rank_2.join();
  EXPECT_EQ(failure, "world: rank 1 (process 77) died: its connection was closed before all ranks had come");
  EXPECT_EQ(failure_of_2, failure);
}

TEST(Control, NamesRank0IfItIsSilentWhileOthersStart) {
  const Descriptor listener = std::move(*listen_on(0, true));
  const int port = port_of(listener);
  ControlOptions options = patient();
  options.judge.silence = 0.3;
  std::string failure;
  std::thread rank_1([&] { failure = message_of([&] { Control({{"127.0.0.1", port}}, 1, 3, Token{}, options); }); });
  // Welcomes the rank and then sends nothing.
  std::optional<Descriptor> accepted;
  while (!accepted) {
    accepted = accept_from(listener);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const Bytes payload = Writer().value(std::uint64_t{0x31306163696d00ffU}).bytes(Bytes(16)).take();
  Bytes message = Writer().value(static_cast<std::uint32_t>(payload.size())).value(std::uint8_t{2}).take();
  message.insert(message.end(), payload.begin(), payload.end());
  write_to(*accepted, std::string(reinterpret_cast<const char*>(message.data()), message.size()));
  rank_1.join();
  EXPECT_EQ(failure, "world: rank 0 has not been heard of for 0.3 s: it hangs, or the link to it is lost");
}

// ---- Addresses for the rendezvous.

class Variables {
 public:
  explicit Variables(std::vector<std::pair<const char*, const char*>> variables) : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) {
      setenv(name, value, 1);
    }
  }
  ~Variables() {
    for (const auto& [name, value] : variables_) {
      unsetenv(name);
    }
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  std::vector<std::pair<const char*, const char*>> variables_;
};

TEST(Rendezvous, ReadsTheFirstHostOfSlurmsList) {
  EXPECT_EQ(first_host("login"), "login");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("gpu[07-12,15],login"), "gpu07");
  EXPECT_EQ(first_host("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_host("rack[2-3]-ib,x"), "rack2-ib");
  EXPECT_THROW((void)first_host(""), Error);
  EXPECT_THROW((void)first_host("gpu[07"), Error);
}

TEST(Rendezvous, FindsTheAddressInTheEnvironment) {
  const Placement torchrun{.rank = 1, .size = 2, .launcher = "torchrun"};
  EXPECT_EQ(message_of([&] { (void)meeting_from_environment(torchrun); }),
            "world: torchrun started 2 processes, which need MPI or the variables MASTER_ADDR and MASTER_PORT to find "
            "each other");
  Token token{};
  {
    const Variables variables({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "65530"}});
    const Meeting meeting = meeting_from_environment(torchrun);
    EXPECT_TRUE(meeting.loopback_only);
    ASSERT_EQ(meeting.addresses.size(), 6U);
    EXPECT_EQ(meeting.addresses[0].host, "127.0.0.1");
    EXPECT_EQ(meeting.addresses[5].port, 65535);
    token = meeting.token;
    EXPECT_EQ(meeting_from_environment(torchrun).token, token);
  }
  {
    // torchrun's store listens at the port itself.
    const Variables variables({{"MASTER_ADDR", "localhost"},
                               {"MASTER_PORT", "37599"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RUN_ID", "078044d1-bedb-4bb4-ab95-787e13a1ea9c"}});
    const Meeting meeting = meeting_from_environment(torchrun);
    EXPECT_TRUE(meeting.loopback_only);
    ASSERT_EQ(meeting.addresses.size(), 16U);
    EXPECT_EQ(meeting.addresses.front().port, 37600);
    EXPECT_EQ(meeting.addresses.back().port, 37615);
    {
      const Variables restarted(std::vector<std::pair<const char*, const char*>>{{"TORCHELASTIC_RESTART_COUNT", "1"}});
      EXPECT_NE(meeting_from_environment(torchrun).token, meeting.token);
    }
    const Variables own(std::vector<std::pair<const char*, const char*>>{{"MICA_DIST_PORT", "6000"}});
    EXPECT_EQ(meeting_from_environment(torchrun).addresses.front().port, 6000);
  }
  {
    const Variables variables({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5000"}, {"MICA_DIST_PORT", "6000"}});
    const Meeting meeting = meeting_from_environment(torchrun);
    EXPECT_FALSE(meeting.loopback_only);
    EXPECT_EQ(meeting.addresses[0].port, 6000);
    EXPECT_NE(meeting.token, token);
  }
  {
    const Variables variables({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "many"}});
    EXPECT_EQ(message_of([&] { (void)meeting_from_environment(torchrun); }),
              "world: expected the variable MASTER_PORT to be a port, got \"many\"");
  }
  const Variables variables({{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "n[4-5]"}});
  const Meeting meeting = meeting_from_environment({.rank = 1, .size = 2, .launcher = "Slurm"});
  EXPECT_EQ(meeting.addresses[0].host, "n4");
  EXPECT_GE(meeting.addresses[0].port, 20000);
}

TEST(Rendezvous, RunsHaveDifferentTokens) {
  using List = std::vector<std::pair<const char*, const char*>>;
  std::set<Token> tokens;
  const auto is_new = [&](const List& list) {
    const Variables variables(list);
    return tokens.insert(meeting_from_environment({.rank = 1, .size = 2, .launcher = "torchrun"}).token).second;
  };
  EXPECT_TRUE(is_new({{"MASTER_ADDR", "other"}, {"MASTER_PORT", "5000"}}));
  EXPECT_TRUE(is_new({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5001"}}));
  const Variables address(List{{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5000"}});
  for (const char* const name :
       {"SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MICA_DIST_TOKEN"}) {
    EXPECT_TRUE(is_new({{name, "x"}})) << name;
  }
  // With tokens of 16 random bits instead of 128, hundreds of these would be equal.
  for (int run = 0; run < 5000; ++run) {
    const std::string id = std::to_string(run);
    ASSERT_TRUE(is_new({{"TORCHELASTIC_RUN_ID", id.c_str()}})) << run;
  }
}

TEST(Rendezvous, TakesTheNextPortIfOneIsInUse) {
  const Descriptor taken = std::move(*listen_on(0, true));
  const int port = port_of(taken);
  EXPECT_FALSE(listen_on(port, true).has_value());
  EXPECT_NE(message_of([&] {
              (void)listen_at({{"", port}}, true);
            }).find("are in use; set MICA_DIST_PORT"),
            std::string::npos);
  const Descriptor next = listen_at({{"", port}, {"", 0}}, true);
  EXPECT_NE(port_of(next), port);
}

TEST(Rendezvous, ReadsTimeouts) {
  const ControlOptions defaults = control_options_from_environment();
  EXPECT_EQ(defaults.judge.collective, 20);
  EXPECT_EQ(defaults.judge.silence, 10);
  EXPECT_EQ(defaults.start, 25);
  {
    const Variables variables({{"MICA_DIST_TIMEOUT", "0"}, {"MICA_DIST_HEARTBEAT_TIMEOUT", "2.5"}});
    const ControlOptions options = control_options_from_environment();
    EXPECT_EQ(options.judge.collective, 0);
    EXPECT_EQ(options.judge.silence, 2.5);
    EXPECT_EQ(options.judge.beat, 0.5);
  }
  for (const char* const name : {"MICA_DIST_TIMEOUT", "MICA_DIST_HEARTBEAT_TIMEOUT", "MICA_DIST_START_TIMEOUT"}) {
    for (const char* const value : {"soon", "-1", "nan", "inf", "3s", "1e300", "2e9"}) {
      const Variables variables(std::vector<std::pair<const char*, const char*>>{{name, value}});
      EXPECT_EQ(message_of([] { (void)control_options_from_environment(); }),
                fmt::format("world: expected the variable {} to be a number of seconds up to 1e+09, got \"{}\"", name,
                            value));
    }
  }
}

}  // namespace
}  // namespace mica::distributed::detail
