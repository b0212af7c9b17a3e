#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/einsum/einsum.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// An operand, or the product of several, with a label for each axis: the letters of the equation, and for the axes of
// an ellipsis '0' (the last one), '1', ….
struct Factor {
  Tensor x;
  std::string labels;
};

using LabelSizes = std::map<char, std::int64_t>;

bool has(const std::string& labels, char label) { return labels.find(label) != std::string::npos; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::string named(char label) {
  return is_letter(label) ? fmt::format("'{}'", label) : fmt::format("axis {} of the ellipsis", '0' - label - 1);
}

// A term of the equation: its letters before and after the ellipsis.
struct Term {
  std::string before, after;
  bool has_ellipsis = false;

  std::string letters() const { return before + after; }
  std::string labels(int ellipsis_axes) const {
    std::string all = before;
    for (int i = ellipsis_axes; i-- > 0;) {
      all += static_cast<char>('0' + i);
    }
    return all + after;
  }
};

Term parse_term(std::string_view text, std::string_view equation) {
  Term term;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 3) == "...") {
      check(!term.has_ellipsis, "einsum: expected at most one '...' in a term, got '{}' in '{}'", text, equation);
      term.has_ellipsis = true;
      i += 2;
    } else {
      check(is_letter(text[i]), "einsum: expected letters, '...', ',' and '->', got '{}' in '{}'", text[i], equation);
      (term.has_ellipsis ? term.after : term.before) += text[i];
    }
  }
  return term;
}

struct Equation {
  std::vector<Term> terms;
  Term result;
};

// The letters that occur once in all terms, in order.
std::string unrepeated(const std::vector<Term>& terms) {
  std::map<char, int> counts;
  for (const Term& term : terms) {
    for (const char c : term.letters()) {
      ++counts[c];
    }
  }
  std::string once;
  for (const auto& [c, count] : counts) {
    if (count == 1) {
      once += c;
    }
  }
  return once;
}

Equation parse(std::string_view equation) {
  std::string text(equation);
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  const std::size_t arrow = text.find("->");
  Equation parsed;
  const std::string_view all = text;
  std::string_view left = all.substr(0, arrow);
  for (std::size_t comma = 0; comma != std::string_view::npos; left = left.substr(comma + 1)) {
    comma = left.find(',');
    parsed.terms.push_back(parse_term(left.substr(0, comma), equation));
    if (comma == std::string_view::npos) {
      break;
    }
  }
  if (arrow == std::string::npos) {
    parsed.result = {.before = "", .after = unrepeated(parsed.terms), .has_ellipsis = true};
    return parsed;
  }
  parsed.result = parse_term(all.substr(arrow + 2), equation);
  const std::string letters = parsed.result.letters();
  for (const char c : letters) {
    check(std::count(letters.begin(), letters.end(), c) == 1, "einsum: expected '{}' once in the result's term of '{}'",
          c, equation);
    check(std::any_of(parsed.terms.begin(), parsed.terms.end(), [c](const Term& t) { return has(t.letters(), c); }),
          "einsum: '{}' is in the result of '{}', but in no operand", c, equation);
  }
  return parsed;
}

// The operands with their labels, and the number of axes of the longest ellipsis.
std::vector<Factor> label(const Equation& parsed, const Tensors& operands, std::string_view equation,
                          int& ellipsis_axes) {
  std::vector<Factor> factors;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Term& term = parsed.terms[i];
    const int letters = static_cast<int>(term.letters().size());
    const int further = operands[i].dim() - letters;
    check(term.has_ellipsis ? further >= 0 : further == 0,
          "einsum: operand {} of '{}' has {} letters{} and a tensor of shape {}", i, equation, letters,
          term.has_ellipsis ? " besides the ellipsis" : "", operands[i].shape());
    ellipsis_axes = std::max(ellipsis_axes, further);
    factors.push_back({operands[i], term.labels(further)});
  }
  return factors;
}

