#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/einsum/einsum.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;
using autograd::gradgradcheck;

namespace einsum_test {

// The sum by its definition, over all values of all letters; for terms of letters only.
Tensor reference(const std::string& equation, const Tensors& operands) {
  const std::string left = equation.substr(0, equation.find("->"));
  const std::string result = equation.substr(equation.find("->") + 2);
  std::vector<std::string> terms{""};
  for (const char c : left) {
    if (c == ',') {
      terms.emplace_back();
    } else {
      terms.back() += c;
    }
  }
  std::map<char, std::int64_t> sizes, at;
  std::vector<std::vector<double>> values;
  for (std::size_t t = 0; t < terms.size(); ++t) {
    values.push_back(to_vector<double>(operands[t]));
    for (std::size_t i = 0; i < terms[t].size(); ++i) {
      std::int64_t& size = sizes[terms[t][i]];
      size = std::max(size, operands[t].size(static_cast<std::int64_t>(i)));
    }
  }
  Shape shape;
  for (const char c : result) {
    shape.push_back(sizes[c]);
  }
  std::int64_t steps = 1;
  for (const auto& [c, size] : sizes) {
    steps *= size;
  }
  std::vector<double> sums(static_cast<std::size_t>(numel_of(shape)));
  for (std::int64_t step = 0; step < steps; ++step) {
    std::int64_t rest = step;
    for (const auto& [c, size] : sizes) {
      at[c] = rest % size;
      rest /= size;
    }
    double product = 1;
    for (std::size_t t = 0; t < terms.size(); ++t) {
      std::int64_t index = 0;
      for (std::size_t i = 0; i < terms[t].size(); ++i) {
        const std::int64_t size = operands[t].size(static_cast<std::int64_t>(i));
        index = index * size + (size == 1 ? 0 : at[terms[t][i]]);
      }
      product *= values[t][static_cast<std::size_t>(index)];
    }
    std::int64_t index = 0;
    for (const char c : result) {
      index = index * sizes[c] + at[c];
    }
    sums[static_cast<std::size_t>(index)] += product;
  }
  return from_data(sums, shape);
}

struct EinsumCase {
  std::string equation;
  std::vector<Shape> shapes;
};

const std::vector<EinsumCase>& cases() {
  static const std::vector<EinsumCase> all{
      {"ij,jk->ik", {{3, 4}, {4, 5}}},
      {"ij,jk->ki", {{3, 4}, {4, 5}}},
      {"bij,bkj->bik", {{2, 3, 4}, {2, 5, 4}}},
      {"ibj,kjb->bki", {{3, 2, 4}, {5, 4, 2}}},
      {"i,i->", {{6}, {6}}},
      {"i,j->ij", {{3}, {4}}},
      {"ij->ji", {{3, 4}}},
      {"ij->", {{3, 4}}},
      {"ii->i", {{4, 4}}},
      {"iji->j", {{3, 4, 3}}},
      {"iii->", {{3, 3, 3}}},
      {"iijj->ij", {{2, 2, 3, 3}}},
      {"ii,i->i", {{4, 4}, {4}}},
      {"ij,ij->ij", {{3, 4}, {3, 4}}},
      {"ij,kl->il", {{2, 3}, {4, 5}}},
      {"i,ij,j->", {{3}, {3, 4}, {4}}},
      {"ij,jk,kl,l->i", {{2, 3}, {3, 4}, {4, 5}, {5}}},
      {"abc,cd,de,eb->a", {{2, 3, 4}, {4, 5}, {5, 2}, {2, 3}}},
      {"ij,jk->ik", {{3, 1}, {4, 5}}},
      {"ij,ij->i", {{1, 4}, {3, 1}}},
      {"bij,bjk->bik", {{1, 3, 4}, {2, 4, 5}}},
      {"ij,jk->ik", {{0, 4}, {4, 5}}},
      {"ij,jk->ik", {{3, 0}, {0, 5}}},
      {",i,->i", {{}, {3}, {}}},
      {"Aa,aB->BA", {{2, 3}, {3, 4}}},
  };
  return all;
}

TEST(Einsum, MatchesItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const EinsumCase& c : cases()) {
      SCOPED_TRACE(fmt::format("{} {}", device, c.equation));
      Tensors operands;
      for (const Shape& shape : c.shapes) {
        operands.push_back(randn(shape, float64, device));
      }
      expect_close(einsum(c.equation, operands), reference(c.equation, operands), 1e-12, 1e-12);
      EXPECT_TRUE(gradcheck([&](const Tensors& x) { return einsum(c.equation, x); }, operands));
    }
  }
}

