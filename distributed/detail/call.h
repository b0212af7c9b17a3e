#pragma once

#include <cstdint>
#include <string>

#include <mica/core/dtype.h>
#include <mica/distributed/reduction.h>

namespace mica::distributed::detail {

enum class CallKind : std::uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, barrier, split, exchange };

/// The arguments of a collective on which all ranks must agree.
struct Call {
  CallKind kind = CallKind::barrier;
  DType dtype = float32;                 ///< this and the members below: only for collectives with tensors
  Reduction reduction = Reduction::sum;  ///< of reducing collectives
  bool on_gpu = false;
  std::int32_t root = 0;   ///< of a broadcast
  std::int64_t count = 0;  ///< number of elements; of a rank's part for reduce_scatter and all_gather

  bool operator==(const Call&) const = default;
};

/// "all_reduce (sum) of 1000 float32 on the CPU"
std::string describe(const Call& call);

}  // namespace mica::distributed::detail