// Replaces axes with the same label by their diagonal.
void take_diagonals(Factor& factor, std::size_t operand) {
  for (std::size_t i = 0; i < factor.labels.size();) {
    const std::size_t j = factor.labels.find(factor.labels[i], i + 1);
    if (j == std::string::npos) {
      ++i;
      continue;
    }
    const char c = factor.labels[i];
    const auto a = static_cast<std::int64_t>(i);
    const auto b = static_cast<std::int64_t>(j);
    check(factor.x.size(a) == factor.x.size(b), "einsum: operand {} has '{}' twice, of sizes {} and {}", operand, c,
          factor.x.size(a), factor.x.size(b));
    factor.x = diagonal(factor.x, 0, a, b);
    factor.labels.erase(j, 1);
    factor.labels.erase(i, 1);
    factor.labels += c;
    i = 0;
  }
}

LabelSizes sizes_of(const std::vector<Factor>& factors) {
  LabelSizes sizes;
  for (std::size_t f = 0; f < factors.size(); ++f) {
    for (std::size_t i = 0; i < factors[f].labels.size(); ++i) {
      const char c = factors[f].labels[i];
      const std::int64_t size = factors[f].x.size(static_cast<std::int64_t>(i));
      std::int64_t& known = sizes.try_emplace(c, size).first->second;
      check(size == known || size == 1 || known == 1, "einsum: {} has size {} in operand {}, and {} in an earlier one",
            named(c), size, f, known);
      known = known == 1 ? size : known;
    }
  }
  return sizes;
}

// Removes axes of length 1 that broadcast: the product is the same without them.
void drop_broadcast(Factor& factor, const LabelSizes& sizes) {
  for (std::size_t i = factor.labels.size(); i-- > 0;) {
    const auto axis = static_cast<std::int64_t>(i);
    if (factor.x.size(axis) == 1 && sizes.at(factor.labels[i]) != 1) {
      factor.x = squeeze(factor.x, axis);
      factor.labels.erase(i, 1);
    }
  }
}

// Sums over the axes whose labels are not in `kept`.
void sum_out(Factor& factor, const std::string& kept) {
  Dims axes;
  std::string rest;
  for (std::size_t i = 0; i < factor.labels.size(); ++i) {
    if (has(kept, factor.labels[i])) {
      rest += factor.labels[i];
    } else {
      axes.push_back(static_cast<std::int64_t>(i));
    }
  }
  if (!axes.empty()) {
    factor.x = sum(factor.x, axes);
    factor.labels = rest;
  }
}

// The tensor with its axes in the order of `labels`; those that it lacks have length 1.
Tensor arranged(const Factor& factor, const std::string& labels) {
  Dims axes;
  for (const char c : labels) {
    if (const std::size_t at = factor.labels.find(c); at != std::string::npos) {
      axes.push_back(static_cast<std::int64_t>(at));
    }
  }
  Tensor x = permute(factor.x, axes);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (!has(factor.labels, labels[i])) {
      x = unsqueeze(x, static_cast<std::int64_t>(i));
    }
  }
  return x;
}

std::int64_t size_of_labels(const std::string& labels, const LabelSizes& sizes) {
  Shape shape;
  for (const char c : labels) {
    shape.push_back(sizes.at(c));
  }
  return numel_of(shape);
}

