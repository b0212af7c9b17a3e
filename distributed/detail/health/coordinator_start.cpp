// Establishes the connections of a run: rank 0 accepts, the others connect.

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
constexpr std::size_t most_strangers = 64;
constexpr std::chrono::seconds patience(5);  // with a peer that sends nothing
constexpr double longest = 1e9;              // seconds: 30 years, which a clock can add

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

ControlOptions control_options_from_environment() {
  ControlOptions options;
  options.judge.collective = seconds_from_environment("MICA_DIST_TIMEOUT", options.judge.collective, true);
  options.judge.silence = seconds_from_environment("MICA_DIST_HEARTBEAT_TIMEOUT", options.judge.silence, false);
  options.start = seconds_from_environment("MICA_DIST_START_TIMEOUT", options.start, false);
  options.judge.beat = std::min(1.0, options.judge.silence / 5);
  if (options.judge.collective > 0) {
    options.judge.beat = std::min(options.judge.beat, options.judge.collective / 5);
  }
  options.judge.beat = std::max(options.judge.beat, 0.02);
  return options;
}

// On rank 0: accepts the other ranks.
class Control::Gathering {
 public:
  Gathering(Control& control, Descriptor listener, const Token& token)
      : control_(control),
        listener_(std::move(listener)),
        token_(token),
        deadline_(control.epoch_ + seconds(control.options_.start)),
        labels_(control.size_),
        gone_(control.size_) {
    labels_[0] = own_label();
    peers().resize(control.size_);
  }

  /// Returns the ranks' labels once all have connected.
  std::vector<std::string> run() {
    while (!missing().empty()) {
      wait_for_news();
      give_up_if_hopeless();
      show_life();
      accept_strangers();
      notice_lost();
      for (Stranger& stranger : strangers_) {
        hear(stranger);
      }
      std::erase_if(strangers_, [](const Stranger& stranger) { return stranger.connection == nullptr; });
    }
    tell_peers(Type::ready, {});
    return std::move(labels_);
  }

 private:
  /// A peer that has connected, but has not yet shown that it belongs to the run.
  struct Stranger {
    std::unique_ptr<Connection> connection;
    Clock::time_point deadline;
  };

