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

#include <mica/dist/detail/connection.h>
#include <mica/dist/detail/journal.h>
#include <mica/dist/detail/judge.h>

namespace mica::dist::detail {

/// Distinguishes the processes of a run from whatever else connects to rank 0.
using Token = std::array<std::byte, 16>;

struct ControlOptions {
  Judge::Options judge{};
  double start = 25;  ///< seconds within which all ranks must have come
};

/// MICA_DIST_TIMEOUT, MICA_DIST_HEARTBEAT_TIMEOUT and MICA_DIST_START_TIMEOUT, in seconds. Throws an Error that names a
/// variable with an impossible value.
ControlOptions control_options_from_environment();

/// The connections between the processes of a run that say how they fare: TCP, in a star around rank 0, by a thread of
/// each process. Each rank reports once a second what it does; rank 0 judges, and tells all ranks what has happened to
/// one of them. Small messages that ranks need before they have other connections travel here, too.
class Control {
 public:
  /// Rank 0's: waits until the other ranks have connected to `listener`. Throws an Error that names those that do not
  /// come in time. Whatever else connects is turned away.
  Control(Descriptor listener, int size, const Token& token, const ControlOptions& options);
  /// Another rank's: connects to rank 0, which listens at one of these addresses.
  Control(const std::vector<Address>& hub, int rank, int size, const Token& token, const ControlOptions& options);
  /// Ends the thread. See close().
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// A group to which this rank belongs; `members` are ranks in the world. Its id must be the same on all of them.
  std::shared_ptr<Journal> open(std::uint64_t id, std::vector<int> members);

  /// A collective of the group: the bytes of each member, in the order of the group. At most 16 KiB each. Throws an
  /// Error if a rank has failed. `kind` is barrier, split or exchange; `number` gets the number of the collective.
  std::vector<Bytes> exchange(Journal& group, const Bytes& mine, CallKind kind = CallKind::exchange,
                              std::uint64_t* number = nullptr);

  // The same in parts, for collectives that others note in the journal. Numbers must differ within the group, and be
  // the same on all members.

  /// Sends this rank's bytes.
  void start_exchange(const Journal& group, std::uint64_t number, const Bytes& mine);
  /// Waits for those of all members. Throws an Error that starts with `op` if a rank has failed.
  std::vector<Bytes> finish_exchange(const Journal& group, std::uint64_t number, const char* op);
  /// Whether finish_exchange() need not wait, or has been called.
  bool has_exchanged(const Journal& group, std::uint64_t number);
  /// Nobody will call finish_exchange().
  void forget_exchange(const Journal& group, std::uint64_t number);

  /// Throws an Error that starts with `op` if a rank has failed.
  void check(const char* op) const {
    if (failed_.load(std::memory_order_acquire)) [[unlikely]] {
      throw_verdict(op);
    }
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// What has happened. Only after failed().
  const std::string& verdict() const { return verdict_; }
  [[noreturn]] void throw_verdict(const char* op) const;
  /// Calls f once when a rank has failed, on the thread of this object; at once if one has.
  void on_verdict(std::function<void()> f);
  /// … on a thread of its own, since f may take long. throw_verdict() waits up to 5 s for the end of both.
  void on_verdict_apart(std::function<void()> f);

  /// A collective has failed here, perhaps since another rank did. The verdict follows.
  void report_trouble(const std::string& reason);
  /// This process ends because of `reason`. Waits up to a second until that was said.
  void report_failure(const std::string& reason);
  /// This process ends; it takes part in no more collectives.
  void leave();
  /// Ends the thread. Rank 0 goes on until all others have left, or one has failed.
  void close();

  /// While a task has begun and not ended, others wait for this rank as long as it takes.
  void begin_task(const std::string& name);
  void end_task();
  void set_collective_timeout(double seconds);

  /// For tests: cuts the connection, as a broken link does.
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
    all_left
  };

  struct Outgoing {
    Type type;
    Bytes payload;
  };
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // group and number

  double now() const { return std::chrono::duration<double>(Clock::now() - epoch_).count(); }
  static void send(Connection& connection, Type type, const Bytes& payload) {
    connection.send(static_cast<std::uint8_t>(type), payload);
  }

  // How the connections come about: control_start.cpp.
  class Gathering;
  void gather(Descriptor listener, const Token& token);
  void reach(const std::vector<Address>& hub, const Token& token);

  void start();
  void wake();
  void post(Type type, Bytes payload);

  void loop();
  void converse();
  void wait_for_news(double until);
  void report(double seconds);
  void take_outgoing();
  void say(Type type, const Bytes& payload);
  void hear(int rank);
  void handle(int rank, const Message& message);
  void handle_at_hub(int rank, const Message& message);
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

  mutable std::mutex mutex_;  // of what follows
  mutable std::condition_variable changed_;
  std::vector<std::shared_ptr<Journal>> new_journals_;
  std::vector<Outgoing> outgoing_;
  std::map<Key, std::vector<Bytes>> results_;
  std::set<Key> awaited_;  // exchanges that have been started, and whose results have not come
  int calls_ = 0;          // what on_verdict() and on_verdict_apart() were given, while it runs
  std::vector<std::function<void()>> on_verdict_, apart_calls_;
  std::vector<std::string> tasks_;
  bool leaving_ = false, left_ = false, closing_ = false, ended_ = false, cut_ = false;
  std::string failure_;  // why this process leaves; empty: it has ended

  // Of the thread.
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank: of rank 0 all others, of others rank 0
  std::vector<std::shared_ptr<Journal>> journals_;
  double unreported_ = 0;  // seconds since the last report
  double hub_heard_ = 0;
  bool all_left_ = false;
  std::unique_ptr<Judge> judge_;  // of rank 0
  std::map<Key, std::map<int, Bytes>> exchanges_;
};

}  // namespace mica::dist::detail
