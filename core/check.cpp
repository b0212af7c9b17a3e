#include <mica/core/check.h>

namespace mica::detail {

void throw_error(fmt::string_view message, fmt::format_args args) { throw Error(fmt::vformat(message, args)); }

}  // namespace mica::detail
