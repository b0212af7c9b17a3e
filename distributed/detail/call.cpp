#include <mica/core/check.h>
#include <mica/distributed/detail/call.h>

namespace mica::distributed::detail {

namespace {

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return "sum";
    case Reduction::mean: return "mean";
    case Reduction::min: return "min";
    case Reduction::max: return "max";
  }
  return "?";
}

}  // namespace

std::string describe(const Call& call) {
  const std::string what =
      fmt::format("of {} {} on the {}", call.count, mica::name_of(call.dtype), call.on_gpu ? "GPU" : "CPU");
  switch (call.kind) {
    case CallKind::all_reduce: return fmt::format("all_reduce ({}) {}", name_of(call.reduction), what);
    case CallKind::reduce_scatter: return fmt::format("reduce_scatter ({}) {}", name_of(call.reduction), what);
    case CallKind::all_gather: return "all_gather " + what;
    case CallKind::broadcast: return fmt::format("broadcast from {} {}", call.root, what);
    case CallKind::barrier: return "barrier";
    case CallKind::split: return "split";
    case CallKind::exchange: return "exchange of addresses";
  }
  return "?";
}

}  // namespace mica::distributed::detail
