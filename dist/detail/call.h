#pragma once

#include <cstdint>
#include <string>

#include <mica/core/dtype.h>
#include <mica/dist/group.h>

namespace mica::dist::detail {

enum class CallKind : std::uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, barrier, split, exchange };

/// What ranks must agree on in a collective.
struct Call {
  CallKind kind = CallKind::barrier;
  DType dtype = float32;                 ///< of collectives with tensors, as what follows
  Reduction reduction = Reduction::sum;  ///< of those that reduce
  bool on_gpu = false;
  std::int32_t root = 0;   ///< of a broadcast
  std::int64_t count = 0;  ///< elements: of the part, where there is a whole and a part

  bool operator==(const Call&) const = default;
};

/// "all_reduce (sum) of 1000 float32 on the CPU"
std::string describe(const Call& call);

}  // namespace mica::dist::detail
