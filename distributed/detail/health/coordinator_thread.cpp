// What the thread of a Coordinator does.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>

#include <mica/distributed/detail/health/coordinator.h>
#include <mica/distributed/detail/health/heartbeat.h>

namespace mica::distributed::detail {

namespace {

double processor_time() {
  timespec time{};
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void Coordinator::thread_main() {
  try {
    serve();
  } catch (const std::exception& error) {
    set_failure(fmt::format("rank {} failed: the thread that speaks with the others ended: {}", rank_, error.what()));
    connections_.clear();
  }
  const std::lock_guard lock(mutex_);
  advance(State::ended);
}

void Coordinator::serve() {
  const double interval = options_.detector.heartbeat_interval;
  double last = now(), next_report = last;
  bool done = false;
  while (!done) {
    wait_for_events(next_report);
    const double time = now();  // silence counts until here, since the process may be suspended anywhere below
    excuse_silence_after_suspension(time - last, time);
    unreported_ += std::min(time - last, 2 * interval);
    last = time;
    bool closing = false;
    {
      const std::lock_guard lock(mutex_);
      closing = state_ == State::closing;
    }
    if (time >= next_report) {
      report();
      next_report = time + interval;
    }
    run_requests();
    done = rank_ == 0 ? serve_ranks(closing, time) : follow_rank_0(closing, time);
    if (flush_all()) {
      const std::lock_guard lock(mutex_);
      if (state_ == State::leaving && requests_.empty()) {
        advance(State::left);
      }
    }
  }
  linger(rank_ == 0 ? 2 : 1);
  connections_.clear();
  logs_.clear();
}

// If much more time has passed than between two heartbeats, this process was suspended, and there are messages of the
// others that it has not read.
void Coordinator::excuse_silence_after_suspension(double passed, double time) {
  if (passed > std::max(2.0, 3 * options_.detector.heartbeat_interval)) {
    rank_0_heard_ = time;
    if (detector_) {
      detector_->restart_silence(time);
    }
  }
}

// Sends this rank's reports.
void Coordinator::report() {
  const double seconds = std::exchange(unreported_, 0.0);
  std::vector<std::shared_ptr<CollectiveLog>> opened;
  std::string task;
  {
    const std::lock_guard lock(mutex_);
    opened.swap(new_logs_);
    task = tasks_.empty() ? "" : tasks_.back();
  }
  send_to_rank_0(Type::alive, Writer().value(processor_time()).text(task).take());
  for (std::shared_ptr<CollectiveLog>& log : opened) {
    Writer writer;
    writer.value(log->id()).value(static_cast<std::uint32_t>(log->members().size()));
    for (const int member : log->members()) {
      writer.value(member);
    }
    send_to_rank_0(Type::join, writer.take());
    logs_.push_back(std::move(log));
  }
  for (std::shared_ptr<CollectiveLog>& log : logs_) {
    const bool unused = log.use_count() == 1;
    send_to_rank_0(Type::heartbeat, pack(log->heartbeat(seconds)));
    if (unused) {
      send_to_rank_0(Type::drop, Writer().value(log->id()).take());
      log = nullptr;
    }
  }
  std::erase(logs_, nullptr);
  if (rank_ == 0) {
    send_to_all(Type::alive, {});
  }
}

void Coordinator::run_requests() {
  std::vector<std::function<void()>> requests;
  {
    const std::lock_guard lock(mutex_);
    if (requests_.empty() && new_logs_.empty()) {
      return;
    }
    requests.swap(requests_);
  }
  report();  // rank 0 must first know the groups, and what this rank called before an error
  for (const std::function<void()>& request : requests) {
    request();
  }
}

// On rank 0: reads what the others send, and tells them why the run failed, or that all have left. Returns whether the
// thread may end.
bool Coordinator::serve_ranks(bool closing, double time) {
  for (int rank = 1; rank < size_; ++rank) {
    receive_from(rank);
  }
  confirm_departures();
  if (const std::optional<std::string>& failure = detector_->failure(time)) {
    send_to_all(Type::failure, Writer().text(*failure).take());
    (void)flush_all();
    set_failure(*failure);
    return true;
  }
  if (closing && detector_->all_left() && !detector_->has_suspicion()) {
    send_to_all(Type::all_left, {});
    return true;
  }
  return false;
}

// On the other ranks: reads what rank 0 sends, and notices its end. Returns whether the thread may end.
bool Coordinator::follow_rank_0(bool closing, double time) {
  receive_from(0);
  if (!failed() && !all_left_) {
    if (connections_[0] == nullptr) {
      set_failure("rank 0 died, or the link to it broke: its connection was closed");
    } else if (const double timeout = options_.detector.heartbeat_timeout; time - rank_0_heard_ > timeout) {
      set_failure(fmt::format("rank 0 has not been heard of for {:g} s: it hangs, or the link to it is lost", timeout));
    }
  }
  return failed() || all_left_ || closing;
}

// Waits until there is something to read, to write or to do, or until the given time.
void Coordinator::wait_for_events(double until) {
  std::vector<pollfd> waiting{{.fd = wake_read_.number(), .events = POLLIN, .revents = 0}};
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection) {
      const int events = POLLIN | (connection->flushed() ? 0 : POLLOUT);
      waiting.push_back({.fd = connection->descriptor(), .events = static_cast<short>(events), .revents = 0});
    }
  }
  const double interval = options_.detector.heartbeat_interval;
  const double seconds = std::clamp(until - now(), 0.0, rank_ == 0 ? interval / 4 : interval);
  (void)poll(waiting.data(), waiting.size(), static_cast<int>(std::ceil(1000 * seconds)));
  char bytes[64];
  while (read(wake_read_.number(), bytes, sizeof bytes) > 0) {
  }
}

// Writes what the connections take. Returns whether nothing is left.
bool Coordinator::flush_all() {
  bool flushed = true;
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection) {
      connection->flush();
      flushed = flushed && connection->flushed();
    }
  }
  return flushed;
}

