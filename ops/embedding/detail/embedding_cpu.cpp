#include <cstring>
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
  on_dtype(SummedTypes{}, args.dweight.dtype(), args.op, [&]<class T>() {
    // Integers are added as unsigned ones, which wrap around; overflow of signed ones would be undefined behavior.
    using Sum = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                            std::type_identity<Accumulate<T>>>::type;
    const T* dy = args.dy.data<T>();
    T* dweight = args.dweight.data<T>();
    // Each thread has a range of columns, so that every sum is in the order of the indices, for any number of threads.
    parallel_for(width, 64, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t columns = end - begin;
      std::vector<Sum> sums(static_cast<std::size_t>(rows * columns), Sum{0});
      for (std::int64_t r = 0; args.accumulate && r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          sums[static_cast<std::size_t>(r * columns + c)] = static_cast<Sum>(dweight[r * width + begin + c]);
        }
      }
      for (std::int64_t i = 0; i < n; ++i) {
        Sum* to = sums.data() + indices[i] * columns;
        const T* from = dy + i * width + begin;
        for (std::int64_t c = 0; c < columns; ++c) {
          to[c] += static_cast<Sum>(from[c]);
        }
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          dweight[r * width + begin + c] = static_cast<T>(sums[static_cast<std::size_t>(r * columns + c)]);
        }
      }
    });
  });
}

}  // namespace mica::kernels