TEST(Einsum, SecondDerivatives) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const auto random = [device](const Shape& shape) { return randn(shape, float64, device); };
    EXPECT_TRUE(gradgradcheck([](const Tensors& x) { return einsum("iij,jk,k->ik", x); },
                              {random({2, 2, 3}), random({3, 2}), random({2})}));
    EXPECT_TRUE(
        gradgradcheck([](const Tensors& x) { return einsum("...i,...i->...", x); }, {random({2, 3}), random({1, 3})}));
  }
}

TEST(Einsum, ImplicitResultAndEllipsis) {
  manual_seed(3);
  const Tensor a = randn({2, 3, 4}, float64), b = randn({4, 5}, float64), v = randn({4}, float64);
  expect_close(einsum("ba", {b}), transpose(b, 0, 1), 0, 0);
  expect_close(einsum("ij, jk", {select(a, 0, 0), b}), matmul(select(a, 0, 0), b), 1e-14, 1e-14);
  expect_close(einsum("ii", {slice(b, 1, 0, 4)}), sum(diagonal(b)), 1e-14, 1e-14);
  expect_close(einsum("bA", {b}), transpose(b, 0, 1), 0, 0);  // capitals first
  expect_close(einsum("...j,jk", {a, b}), matmul(a, b), 1e-14, 1e-14);
  expect_close(einsum("...j,j->...", {a, v}), matmul(a, v), 1e-14, 1e-14);
  expect_close(einsum("i...->...i", {a}), permute(a, {1, 2, 0}), 0, 0);
  expect_close(einsum("...->", {a}), sum(a), 1e-14, 1e-14);
  expect_close(einsum("...", {a}), a, 0, 0);
  expect_close(einsum("i->...i", {v}), v, 0, 0);
  // Ellipses of different lengths, and an axis of length 1.
  const Tensor c = randn({3, 1, 2}, float64);
  expect_close(einsum("...i,...i->...", {c, randn({2}, float64) * 0 + 1}), sum(c, {-1}), 1e-14, 1e-14);
  expect_close(einsum("...,...->...", {a, unsqueeze(v, 0)}), a * v, 0, 0);
  const Tensor square = slice(b, 1, 0, 3);
  expect_close(einsum("a...b,b...->a...", {a, square}), reference("acb,bc->ac", {a, square}), 1e-14, 1e-14);
}

TEST(Einsum, AllFloatingDtypesAndStrides) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor a = randn({2, 5, 3}, dtype, device), b = randn({5, 2, 4}, dtype, device);
      const Tensor y = einsum("bki,kbj->bij", {a, b});
      EXPECT_EQ(y.dtype(), dtype);
      expect_close(y, reference("bki,kbj->bij", {a, b}), 4 * epsilon_of(dtype), 4 * epsilon_of(dtype));
    }
    const autograd::Autocast guard(bfloat16);
    EXPECT_EQ(einsum("ij,jk", {ones({2, 3}, float32, device), ones({3, 2}, float32, device)}).dtype(), bfloat16);
  }
}

// The product of the first two would have 10¹² elements.
TEST(Einsum, MultipliesTheCheapestPairFirst) {
  const std::int64_t n = 1'000'000;
  const Tensor column = ones({n, 1}), row = ones({1, n}), v = full({n}, 2);
  expect_close(einsum("ij,jk,k->i", {column, row, v}), full({n}, 2.0 * n), 1e-5, 0);
}

