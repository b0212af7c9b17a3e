#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <mica/distributed/detail/health/coordinator.h>

namespace mica::distributed::detail {

namespace {

constexpr std::size_t longest_text = 4096;

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "…";
}

}  // namespace

Coordinator::Coordinator(Descriptor listener, int size, const Token& token, const CoordinatorOptions& options)
    : rank_(0), size_(size), options_(options) {
  accept_ranks(std::move(listener), token);
  start();
}

Coordinator::Coordinator(const std::vector<Address>& rank_0, int rank, int size, const Token& token,
                         const CoordinatorOptions& options)
    : rank_(rank), size_(size), options_(options) {
  connect_to_rank_0(rank_0, token);
  start();
}

Coordinator::~Coordinator() { close(); }

void Coordinator::start() {
  int ends[2];
  mica::check(pipe(ends) == 0, "world: pipe failed: {}", std::strerror(errno));
  wake_read_ = Descriptor(ends[0]);
  wake_write_ = Descriptor(ends[1]);
  for (const int end : ends) {
    (void)fcntl(end, F_SETFD, FD_CLOEXEC);
    (void)fcntl(end, F_SETFL, O_NONBLOCK);
  }
  thread_ = std::thread([this] { thread_main(); });
}

void Coordinator::wake() {
  const char byte{};
  (void)!::write(wake_write_.number(), &byte, sizeof byte);  // if the pipe is full, the thread wakes up anyway
}

void Coordinator::run_on_thread(std::function<void()> f) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(f));
  }
  wake();
}

// Requires a lock on mutex_.
void Coordinator::advance(State to) {
  if (state_ < to) {
    state_ = to;
    changed_.notify_all();
  }
}

std::shared_ptr<CollectiveLog> Coordinator::open(std::uint64_t id, std::vector<int> members) {
  auto log = std::make_shared<CollectiveLog>(id, std::move(members));
  {
    const std::lock_guard lock(mutex_);
    new_logs_.push_back(log);
  }
  wake();
  return log;
}

std::vector<Bytes> Coordinator::exchange(CollectiveLog& group, const Bytes& mine, CallKind kind,
                                         std::uint64_t* number) {
  const char* const op = kind == CallKind::barrier ? "barrier" : kind == CallKind::split ? "split" : "exchange";
  mica::check(mine.size() <= largest_exchange, "{}: expected at most {} bytes, got {}", op, largest_exchange,
              mine.size());
  check(op);
  const LoggedCall call(group, {.kind = kind});
  if (number != nullptr) {
    *number = call.number();
  }
  start_exchange(group, call.number(), mine);
  return finish_exchange(group, call.number(), op);
}

void Coordinator::start_exchange(const CollectiveLog& group, std::uint64_t number, const Bytes& mine) {
  {
    const std::lock_guard lock(mutex_);
    awaited_.emplace(group.id(), number);
  }
  run_on_thread([this, message = Writer().value(group.id()).value(number).bytes(mine).take()] {
    send_to_rank_0(Type::exchange, message);
  });
}

std::vector<Bytes> Coordinator::finish_exchange(const CollectiveLog& group, std::uint64_t number, const char* op) {
  const Key key(group.id(), number);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failed() || state_ == State::ended || results_.contains(key); });
  if (const auto found = results_.find(key); found != results_.end()) {
    std::vector<Bytes> result = std::move(found->second);
    results_.erase(found);
    return result;
  }
  lock.unlock();
  check(op);
  fail("{}: this process has left the group", op);
}

bool Coordinator::has_exchanged(const CollectiveLog& group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return !awaited_.contains(Key(group.id(), number));
}

void Coordinator::forget_exchange(const CollectiveLog& group, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  awaited_.erase(Key(group.id(), number));
  results_.erase(Key(group.id(), number));
}

// Requires a lock on mutex_.
void Coordinator::keep_result(const Key& key, std::vector<Bytes> parts) {
  if (awaited_.erase(key) > 0) {
    results_[key] = std::move(parts);
    changed_.notify_all();
  }
}

void Coordinator::throw_failure(const char* op) const {
  {
    std::unique_lock lock(mutex_);
    (void)changed_.wait_for(lock, std::chrono::seconds(5), [this] { return calls_ == 0; });
  }
  fail("{}: {}", op, failure_);
}

void Coordinator::on_failure(std::function<void()> f) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed()) {
      on_failure_.push_back(std::move(f));
      return;
    }
  }
  f();
}

void Coordinator::on_failure_in_background(std::function<void()> f) {
  const std::lock_guard lock(mutex_);
  if (!failed()) {
    on_failure_in_background_.push_back(std::move(f));
    return;
  }
  call_in_background(std::move(f));
}

// Requires a lock on mutex_. The thread may still run when the process ends, so it is detached, and the world's
// Coordinator is never destroyed.
void Coordinator::call_in_background(std::function<void()> f) {
  ++calls_;
  std::thread([this, f = std::move(f)] {
    f();
    const std::lock_guard lock(mutex_);
    --calls_;
    changed_.notify_all();
  }).detach();
}

void Coordinator::report_error(const std::string& reason) {
  run_on_thread([this, message = Writer().text(shortened(reason)).take()] { send_to_rank_0(Type::error, message); });
}

// Requires a lock on mutex_. An empty `failure` means that the process ends normally. Returns false if it has said so
// before, or the run has failed.
bool Coordinator::tell_that_it_leaves(const std::string& failure) {
  if (state_ != State::running || failed()) {
    return false;
  }
  advance(State::leaving);
  requests_.push_back([this, message = Writer().text(failure).take()] { send_to_rank_0(Type::leave, message); });
  wake();
  return true;
}

void Coordinator::report_failure(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (tell_that_it_leaves(reason.empty() ? "no reason given" : shortened(reason))) {
    // On rank 0, the report is sent when the detector has decided and all others know.
    (void)changed_.wait_for(lock, std::chrono::seconds(1), [this] {
      return (rank_ > 0 && state_ >= State::left) || failed() || state_ == State::ended;
    });
  }
}

void Coordinator::leave() {
  std::unique_lock lock(mutex_);
  if (tell_that_it_leaves("")) {
    (void)changed_.wait_for(lock, std::chrono::duration<double>(options_.detector.heartbeat_timeout),
                            [this] { return state_ >= State::confirmed || failed(); });
  }
}

void Coordinator::close() {
  {
    const std::lock_guard lock(mutex_);
    advance(State::closing);
  }
  wake();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Coordinator::begin_task(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(name.empty() ? "a task" : name.substr(0, longest_text));
  }
  wake();
}

void Coordinator::end_task() {
  const std::lock_guard lock(mutex_);
  tasks_.pop_back();
}

void Coordinator::set_collective_timeout(double seconds) {
  if (rank_ == 0) {
    run_on_thread([this, seconds] { detector_->set_collective_timeout(seconds); });
  }
}

void Coordinator::cut() {
  run_on_thread([this] {
    for (std::unique_ptr<Connection>& connection : connections_) {
      connection = nullptr;
    }
  });
}

}  // namespace mica::distributed::detail
