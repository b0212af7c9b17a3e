#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <string_view>

#include <mica/dist/detail/control.h>

namespace mica::dist::detail {

namespace {

constexpr std::uint64_t magic = 0x31306163696d00ffU;  // not the beginning of any text
constexpr std::size_t largest_hello = 1024;           // bytes, before a peer has shown the token
constexpr std::size_t largest_report = 1 << 20;
constexpr std::size_t largest_answer = 1 << 26;
constexpr std::size_t most_strangers = 64;
constexpr std::size_t longest_text = 4096;

double seconds_from_environment(const char* variable, double otherwise, bool zero_allowed) {
  const char* const value = std::getenv(variable);
  if (value == nullptr || *value == '\0') {
    return otherwise;
  }
  const std::string_view text = value;
  double result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  mica::check(error == std::errc{} && end == text.data() + text.size() && std::isfinite(result) &&
                  (result > 0 || (zero_allowed && result == 0)),
              "world: expected the variable {} to be a number of seconds, got \"{}\"", variable, text);
  return result;
}

double processor_time() {
  timespec time{};
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::string own_label() { return fmt::format("process {} on {}", getpid(), host_name()); }

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "…";
}

Bytes hello(const Token& token, int rank, int size, const std::string& label) {
  return Writer().value(magic).bytes(Bytes(token.begin(), token.end())).value(rank).value(size).text(label).take();
}

Bytes welcome(const Token& token) { return Writer().value(magic).bytes(Bytes(token.begin(), token.end())).take(); }

bool shows_token(Reader& reader, const Token& token) {
  return reader.value<std::uint64_t>() == magic && reader.bytes() == Bytes(token.begin(), token.end());
}

Bytes pack(const Call& call) {
  const auto byte = [](auto x) { return static_cast<std::uint8_t>(x); };
  return Writer()
      .value(byte(call.kind))
      .value(byte(call.dtype))
      .value(byte(call.reduction))
      .value(byte(call.on_gpu))
      .value(call.root)
      .value(call.count)
      .take();
}

// What comes is shown to the user and indexes names, so it must be one of the values.
template <class T>
T enumerator(Reader& reader, T last) {
  const auto value = reader.value<std::uint8_t>();
  check(value <= static_cast<std::uint8_t>(last), "a report with a value that does not exist");
  return static_cast<T>(value);
}

Call unpack_call(Reader& reader) {
  Call call;
  call.kind = enumerator(reader, CallKind::exchange);
  call.dtype = enumerator(reader, DType::boolean);
  call.reduction = enumerator(reader, Reduction::max);
  call.on_gpu = reader.value<std::uint8_t>() != 0;
  call.root = reader.value<std::int32_t>();
  call.count = reader.value<std::int64_t>();
  return call;
}

Bytes pack(const Beat& beat) {
  Writer writer;
  writer.value(beat.group).value(beat.started).value(beat.first);
  writer.value(static_cast<std::uint32_t>(beat.calls.size()));
  Bytes bytes = writer.take();
  const auto append = [&](const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); };
  for (const Call& call : beat.calls) {
    append(pack(call));
  }
  append(Writer().value(static_cast<std::uint8_t>(beat.pending ? 1 : 0)).take());
  if (beat.pending) {
    append(Writer().value(beat.pending->number).value(beat.pending->seconds).take());
    append(pack(beat.pending->call));
  }
  return bytes;
}

Beat unpack_beat(Reader& reader) {
  Beat beat;
  beat.group = reader.value<std::uint64_t>();
  beat.started = reader.value<std::uint64_t>();
  beat.first = reader.value<std::uint64_t>();
  const auto count = reader.value<std::uint32_t>();
  check(count <= Journal::capacity, "a report of too many collectives");
  for (std::uint32_t i = 0; i < count; ++i) {
    beat.calls.push_back(unpack_call(reader));
  }
  if (reader.value<std::uint8_t>() != 0) {
    Beat::Pending pending;
    pending.number = reader.value<std::uint64_t>();
    pending.seconds = reader.value<double>();
    pending.call = unpack_call(reader);
    beat.pending = pending;
  }
  return beat;
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

Control::Control(Descriptor listener, int size, const Token& token, const ControlOptions& options)
    : rank_(0), size_(size), options_(options) {
  gather(std::move(listener), token);
  start();
}

Control::Control(const std::vector<Address>& hub, int rank, int size, const Token& token, const ControlOptions& options)
    : rank_(rank), size_(size), options_(options) {
  reach(hub, token);
  start();
}

Control::~Control() { close(); }

// Rank 0 accepts the others.
void Control::gather(Descriptor listener, const Token& token) {
  struct Stranger {
    std::unique_ptr<Connection> connection;
    Clock::time_point deadline;
  };
  std::vector<Stranger> strangers;
  std::vector<std::string> labels(size_);
  labels[0] = own_label();
  std::vector<std::optional<double>> gone(size_);  // since when a rank that had come is gone
  double next_sign = 0;                            // of life, to those that wait
  connections_.resize(size_);
  const Clock::time_point deadline =
      epoch_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.start));
  std::string refused;
  const auto give_up = [&](const std::string& text) {
    for (const std::unique_ptr<Connection>& connection : connections_) {
      if (connection) {
        send(*connection, Type::reject, Writer().text(text).take());
        connection->flush();
      }
    }
    fail("world: {}", text);
  };
  int missing = size_ - 1;
  while (missing > 0) {
    std::vector<pollfd> waiting{{.fd = listener.number(), .events = POLLIN, .revents = 0}};
    for (const Stranger& stranger : strangers) {
      waiting.push_back({.fd = stranger.connection->descriptor(), .events = POLLIN, .revents = 0});
    }
    for (const std::unique_ptr<Connection>& connection : connections_) {
      if (connection) {
        waiting.push_back({.fd = connection->descriptor(), .events = POLLIN, .revents = 0});
      }
    }
    (void)poll(waiting.data(), waiting.size(), 100);
    if (Clock::now() >= deadline) {
      std::vector<int> late;
      for (int rank = 1; rank < size_; ++rank) {
        if (connections_[rank] == nullptr) {
          late.push_back(rank);
        }
      }
      give_up(
          fmt::format("{} did not connect to rank 0 within {:g} s{}. If the ranks need longer to start, set "
                      "MICA_DIST_START_TIMEOUT "
                      "to more seconds",
                      list_ranks(late), options_.start, refused.empty() ? "" : "; refused: " + refused));
    }
    for (int rank = 1; rank < size_; ++rank) {
      if (gone[rank] && now() > *gone[rank] + options_.judge.silence / 2) {
        give_up(
            fmt::format("rank {} ({}) died: its connection was closed before all ranks had come", rank, labels[rank]));
      }
    }
    if (now() >= next_sign) {
      next_sign = now() + options_.judge.beat;
      for (const std::unique_ptr<Connection>& connection : connections_) {
        if (connection) {
          send(*connection, Type::alive, {});
          connection->flush();
        }
      }
    }
    while (std::optional<Descriptor> accepted = accept_from(listener)) {
      if (strangers.size() < most_strangers) {
        strangers.push_back({.connection = std::make_unique<Connection>(std::move(*accepted), largest_hello),
                             .deadline = Clock::now() + std::chrono::seconds(5)});
      }
    }
    // One that gave up comes again.
    for (int rank = 1; rank < size_; ++rank) {
      if (connections_[rank]) {
        connections_[rank]->receive();
        if (connections_[rank]->closed()) {
          connections_[rank] = nullptr;
          gone[rank] = now();
          ++missing;
        }
      }
    }
    for (Stranger& stranger : strangers) {
      stranger.connection->receive();
      const std::optional<Message> message = stranger.connection->next();
      if (!message) {
        if (stranger.connection->closed() || Clock::now() >= stranger.deadline) {
          stranger.connection = nullptr;
        }
        continue;
      }
      std::unique_ptr<Connection> connection = std::move(stranger.connection);
      try {
        Reader reader(message->payload);
        if (message->type != static_cast<std::uint8_t>(Type::hello) || !shows_token(reader, token)) {
          continue;
        }
        const auto rank = reader.value<int>();
        const auto size = reader.value<int>();
        const std::string label = reader.text();
        if (size != size_ || rank < 1 || rank >= size_) {
          refused = fmt::format("{} says that it is rank {} of {}, and rank 0 is one of {}", label, rank, size, size_);
        } else if (connections_[rank] != nullptr && labels[rank] != label) {
          refused = fmt::format("{} and {} both say that they are rank {}", labels[rank], label, rank);
        } else {
          missing -= connections_[rank] == nullptr ? 1 : 0;
          labels[rank] = label;
          connection->set_limit(largest_report);
          send(*connection, Type::welcome, welcome(token));
          connection->flush();
          connections_[rank] = std::move(connection);
          gone[rank].reset();
          continue;
        }
        send(*connection, Type::reject, Writer().text(refused).take());
        connection->flush();
      } catch (const Error&) {
        // Not one of ours.
      }
    }
    std::erase_if(strangers, [](const Stranger& stranger) { return stranger.connection == nullptr; });
  }
  for (int rank = 1; rank < size_; ++rank) {
    send(*connections_[rank], Type::ready, {});
  }
  judge_ = std::make_unique<Judge>(std::move(labels), options_.judge, now());
}