TEST(Einsum, Errors) {
  const Tensor m = ones({2, 3}), v = ones({4});
  const auto expect = [](const std::string& equation, const Tensors& operands, const std::string& text) {
    expect_error([&] { einsum(equation, operands); }, text);
  };
  expect("ij", {}, "einsum: expected at least one operand, got none");
  expect("ij,j", {m}, "einsum: 'ij,j' has 2 terms for operands, got 1 operands");
  expect("i1", {m}, "einsum: expected letters, '...', ',' and '->', got '1' in 'i1'");
  expect("i..", {m}, "got '.' in 'i..'");
  expect("...i...", {m}, "at most one '...'");
  expect("ijk", {m}, "einsum: operand 0 of 'ijk' has 3 letters and a tensor of shape [2, 3]");
  expect("i", {m}, "einsum: operand 0 of 'i' has 1 letters and a tensor of shape [2, 3]");
  expect("...ijk", {m}, "has 3 letters besides the ellipsis");
  expect("ii", {m}, "einsum: operand 0 has 'i' twice, of sizes 2 and 3");
  expect("ij,j", {m, v}, "einsum: 'j' has size 4 in operand 1, and 3 in an earlier one");
  expect("...,...", {m, v}, "einsum: axis -1 of the ellipsis has size 4 in operand 1, and 3 in an earlier one");
  expect("ij->ik", {m}, "einsum: 'k' is in the result of 'ij->ik', but in no operand");
  expect("ij->ii", {m}, "einsum: expected 'i' once in the result's term of 'ij->ii'");
  expect("ij->i->j", {m}, "got '-'");
  expect("ij,jk", {m, ones({3, 2}, float64)}, "einsum: expected operands of one dtype and device");
  expect("ij", {ones({2, 3}, int64)}, "einsum: expected a floating dtype, got int64");
  const Tensor many = ones({1, 1, 1, 1, 1}, float32);
  expect("abcde,fghij", {many, many}, "more than 8");
}

TEST(Tensordot, AxesByNumberAndList) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    const Tensor a = randn({2, 3, 4}, float64, device), b = randn({3, 4, 5}, float64, device);
    const Tensor expected = matmul(view(a, {2, 12}), view(b, {12, 5}));
    expect_close(tensordot(a, b), expected, 1e-13, 1e-13);
    expect_close(tensordot(a, permute(b, {2, 1, 0}), {1, -1}, {2, 1}), expected, 1e-13, 1e-13);
    EXPECT_EQ(tensordot(a, b, 0).shape(), (Shape{2, 3, 4, 3, 4, 5}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return tensordot(x, y, 1); },
                              {randn({2, 3}, float64, device), randn({3, 2}, float64, device)}));
  }
  expect_error(
      [] {
        tensordot(ones({2, 3}), ones({4, 2}), {1}, {0});
      },
      "tensordot: axis 1 of a has size 3, and axis 0 of b has size 4");
  expect_error([] { tensordot(ones({2}), ones({2}), 2); }, "tensordot: expected between 0 and 1 axes");
  expect_error([] { tensordot(ones({2, 2}), ones({2, 2}), {0, 0}, {0, 1}); }, "tensordot: expected each axis once");
  expect_error([] { tensordot(ones({2, 2}), ones({2, 2}), {0}, {0, 1}); }, "tensordot: expected as many axes");
}

TEST(Products, OuterInnerKron) {
  const Tensor a = from_data<double>({1.0, 2.0}), b = from_data<double>({3.0, 4.0, 5.0});
  expect_close(outer(a, b), from_data<double>({3.0, 4.0, 5.0, 6.0, 8.0, 10.0}, {2, 3}), 0, 0);
  expect_close(inner(a, a), scalar(5), 0, 0);
  expect_close(inner(ones({2, 3, 4}), ones({5, 4})), full({2, 3, 5}, 4), 0, 0);
  expect_close(inner(scalar(2), b), 2 * b, 0, 0);
  expect_close(kron(a, b), from_data<double>({3.0, 4.0, 5.0, 6.0, 8.0, 10.0}), 0, 0);
  expect_close(kron(from_data<double>({1.0, 2.0}, {2, 1}), from_data<double>({1.0, 10.0}, {1, 2})),
               from_data<double>({1.0, 10.0, 2.0, 20.0}, {2, 2}), 0, 0);
  expect_close(kron(a, from_data<double>({1.0, 3.0}, {2, 1})), from_data<double>({1.0, 2.0, 3.0, 6.0}, {2, 2}), 0, 0);
  EXPECT_TRUE(gradcheck([](const Tensor& x, const Tensor& y) { return kron(x, y); }, {a, b}));
  expect_error([] { outer(ones({2, 2}), ones({2})); }, "outer: expected two vectors, got shapes [2, 2] and [2]");
  expect_error([] { kron(ones({1, 1, 1, 1, 1}), ones({2})); }, "kron: expected at most 4 axes");
}

}  // namespace einsum_test