  std::vector<std::unique_ptr<Connection>>& peers() { return control_.connections_; }

  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int rank = 1; rank < control_.size_; ++rank) {
      if (peers()[rank] == nullptr) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  void wait_for_news() {
    std::vector<pollfd> waiting{{.fd = listener_.number(), .events = POLLIN, .revents = 0}};
    for (const Stranger& stranger : strangers_) {
      waiting.push_back({.fd = stranger.connection->descriptor(), .events = POLLIN, .revents = 0});
    }
    for (const std::unique_ptr<Connection>& peer : peers()) {
      if (peer) {
        waiting.push_back({.fd = peer->descriptor(), .events = POLLIN, .revents = 0});
      }
    }
    (void)poll(waiting.data(), waiting.size(), 100);
  }

  void give_up_if_hopeless() {
    if (Clock::now() >= deadline_) {
      give_up(fmt::format(
          "{} did not connect to rank 0 within {:g} s{}. If the ranks need longer to start, set "
          "MICA_DIST_START_TIMEOUT to more seconds",
          list_ranks(missing()), control_.options_.start, refused_.empty() ? "" : "; refused: " + refused_));
    }
    for (int rank = 1; rank < control_.size_; ++rank) {
      if (gone_[rank] && control_.now() > *gone_[rank] + control_.options_.judge.silence / 2) {
        give_up(
            fmt::format("rank {} ({}) died: its connection was closed before all ranks had come", rank, labels_[rank]));
      }
    }
  }

  [[noreturn]] void give_up(const std::string& text) {
    tell_peers(Type::reject, Writer().text(text).take());
    fail("world: {}", text);
  }

  void tell_peers(Type type, const Bytes& payload) {
    for (const std::unique_ptr<Connection>& peer : peers()) {
      if (peer) {
        send(*peer, type, payload);
        peer->flush();
      }
    }
  }

  /// Tells the connected ranks, which wait for the others, that rank 0 is alive.
  void show_life() {
    if (control_.now() >= next_sign_of_life_) {
      next_sign_of_life_ = control_.now() + control_.options_.judge.beat;
      tell_peers(Type::alive, {});
    }
  }

  void accept_strangers() {
    while (std::optional<Descriptor> accepted = accept_from(listener_)) {
      if (strangers_.size() < most_strangers) {
        strangers_.push_back({.connection = std::make_unique<Connection>(std::move(*accepted), largest_hello),
                              .deadline = Clock::now() + patience});
      }
    }
  }

  /// Notices lost connections. Such a rank may connect again.
  void notice_lost() {
    for (int rank = 1; rank < control_.size_; ++rank) {
      if (peers()[rank]) {
        peers()[rank]->receive();
        if (peers()[rank]->closed()) {
          peers()[rank] = nullptr;
          gone_[rank] = control_.now();
        }
      }
    }
  }

  void hear(Stranger& stranger) {
    stranger.connection->receive();
    const std::optional<Message> message = stranger.connection->next();
    if (!message) {
      if (stranger.connection->closed() || Clock::now() >= stranger.deadline) {
        stranger.connection = nullptr;
      }
      return;
    }
    try {
      admit(*message, std::move(stranger.connection));
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
    if (size != control_.size_ || rank < 1 || rank >= size) {
      refused_ =
          fmt::format("{} says that it is rank {} of {}, and rank 0 is one of {}", label, rank, size, control_.size_);
    } else if (peers()[rank] != nullptr && labels_[rank] != label) {
      refused_ = fmt::format("{} and {} both say that they are rank {}", labels_[rank], label, rank);
    } else {
      labels_[rank] = label;
      gone_[rank].reset();
      connection->set_limit(largest_report);
      send(*connection, Type::welcome, welcome(token_));
      connection->flush();
      peers()[rank] = std::move(connection);
      return;
    }
    send(*connection, Type::reject, Writer().text(refused_).take());
    connection->flush();
  }

  Control& control_;
  Descriptor listener_;
  Token token_;
  Clock::time_point deadline_;
  std::vector<std::string> labels_;
  std::vector<std::optional<double>> gone_;  // when the connection to a rank was lost
  std::vector<Stranger> strangers_;
  std::string refused_;  // why the last rank was refused
  double next_sign_of_life_ = 0;
};

void Control::gather(Descriptor listener, const Token& token) {
  std::vector<std::string> labels = Gathering(*this, std::move(listener), token).run();
  judge_ = std::make_unique<Judge>(std::move(labels), options_.judge, now());
}

// On the other ranks: connects to rank 0.
void Control::reach(const std::vector<Address>& hub, const Token& token) {
  const Clock::time_point deadline = epoch_ + seconds(options_.start);
  const Bytes greeting = hello(token, rank_, size_, own_label());
  std::string refused;
  const auto accepted = [&](Connection& connection, Clock::time_point soon) {
    send(connection, Type::hello, greeting);
    connection.flush();
    while (wait_to_read(connection, soon + std::chrono::seconds(2))) {
      connection.receive();
      if (const std::optional<Message> message = connection.next()) {
        try {
          Reader reader(message->payload);
          if (message->type == static_cast<std::uint8_t>(Type::reject)) {
            refused = reader.text();
          }
          return message->type == static_cast<std::uint8_t>(Type::welcome) && shows_token(reader, token);
        } catch (const Error&) {
          return false;
        }
      }
      if (connection.closed()) {
        break;
      }
    }
    return false;
  };
  std::unique_ptr<Connection> connection;
  for (;;) {
    connection = connect_to(hub, deadline, accepted);
    mica::check(refused.empty(), "world: rank 0 refused this process: {}", refused);
    if (connection != nullptr) {
      break;
    }
    std::string tried;
    for (const Address& address : hub) {
      tried += fmt::format("{}{} port {}", tried.empty() ? "" : ", ", address.host, address.port);
    }
    mica::check(Clock::now() < deadline, "world: rank {} could not connect to rank 0 within {:g} s; tried {}", rank_,
                options_.start, tried);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  connection->set_limit(largest_answer);
  // Until the others have connected, or rank 0 has given up waiting.
  for (;;) {
    mica::check(wait_to_read(*connection, Clock::now() + seconds(options_.judge.silence)),
                "world: rank 0 has not been heard of for {:g} s: it hangs, or the link to it is lost",
                options_.judge.silence);
    connection->receive();
    if (const std::optional<Message> message = connection->next()) {
      if (message->type == static_cast<std::uint8_t>(Type::ready)) {
        break;
      }
      if (message->type == static_cast<std::uint8_t>(Type::reject)) {
        mica::fail("world: {}", Reader(message->payload).text());
      }
    }
    mica::check(!connection->closed(), "world: rank 0 closed its connection before all ranks had come");
  }
  connections_.resize(1);
  connections_[0] = std::move(connection);
  hub_heard_ = now();
}

}  // namespace mica::distributed::detail