// Another rank connects to rank 0.
void Control::reach(const std::vector<Address>& hub, const Token& token) {
  const auto seconds = [](double x) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(x));
  };
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
  // Until the others have come, or rank 0 has given them up.
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

void Control::start() {
  int ends[2];
  mica::check(pipe(ends) == 0, "world: pipe failed: {}", std::strerror(errno));
  wake_read_ = Descriptor(ends[0]);
  wake_write_ = Descriptor(ends[1]);
  for (const int end : ends) {
    (void)fcntl(end, F_SETFD, FD_CLOEXEC);
    (void)fcntl(end, F_SETFL, O_NONBLOCK);
  }
  thread_ = std::thread([this] { loop(); });
}

void Control::wake() {
  const char byte = 0;
  (void)!write(wake_write_.number(), &byte, 1);  // a full pipe wakes, too
}

void Control::post(Type type, Bytes payload) {
  {
    const std::lock_guard lock(mutex_);
    outgoing_.push_back({type, std::move(payload)});
  }
  wake();
}

std::shared_ptr<Journal> Control::open(std::uint64_t id, std::vector<int> members) {
  auto journal = std::make_shared<Journal>(id, std::move(members));
  {
    const std::lock_guard lock(mutex_);
    new_journals_.push_back(journal);
  }
  wake();
  return journal;
}

