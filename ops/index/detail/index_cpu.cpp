#include <algorithm>

#include <mica/core/parallel.h>
#include <mica/ops/index/detail/index_kernels.h>

namespace mica::kernels {

void index_rows(Cpu, const IndexRows& args) {
  const std::int64_t* const index = args.index.data<std::int64_t>();
  for (std::int64_t k = 0; k < args.index.numel(); ++k) {
    check(index[k] >= 0 && index[k] < args.size, "{}: index {} is out of range for an axis of length {}", args.op,
          index[k], args.size);
  }
  std::int64_t* const rows = args.rows.data<std::int64_t>();
  const std::int64_t lines = args.outer * args.length;
  parallel_for(lines, 1 + 16384 / (args.inner + 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t line = begin; line < end; ++line) {
      const std::int64_t outer = line / args.length;
      const std::int64_t* const from = index + (args.shared ? line - outer * args.length : line) * args.inner;
      std::int64_t* const to = rows + line * args.inner;
      for (std::int64_t i = 0; i < args.inner; ++i) {
        to[i] = (outer * args.size + from[i]) * args.inner + i;
      }
    }
  });
}

Tensor positions_of(Cpu, const Tensor& mask) {
  const bool* const on = mask.data<bool>();
  const Tensor positions = empty({std::count(on, on + mask.numel(), true)}, int64);
  std::int64_t* to = positions.data<std::int64_t>();
  for (std::int64_t i = 0; i < mask.numel(); ++i) {
    if (on[i]) {
      *to++ = i;
    }
  }
  return positions;
}

}  // namespace mica::kernels
