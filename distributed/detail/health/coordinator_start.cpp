// How the ranks of a run connect: rank 0 accepts, the others call.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string_view>

#include <mica/distributed/detail/health/coordinator.h>

namespace mica::distributed::detail {

namespace {

constexpr std::uint64_t magic = 0x31306163696d00ffU;  // no text begins with these bytes
constexpr std::size_t largest_hello = 1024;           // bytes; limit before a peer has shown the token
constexpr std::size_t largest_report = 1 << 20;
constexpr std::size_t largest_answer = 1 << 26;
constexpr std::size_t most_unknown_peers = 64;
constexpr std::chrono::seconds hello_timeout(5);
constexpr double longest = 1e9;  // seconds: 30 years, which a clock can add

double seconds_from_environment(const char* variable, double otherwise, bool zero_allowed) {
  const char* const value = std::getenv(variable);
  if (value == nullptr || *value == '\0') {
    return otherwise;
  }
  const std::string_view text = value;
  double result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  mica::check(error == std::errc{} && end == text.data() + text.size() && std::isfinite(result) &&
                  (result > 0 || (zero_allowed && result == 0)) && result <= longest,
              "world: expected the variable {} to be a number of seconds up to {:g}, got \"{}\"", variable, longest,
              text);
  return result;
}

Clock::duration seconds(double x) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(x));
}

std::string own_label() { return fmt::format("process {} on {}", getpid(), host_name()); }

Bytes hello(const Token& token, int rank, int size, const std::string& label) {
  return Writer().value(magic).bytes(Bytes(token.begin(), token.end())).value(rank).value(size).text(label).take();
}

Bytes welcome(const Token& token) { return Writer().value(magic).bytes(Bytes(token.begin(), token.end())).take(); }

bool shows_token(Reader& reader, const Token& token) {
  return reader.value<std::uint64_t>() == magic && reader.bytes() == Bytes(token.begin(), token.end());
}

}  // namespace

CoordinatorOptions coordinator_options_from_environment() {
  CoordinatorOptions options;
  FailureDetector::Options& detector = options.detector;
  detector.collective_timeout = seconds_from_environment("MICA_DIST_TIMEOUT", detector.collective_timeout, true);
  detector.heartbeat_timeout =
      seconds_from_environment("MICA_DIST_HEARTBEAT_TIMEOUT", detector.heartbeat_timeout, false);
  options.start_timeout = seconds_from_environment("MICA_DIST_START_TIMEOUT", options.start_timeout, false);
  detector.heartbeat_interval = std::min(1.0, detector.heartbeat_timeout / 5);
  if (detector.collective_timeout > 0) {
    detector.heartbeat_interval = std::min(detector.heartbeat_interval, detector.collective_timeout / 5);
  }
  detector.heartbeat_interval = std::max(detector.heartbeat_interval, 0.02);
  return options;
}

// On rank 0: accepts the other ranks.
class Coordinator::Acceptor {
 public:
  Acceptor(Coordinator& coordinator, Descriptor listener, const Token& token)
      : coordinator_(coordinator),
        listener_(std::move(listener)),
        token_(token),
        deadline_(coordinator.epoch_ + seconds(coordinator.options_.start_timeout)),
        labels_(coordinator.size_),
        lost_(coordinator.size_) {
    labels_[0] = own_label();
    ranks().resize(coordinator.size_);
  }

  /// Returns the ranks' labels once all have connected.
  std::vector<std::string> run() {
    while (!missing().empty()) {
      wait_for_events();
      give_up_if_too_late();
      send_signs_of_life();
      accept_peers();
      notice_lost_ranks();
      for (UnknownPeer& peer : unknown_peers_) {
        receive_hello(peer);
      }
      std::erase_if(unknown_peers_, [](const UnknownPeer& peer) { return peer.connection == nullptr; });
    }
    coordinator_.send_to_all(Type::ready, {});
    (void)coordinator_.flush_all();
    return std::move(labels_);
  }

 private:
  /// Has connected, but has not yet shown that it belongs to the run.
  struct UnknownPeer {
    std::unique_ptr<Connection> connection;
    Clock::time_point deadline;
  };

