#include <exception>

#include <mica/core/check.h>
#include <mica/core/detail/nesting.h>

namespace mica::detail {

void ended_out_of_order(const char* guard) noexcept {
  try {
    fail("{}: expected guards to end in the reverse order of their construction, on the thread that constructed them",
         guard);
  } catch (const Error&) {
    std::terminate();
  }
}

}  // namespace mica::detail