std::vector<Bytes> Control::exchange(Journal& group, const Bytes& mine, CallKind kind, std::uint64_t* number) {
  const char* const op = kind == CallKind::barrier ? "barrier" : kind == CallKind::split ? "split" : "exchange";
  mica::check(mine.size() <= largest_exchange, "{}: expected at most {} bytes, got {}", op, largest_exchange,
              mine.size());
  check(op);
  const Entered entered(group, {.kind = kind});
  const Key key(group.id(), entered.number());
  if (number != nullptr) {
    *number = entered.number();
  }
  start_exchange(group, key.second, mine);
  return finish_exchange(group, key.second, op);
}

void Control::start_exchange(const Journal& group, std::uint64_t number, const Bytes& mine) {
  {
    const std::lock_guard lock(mutex_);
    awaited_.emplace(group.id(), number);
  }
  post(Type::exchange, Writer().value(group.id()).value(number).bytes(mine).take());
}

std::vector<Bytes> Control::finish_exchange(const Journal& group, std::uint64_t number, const char* op) {
  const Key key(group.id(), number);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failed() || ended_ || results_.contains(key); });
  if (const auto found = results_.find(key); found != results_.end()) {
    std::vector<Bytes> result = std::move(found->second);
    results_.erase(found);
    return result;
  }
  lock.unlock();
  check(op);
  fail("{}: this process has left the group", op);
}

bool Control::has_exchanged(const Journal& group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return !awaited_.contains(Key(group.id(), number));
}

void Control::forget_exchange(const Journal& group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  awaited_.erase(Key(group.id(), number));
  results_.erase(Key(group.id(), number));
}

// With a lock on mutex_.
void Control::keep_result(const Key& key, std::vector<Bytes> parts) {
  if (awaited_.erase(key) > 0) {
    results_[key] = std::move(parts);
    changed_.notify_all();
  }
}

void Control::throw_verdict(const char* op) const {
  {
    std::unique_lock lock(mutex_);
    (void)changed_.wait_for(lock, std::chrono::seconds(5), [this] { return calls_ == 0; });
  }
  fail("{}: {}", op, verdict_);
}

void Control::on_verdict(std::function<void()> f) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed()) {
      on_verdict_.push_back(std::move(f));
      return;
    }
  }
  f();
}