// The product of two factors, summed over their common labels that are not in `kept`. Each other label of one of them
// is in `kept`.
Factor product_of(const Factor& a, const Factor& b, const std::string& kept, const LabelSizes& sizes) {
  std::string batch, left, right, summed;
  for (const char c : a.labels) {
    (!has(b.labels, c) ? left : has(kept, c) ? batch : summed) += c;
  }
  for (const char c : b.labels) {
    right += has(a.labels, c) ? "" : std::string(1, c);
  }
  const std::string result = batch + left + right;
  check(result.size() <= kMaxRank, "einsum: a product of two operands has {} axes ({}), more than {}", result.size(),
        result, kMaxRank);
  if (summed.empty()) {
    return {mul(arranged(a, result), arranged(b, result)), result};
  }
  const std::int64_t m = size_of_labels(left, sizes);
  const std::int64_t n = size_of_labels(right, sizes);
  const std::int64_t k = size_of_labels(summed, sizes);
  Shape rows, columns;
  if (!batch.empty()) {
    rows.push_back(size_of_labels(batch, sizes));
    columns = rows;
  }
  rows.push_back(m);
  rows.push_back(k);
  columns.push_back(k);
  columns.push_back(n);
  const Tensor y =
      matmul(reshape(arranged(a, batch + left + summed), rows), reshape(arranged(b, batch + summed + right), columns));
  Shape shape;
  for (const char c : result) {
    shape.push_back(sizes.at(c));
  }
  return {reshape(y, shape), result};
}

// Multiplications in the product of two factors.
double cost_of(const Factor& a, const Factor& b, const LabelSizes& sizes) {
  double cost = 1;
  for (const auto& [label, size] : sizes) {
    cost *= has(a.labels, label) || has(b.labels, label) ? static_cast<double>(size) : 1;
  }
  return cost;
}

// The labels of the result and of all factors except two.
std::string labels_beside(const std::vector<Factor>& factors, const std::string& result, std::size_t a, std::size_t b) {
  std::string labels = result;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    labels += i == a || i == b ? "" : factors[i].labels;
  }
  return labels;
}

// Replaces the two factors whose product is the cheapest; the first ones, if several are.
void multiply_cheapest(std::vector<Factor>& factors, const std::string& result, const LabelSizes& sizes) {
  std::size_t best_a = 0, best_b = 1;
  double best = cost_of(factors[0], factors[1], sizes);
  for (std::size_t a = 0; a < factors.size(); ++a) {
    for (std::size_t b = a + 1; b < factors.size(); ++b) {
      if (const double cost = cost_of(factors[a], factors[b], sizes); cost < best) {
        best = cost;
        best_a = a;
        best_b = b;
      }
    }
  }
  factors[best_a] = product_of(factors[best_a], factors[best_b], labels_beside(factors, result, best_a, best_b), sizes);
  factors.erase(factors.begin() + static_cast<std::ptrdiff_t>(best_b));
}

void expect_alike(const Tensors& operands, const char* op) {
  const Tensor& first = operands[0];
  check(is_floating(first.dtype()), "{}: expected a floating dtype, got {}", op, first.dtype());
  for (const Tensor& x : operands) {
    check(x.dtype() == first.dtype() && x.device() == first.device(),
          "{}: expected operands of one dtype and device, got {} on {} and {} on {}", op, first.dtype(), first.device(),
          x.dtype(), x.device());
  }
}

}  // namespace

Tensor einsum(std::string_view equation, const Tensors& operands) {
  check(!operands.empty(), "einsum: expected at least one operand, got none");
  const Equation parsed = parse(equation);
  check(parsed.terms.size() == operands.size(), "einsum: '{}' has {} terms for operands, got {} operands", equation,
        parsed.terms.size(), operands.size());
  expect_alike(operands, "einsum");
  int ellipsis_axes = 0;
  std::vector<Factor> factors = label(parsed, operands, equation, ellipsis_axes);
  const std::string result = parsed.result.labels(parsed.result.has_ellipsis ? ellipsis_axes : 0);
  check(result.size() <= kMaxRank, "einsum: the result of '{}' has {} axes, more than {}", equation, result.size(),
        kMaxRank);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    take_diagonals(factors[i], i);
  }
  const LabelSizes sizes = sizes_of(factors);
  for (Factor& factor : factors) {
    drop_broadcast(factor, sizes);
  }
  for (std::size_t i = 0; i < factors.size(); ++i) {
    sum_out(factors[i], labels_beside(factors, result, i, i));
  }
  while (factors.size() > 1) {
    multiply_cheapest(factors, result, sizes);
  }
  return arranged(factors[0], result);
}

