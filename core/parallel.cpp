#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include <mica/core/detail/callable.h>
#include <mica/core/parallel.h>

namespace mica {

namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

int default_threads() {
  if (const char* const text = std::getenv("OMP_NUM_THREADS"); text != nullptr && *text != '\0') {
    const std::string_view given(text);
    const std::string_view first = given.substr(0, given.find(','));  // OpenMP's list is for nested parallelism
    int n = 0;
    const auto [end, error] = std::from_chars(first.data(), first.data() + first.size(), n);
    check(error == std::errc() && end == first.data() + first.size() && n >= 1,
          "OMP_NUM_THREADS: expected a number of threads, got \"{}\"", given);
    return std::min(n, kMaxThreads);
  }
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t allowed;  // not all cores in some containers and under taskset
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    cores = CPU_COUNT(&allowed);
  }
#endif
  return std::clamp(cores, 1, kMaxThreads);
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_threads()};
  return count;
}

thread_local bool inside_parallel_for = false;

using Clock = std::chrono::steady_clock;

constexpr int kPartsPerThread = 4;  // so that the others can take most of a slow thread's range
// A few times as long as it takes to wake a thread, which is slower on virtual machines.
constexpr Clock::duration kLongestSpin = std::chrono::microseconds(200);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// How one thread waits: it spins, then sleeps. Long waits show that other threads have no core, or no work. For some
/// milliseconds after one, it spins less, since that would keep the core from them and from other processes.
class Waiting {
 public:
  /// Returns when done(value).
  template <class Done>
  void wait(const std::atomic<std::uint32_t>& value, const Done& done) {
    constexpr int kPauses = 16;  // between two looks at the clock
    const Clock::time_point begin = Clock::now();
    const Clock::time_point end = begin + std::min(kLongestSpin, (begin - last_long_) / 128);
    do {
      for (int i = 0; i < kPauses; ++i) {
        if (done(value.load(std::memory_order_acquire))) {
          return;
        }
        pause();
      }
    } while (Clock::now() < end);
    for (std::uint32_t now = value.load(std::memory_order_acquire); !done(now);
         now = value.load(std::memory_order_acquire)) {
      value.wait(now, std::memory_order_acquire);
    }
    const Clock::time_point woken = Clock::now();
    if (woken - begin > 2 * kLongestSpin) {
      last_long_ = woken;
    }
  }

 private:
  Clock::time_point last_long_{};
};

/// [0, n) in `count` parts of nearly equal length.
struct Parts {
  std::int64_t n = 0, count = 1;

  // The first n % count parts are longer by one. (n · part would overflow for large n.)
  std::int64_t begin(std::int64_t part) const { return n / count * part + std::min(part, n % count); }

  void run(const Body& body, std::int64_t part) const {
    struct Inside {
      Inside() { inside_parallel_for = true; }
      ~Inside() { inside_parallel_for = false; }
    } const inside;
    body(begin(part), begin(part + 1));
  }
};

/// Threads that help a caller of parallel_for. Each thread, including the caller, has a range of the parts and takes
/// one after the other, then parts of other ranges. So a thread without a core delays the others by one part at most.
/// If all have cores, a thread mostly gets the same parts in each call, and its cache has their data.
class Pool {
 public:
  explicit Pool(const Pool* parent) : parent_(parent) {}

  /// The pool of this process.
  static Pool& current();