void Control::on_verdict_apart(std::function<void()> f) {
  const std::lock_guard lock(mutex_);
  if (!failed()) {
    apart_calls_.push_back(std::move(f));
    return;
  }
  call_apart(std::move(f));
}

// With a lock on mutex_. Nobody waits for the thread at the process's end, so this object must then still exist: dist
// never destroys the one that watches over the world.
void Control::call_apart(std::function<void()> f) {
  ++calls_;
  std::thread([this, f = std::move(f)] {
    f();
    const std::lock_guard lock(mutex_);
    --calls_;
    changed_.notify_all();
  }).detach();
}

void Control::report_trouble(const std::string& reason) {
  post(Type::trouble, Writer().text(shortened(reason)).take());
}

void Control::report_failure(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (leaving_ || failed() || ended_) {
    return;
  }
  leaving_ = true;
  failure_ = reason.empty() ? "no reason given" : shortened(reason);
  wake();
  // Rank 0 has said it when it has told the others.
  changed_.wait_for(lock, std::chrono::seconds(1), [this] { return (rank_ > 0 && left_) || failed() || ended_; });
}

void Control::leave() {
  std::unique_lock lock(mutex_);
  if (leaving_ || failed() || ended_) {
    return;
  }
  leaving_ = true;
  wake();
  changed_.wait_for(lock, std::chrono::seconds(1), [this] { return left_ || failed() || ended_; });
}

void Control::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Control::begin_task(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(name.empty() ? "a task" : name.substr(0, longest_text));
  }
  wake();
}

void Control::end_task() {
  const std::lock_guard lock(mutex_);
  tasks_.pop_back();
}

void Control::set_collective_timeout(double seconds) {
  if (rank_ == 0) {
    post(Type::timeout, Writer().value(seconds).take());
  }
}

void Control::cut() {
  {
    const std::lock_guard lock(mutex_);
    cut_ = true;
  }
  wake();
}

// ---- The thread.

void Control::loop() {
  try {
    converse();
  } catch (const std::exception& error) {
    pronounce(fmt::format("rank {} failed: the thread that speaks with the others ended: {}", rank_, error.what()));
    connections_.clear();
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void Control::converse() {
  const double beat = options_.judge.beat;
  double last = now(), next_report = last;
  bool ends = false;
  while (!ends) {
    wait_for_news(next_report);
    const double time = now();
    if (time - last > std::max(2.0, 3 * beat)) {
      // This process was stopped, and what the others sent meanwhile is still unread.
      hub_heard_ = time;
      if (judge_) {
        judge_->forgive(time);
      }
    }
    const double passed = std::min(time - last, 2 * beat);
    bool leaving = false, closing = false;
    {
      const std::lock_guard lock(mutex_);
      if (cut_) {
        for (std::unique_ptr<Connection>& connection : connections_) {
          connection = nullptr;
        }
      }
      leaving = leaving_ && !left_;
      closing = closing_;
    }
    unreported_ += passed;
    last = time;
    if (time >= next_report || leaving) {
      report(std::exchange(unreported_, 0.0));
      next_report = time + beat;
    }
    take_outgoing();
    if (leaving) {
      std::string failure;
      {
        const std::lock_guard lock(mutex_);
        failure = failure_;
      }
      say(Type::leave, Writer().text(failure).take());
    }
    if (rank_ == 0) {
      for (int rank = 1; rank < size_; ++rank) {
        hear(rank);
      }
      if (const std::optional<std::string>& verdict = judge_->verdict(now())) {
        for (int rank = 1; rank < size_; ++rank) {
          if (connections_[rank]) {
            send(*connections_[rank], Type::verdict, Writer().text(*verdict).take());
            connections_[rank]->flush();
          }
        }
        pronounce(*verdict);
        ends = true;
      } else if (closing && judge_->all_left()) {
        for (int rank = 1; rank < size_; ++rank) {
          if (connections_[rank]) {
            send(*connections_[rank], Type::all_left, {});
          }
        }
        ends = true;
      }
    } else {
      hear(0);
      if (!failed() && !all_left_) {
        if (connections_[0] == nullptr) {
          pronounce("rank 0 died, or the link to it broke: its connection was closed");
        } else if (now() - hub_heard_ > options_.judge.silence) {
          pronounce(fmt::format("rank 0 has not been heard of for {:g} s: it hangs, or the link to it is lost",
                                options_.judge.silence));
        }
      }
      ends = failed() || all_left_ || closing;
    }
    bool flushed = true;
    for (const std::unique_ptr<Connection>& connection : connections_) {
      if (connection) {
        connection->flush();
        flushed = flushed && connection->flushed();
      }
    }
    if (leaving && flushed) {
      const std::lock_guard lock(mutex_);
      left_ = true;
      changed_.notify_all();
    }
  }
  linger(rank_ == 0 ? 2 : 1);
  connections_.clear();
  journals_.clear();
}

// Until there is something to read, to write or to do, or the time has come.
void Control::wait_for_news(double until) {
  std::vector<pollfd> waiting{{.fd = wake_read_.number(), .events = POLLIN, .revents = 0}};
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection) {
      const int events = POLLIN | (connection->flushed() ? 0 : POLLOUT);
      waiting.push_back({.fd = connection->descriptor(), .events = static_cast<short>(events), .revents = 0});
    }
  }
  const double longest = rank_ == 0 ? options_.judge.beat / 4 : options_.judge.beat;
  const double seconds = std::clamp(until - now(), 0.0, longest);
  (void)poll(waiting.data(), waiting.size(), static_cast<int>(std::ceil(1000 * seconds)));
  char bytes[64];
  while (read(wake_read_.number(), bytes, sizeof bytes) > 0) {
  }
}

