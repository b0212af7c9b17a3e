#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <optional>

#include <mica/dist/detail/beat.h>
#include <mica/dist/detail/control.h>

namespace mica::dist::detail {

namespace {

constexpr std::size_t longest_text = 4096;

double processor_time() {
  timespec time{};
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "…";
}

}  // namespace

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
  const char byte{};
  (void)!::write(wake_write_.number(), &byte, sizeof byte);  // if the pipe is full, the thread wakes up anyway
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

// Requires a lock on mutex_.
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

// Requires a lock on mutex_. The thread is detached and may still run when the process ends, so this object must live
// until then: `dist` never destroys the Control of the world.
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
  // On rank 0, the failure is reported once the verdict was sent to the others.
  changed_.wait_for(lock, std::chrono::seconds(1), [this] { return (rank_ > 0 && left_) || failed() || ended_; });
}

void Control::leave() {
  std::unique_lock lock(mutex_);
  if (leaving_ || failed() || ended_) {
    return;
  }
  leaving_ = true;
  wake();
  changed_.wait_for(lock, std::chrono::duration<double>(options_.judge.silence),
                    [this] { return settled_ || failed() || ended_; });
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

// ---- Functions of the thread.

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
    forgive_suspension(time - last, time);
    unreported_ += std::min(time - last, 2 * beat);
    last = time;
    const auto [leaving, closing] = take_requests();
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
    ends = rank_ == 0 ? judge_others(closing) : heed_hub(closing);
    if (flush_all() && leaving) {
      const std::lock_guard lock(mutex_);
      left_ = true;
      changed_.notify_all();
    }
  }
  linger(rank_ == 0 ? 2 : 1);
  connections_.clear();
  journals_.clear();
}

// If more time has passed than between two beats, this process was suspended, and messages that the others sent
// meanwhile are still unread.
void Control::forgive_suspension(double passed, double time) {
  if (passed > std::max(2.0, 3 * options_.judge.beat)) {
    hub_heard_ = time;
    if (judge_) {
      judge_->forgive(time);
    }
  }
}

// What other threads have asked for. Cuts the connections if they asked for that.
Control::Requests Control::take_requests() {
  const std::lock_guard lock(mutex_);
  if (cut_) {
    for (std::unique_ptr<Connection>& connection : connections_) {
      connection = nullptr;
    }
  }
  return {.leaving = leaving_ && !left_, .closing = closing_};
}

// Rank 0: reads what the others send, and tells them why the run failed, or that all have left. Returns whether the
// thread may end.
bool Control::judge_others(bool closing) {
  for (int rank = 1; rank < size_; ++rank) {
    hear(rank);
  }
  settle();
  if (const std::optional<std::string>& verdict = judge_->verdict(now())) {
    for (int rank = 1; rank < size_; ++rank) {
      if (connections_[rank]) {
        send(*connections_[rank], Type::verdict, Writer().text(*verdict).take());
        connections_[rank]->flush();
      }
    }
    pronounce(*verdict);
    return true;
  }
  if (closing && judge_->all_left() && !judge_->has_suspicion()) {
    for (int rank = 1; rank < size_; ++rank) {
      if (connections_[rank]) {
        send(*connections_[rank], Type::all_left, {});
      }
    }
    return true;
  }
  return false;
}

// The other ranks: hears rank 0, and notices its end. Returns whether the conversation ends.
bool Control::heed_hub(bool closing) {
  hear(0);
  if (!failed() && !all_left_) {
    if (connections_[0] == nullptr) {
      pronounce("rank 0 died, or the link to it broke: its connection was closed");
    } else if (now() - hub_heard_ > options_.judge.silence) {
      pronounce(fmt::format("rank 0 has not been heard of for {:g} s: it hangs, or the link to it is lost",
                            options_.judge.silence));
    }
  }
  return failed() || all_left_ || closing;
}

// Writes what the connections take. Returns whether nothing is left.
bool Control::flush_all() {
  bool flushed = true;
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection) {
      connection->flush();
      flushed = flushed && connection->flushed();
    }
  }
  return flushed;
}

// Waits until there is something to read, to write or to do, or until the given time.
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

// Sends this rank's reports.
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
  report(std::exchange(unreported_, 0.0));  // rank 0 must first know the groups, and the state before the trouble
  for (const Outgoing& message : outgoing) {
    say(message.type, message.payload);
  }
}

// Sends a message to rank 0; on rank 0 itself, handles it directly.
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
    case Type::settled: {
      const std::lock_guard lock(mutex_);
      settled_ = true;
      changed_.notify_all();
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
      if (failure.empty()) {
        unsettled_.insert(rank);
      }
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

// Tells ranks that have left that they called the same collectives as the others.
void Control::settle() {
  std::erase_if(unsettled_, [this](int rank) {
    if (!judge_->has_settled(rank)) {
      return false;
    }
    if (rank == 0) {
      const std::lock_guard lock(mutex_);
      settled_ = true;
      changed_.notify_all();
    } else if (connections_[rank]) {
      send(*connections_[rank], Type::settled, {});
    }
    return true;
  });
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
  if (judge_->has_suspicion()) {
    return;  // These ranks may have called different collectives, and a verdict follows.
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

// Sets the verdict and calls the functions that wait for one. Later verdicts are ignored.
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

// Closing a socket that still has unread data may discard data it has sent. So each side shuts down its sending
// direction, and reads until the other side has done so, too.
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
