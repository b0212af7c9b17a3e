#include <cstdio>
#include <cstdlib>

#include <mica/core/check.h>
#include <mica/core/detail/cpu_features.h>

namespace mica::detail {

void throw_error(fmt::string_view message, fmt::format_args args) { throw Error(fmt::vformat(message, args)); }

#if defined(__x86_64__) && defined(__GNUC__)
namespace {

// Ends the program with a message where it would end by an illegal instruction. It runs before other code of the
// library and is in this file because every program links it. CMake compiles the file for any CPU.
[[gnu::constructor(101)]] void check_cpu() {
  __builtin_cpu_init();
  const bool* used = cpu_features_used;
  bool good = true;
  const auto expect = [&](const char* name, bool present) {
    if (*used++ && !present) {
      std::fputs(good ? "mica: this library was compiled for a CPU with " : ", ", stderr);
      std::fputs(name, stderr);
      good = false;
    }
  };
#define MICA_EXPECT(macro, name) expect(name, __builtin_cpu_supports(name) != 0);
  MICA_CPU_FEATURES(MICA_EXPECT)
#undef MICA_EXPECT
  if (!good) {
    std::fputs(", which this CPU lacks. Build it with -DMICA_NATIVE=OFF\n", stderr);
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace
#endif

}  // namespace mica::detail
