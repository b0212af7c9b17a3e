#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mica/distributed/detail/health/collective_log.h>
#include <mica/distributed/detail/health/failure_detector.h>
#include <mica/distributed/detail/network/connection.h>

namespace mica::distributed::detail {

struct CoordinatorOptions {
  FailureDetector::Options detector{};
  double start_timeout = 25;  ///< seconds within which all ranks must connect
};

/// MICA_DIST_TIMEOUT, MICA_DIST_HEARTBEAT_TIMEOUT and MICA_DIST_START_TIMEOUT, in seconds. Throws an Error that names a
/// variable with an impossible value.
CoordinatorOptions coordinator_options_from_environment();

/// Detects failed ranks: a thread in each process sends heartbeats to rank 0 over TCP, and rank 0 runs the
/// FailureDetector and tells all ranks if one has failed. Also carries small messages, which ranks need before they
/// have other connections.
class Coordinator {
 public:
  /// For rank 0: waits until the other ranks have connected to `listener`. Throws an Error that names those that do not
  /// connect in time. Refuses connections from outside the run.
  Coordinator(Descriptor listener, int size, const Token& token, const CoordinatorOptions& options);
  /// For the other ranks: connects to rank 0, which listens at one of these addresses.
  Coordinator(const std::vector<Address>& rank_0, int rank, int size, const Token& token,
              const CoordinatorOptions& options);
  /// Calls close().
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Opens a group to which this rank belongs; `members` are ranks in the world. All members must pass the same id.
  std::shared_ptr<CollectiveLog> open(std::uint64_t id, std::vector<int> members);

  /// A collective that sends each member's bytes (at most 16 KiB) to all members, and returns them in the order of the
  /// group. Throws an Error if a rank has failed. `kind` is barrier, split or exchange; *number receives the number of
  /// the collective.
  std::vector<Bytes> exchange(CollectiveLog& group, const Bytes& mine, CallKind kind = CallKind::exchange,
                              std::uint64_t* number = nullptr);

  // The steps of exchange(), for callers that write to the log themselves. A number must be unique within the group and
  // the same on all members.

  /// Sends this rank's bytes.
  void start_exchange(const CollectiveLog& group, std::uint64_t number, const Bytes& mine);
  /// Waits for the bytes of all members. Throws an Error that starts with `op` if a rank has failed.
  std::vector<Bytes> finish_exchange(const CollectiveLog& group, std::uint64_t number, const char* op);
  /// Whether finish_exchange() would return at once, or has been called.
  bool has_exchanged(const CollectiveLog& group, std::uint64_t number);
  /// Discards the result: finish_exchange() will not be called.
  void forget_exchange(const CollectiveLog& group, std::uint64_t number);

