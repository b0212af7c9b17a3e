#pragma once

#include <array>
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

/// Identifies the processes of a run, so that rank 0 can refuse other connections.
using Token = std::array<std::byte, 16>;

struct ControlOptions {
  Judge::Options judge{};
  double start = 25;  ///< seconds within which all ranks must connect
};

/// MICA_DIST_TIMEOUT, MICA_DIST_HEARTBEAT_TIMEOUT and MICA_DIST_START_TIMEOUT, in seconds. Throws an Error that names a
/// variable with an impossible value.
ControlOptions control_options_from_environment();

/// Detects failed ranks, over TCP connections from rank 0 to all others that a thread of each process serves. Each rank
/// reports its state once a second; rank 0 decides whether a rank has failed, and sends that verdict to all. Also
/// carries small messages that ranks need before they have other connections.
class Control {
 public:
  /// For rank 0: waits until the other ranks have connected to `listener`. Throws an Error that names those that do not
  /// connect in time. Refuses connections from outside the run.
  Control(Descriptor listener, int size, const Token& token, const ControlOptions& options);
  /// For the other ranks: connects to rank 0, which listens at one of these addresses.
  Control(const std::vector<Address>& hub, int rank, int size, const Token& token, const ControlOptions& options);
  /// Ends the thread. See close().
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Opens a group to which this rank belongs; `members` are ranks in the world. All members must pass the same id.
  std::shared_ptr<Journal> open(std::uint64_t id, std::vector<int> members);

  /// A collective that sends each member's bytes (at most 16 KiB) to all members, and returns them in the order of the
  /// group. Throws an Error if a rank has failed. `kind` is barrier, split or exchange; *number receives the number of
  /// the collective.
  std::vector<Bytes> exchange(Journal& group, const Bytes& mine, CallKind kind = CallKind::exchange,
                              std::uint64_t* number = nullptr);

  // The steps of exchange(), for callers that write to the journal themselves. A number must be unique within the
  // group and the same on all members.

  /// Sends this rank's bytes.
  void start_exchange(const Journal& group, std::uint64_t number, const Bytes& mine);
  /// Waits for the bytes of all members. Throws an Error that starts with `op` if a rank has failed.
  std::vector<Bytes> finish_exchange(const Journal& group, std::uint64_t number, const char* op);
  /// Whether finish_exchange() would return at once, or has been called.
  bool has_exchanged(const Journal& group, std::uint64_t number);
  /// Discards the result: finish_exchange() will not be called.
  void forget_exchange(const Journal& group, std::uint64_t number);

  /// Throws an Error that starts with `op` if a rank has failed.
  void check(const char* op) const {
    if (failed_.load(std::memory_order_acquire)) [[unlikely]] {
      throw_verdict(op);
    }
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// What has happened. Valid only if failed().
  const std::string& verdict() const { return verdict_; }
  [[noreturn]] void throw_verdict(const char* op) const;
  /// Calls f once when a rank fails, on the thread of this object; at once if one has failed already.
  void on_verdict(std::function<void()> f);
  /// Like on_verdict(), but on a separate thread, since f may take long. throw_verdict() waits up to 5 s for all of
  /// these functions to return.
  void on_verdict_apart(std::function<void()> f);

  /// Reports that a collective has failed here, perhaps because another rank failed. Rank 0 then decides on a verdict.
  void report_trouble(const std::string& reason);
  /// Reports that this process ends because of `reason`. Waits up to a second until the report was sent.
  void report_failure(const std::string& reason);
  /// Reports that this process ends normally and takes part in no more collectives. Waits until rank 0 has compared its
  /// collectives with those of the other ranks, or a rank has failed; at most as long as a rank may be silent.
  void leave();
  /// Ends the thread. On rank 0, first waits until all others have left, or one has failed.
  void close();

  /// Between begin_task() and end_task(), the others wait for this rank without a timeout.
  void begin_task(const std::string& name);
  void end_task();
  void set_collective_timeout(double seconds);

  /// For tests: cuts the connection, as a broken network link would.
  void cut();

  static constexpr std::size_t largest_exchange = 16384;

 private:
  enum class Type : std::uint8_t {
    hello = 1,
    welcome,
    reject,
    ready,
    alive,
    join,
    drop,
    beat,
    leave,
    trouble,
    timeout,
    exchange,
    result,
    verdict,
    all_left,
    settled
  };

  struct Outgoing {
    Type type;
    Bytes payload;
  };
  struct Requests {
    bool leaving, closing;
  };
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // group and number

  double now() const { return std::chrono::duration<double>(Clock::now() - epoch_).count(); }
  static void send(Connection& connection, Type type, const Bytes& payload) {
    connection.send(static_cast<std::uint8_t>(type), payload);
  }

  // Establishing the connections: control_start.cpp.
  class Gathering;
  void gather(Descriptor listener, const Token& token);
  void reach(const std::vector<Address>& hub, const Token& token);

  void start();
  void wake();
  void post(Type type, Bytes payload);

  void loop();
  void converse();
  void forgive_suspension(double passed, double time);
  Requests take_requests();
  bool judge_others(bool closing);
  bool heed_hub(bool closing);
  bool flush_all();
  void wait_for_news(double until);
  void report(double seconds);
  void take_outgoing();
  void say(Type type, const Bytes& payload);
  void hear(int rank);
  void handle(int rank, const Message& message);
  void handle_at_hub(int rank, const Message& message);
  void settle();
  void add_to_exchange(int rank, Reader& reader);
  void pronounce(const std::string& verdict);
  void linger(double seconds);
  void keep_result(const Key& key, std::vector<Bytes> parts);
  void call_apart(std::function<void()> f);

  const int rank_;
  const int size_;
  ControlOptions options_;
  const Clock::time_point epoch_ = Clock::now();
  Descriptor wake_read_, wake_write_;
  std::thread thread_;

  std::atomic<bool> failed_{false};
  std::string verdict_;  // written before failed_ is set

  mutable std::mutex mutex_;  // guards the members below, up to failure_
  mutable std::condition_variable changed_;
  std::vector<std::shared_ptr<Journal>> new_journals_;
  std::vector<Outgoing> outgoing_;
  std::map<Key, std::vector<Bytes>> results_;
  std::set<Key> awaited_;  // exchanges that were started and have no result yet
  int calls_ = 0;          // functions of on_verdict() and on_verdict_apart() that are running
  std::vector<std::function<void()>> on_verdict_, apart_calls_;
  std::vector<std::string> tasks_;
  bool leaving_ = false, left_ = false, closing_ = false, ended_ = false, cut_ = false, settled_ = false;
  std::string failure_;  // why this process leaves; empty: it ends normally

  // Used by the thread only.
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank; on rank 0 to all others, elsewhere to rank 0
  std::vector<std::shared_ptr<Journal>> journals_;
  double unreported_ = 0;  // seconds since the last report
  double hub_heard_ = 0;
  bool all_left_ = false;
  std::unique_ptr<Judge> judge_;  // on rank 0 only
  std::map<Key, std::map<int, Bytes>> exchanges_;
  std::set<int> unsettled_;  // ranks that have left and wait until their collectives have been compared
};

}  // namespace mica::distributed::detail
