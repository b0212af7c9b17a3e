#include <mica/ops/attention/detail/attention_plan.h>

namespace mica {

namespace {

constexpr std::int64_t kManyWeights = std::int64_t{1} << 22;   // elements per head
constexpr std::int64_t kMaxWorkspace = std::int64_t{1} << 29;  // elements of all heads, of 2 bytes each

}  // namespace

std::vector<AttentionBackend> plan_attention(const AttentionProblem& problem) {
  using enum AttentionBackend;
  const bool is_16_bit = problem.dtype == float16 || problem.dtype == bfloat16;
  const bool plain = problem.rank == 4 && !problem.mask_gradient && !problem.capped && !problem.empty;
  if (!problem.cuda && plain && !problem.masked && !problem.windowed) {
    const bool few = problem.key_items < 4 && problem.queries * problem.keys < kManyWeights;
    return few ? std::vector{composed, blocked} : std::vector{blocked, composed};
  }
  if (plain && is_16_bit && problem.width == problem.value_width && problem.width >= 32 && problem.width <= 128 &&
      problem.width % 8 == 0) {
    const bool regular = problem.queries % 64 == 0 && problem.keys % 64 == 0 &&
                         problem.items * problem.queries * problem.keys <= kMaxWorkspace;
    if (problem.windowed) {
      return regular && !problem.drops && !problem.masked ? std::vector{cudnn, composed} : std::vector{composed};
    }
    if (problem.drops || problem.masked) {
      return {flash, composed};
    }
    const bool cudnn_is_faster = problem.width > 64 || !problem.wgmma;
    return regular && cudnn_is_faster ? std::vector{cudnn, flash, composed} : std::vector{flash, cudnn, composed};
  }
  return {composed};
}

}  // namespace mica
