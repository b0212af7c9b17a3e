#pragma once

// The calls of small ops and losses, in addition to those in calls.h.

#include <optional>

#include "calls.h"

namespace mica::conformance {

/// The second and third argument of lerp or clamp: a tensor, a number, or none.
inline Tensor further(const Case& c, const Tensors& x, const char* name, std::size_t& next) {
  if (!c.has(name)) {
    return {};
  }
  const Json& value = c.attributes[name];
  return value == "tensor" ? x.at(next++) : full({}, number(value), x.at(0).dtype(), x.at(0).device());
}

inline ScatterReduction scatter_reduction(const Json& attributes) {
  const std::string name = attributes["reduction"];
  return name == "sum"    ? ScatterReduction::sum
         : name == "prod" ? ScatterReduction::prod
         : name == "mean" ? ScatterReduction::mean
         : name == "amax" ? ScatterReduction::amax
                          : ScatterReduction::amin;
}

inline Tensors call_quantile(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  const std::string name = a["interpolation"];
  const Interpolation interpolation = name == "linear"     ? Interpolation::linear
                                      : name == "lower"    ? Interpolation::lower
                                      : name == "higher"   ? Interpolation::higher
                                      : name == "midpoint" ? Interpolation::midpoint
                                                           : Interpolation::nearest;
  const std::optional<std::int64_t> axis = a.contains("axis") ? std::optional<std::int64_t>(a["axis"]) : std::nullopt;
  const bool keepdim = a["keepdim"];
  return {a["q"].is_array() ? quantile(x.at(0), a["q"].get<std::vector<double>>(), axis, keepdim, interpolation)
                            : quantile(x.at(0), number(a["q"]), axis, keepdim, interpolation)};
}

inline Tensors call_histogram(const Case& c, const Tensors& x, Device) {
  HistogramOptions options{.density = c.attributes["density"]};
  options.weight = x.size() > 1 ? x[1] : Tensor{};
  if (c.has("range")) {
    options.range = {number(c.attributes["range"][0]), number(c.attributes["range"][1])};
  }
  const HistogramResult result = histogram(x.at(0), c.attributes["bins"].get<std::int64_t>(), options);
  return {result.counts, result.edges};
}

inline Closeness closeness_of(const Json& a) {
  return {.rtol = number(a["rtol"]), .atol = number(a["atol"]), .equal_nan = a["equal_nan"]};
}

inline Tensor as_tensor(bool value) { return full({}, value ? 1 : 0, boolean); }

inline Tensors call_ctc_loss(const Case& c, const Tensors& x, Device) {
  CtcOptions options{.reduction = reduction_of(c.attributes)};
  options.blank = c.attributes.value("blank", options.blank);
  options.zero_infinity = c.attributes.value("zero_infinity", options.zero_infinity);
  return {ctc_loss(log_softmax(x.at(0), -1), x.at(1), x.at(2), x.at(3), options)};
}

/// The named number of the attributes, or `standard`.
inline double number_or(const Json& attributes, const char* name, double standard) {
  return attributes.contains(name) ? number(attributes[name]) : standard;
}

/// Calls f(tensors, attributes).
template <class F>
Call of_tensors(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors { return {f(x, c.attributes)}; };
}

inline void add_small_ops(std::map<std::string, Call>& table) {
  using Unary = Tensor (*)(const Tensor&);
  const std::pair<const char*, Unary> unary[] = {
      {"tan", tan},       {"asin", asin},   {"acos", acos},       {"atan", atan},
      {"sinh", sinh},     {"cosh", cosh},   {"asinh", asinh},     {"acosh", acosh},
      {"atanh", atanh},   {"trunc", trunc}, {"frac", frac},       {"sign", sign},
      {"median", median}, {"trace", trace}, {"nonzero", nonzero}, {"bitwise_not", bitwise_not}};
  for (const auto& [name, f] : unary) {
    table[name] = plain(f);
  }
  table["atan2"] = plain([](const Tensor& y, const Tensor& x) { return atan2(y, x); });
  table["bitwise_and"] = binary([](const Tensor& a, const auto& b) { return bitwise_and(a, b); });
  table["bitwise_or"] = binary([](const Tensor& a, const auto& b) { return bitwise_or(a, b); });
  table["bitwise_xor"] = binary([](const Tensor& a, const auto& b) { return bitwise_xor(a, b); });
  table["bitwise_left_shift"] = binary([](const Tensor& a, const auto& b) { return bitwise_left_shift(a, b); });
  table["bitwise_right_shift"] = binary([](const Tensor& a, const auto& b) { return bitwise_right_shift(a, b); });
  table["lerp"] = [](const Case& c, const Tensors& x, Device) -> Tensors {
    const Json& weight = c.attributes["third"];
    return {weight == "tensor" ? lerp(x.at(0), x.at(1), x.at(2)) : lerp(x.at(0), x.at(1), number(weight))};
  };
  table["clamp_tensors"] = [](const Case& c, const Tensors& x, Device) -> Tensors {
    std::size_t next = 1;
    const Tensor low = further(c, x, "second", next), high = further(c, x, "third", next);
    return {clamp(x.at(0), low, high)};
  };
  table["isclose"] =
      of_tensors([](const Tensors& x, const Json& a) { return isclose(x.at(0), x.at(1), closeness_of(a)); });
  table["allclose"] = of_tensors([](const Tensors& x, const Json& a) {
    return as_tensor(allclose(x.at(0), x.at(1), closeness_of(a))).to(x.at(0).device());
  });
  table["equal"] =
      of_tensors([](const Tensors& x, const Json&) { return as_tensor(equal(x.at(0), x.at(1))).to(x.at(0).device()); });

  table["cumprod"] = with([](const Tensor& x, const Json& a) { return cumprod(x, a["axis"]); });
  table["logcumsumexp"] = with([](const Tensor& x, const Json& a) { return logcumsumexp(x, a["axis"]); });
  for (const bool largest : {true, false}) {
    table[largest ? "cummax" : "cummin"] = [largest](const Case& c, const Tensors& x, Device) -> Tensors {
      const MaxResult result = largest ? cummax(x.at(0), c.attributes["axis"]) : cummin(x.at(0), c.attributes["axis"]);
      return {result.values, result.indices};
    };
  }
  table["median"] = [](const Case& c, const Tensors& x, Device) -> Tensors {
    if (!c.has("axis")) {
      return {median(x.at(0))};
    }
    const MaxResult result = median(x.at(0), c.attributes["axis"], c.attributes["keepdim"]);
    return {result.values, result.indices};
  };
  table["quantile"] = call_quantile;
  table["var_mean"] = [](const Case& c, const Tensors& x, Device) -> Tensors {
    const Json& a = c.attributes;
    const VarMeanResult result = var_mean(x.at(0), dims(a["axes"]), number(a["correction"]), a["keepdim"]);
    return {result.var, result.mean};
  };
  table["std_mean"] = [](const Case& c, const Tensors& x, Device) -> Tensors {
    const Json& a = c.attributes;
    const StddevMeanResult result = stddev_mean(x.at(0), dims(a["axes"]), number(a["correction"]), a["keepdim"]);
    return {result.stddev, result.mean};
  };
  table["bincount"] = of_tensors([](const Tensors& x, const Json& a) {
    return bincount(x.at(0), x.size() > 1 ? x[1] : Tensor{}, a["minlength"]);
  });
  table["histogram"] = call_histogram;

  table["linspace"] = creation([](const Json& a, DType dtype, Device device) {
    return linspace(number(a["start"]), number(a["end"]), a["count"], dtype, device);
  });
  table["logspace"] = creation([](const Json& a, DType dtype, Device device) {
    return logspace(number(a["start"]), number(a["end"]), a["count"], number(a["base"]), dtype, device);
  });
  table["eye"] = creation([](const Json& a, DType dtype, Device device) {
    return eye(a["rows"].get<std::int64_t>(), a["columns"].get<std::int64_t>(), dtype, device);
  });
  table["meshgrid"] = [](const Case&, const Tensors& x, Device) { return meshgrid(x); };
  table["diagonal"] = with([](const Tensor& x, const Json& a) { return diagonal(x, a["offset"], a["a"], a["b"]); });
  table["diag_embed"] = with([](const Tensor& x, const Json& a) { return diag_embed(x, a["offset"]); });
  table["diag"] = with([](const Tensor& x, const Json& a) { return diag(x, a["offset"]); });
  table["tile"] = with([](const Tensor& x, const Json& a) { return tile(x, dims(a["counts"])); });
  table["unique"] = [](const Case&, const Tensors& x, Device) -> Tensors {
    const UniqueResult result = unique(x.at(0));
    return {result.values, result.inverse, result.counts};
  };
  table["searchsorted"] = of_tensors(
      [](const Tensors& x, const Json& a) { return searchsorted(x.at(0), x.at(1), a["right"].get<bool>()); });
  table["bucketize"] =
      of_tensors([](const Tensors& x, const Json& a) { return bucketize(x.at(0), x.at(1), a["right"].get<bool>()); });
  table["scatter"] =
      of_tensors([](const Tensors& x, const Json& a) { return scatter(x.at(0), a["axis"], x.at(1), x.at(2)); });
  table["scatter_reduce"] = of_tensors([](const Tensors& x, const Json& a) {
    return scatter_reduce(x.at(0), a["axis"], x.at(1), x.at(2), scatter_reduction(a), a["include_self"]);
  });
  table["index_reduce"] = of_tensors([](const Tensors& x, const Json& a) {
    return index_reduce(x.at(0), a["axis"], x.at(1), x.at(2), scatter_reduction(a), a["include_self"]);
  });

  table["cdist"] = of_tensors([](const Tensors& x, const Json& a) { return cdist(x.at(0), x.at(1), number(a["p"])); });
  table["normalize"] = with([](const Tensor& x, const Json& a) {
    return normalize(x, number_or(a, "p", 2), a["axis"], number_or(a, "eps", 1e-12));
  });
  table["cosine_similarity"] = of_tensors([](const Tensors& x, const Json& a) {
    return cosine_similarity(x.at(0), x.at(1), a["axis"], number_or(a, "eps", 1e-8));
  });
  table["pairwise_distance"] = of_tensors([](const Tensors& x, const Json& a) {
    return pairwise_distance(x.at(0), x.at(1), number_or(a, "p", 2), number_or(a, "eps", 1e-6),
                             a.value("keepdim", false));
  });

  table["smooth_l1_loss"] = loss([](const Tensor& x, const Tensor& t, const Json& a, Reduction r) {
    return smooth_l1_loss(x, t, number_or(a, "beta", 1), r);
  });
  table["triplet_margin_loss"] = of_tensors([](const Tensors& x, const Json& a) {
    return triplet_margin_loss(x.at(0), x.at(1), x.at(2),
                               {.margin = number_or(a, "margin", 1),
                                .p = number_or(a, "p", 2),
                                .eps = number_or(a, "eps", 1e-6),
                                .swap = a.value("swap", false),
                                .reduction = reduction_of(a)});
  });
  table["cosine_embedding_loss"] = of_tensors([](const Tensors& x, const Json& a) {
    return cosine_embedding_loss(x.at(0), x.at(1), x.at(2), number_or(a, "margin", 0), reduction_of(a));
  });
  table["gaussian_nll_loss"] = of_tensors([](const Tensors& x, const Json& a) {
    return gaussian_nll_loss(
        x.at(0), x.at(1), x.at(2),
        {.full = a.value("full", false), .eps = number_or(a, "eps", 1e-6), .reduction = reduction_of(a)});
  });
  table["poisson_nll_loss"] = loss([](const Tensor& x, const Tensor& t, const Json& a, Reduction r) {
    return poisson_nll_loss(x, t,
                            {.log_input = a.value("log_input", true),
                             .full = a.value("full", false),
                             .eps = number_or(a, "eps", 1e-8),
                             .reduction = r});
  });
  table["margin_ranking_loss"] = of_tensors([](const Tensors& x, const Json& a) {
    return margin_ranking_loss(x.at(0), x.at(1), x.at(2), number_or(a, "margin", 0), reduction_of(a));
  });
  table["hinge_embedding_loss"] = loss([](const Tensor& x, const Tensor& t, const Json& a, Reduction r) {
    return hinge_embedding_loss(x, t, number_or(a, "margin", 1), r);
  });
  table["soft_margin_loss"] =
      loss([](const Tensor& x, const Tensor& t, const Json&, Reduction r) { return soft_margin_loss(x, t, r); });
  table["multilabel_soft_margin_loss"] = of_tensors([](const Tensors& x, const Json& a) {
    return multilabel_soft_margin_loss(x.at(0), x.at(1), x.size() > 2 ? x[2] : Tensor{}, reduction_of(a));
  });
  table["ctc_loss"] = call_ctc_loss;
}

/// Those of calls.h and of this file.
inline const std::map<std::string, Call>& all_calls() {
  static const std::map<std::string, Call> all = [] {
    std::map<std::string, Call> table = calls();
    add_small_ops(table);
    return table;
  }();
  return all;
}

}  // namespace mica::conformance