  /// Whether the calling thread has the pool now.
  bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }

  /// Runs the parts from `first` on, on this many threads. Throws their first exception.
  void run(const Body& body, const Parts& parts, std::int64_t first, int threads) {
    start(threads - 1);
    body_ = &body;
    parts_ = parts;
    const Parts ranges{.n = parts.count - first, .count = std::min<std::int64_t>(parts.count - first, threads)};
    unfinished_.store(static_cast<std::uint32_t>(ranges.n), std::memory_order_relaxed);
    used_ranges_.store(static_cast<int>(ranges.count), std::memory_order_relaxed);
    for (std::int64_t i = 0; i < ranges.count; ++i) {
      const auto begin = static_cast<std::uint64_t>(first + ranges.begin(i));
      const auto end = static_cast<std::uint64_t>(first + ranges.begin(i + 1));
      ranges_[static_cast<std::size_t>(i)].left.store(begin << 32 | end, std::memory_order_release);
    }
    calls_.fetch_add(1, std::memory_order_release);
    if (ranges.count == threads) {
      calls_.notify_all();
    } else {
      for (std::int64_t i = 1; i < ranges.count; ++i) {
        calls_.notify_one();
      }
    }
    help(0);
    waiting_.wait(unfinished_, [](std::uint32_t left) { return left == 0; });
    if (failed_.exchange(false, std::memory_order_relaxed)) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

 private:
  struct alignas(64) ThreadRange {
    std::atomic<std::uint64_t> left{0};  // the parts from left >> 32 to left mod 2³²
  };

  /// Starts as many helpers, or as many as the system allows.
  void start(int count) {
    if (count + 1 == static_cast<int>(ranges_.size())) {
      return;
    }
    end();
    used_ranges_.store(0, std::memory_order_relaxed);  // ranges_ may become shorter
    ranges_ = std::vector<ThreadRange>(static_cast<std::size_t>(count) + 1);
    for (int id = 1; id <= count; ++id) {
      try {
        helpers_.emplace_back([this, id] { serve(id); });
      } catch (const std::system_error&) {
        break;  // at worst, the caller computes alone
      }
    }
  }

  /// Ends the helpers.
  void end() {
    ending_.store(true, std::memory_order_relaxed);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    for (std::thread& helper : helpers_) {
      helper.join();
    }
    helpers_.clear();
    ending_.store(false, std::memory_order_relaxed);
  }

  void serve(int id) {
    Waiting waiting;
    for (;;) {
      const std::uint32_t call = calls_.load(std::memory_order_acquire);
      if (ending_.load(std::memory_order_relaxed)) {
        return;
      }
      help(id);
      waiting.wait(calls_, [call](std::uint32_t now) { return now != call; });
    }
  }

  /// Runs parts until all are taken: those of the thread's own range from its begin, those of others from their end.
  void help(int id) {
    const int ranges = used_ranges_.load(std::memory_order_relaxed);
    for (int i = 0; i < ranges; ++i) {
      const int owner = (id + i) % ranges;
      std::atomic<std::uint64_t>& left = ranges_[static_cast<std::size_t>(owner)].left;
      std::uint64_t was = left.load(std::memory_order_relaxed);
      while (was >> 32 < static_cast<std::uint32_t>(was)) {
        const std::uint64_t next = owner == id ? was + (std::uint64_t{1} << 32) : was - 1;
        // A late helper may take a part of the next call here, which is correct, too.
        if (left.compare_exchange_weak(was, next, std::memory_order_acquire, std::memory_order_relaxed)) {
          run_part(owner == id ? was >> 32 : static_cast<std::uint32_t>(next));
          was = left.load(std::memory_order_relaxed);
        }
      }
    }
  }

  void run_part(std::uint64_t part) {
    try {
      parts_.run(*body_, static_cast<std::int64_t>(part));
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) {
        error_ = std::current_exception();
      }
    }
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      unfinished_.notify_one();
    }
  }

  [[maybe_unused]] const Pool* const parent_;  // of the process that forked this one, so that it is no leak
  std::vector<std::thread> helpers_;
  Waiting waiting_;  // of the caller
  // The current call, until all parts are finished. Whoever has taken a part reads it.
  const Body* body_ = nullptr;
  Parts parts_;
  std::vector<ThreadRange> ranges_;
  std::atomic<int> used_ranges_{0};
  std::exception_ptr error_;
  std::atomic<bool> failed_{false}, ending_{false};
  alignas(64) std::atomic<bool> taken_{false};
  alignas(64) std::atomic<std::uint32_t> calls_{0};       // helpers wait for the next
  alignas(64) std::atomic<std::uint32_t> unfinished_{0};  // parts; the caller waits for 0
};

Pool& Pool::current() {
  static Pool* pool = nullptr;  // never destroyed, since static destructors may still call parallel_for
  struct Lifetime {
    Lifetime() {
      pool = new Pool(nullptr);
      pthread_atfork(nullptr, nullptr, [] { pool = new Pool(pool); });  // the child has none of the threads
    }
    ~Lifetime() {
      // At exit. From now on, callers compute alone, as if another thread had the pool.
      if (pool->take()) {
        pool->end();
      }
    }
  };
  static const Lifetime lifetime;
  return *pool;
}

}  // namespace

int num_threads() { return thread_count().load(std::memory_order_relaxed); }

void set_num_threads(int n) {
  check(n >= 1 && n <= kMaxThreads, "set_num_threads: expected from 1 to {} threads, got {}", kMaxThreads, n);
  thread_count().store(n, std::memory_order_relaxed);
}

void parallel_for(std::int64_t n, std::int64_t grain, const Body& body) {
  if (n <= 0) {
    return;
  }
  check_callable(body, "parallel_for");
  const std::int64_t least = std::max<std::int64_t>(grain, 1);
  const std::int64_t most = n / least + (n % least > 0 ? 1 : 0);
  const int threads = num_threads();
  const Parts parts{.n = n, .count = std::min<std::int64_t>(threads > 1 ? kPartsPerThread * threads : 1, most)};
  if (parts.count <= 1 || inside_parallel_for) {
    body(0, n);
    return;
  }
  Pool& pool = Pool::current();
  for (std::int64_t part = 0; part < parts.count; ++part) {
    if (pool.take()) {
      struct GiveBack {
        Pool& pool;
        ~GiveBack() { pool.give_back(); }
      } const give_back{pool};
      pool.run(body, parts, part, threads);
      return;
    }
    parts.run(body, part);  // while another thread has the pool
  }
}

}  // namespace mica
