// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics, and about packets as template
// arguments.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <functional>

#include <mica/core/detail/ceil_div.h>
#include <mica/ops/gemm/detail/few_rows.h>
#include <mica/ops/gemm/detail/gemm_cpu.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/detail/reduce_kernels.h>

namespace mica::kernels {

namespace {

template <class T>
gemm::Matrix<T> matrix(const Tensor& x, std::int64_t offset) {
  const MatrixLayout layout = matrix_layout(x);
  return {x.data<T>() + offset, layout.transposed ? 1 : layout.leading, layout.transposed ? layout.leading : 1};
}

// The bias, or zeros if there is none, padded to a whole number of tiles.
template <class S, class T>
const S* starts(const Tensor& bias, std::int64_t n, gemm::Buffer<S>& buffer) {
  buffer.assign(ceil_div(n, gemm::Tile<S>::kColumns) * gemm::Tile<S>::kColumns, S{0});
  if (bias.defined()) {
    const T* const from = bias.data<T>();
    std::transform(from, from + n, buffer.begin(), [](T value) { return static_cast<S>(value); });
  }
  return buffer.data();
}

template <class T>
void multiply(const MatmulArgs& args) {
  using S = Accumulate<T>;
  const int axes = args.out.dim();
  const std::int64_t m = args.out.shape()[axes - 2];
  const std::int64_t n = args.out.shape()[axes - 1];
  const std::int64_t depth = args.a.size(-1);
  const MatmulBatch batch(args.a, args.b, args.out.shape());
  // If K is so long that sums are stored between its parts, they are stored in the accumulation type.
  const bool wide = !std::is_same_v<S, T> && depth > gemm::kDepth;

  // Many small products get one thread each; each of few large ones gets all threads.
  const std::int64_t work = m * n * depth;
  const bool each = batch.size() >= 2 * num_threads() || work <= gemm::kMultiplyGrain;
  const std::int64_t grain = each ? gemm::kMultiplyGrain / work + 1 : batch.size();
  parallel_for(batch.size(), grain, [&](std::int64_t begin, std::int64_t end) {
    static thread_local gemm::Scratch<S> scratch;
    const S* const start = starts<S, T>(args.bias, n, scratch.start);
    for (std::int64_t item = begin; item < end; ++item) {
      const auto a = matrix<T>(args.a, batch.offset(0, item));
      const auto b = matrix<T>(args.b, batch.offset(1, item));
      T* const out = args.out.data<T>() + item * m * n;
      if (m <= gemm::kFewRows) {
        gemm::multiply_few_rows(m, n, depth, a, b, args.bias.data_or_null<T>(), out);
        continue;
      }
      if constexpr (std::is_same_v<T, float>) {
        if (float32_matmul_precision() == MatmulPrecision::bfloat16x2 && gemm::has_split_product(a, b)) {
          gemm::multiply_split(m, n, depth, a, b, start, out);
          continue;
        }
      }
      if (!wide) {
        gemm::multiply<S, T, T>(m, n, depth, a, b, start, out, scratch);
        continue;
      }
      S* const sums = gemm::grown(scratch.sums, m * n);
      gemm::multiply<S, T, S>(m, n, depth, a, b, start, sums, scratch);
      parallel_for(m * n, gemm::kPackGrain, [&](std::int64_t from, std::int64_t to) {
        std::transform(sums + from, sums + to, out + from, [](S value) { return static_cast<T>(value); });
      });
    }
  });
}

template <class T>
void multiply_add(const MatmulAddArgs& args) {
  using S = Accumulate<T>;
  const std::int64_t m = args.sum.size(0);
  const std::int64_t n = args.sum.size(1);
  static thread_local gemm::Scratch<S> scratch;
  S* const product = gemm::grown(scratch.sums, m * n);
  gemm::multiply<S, T, S>(m, n, args.a.size(1), matrix<T>(args.a, 0), matrix<T>(args.b, 0),
                          starts<S, T>({}, n, scratch.start), product, scratch);
  S* const sum = args.sum.data<S>();
  parallel_for(m * n, gemm::kPackGrain, [&](std::int64_t from, std::int64_t to) {
    std::transform(product + from, product + to, sum + from, sum + from, std::plus<S>());
  });
}

}  // namespace

void matmul(Cpu, const MatmulArgs& args) {
  const Tensor& sums = args.sums.defined() ? args.sums : args.out;
  const MatmulArgs product{.a = args.a, .b = args.b, .bias = args.bias, .out = sums};
  on_dtype(FloatTypes{}, sums.dtype(), "matmul", [&]<class T>() { multiply<T>(product); });
  activate(Cpu{}, args.activation, sums, args.out);
}

void activation_backward(Cpu, const ActivationBackward& args) {
  const bool has_function = args.activation != Activation::none;
  if (has_function) {
    unary_backward(Cpu{}, function_of(args.activation), args.dz, args.dy, args.v);
  }
  const Tensor sums =
      as_strided(args.dbias, {1, args.dbias.numel()}, {args.dbias.numel(), 1}, args.dbias.handle()->offset);
  sum(Cpu{}, Sum{.x = has_function ? args.dz : args.dy, .divisor = 1, .y = sums});
}

void matmul_activation_backward(Cpu, const MatmulActivationBackward& args) {
  matmul_activation_backward_in_steps(Cpu{}, args);
}

bool has_fast_bfloat16(Cpu) { return gemm::bfloat16_unit() != gemm::Bfloat16Unit::none; }

std::string timed_algorithms(Cpu) { return {}; }
void set_timed_algorithms(Cpu, std::string_view text) {
  check(text.empty(), "set_matmul_algorithms: expected a GPU; algorithms can be chosen only there");
}

void matmul_add(Cpu, const MatmulAddArgs& args) {
  on_dtype(FloatTypes{}, args.a.dtype(), "matmul", [&]<class T>() { multiply_add<T>(args); });
}

}  // namespace mica::kernels
