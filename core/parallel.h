#pragma once

#include <cstdint>
#include <functional>

// Before a loop whose iterations do not depend on each other, which the compiler cannot see: it may vectorize.
#if defined(__clang__)
#define MICA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MICA_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace mica {

/// Threads that CPU kernels use: as many as the machine has cores, unless set_num_threads or OMP_NUM_THREADS say else.
int num_threads();
/// Throws unless n ≥ 1.
void set_num_threads(int n);

/// Splits [0, n) into one range a thread, each of at least `grain` but for the last, and calls body(begin, end) for
/// them at once. Inside another parallel_for it runs as one range. The first exception comes back to the caller.
void parallel_for(std::int64_t n, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace mica
