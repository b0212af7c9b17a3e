#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/embedding/detail/embedding_kernels.h>

namespace mica::kernels {

void embedding_forward(Cpu, const EmbeddingForward& args) {
  const std::int64_t rows = args.weight.shape()[0];
  const std::int64_t width = args.weight.shape()[1];
  const std::int64_t n = args.indices.numel();
  const std::int64_t* indices = args.indices.data<std::int64_t>();
  for (std::int64_t i = 0; i < n; ++i) {
    check(indices[i] >= 0 && indices[i] < rows, "{}: index {} is out of range for {} rows", args.op, indices[i], rows);
  }
  if (args.y.numel() == 0) {
    return;
  }
  const std::byte* weight = args.weight.raw_data();
  std::byte* y = args.y.raw_data();
  const auto copy_rows = [&](auto bytes) {  // `bytes` per row
    parallel_for(n, 1 + 16384 / (width + 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(y + i * bytes, weight + indices[i] * bytes, static_cast<std::size_t>(bytes));
      }
    });
  };
  // For rows of a single element, the size is passed as a constant, so that the copy is inlined.
  switch (const std::int64_t bytes = width * static_cast<std::int64_t>(size_of(args.weight.dtype()))) {
    case 1: copy_rows(std::integral_constant<std::int64_t, 1>{}); break;
    case 2: copy_rows(std::integral_constant<std::int64_t, 2>{}); break;
    case 4: copy_rows(std::integral_constant<std::int64_t, 4>{}); break;
    case 8: copy_rows(std::integral_constant<std::int64_t, 8>{}); break;
    default: copy_rows(bytes);
  }
}

void embedding_backward(Cpu, const EmbeddingBackward& args) {
  const std::int64_t rows = args.dweight.shape()[0];
  const std::int64_t width = args.dweight.shape()[1];
  const std::int64_t n = args.indices.numel();
  const std::int64_t* indices = args.indices.data<std::int64_t>();
  // positions[first[r]], …, positions[first[r + 1] − 1] are the i with indices[i] = r, in increasing order.
  std::vector<std::int64_t> first(static_cast<std::size_t>(rows + 2), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    ++first[indices[i] + 2];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<std::int64_t> positions(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    positions[first[indices[i] + 1]++] = i;
  }
  on_dtype(SummedTypes{}, args.dweight.dtype(), args.op, [&]<class T>() {
    // Integers are added as unsigned ones, which wrap around; overflow of signed ones would be undefined behavior.
    // Floats are added in double: float would lose the small terms of a long sum.
    using Sum =
        typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<double>>::type;
    const T* dy = args.dy.data<T>();
    T* dweight = args.dweight.data<T>();
    constexpr std::int64_t kColumns = 64;
    const std::int64_t strips = (width + kColumns - 1) / kColumns;
    // Each thread has strips of rows, so that every sum is in the order of the indices, for any number of threads.
    const std::int64_t terms = (n / (rows + 1) + 1) * std::min(width, kColumns);  // of a strip, on average
    parallel_for(rows * strips, 1 + 16384 / (terms + 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t strip = begin; strip < end; ++strip) {
        const std::int64_t row = strip / strips;
        const std::int64_t column = strip % strips * kColumns;
        const std::int64_t columns = std::min(kColumns, width - column);
        T* const to = dweight + row * width + column;
        std::array<Sum, kColumns> sums;
        for (std::int64_t c = 0; c < columns; ++c) {
          sums[c] = args.accumulate ? static_cast<Sum>(to[c]) : Sum{0};
        }
        for (std::int64_t at = first[row]; at < first[row + 1]; ++at) {
          const T* const from = dy + positions[at] * width + column;
          for (std::int64_t c = 0; c < columns; ++c) {
            sums[c] += static_cast<Sum>(from[c]);
          }
        }
        std::transform(sums.begin(), sums.begin() + columns, to, [](Sum sum) { return static_cast<T>(sum); });
      }
    });
  });
}

}  // namespace mica::kernels