// On rank 0.
void Coordinator::send_to_all(Type type, const Bytes& payload) {
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection) {
      send(*connection, type, payload);
    }
  }
}

// On rank 0 itself, handles the message.
void Coordinator::send_to_rank_0(Type type, const Bytes& payload) {
  if (rank_ == 0) {
    handle_at_rank_0(0, {.type = static_cast<std::uint8_t>(type), .payload = payload});
  } else if (connections_[0]) {
    send(*connections_[0], type, payload);
  }
}

void Coordinator::receive_from(int rank) {
  std::unique_ptr<Connection>& connection = connections_[rank];
  if (!connection) {
    return;
  }
  connection->receive();
  bool closed = false;
  std::string problem;
  try {
    while (const std::optional<Message> message = connection->next()) {
      if (rank_ == 0) {
        handle_at_rank_0(rank, *message);
      } else {
        handle(*message);
      }
    }
    closed = connection->closed();
  } catch (const Error& error) {
    closed = true;
    problem = error.what();
  }
  if (closed) {
    if (rank_ == 0) {
      detector_->closed(rank, problem, now());
    }
    connection = nullptr;
  }
}

// A message of rank 0.
void Coordinator::handle(const Message& message) {
  rank_0_heard_ = now();
  Reader reader(message.payload);
  switch (static_cast<Type>(message.type)) {
    case Type::alive: break;
    case Type::failure: set_failure(reader.text()); break;
    case Type::all_left: all_left_ = true; break;
    case Type::confirmed: {
      const std::lock_guard lock(mutex_);
      advance(State::confirmed);
      break;
    }
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

void Coordinator::handle_at_rank_0(int rank, const Message& message) {
  Reader reader(message.payload);
  const double time = now();
  switch (static_cast<Type>(message.type)) {
    case Type::alive: {
      const auto used = reader.value<double>();
      detector_->alive(rank, used, reader.text(), time);
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
      detector_->join(rank, id, members, time);
      break;
    }
    case Type::drop: detector_->drop(rank, reader.value<std::uint64_t>(), time); break;
    case Type::heartbeat: detector_->heartbeat(rank, unpack_heartbeat(reader), time); break;
    case Type::leave: {
      const std::string failure = reader.text();
      detector_->leave(rank, !failure.empty(), failure, time);
      if (failure.empty()) {
        unconfirmed_.insert(rank);
      }
      break;
    }
    case Type::error: detector_->error(rank, reader.text(), time); break;
    case Type::exchange: add_to_exchange(rank, reader); break;
    default: mica::fail("a message of unknown type {}", message.type);
  }
}

// Tells ranks that have left that all others called the same collectives.
void Coordinator::confirm_departures() {
  std::erase_if(unconfirmed_, [this](int rank) {
    if (!detector_->has_confirmed(rank)) {
      return false;
    }
    if (rank == 0) {
      const std::lock_guard lock(mutex_);
      advance(State::confirmed);
    } else if (connections_[rank]) {
      send(*connections_[rank], Type::confirmed, {});
    }
    return true;
  });
}

void Coordinator::add_to_exchange(int rank, Reader& reader) {
  const auto group = reader.value<std::uint64_t>();
  const auto number = reader.value<std::uint64_t>();
  const std::vector<int>* const members = detector_->members(group);
  mica::check(members != nullptr && std::find(members->begin(), members->end(), rank) != members->end(),
              "an exchange of a group that it did not join");
  const Key key(group, number);
  std::map<int, Bytes>& parts = exchanges_[key];
  parts[rank] = reader.bytes();
  if (parts.size() < members->size()) {
    return;
  }
  if (detector_->has_suspicion()) {
    return;  // the ranks may have called different collectives, and then none must get a result
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

// Records the failure and calls the functions of on_failure(). Later failures are ignored.
void Coordinator::set_failure(const std::string& text) {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    if (failed()) {
      return;
    }
    failure_ = text;
    failed_.store(true, std::memory_order_release);
    calls.swap(on_failure_);
    ++calls_;
    for (std::function<void()>& call : std::exchange(on_failure_in_background_, {})) {
      call_in_background(std::move(call));
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

// Closing a socket that has unread data may discard what was sent. So each side shuts down its sending direction, and
// reads until the other side has done so, too.
void Coordinator::linger(double seconds) {
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
    wait_for_events(now() + 0.05);
  }
}

}  // namespace mica::distributed::detail