  std::vector<std::unique_ptr<Connection>>& ranks() { return coordinator_.connections_; }

  std::vector<int> missing() {
    std::vector<int> missing;
    for (int rank = 1; rank < coordinator_.size_; ++rank) {
      if (ranks()[rank] == nullptr) {
        missing.push_back(rank);
      }
    }
    return missing;
  }

  void wait_for_events() {
    std::vector<pollfd> waiting{{.fd = listener_.number(), .events = POLLIN, .revents = 0}};
    for (const UnknownPeer& peer : unknown_peers_) {
      waiting.push_back({.fd = peer.connection->descriptor(), .events = POLLIN, .revents = 0});
    }
    for (const std::unique_ptr<Connection>& rank : ranks()) {
      if (rank) {
        waiting.push_back({.fd = rank->descriptor(), .events = POLLIN, .revents = 0});
      }
    }
    (void)poll(waiting.data(), waiting.size(), 100);
  }

  /// Gives up at the deadline, or if a rank has died.
  void give_up_if_too_late() {
    if (Clock::now() >= deadline_) {
      give_up(
          fmt::format("{} did not connect to rank 0 within {:g} s{}. If the ranks need longer to start, set "
                      "MICA_DIST_START_TIMEOUT to more seconds",
                      list_ranks(missing()), coordinator_.options_.start_timeout,
                      refused_.empty() ? "" : "; refused: " + refused_));
    }
    for (int rank = 1; rank < coordinator_.size_; ++rank) {
      if (lost_[rank] && coordinator_.now() > *lost_[rank] + coordinator_.options_.detector.heartbeat_timeout / 2) {
        give_up(
            fmt::format("rank {} ({}) died: its connection was closed before all ranks had come", rank, labels_[rank]));
      }
    }
  }

  [[noreturn]] void give_up(const std::string& text) {
    coordinator_.send_to_all(Type::reject, Writer().text(text).take());
    (void)coordinator_.flush_all();
    fail("world: {}", text);
  }

  /// The connected ranks wait for the others, and would take silence for a failure of rank 0.
  void send_signs_of_life() {
    if (coordinator_.now() >= next_sign_of_life_) {
      next_sign_of_life_ = coordinator_.now() + coordinator_.options_.detector.heartbeat_interval;
      coordinator_.send_to_all(Type::alive, {});
      (void)coordinator_.flush_all();
    }
  }

  void accept_peers() {
    while (std::optional<Descriptor> accepted = accept_from(listener_)) {
      if (unknown_peers_.size() < most_unknown_peers) {
        unknown_peers_.push_back({.connection = std::make_unique<Connection>(std::move(*accepted), largest_hello),
                                  .deadline = Clock::now() + hello_timeout});
      }
    }
  }

  /// A rank whose connection is lost may connect again.
  void notice_lost_ranks() {
    for (int rank = 1; rank < coordinator_.size_; ++rank) {
      if (ranks()[rank]) {
        ranks()[rank]->receive();
        if (ranks()[rank]->closed()) {
          ranks()[rank] = nullptr;
          lost_[rank] = coordinator_.now();
        }
      }
    }
  }

  void receive_hello(UnknownPeer& peer) {
    peer.connection->receive();
    const std::optional<Message> message = peer.connection->next();
    if (!message) {
      if (peer.connection->closed() || Clock::now() >= peer.deadline) {
        peer.connection = nullptr;
      }
      return;
    }
    try {
      admit(*message, std::move(peer.connection));
    } catch (const Error&) {
      // The peer does not belong to this run.
    }
  }

  void admit(const Message& message, std::unique_ptr<Connection> connection) {
    Reader reader(message.payload);
    if (message.type != static_cast<std::uint8_t>(Type::hello) || !shows_token(reader, token_)) {
      return;
    }
    const auto rank = reader.value<int>();
    const auto size = reader.value<int>();
    const std::string label = reader.text();
    if (size != coordinator_.size_ || rank < 1 || rank >= size) {
      refused_ = fmt::format("{} says that it is rank {} of {}, and rank 0 is one of {}", label, rank, size,
                             coordinator_.size_);
    } else if (ranks()[rank] != nullptr && labels_[rank] != label) {
      refused_ = fmt::format("{} and {} both say that they are rank {}", labels_[rank], label, rank);
    } else {
      labels_[rank] = label;
      lost_[rank].reset();
      connection->set_limit(largest_report);
      send(*connection, Type::welcome, welcome(token_));
      connection->flush();
      ranks()[rank] = std::move(connection);
      return;
    }
    send(*connection, Type::reject, Writer().text(refused_).take());
    connection->flush();
  }

