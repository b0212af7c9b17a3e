#include <mica/core/detail/cpu_features.h>

namespace mica::detail {

// A macro that is defined becomes "1", others their name.
#define MICA_TEXT(macro) #macro
#define MICA_USED(macro, name) *MICA_TEXT(macro) == '1',

// Constants, since code of this file would use these instructions.
constexpr bool cpu_features_used[] = {MICA_CPU_FEATURES(MICA_USED)};

#undef MICA_TEXT
#undef MICA_USED

}  // namespace mica::detail