  /// Throws an Error that starts with `op` if a rank has failed.
  void check(const char* op) const {
    if (failed()) [[unlikely]] {
      throw_failure(op);
    }
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// Which rank has failed, and how. Valid only if failed().
  const std::string& failure() const { return failure_; }
  [[noreturn]] void throw_failure(const char* op) const;
  /// Calls f once when a rank fails, on the thread of this object; at once if one has failed already.
  void on_failure(std::function<void()> f);
  /// Like on_failure(), but on a separate thread, since f may take long. throw_failure() waits up to 5 s for all of
  /// these functions to return.
  void on_failure_in_background(std::function<void()> f);

  /// Reports that a collective has failed here, perhaps because another rank failed. Rank 0 then decides which.
  void report_error(const std::string& reason);
  /// Reports that this process has failed and will end. Waits up to a second, until the report was sent.
  void report_failure(const std::string& reason);
  /// Reports that this process ends normally. Then waits until all ranks have reported the same collectives, or one has
  /// failed, at most for the heartbeat timeout.
  void leave();
  /// Ends the thread. On rank 0, first waits until all others have left, or one has failed.
  void close();

  /// Between begin_task() and end_task(), the others wait for this rank without a timeout.
  void begin_task(const std::string& name);
  void end_task();
  /// Has an effect on rank 0 only.
  void set_collective_timeout(double seconds);

  /// For tests: closes the connections, as a broken network link would.
  void cut();

  static constexpr std::size_t largest_exchange = 16384;

 private:
  // The types of messages, as they are sent.
  enum class Type : std::uint8_t {
    hello = 1,
    welcome = 2,
    reject = 3,
    ready = 4,
    alive = 5,
    join = 6,
    drop = 7,
    heartbeat = 8,
    leave = 9,
    error = 10,
    exchange = 12,
    result = 13,
    failure = 14,
    all_left = 15,
    confirmed = 16
  };

  // What this process and its thread have reached. Only advances.
  enum class State {
    running,
    leaving,    // leave() or report_failure() was called
    left,       // rank 0 was told so
    confirmed,  // rank 0 has found that all ranks called the same collectives as this one
    closing,    // close() was called
    ended       // the thread has ended
  };

  using Key = std::pair<std::uint64_t, std::uint64_t>;  // group and number

  double now() const { return std::chrono::duration<double>(Clock::now() - epoch_).count(); }
  static void send(Connection& connection, Type type, const Bytes& payload) {
    connection.send(static_cast<std::uint8_t>(type), payload);
  }

  // Establishing the connections: coordinator_start.cpp.
  class Acceptor;
  void accept_ranks(Descriptor listener, const Token& token);
  void connect_to_rank_0(const std::vector<Address>& addresses, const Token& token);
  std::unique_ptr<Connection> greet_rank_0(const std::vector<Address>& addresses, const Token& token) const;
  void wait_until_ready(Connection& connection) const;

  void start();
  void wake();
  void run_on_thread(std::function<void()> f);
  void advance(State to);
  bool tell_that_it_leaves(const std::string& failure);
  void keep_result(const Key& key, std::vector<Bytes> parts);
  void call_in_background(std::function<void()> f);

  // Functions of the thread: coordinator_thread.cpp.
  void thread_main();
  void serve();
  void excuse_silence_after_suspension(double passed, double time);
  void report();
  void run_requests();
  bool serve_ranks(bool closing, double time);
  bool follow_rank_0(bool closing, double time);
  void wait_for_events(double until);
  bool flush_all();
  void send_to_all(Type type, const Bytes& payload);
  void send_to_rank_0(Type type, const Bytes& payload);
  void receive_from(int rank);
  void handle(const Message& message);
  void handle_at_rank_0(int rank, const Message& message);
  void confirm_departures();
  void add_to_exchange(int rank, Reader& reader);
  void set_failure(const std::string& text);
  void linger(double seconds);

  const int rank_;
  const int size_;
  CoordinatorOptions options_;
  const Clock::time_point epoch_ = Clock::now();
  Descriptor wake_read_, wake_write_;
  std::thread thread_;

  std::atomic<bool> failed_{false};
  std::string failure_;  // written before failed_ is set

  mutable std::mutex mutex_;  // guards the members below, up to tasks_
  mutable std::condition_variable changed_;
  State state_ = State::running;
  std::vector<std::shared_ptr<CollectiveLog>> new_logs_;
  std::vector<std::function<void()>> requests_;  // of run_on_thread()
  std::map<Key, std::vector<Bytes>> results_;
  std::set<Key> awaited_;  // exchanges that were started and have no result yet
  int calls_ = 0;          // functions of on_failure() and on_failure_in_background() that are running
  std::vector<std::function<void()>> on_failure_, on_failure_in_background_;
  std::vector<std::string> tasks_;

  // Used by the thread only.
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank; on rank 0 to all others, elsewhere to rank 0
  std::vector<std::shared_ptr<CollectiveLog>> logs_;
  double unreported_ = 0;  // seconds since the last report
  double rank_0_heard_ = 0;
  bool all_left_ = false;                      // according to rank 0
  std::unique_ptr<FailureDetector> detector_;  // this and the members below: on rank 0 only
  std::map<Key, std::map<int, Bytes>> exchanges_;
  std::set<int> unconfirmed_;  // ranks that have left, and whose collectives are still being compared
};

}  // namespace mica::distributed::detail
