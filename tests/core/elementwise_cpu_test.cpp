#include <tests/support.h>

#include <mica/core/elementwise_cpu.h>
#include <mica/core/half.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// out0 = a b + c and out1 = a - b c of small integers, which every dtype holds exactly.
template <class T>
void compute(const std::array<const Tensor*, 2>& outs, const Tensor& a, const Tensor& b, const Tensor& c) {
  using S = Accumulate<T>;
  const auto f = [](S x, S y, S z) { return Results<S, 2>{{x * y + z, x - y * z}}; };
  elementwise<T, T, T, T>(Cpu{}, f, outs, a, b, c);
}

Tensor small_integers(const Shape& shape, DType dtype, int offset) {
  std::vector<double> values(static_cast<std::size_t>(numel_of(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<double>((i * 7 + static_cast<std::size_t>(offset)) % 5) - 2;
  }
  return from_data(values, shape).to(dtype);
}

// Either output may be null: the other one gets the same values, whatever the layout of the operands.
template <class T>
void expect_each_output_alone(std::int64_t rows, std::int64_t columns, bool transposed) {
  const DType dtype = dtype_of<T>;
  const Shape shape{rows, columns};
  const Tensor a = small_integers(shape, dtype, 0), b = small_integers({columns}, dtype, 1);
  const Tensor c = transpose(small_integers({columns, rows}, dtype, 3), 0, 1);
  const auto new_output = [&] {
    const Tensor out = full(transposed ? Shape{columns, rows} : shape, -100, dtype);
    return transposed ? transpose(out, 0, 1) : out;
  };
  std::vector<double> expected[2];
  const auto x = to_vector<double>(a), y = to_vector<double>(b), z = to_vector<double>(c);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double weight = y[i % static_cast<std::size_t>(columns)];
    expected[0].push_back(x[i] * weight + z[i]);
    expected[1].push_back(x[i] - weight * z[i]);
  }
  const Tensor both[2] = {new_output(), new_output()};
  compute<T>({&both[0], &both[1]}, a, b, c);
  for (int k = 0; k < 2; ++k) {
    const Tensor alone = new_output();
    compute<T>({k == 0 ? &alone : nullptr, k == 1 ? &alone : nullptr}, a, b, c);
    expect_close(both[k], expected[k], 0, 0);
    expect_close(alone, expected[k], 0, 0);
  }
}

TEST(ElementwiseCpu, AnOutputMayBeNull) {
  for (const bool transposed : {false, true}) {
    for (const auto& [rows, columns] : {std::pair{3, 5}, {700, 3}, {3, 700}, {2, 20000}}) {
      expect_each_output_alone<double>(rows, columns, transposed);
      expect_each_output_alone<float>(rows, columns, transposed);
      expect_each_output_alone<Float16>(rows, columns, transposed);
      expect_each_output_alone<BFloat16>(rows, columns, transposed);
    }
  }
}

TEST(ElementwiseCpu, RefusesAnotherDtype) {
  const Tensor a = ones({3}, float32), out = ones({3}, float64);
  expect_error([&] { compute<float>({&out, nullptr}, a, a, a); }, "expected elements of float32, got float64");
  expect_error([&] { compute<float>({&a, nullptr}, a, out, a); }, "expected elements of float32, got float64");
}

}  // namespace
