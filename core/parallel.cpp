#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

#include <mica/core/callable.h>
#include <mica/core/parallel.h>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace mica {

namespace {

int default_threads() {
#ifdef _OPENMP
  return std::min(omp_get_max_threads(), kMaxThreads);
#else
  return 1;
#endif
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_threads()};
  return count;
}

thread_local bool inside_parallel_for = false;

}  // namespace

int num_threads() { return thread_count().load(std::memory_order_relaxed); }

void set_num_threads(int n) {
  check(n >= 1 && n <= kMaxThreads, "set_num_threads: expected from 1 to {} threads, got {}", kMaxThreads, n);
  thread_count().store(n, std::memory_order_relaxed);
}

void parallel_for(std::int64_t n, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (n <= 0) {
    return;
  }
  check_callable(body, "parallel_for");
  const std::int64_t least = std::max<std::int64_t>(grain, 1);
  const std::int64_t most = n / least + (n % least > 0 ? 1 : 0);
  const int parts = static_cast<int>(std::min<std::int64_t>(num_threads(), most));
  if (parts <= 1 || inside_parallel_for) {
    body(0, n);
    return;
  }
#ifdef _OPENMP
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  // The first n % parts ranges are longer by one. (n · part would overflow for large n.)
  const auto start_of = [&](int part) { return n / parts * part + std::min<std::int64_t>(part, n % parts); };
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; ++part) {
    inside_parallel_for = true;
    try {
      body(start_of(part), start_of(part + 1));
    } catch (...) {
      if (!failed.exchange(true)) {
        error = std::current_exception();
      }
    }
    inside_parallel_for = false;
  }
  if (error) {
    std::rethrow_exception(error);
  }
#else
  body(0, n);
#endif
}

}  // namespace mica
