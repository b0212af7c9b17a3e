#pragma once

#include <cstdint>
#include <functional>

// Placed before a loop whose iterations are independent, so that the compiler may vectorize it.
#if defined(__clang__)
#define MICA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MICA_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace mica {

/// The maximum for set_num_threads.
inline constexpr int kMaxThreads = 1024;

/// The number of threads for CPU kernels: the number of cores that this process may use, unless set by set_num_threads
/// or OMP_NUM_THREADS. Throws if OMP_NUM_THREADS is not a positive number, or a list that begins with one.
int num_threads();
/// Throws unless 1 ≤ n ≤ kMaxThreads.
void set_num_threads(int n);

/// Splits [0, n) into ranges of nearly equal length, at most four per thread and at most ⌈n / grain⌉, and calls
/// body(begin, end) for all of them in parallel. Nested calls run serially. Rethrows the first exception.
///
/// One pool of num_threads() - 1 threads serves the process. It starts with the first call and works for one call at a
/// time; if another thread has it, the caller runs its ranges alone until the pool is free. If the system cannot start
/// the threads, fewer take part. A process made by fork() outside of parallel_for starts its own.
void parallel_for(std::int64_t n, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace mica