Tensor tensordot(const Tensor& a, const Tensor& b, const Dims& a_axes, const Dims& b_axes) {
  expect_alike({a, b}, "tensordot");
  check(a_axes.size() == b_axes.size(), "tensordot: expected as many axes of a as of b, got {} and {}", a_axes, b_axes);
  std::string a_labels, b_labels, result;
  for (int i = 0; i < a.dim(); ++i) {
    a_labels += static_cast<char>('a' + i);
  }
  for (int i = 0; i < b.dim(); ++i) {
    b_labels += static_cast<char>('A' + i);
  }
  result = a_labels + b_labels;
  for (int i = 0; i < a_axes.size(); ++i) {
    const int from = normalize_axis(a_axes[i], a.dim(), "tensordot");
    const int to = normalize_axis(b_axes[i], b.dim(), "tensordot");
    check(a.size(from) == b.size(to) || a.size(from) == 1 || b.size(to) == 1,
          "tensordot: axis {} of a has size {}, and axis {} of b has size {}", from, a.size(from), to, b.size(to));
    const char c = a_labels[static_cast<std::size_t>(from)];
    check(has(result, c) && has(result, b_labels[static_cast<std::size_t>(to)]),
          "tensordot: expected each axis once, got {} and {}", a_axes, b_axes);
    result.erase(result.find(c), 1);
    result.erase(result.find(b_labels[static_cast<std::size_t>(to)]), 1);
    b_labels[static_cast<std::size_t>(to)] = c;
  }
  check(result.size() <= kMaxRank, "tensordot: the result has {} axes, more than {}", result.size(), kMaxRank);
  return einsum(fmt::format("{},{}->{}", a_labels, b_labels, result), {a, b});
}

Tensor tensordot(const Tensor& a, const Tensor& b, std::int64_t axes) {
  check(axes >= 0 && axes <= a.dim() && axes <= b.dim(),
        "tensordot: expected between 0 and {} axes for shapes {} and {}, got {}", std::min(a.dim(), b.dim()), a.shape(),
        b.shape(), axes);
  Dims last, first;
  for (std::int64_t i = 0; i < axes; ++i) {
    last.push_back(a.dim() - axes + i);
    first.push_back(i);
  }
  return tensordot(a, b, last, first);
}

Tensor outer(const Tensor& a, const Tensor& b) {
  check(a.dim() == 1 && b.dim() == 1, "outer: expected two vectors, got shapes {} and {}", a.shape(), b.shape());
  return mul(unsqueeze(a, 1), b);
}

Tensor inner(const Tensor& a, const Tensor& b) {
  expect_alike({a, b}, "inner");
  return a.dim() == 0 || b.dim() == 0 ? mul(a, b) : tensordot(a, b, {-1}, {-1});
}

Tensor kron(const Tensor& a, const Tensor& b) {
  const int rank = std::max(a.dim(), b.dim());
  check(2 * rank <= kMaxRank, "kron: expected at most {} axes, got shapes {} and {}", kMaxRank / 2, a.shape(),
        b.shape());
  // Axis k becomes (a's, b's): a gets an axis of length 1 after each of its own, b one before each.
  Shape a_shape, b_shape, shape;
  for (int k = 0; k < rank; ++k) {
    const std::int64_t in_a = k < rank - a.dim() ? 1 : a.size(k - rank);
    const std::int64_t in_b = k < rank - b.dim() ? 1 : b.size(k - rank);
    for (const std::int64_t size : {in_a, std::int64_t{1}}) {
      a_shape.push_back(size);
    }
    for (const std::int64_t size : {std::int64_t{1}, in_b}) {
      b_shape.push_back(size);
    }
    shape.push_back(in_a * in_b);
  }
  return reshape(mul(reshape(a, a_shape), reshape(b, b_shape)), shape);
}

}  // namespace mica