  Coordinator& coordinator_;
  Descriptor listener_;
  Token token_;
  Clock::time_point deadline_;
  std::vector<std::string> labels_;
  std::vector<std::optional<double>> lost_;  // when the connection to a rank was lost
  std::vector<UnknownPeer> unknown_peers_;
  std::string refused_;  // why the last rank was refused
  double next_sign_of_life_ = 0;
};

void Coordinator::accept_ranks(Descriptor listener, const Token& token) {
  std::vector<std::string> labels = Acceptor(*this, std::move(listener), token).run();
  detector_ = std::make_unique<FailureDetector>(std::move(labels), options_.detector, now());
}

// On the other ranks.
void Coordinator::connect_to_rank_0(const std::vector<Address>& addresses, const Token& token) {
  std::unique_ptr<Connection> connection = greet_rank_0(addresses, token);
  connection->set_limit(largest_answer);
  wait_until_ready(*connection);
  connections_.push_back(std::move(connection));
  rank_0_heard_ = now();
}

// Tries the addresses until rank 0 welcomes this process.
std::unique_ptr<Connection> Coordinator::greet_rank_0(const std::vector<Address>& addresses, const Token& token) const {
  const Clock::time_point deadline = epoch_ + seconds(options_.start_timeout);
  const Bytes greeting = hello(token, rank_, size_, own_label());
  std::string refused;
  const auto is_welcome = [&](const Message& message) {
    try {
      Reader reader(message.payload);
      if (message.type == static_cast<std::uint8_t>(Type::reject)) {
        refused = reader.text();
      }
      return message.type == static_cast<std::uint8_t>(Type::welcome) && shows_token(reader, token);
    } catch (const Error&) {
      return false;
    }
  };
  const auto accepted = [&](Connection& connection, Clock::time_point soon) {
    send(connection, Type::hello, greeting);
    connection.flush();
    while (wait_to_read(connection, soon + std::chrono::seconds(2))) {
      connection.receive();
      if (const std::optional<Message> message = connection.next()) {
        return is_welcome(*message);
      }
      if (connection.closed()) {
        break;
      }
    }
    return false;
  };
  for (;;) {
    std::unique_ptr<Connection> connection = connect_to(addresses, deadline, accepted);
    mica::check(refused.empty(), "world: rank 0 refused this process: {}", refused);
    if (connection != nullptr) {
      return connection;
    }
    std::string tried;
    for (const Address& address : addresses) {
      tried += fmt::format("{}{} port {}", tried.empty() ? "" : ", ", address.host, address.port);
    }
    mica::check(Clock::now() < deadline, "world: rank {} could not connect to rank 0 within {:g} s; tried {}", rank_,
                options_.start_timeout, tried);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// Until all ranks have connected, or rank 0 has given up waiting for them.
void Coordinator::wait_until_ready(Connection& connection) const {
  const double timeout = options_.detector.heartbeat_timeout;
  for (;;) {
    // First those that arrived together with the welcome.
    while (const std::optional<Message> message = connection.next()) {
      if (message->type == static_cast<std::uint8_t>(Type::ready)) {
        return;
      }
      if (message->type == static_cast<std::uint8_t>(Type::reject)) {
        mica::fail("world: {}", Reader(message->payload).text());
      }
    }
    mica::check(!connection.closed(), "world: rank 0 closed its connection before all ranks had come");
    mica::check(wait_to_read(connection, Clock::now() + seconds(timeout)),
                "world: rank 0 has not been heard of for {:g} s: it hangs, or the link to it is lost", timeout);
    connection.receive();
  }
}

}  // namespace mica::distributed::detail