// What this rank does.
void Control::report(double seconds) {
  std::vector<std::shared_ptr<Journal>> opened;
  std::string task;
  {
    const std::lock_guard lock(mutex_);
    opened.swap(new_journals_);
    task = tasks_.empty() ? "" : tasks_.back();
  }
  say(Type::alive, Writer().value(processor_time()).text(task).take());
  for (std::shared_ptr<Journal>& journal : opened) {
    Writer writer;
    writer.value(journal->id()).value(static_cast<std::uint32_t>(journal->members().size()));
    for (const int member : journal->members()) {
      writer.value(member);
    }
    say(Type::join, writer.take());
    journals_.push_back(std::move(journal));
  }
  for (std::shared_ptr<Journal>& journal : journals_) {
    const bool unused = journal.use_count() == 1;
    say(Type::beat, pack(journal->beat(seconds)));
    if (unused) {
      say(Type::drop, Writer().value(journal->id()).take());
      journal = nullptr;
    }
  }
  std::erase(journals_, nullptr);
  if (rank_ == 0) {
    for (int rank = 1; rank < size_; ++rank) {
      if (connections_[rank]) {
        send(*connections_[rank], Type::alive, {});
      }
    }
  }
}

void Control::take_outgoing() {
  std::vector<Outgoing> outgoing;
  {
    const std::lock_guard lock(mutex_);
    if (outgoing_.empty() && new_journals_.empty()) {
      return;
    }
    outgoing.swap(outgoing_);
  }
  report(std::exchange(unreported_, 0.0));  // rank 0 must know the groups first, and what came before a trouble
  for (const Outgoing& message : outgoing) {
    say(message.type, message.payload);
  }
}

// To rank 0.
void Control::say(Type type, const Bytes& payload) {
  if (rank_ == 0) {
    handle(0, {.type = static_cast<std::uint8_t>(type), .payload = payload});
  } else if (connections_[0]) {
    send(*connections_[0], type, payload);
  }
}

void Control::hear(int rank) {
  std::unique_ptr<Connection>& connection = connections_[rank];
  if (!connection) {
    return;
  }
  connection->receive();
  try {
    while (const std::optional<Message> message = connection->next()) {
      handle(rank, *message);
    }
  } catch (const Error& error) {
    if (rank_ == 0) {
      judge_->closed(rank, error.what(), now());
    }
    connection = nullptr;
    return;
  }
  if (connection->closed()) {
    if (rank_ == 0) {
      judge_->closed(rank, "", now());
    }
    connection = nullptr;
  }
}

void Control::handle(int rank, const Message& message) {
  if (rank_ == 0) {
    handle_at_hub(rank, message);
    return;
  }
  hub_heard_ = now();
  Reader reader(message.payload);
  switch (static_cast<Type>(message.type)) {
    case Type::alive: break;
    case Type::verdict: pronounce(reader.text()); break;
    case Type::all_left: all_left_ = true; break;
    case Type::result: {
      const auto group = reader.value<std::uint64_t>();
      const Key key(group, reader.value<std::uint64_t>());
      const auto count = reader.value<std::uint32_t>();
      mica::check(count <= static_cast<std::uint32_t>(size_), "the bytes of too many ranks");
      std::vector<Bytes> parts(count);
      for (Bytes& part : parts) {
        part = reader.bytes();
      }
      const std::lock_guard lock(mutex_);
      keep_result(key, std::move(parts));
      break;
    }
    default: mica::fail("a message of unknown type {}", message.type);
  }
}

