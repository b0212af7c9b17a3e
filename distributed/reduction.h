#pragma once

namespace mica::distributed {

/// How a collective combines the ranks' elements. `mean` is the sum divided by the number of ranks.
enum class Reduction { sum, mean, min, max };

}  // namespace mica::distributed