void Control::handle_at_hub(int rank, const Message& message) {
  Reader reader(message.payload);
  const double time = now();
  switch (static_cast<Type>(message.type)) {
    case Type::alive: {
      const auto used = reader.value<double>();
      judge_->alive(rank, used, reader.text(), time);
      break;
    }
    case Type::join: {
      const auto id = reader.value<std::uint64_t>();
      const auto count = reader.value<std::uint32_t>();
      mica::check(count <= static_cast<std::uint32_t>(size_), "a group of too many ranks");
      std::vector<int> members(count);
      for (int& member : members) {
        member = reader.value<int>();
      }
      judge_->join(rank, id, members, time);
      break;
    }
    case Type::drop: judge_->drop(rank, reader.value<std::uint64_t>(), time); break;
    case Type::beat: judge_->beat(rank, unpack_beat(reader), time); break;
    case Type::leave: {
      const std::string failure = reader.text();
      judge_->leave(rank, !failure.empty(), failure, time);
      break;
    }
    case Type::trouble: judge_->trouble(rank, reader.text(), time); break;
    case Type::exchange: add_to_exchange(rank, reader); break;
    case Type::timeout:
      mica::check(rank == 0, "a timeout, which is rank 0's to set");
      judge_->set_collective_timeout(reader.value<double>());
      break;
    default: mica::fail("a message of unknown type {}", message.type);
  }
}

void Control::add_to_exchange(int rank, Reader& reader) {
  const auto group = reader.value<std::uint64_t>();
  const auto number = reader.value<std::uint64_t>();
  const std::vector<int>* const members = judge_->members(group);
  mica::check(members != nullptr && std::find(members->begin(), members->end(), rank) != members->end(),
              "an exchange of a group that it did not join");
  const Key key(group, number);
  std::map<int, Bytes>& parts = exchanges_[key];
  parts[rank] = reader.bytes();
  if (parts.size() < members->size()) {
    return;
  }
  Bytes all = Writer().value(group).value(number).value(static_cast<std::uint32_t>(members->size())).take();
  std::vector<Bytes> in_order;
  for (const int member : *members) {
    const Bytes part = Writer().bytes(parts[member]).take();
    all.insert(all.end(), part.begin(), part.end());
    in_order.push_back(std::move(parts[member]));
  }
  exchanges_.erase(key);
  for (const int member : *members) {
    if (member != 0 && connections_[member]) {
      send(*connections_[member], Type::result, all);
    } else if (member == 0) {
      const std::lock_guard lock(mutex_);
      keep_result(key, in_order);
    }
  }
}

// The first verdict stands.
void Control::pronounce(const std::string& verdict) {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    if (failed()) {
      return;
    }
    verdict_ = verdict;
    failed_.store(true, std::memory_order_release);
    calls.swap(on_verdict_);
    ++calls_;
    for (std::function<void()>& call : std::exchange(apart_calls_, {})) {
      call_apart(std::move(call));
    }
    changed_.notify_all();
  }
  for (const std::function<void()>& call : calls) {
    call();
  }
  const std::lock_guard lock(mutex_);
  --calls_;
  changed_.notify_all();
}

// A socket that is closed while something unread is in it may lose what it has sent. So each side says that it has
// finished, and reads until the other one has.
void Control::linger(double seconds) {
  const double end = now() + seconds;
  std::vector<bool> finished(connections_.size(), false);
  for (;;) {
    bool open = false;
    for (std::size_t i = 0; i < connections_.size(); ++i) {
      std::unique_ptr<Connection>& connection = connections_[i];
      if (!connection) {
        continue;
      }
      connection->flush();
      if (connection->flushed() && !finished[i]) {
        connection->finish();
        finished[i] = true;
      }
      connection->receive();
      while (connection->next()) {
      }
      if (connection->closed()) {
        connection = nullptr;
      }
      open = open || connection != nullptr;
    }
    if (!open || now() >= end) {
      return;
    }
    wait_for_news(now() + 0.05);
  }
}

}  // namespace mica::dist::detail
