#pragma once

// The call of mica that corresponds to each fixture of PyTorch.

#include <functional>

#include "fixture.h"
#include "image_calls.h"
#include <mica/mica.h>

namespace mica::conformance {

using Call = std::function<Tensors(const Case&, const Tensors&, Device)>;

/// Calls a function whose arguments are all tensors.
template <class F>
Call plain(F f) {
  return [f](const Case&, const Tensors& x, Device) -> Tensors {
    if constexpr (std::is_invocable_v<F, Tensor>) {
      return {f(x.at(0))};
    } else if constexpr (std::is_invocable_v<F, Tensor, Tensor>) {
      return {f(x.at(0), x.at(1))};
    } else {
      return {f(x.at(0), x.at(1), x.at(2))};
    }
  };
}

/// Calls a function of two operands, one of which may be a number.
template <class F>
Call binary(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors {
    if (c.has("right")) {
      return {f(x.at(0), number(c.attributes["right"]))};
    }
    if constexpr (std::is_invocable_v<F, double, Tensor>) {
      if (c.has("left")) {
        return {f(number(c.attributes["left"]), x.at(0))};
      }
    }
    return {f(x.at(0), x.at(1))};
  };
}

/// Calls a function of one tensor and of the attributes.
template <class F>
Call with(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors { return {f(x.at(0), c.attributes)}; };
}

template <class F>
Call reduction(F f) {
  return with([f](const Tensor& x, const Json& a) { return f(x, dims(a["axes"]), a["keepdim"].get<bool>()); });
}

template <class F>
Call creation(F f) {
  return [f](const Case& c, const Tensors&, Device device) -> Tensors {
    return {f(c.attributes, dtype_named(c.attributes["dtype"]), device)};
  };
}

inline Call cast(DType dtype) {
  return plain([dtype](const Tensor& x) { return x.to(dtype); });
}

template <class F>
Call along_axis(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors {
    const MaxResult result = f(x.at(0), c.attributes["axis"].get<std::int64_t>(), c.attributes["keepdim"].get<bool>());
    return {result.values, result.indices};
  };
}

inline Reduction reduction_of(const Json& attributes) {
  const std::string name = attributes.value("reduction", "mean");
  return name == "none" ? Reduction::none : name == "sum" ? Reduction::sum : Reduction::mean;
}

/// Calls a loss of predictions and targets that have the same shape.
template <class F>
Call loss(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors {
    return {f(x.at(0), x.at(1), c.attributes, reduction_of(c.attributes))};
  };
}

/// Moves the axis of classes to the end; in PyTorch it is another one.
inline Tensor with_classes_last(const Tensor& x, int class_axis) {
  Dims order;
  for (int i = 0; i < x.dim(); ++i) {
    if (i != class_axis) {
      order.push_back(i);
    }
  }
  order.push_back(class_axis);
  return permute(x, order);
}

inline Tensors call_cross_entropy(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  CrossEntropyOptions options;
  options.ignore_index = a.value("ignore_index", options.ignore_index);
  options.label_smoothing = a.value("label_smoothing", options.label_smoothing);
  options.weight = x.size() > 2 ? x[2].detach() : Tensor{};
  options.reduction = reduction_of(a);
  const int classes = a["class_axis"];
  const Tensor& target = x.at(1);
  const Tensor loss = cross_entropy(with_classes_last(x.at(0), classes),
                                    is_floating(target.dtype()) ? with_classes_last(target, classes) : target, options);
  return {loss.to(x.at(0).dtype())};  // for 16-bit logits, PyTorch rounds the loss to 16 bits
}

inline Tensors call_nll_loss(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  NllOptions options{.reduction = reduction_of(a)};
  options.ignore_index = a.value("ignore_index", options.ignore_index);
  options.weight = x.size() > 2 ? x[2].detach() : Tensor{};
  return {nll_loss(with_classes_last(x.at(0), a["class_axis"]), x.at(1), options)};
}

inline Tensors call_attention(const Case& c, const Tensors& x, Device) {
  AttentionOptions options{.causal = c.attributes["causal"]};
  if (c.has("scale")) {
    options.scale = number(c.attributes["scale"]);
  }
  options.mask = x.size() > 3 ? x[3] : Tensor{};
  return {scaled_dot_product_attention(x.at(0), x.at(1), x.at(2), options)};
}

inline Call convolution(Tensor (*f)(const Tensor&, const Tensor&, const Tensor&, const ConvOptions&)) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors {
    const Json& a = c.attributes;
    ConvOptions options{
        .stride = dims(a["stride"]), .dilation = dims(a["dilation"]), .groups = a["groups"].get<std::int64_t>()};
    if (a["padding"].is_string()) {
      options.padding = ConvPadding(a["padding"].get<std::string>());
    } else {
      options.padding = dims(a["padding"]);
    }
    return {f(x.at(0), x.at(1), x.size() > 2 ? x[2] : Tensor{}, options)};
  };
}

inline Call transposed_convolution(Tensor (*f)(const Tensor&, const Tensor&, const Tensor&,
                                               const ConvTransposeOptions&)) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors {
    const Json& a = c.attributes;
    return {f(x.at(0), x.at(1), x.size() > 2 ? x[2] : Tensor{},
              ConvTransposeOptions{.stride = dims(a["stride"]),
                                   .padding = dims(a["padding"]),
                                   .output_padding = dims(a["output_padding"]),
                                   .dilation = dims(a["dilation"]),
                                   .groups = a["groups"].get<std::int64_t>()})};
  };
}

inline Tensors call_layer_norm(const Case& c, const Tensors& x, Device) {
  return {layer_norm(x.at(0), dims(c.attributes["normalized_shape"]), x.size() > 1 ? x[1] : Tensor{},
                     x.size() > 2 ? x[2] : Tensor{}, number(c.attributes["eps"]))};
}

inline Tensors call_rms_norm(const Case& c, const Tensors& x, Device) {
  return {rms_norm(x.at(0), dims(c.attributes["normalized_shape"]), x.size() > 1 ? x[1] : Tensor{},
                   number(c.attributes["eps"]))};
}

inline FftNorm norm_of(const Json& a) {
  return a["norm"] == "ortho" ? FftNorm::ortho : a["norm"] == "forward" ? FftNorm::forward : FftNorm::backward;
}

/// Calls a transform along one axis, or along several.
template <class F>
Call transform(F f) {
  return with([f](const Tensor& x, const Json& a) {
    if constexpr (std::is_invocable_v<F, Tensor, FftOptions>) {
      FftOptions options{.axis = a.value("axes", -1), .norm = norm_of(a)};
      if (a.contains("n")) {
        options.n = a["n"].get<std::int64_t>();
      }
      return f(x, options);
    } else {
      Fft2Options options{.norm = norm_of(a)};
      if (a.contains("axes")) {
        options.axes = a["axes"].is_array() ? dims(a["axes"]) : Dims{a["axes"].get<std::int64_t>()};
      }
      if (a.contains("lengths")) {
        options.lengths = dims(a["lengths"]);
      }
      return f(x, options);
    }
  });
}

/// Calls a function of two tensors and attributes.
template <class F>
Call of_two(F f) {
  return [f](const Case& c, const Tensors& x, Device) -> Tensors { return {f(x.at(0), x.at(1), c.attributes)}; };
}

inline Tensors call_pinv(const Case& c, const Tensors& x, Device) {
  PinvOptions options{.atol = c.attributes.value("atol", 0.0)};
  if (c.has("rtol")) {
    options.rtol = number(c.attributes["rtol"]);
  }
  return {pinv(x.at(0), options)};
}

inline Tensors call_matrix_norm(const Case& c, const Tensors& x, Device) {
  const Json& ord = c.attributes["ord"];
  const bool keepdim = c.attributes["keepdim"];
  if (ord == "fro" || ord == "nuc") {
    return {matrix_norm(x.at(0), ord == "fro" ? MatrixNorm::frobenius : MatrixNorm::nuclear, keepdim)};
  }
  return {matrix_norm(x.at(0), number(ord), keepdim)};
}

inline const std::map<std::string, Call>& calls() {
  static const std::map<std::string, Call> table{
      {"add", binary([](const auto& a, const auto& b) -> decltype(add(a, b)) { return add(a, b); })},
      {"sub", binary([](const auto& a, const auto& b) -> decltype(sub(a, b)) { return sub(a, b); })},
      {"mul", binary([](const auto& a, const auto& b) -> decltype(mul(a, b)) { return mul(a, b); })},
      {"div", binary([](const auto& a, const auto& b) -> decltype(div(a, b)) { return div(a, b); })},
      {"pow", binary([](const auto& a, const auto& b) -> decltype(pow(a, b)) { return pow(a, b); })},
      {"fmod", binary([](const auto& a, const auto& b) -> decltype(fmod(a, b)) { return fmod(a, b); })},
      {"floor_divide", binary([](const auto& a, const auto& b) -> decltype(floor_divide(a, b)) { return floor_divide(a, b); })},
      {"maximum", binary([](const Tensor& a, const auto& b) { return maximum(a, b); })},
      {"minimum", binary([](const Tensor& a, const auto& b) { return minimum(a, b); })},
      {"eq", binary([](const Tensor& a, const auto& b) { return eq(a, b); })},
      {"ne", binary([](const Tensor& a, const auto& b) { return ne(a, b); })},
      {"lt", binary([](const Tensor& a, const auto& b) { return lt(a, b); })},
      {"le", binary([](const Tensor& a, const auto& b) { return le(a, b); })},
      {"gt", binary([](const Tensor& a, const auto& b) { return gt(a, b); })},
      {"ge", binary([](const Tensor& a, const auto& b) { return ge(a, b); })},
      {"logical_and", plain(logical_and)},
      {"logical_or", plain(logical_or)},
      {"logical_not", plain(logical_not)},
      {"where",
       plain([](const Tensor& condition, const Tensor& a, const Tensor& b) { return where(condition, a, b); })},
      {"masked_fill",
       [](const Case& c, const Tensors& x, Device) -> Tensors {
         return {masked_fill(x.at(0), x.at(1), number(c.attributes["value"]))};
       }},

      {"neg", plain([](const Tensor& x) { return neg(x); })},
      {"exp", plain([](const Tensor& x) { return exp(x); })},
      {"log", plain([](const Tensor& x) { return log(x); })},
      {"log1p", plain([](const Tensor& x) { return log1p(x); })},
      {"expm1", plain([](const Tensor& x) { return expm1(x); })},
      {"sin", plain([](const Tensor& x) { return sin(x); })},
      {"cos", plain([](const Tensor& x) { return cos(x); })},
      {"sqrt", plain([](const Tensor& x) { return sqrt(x); })},
      {"rsqrt", plain([](const Tensor& x) { return rsqrt(x); })},
      {"tanh", plain([](const Tensor& x) { return tanh(x); })},
      {"erf", plain([](const Tensor& x) { return erf(x); })},
      {"sigmoid", plain([](const Tensor& x) { return sigmoid(x); })},
      {"abs", plain([](const Tensor& x) { return abs(x); })},
      {"relu", plain([](const Tensor& x) { return relu(x); })},
      {"leaky_relu", with([](const Tensor& x, const Json& a) { return leaky_relu(x, number(a["slope"])); })},
      {"elu", with([](const Tensor& x, const Json& a) { return elu(x, number(a["alpha"])); })},
      {"softplus", with([](const Tensor& x, const Json& a) {
         return softplus(x, number(a["beta"]), number(a["threshold"]));
       })},
      {"floor", plain([](const Tensor& x) { return floor(x); })},
      {"ceil", plain([](const Tensor& x) { return ceil(x); })},
      {"round", plain([](const Tensor& x) { return round(x); })},
      {"isnan", plain([](const Tensor& x) { return isnan(x); })},
      {"isfinite", plain([](const Tensor& x) { return isfinite(x); })},
      {"silu", plain([](const Tensor& x) { return silu(x); })},
      {"gelu", with([](const Tensor& x, const Json& a) {
         return gelu(x, a["approximate"] == "tanh" ? GeluApproximation::tanh : GeluApproximation::none);
       })},
      {"clamp", with([](const Tensor& x, const Json& a) { return clamp(x, number(a["low"]), number(a["high"])); })},

      {"sum", reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return sum(x, axes, keepdim); })},
      {"prod", reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return prod(x, axes, keepdim); })},
      {"cumsum", with([](const Tensor& x, const Json& a) { return cumsum(x, a["axis"]); })},
      {"mean", reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return mean(x, axes, keepdim); })},
      {"logsumexp",
       reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return logsumexp(x, axes, keepdim); })},
      {"amax", reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return amax(x, axes, keepdim); })},
      {"amin", reduction([](const Tensor& x, const Dims& axes, bool keepdim) { return amin(x, axes, keepdim); })},
      {"var", with([](const Tensor& x, const Json& a) {
         return var(x, dims(a["axes"]), number(a["correction"]), a["keepdim"].get<bool>());
       })},
      {"stddev", with([](const Tensor& x, const Json& a) {
         return stddev(x, dims(a["axes"]), number(a["correction"]), a["keepdim"].get<bool>());
       })},
      {"vector_norm", with([](const Tensor& x, const Json& a) {
         return vector_norm(x, dims(a["axes"]), number(a["p"]), a["keepdim"].get<bool>());
       })},
      {"max", plain([](const Tensor& x) { return max(x); })},
      {"min", plain([](const Tensor& x) { return min(x); })},
      {"max_along", along_axis([](const Tensor& x, std::int64_t axis, bool keepdim) { return max(x, axis, keepdim); })},
      {"min_along", along_axis([](const Tensor& x, std::int64_t axis, bool keepdim) { return min(x, axis, keepdim); })},
      {"argmax", with([](const Tensor& x, const Json& a) {
         return a.contains("axis") ? argmax(x, a["axis"], a["keepdim"].get<bool>()) : argmax(x);
       })},
      {"argmin", with([](const Tensor& x, const Json& a) {
         return a.contains("axis") ? argmin(x, a["axis"], a["keepdim"].get<bool>()) : argmin(x);
       })},
      {"sum_to", with([](const Tensor& x, const Json& a) { return sum_to(x, dims(a["shape"])); })},

      {"softmax", with([](const Tensor& x, const Json& a) { return softmax(x, a["axis"]); })},
      {"log_softmax", with([](const Tensor& x, const Json& a) { return log_softmax(x, a["axis"]); })},
      {"cross_entropy", call_cross_entropy},
      {"nll_loss", call_nll_loss},
      {"mse_loss", loss([](const Tensor& x, const Tensor& t, const Json&, Reduction r) { return mse_loss(x, t, r); })},
      {"l1_loss", loss([](const Tensor& x, const Tensor& t, const Json&, Reduction r) { return l1_loss(x, t, r); })},
      {"huber_loss", loss([](const Tensor& x, const Tensor& t, const Json& a, Reduction r) {
         return huber_loss(x, t, a.contains("delta") ? number(a["delta"]) : 1.0, r);
       })},
      {"kl_div", loss([](const Tensor& x, const Tensor& t, const Json& a, Reduction r) {
         return kl_div(x, t, a.value("log_target", false), r);
       })},
      {"bce_with_logits",
       [](const Case& c, const Tensors& x, Device) -> Tensors {
         BceOptions options{.reduction = reduction_of(c.attributes)};
         std::size_t next = 2;
         for (const Json& name : c.attributes["given"]) {
           (name == "weight" ? options.weight : options.pos_weight) = x.at(next++);
         }
         return {bce_with_logits(x.at(0), x.at(1), options)};
       }},
      {"layer_norm", call_layer_norm},
      {"batch_norm", call_batch_norm},
      {"group_norm", call_group_norm},
      {"instance_norm", call_instance_norm},
      {"max_pool", call_max_pool},
      {"avg_pool", call_avg_pool},
      {"adaptive_avg_pool", call_adaptive_avg_pool},
      {"adaptive_max_pool", call_adaptive_max_pool},
      {"max_unpool", call_max_unpool},
      {"interpolate", call_interpolate},
      {"unfold", call_unfold},
      {"pixel_shuffle", with([](const Tensor& x, const Json& a) { return pixel_shuffle(x, a["factor"]); })},
      {"pixel_unshuffle", with([](const Tensor& x, const Json& a) { return pixel_unshuffle(x, a["factor"]); })},
      {"grid_sample", call_grid_sample},
      {"rms_norm", call_rms_norm},
      {"embedding", plain([](const Tensor& weight, const Tensor& indices) { return embedding(weight, indices); })},
      {"dropout", with([](const Tensor& x, const Json& a) { return dropout(x, number(a["p"]), a["training"]); })},
      {"scaled_dot_product_attention", call_attention},
      {"matmul", plain([](const Tensor& a, const Tensor& b) { return matmul(a, b); })},
      {"linear",
       [](const Case&, const Tensors& x,
          Device) -> Tensors { return {linear(x.at(0), x.at(1), x.size() > 2 ? x[2] : Tensor{})}; }},

      {"conv1d", convolution(conv1d)},
      {"conv2d", convolution(conv2d)},
      {"conv3d", convolution(conv3d)},
      {"conv_transpose1d", transposed_convolution(conv_transpose1d)},
      {"conv_transpose2d", transposed_convolution(conv_transpose2d)},
      {"conv_transpose3d", transposed_convolution(conv_transpose3d)},

      {"einsum", [](const Case& c, const Tensors& x, Device) -> Tensors {
         return {einsum(c.attributes["equation"].get<std::string>(), x)};
       }},
      {"tensordot", of_two([](const Tensor& x, const Tensor& y, const Json& a) {
         return a.contains("count") ? tensordot(x, y, a["count"].get<std::int64_t>())
                                    : tensordot(x, y, dims(a["a_axes"]), dims(a["b_axes"]));
       })},
      {"outer", plain(outer)},
      {"inner", plain(inner)},
      {"inv", plain(inv)},
      {"det", plain(det)},
      {"slogdet",
       [](const Case&, const Tensors& x, Device) -> Tensors {
         const SlogdetResult result = slogdet(x.at(0));
         return {result.sign, result.logabsdet};
       }},
      {"solve", plain(solve)},
      {"solve_triangular", of_two([](const Tensor& x, const Tensor& b, const Json& a) {
         return solve_triangular(x, b, {.upper = a["upper"], .left = a["left"], .unitriangular = a["unitriangular"]});
       })},
      {"cholesky", with([](const Tensor& x, const Json& a) { return cholesky(x, a["upper"]); })},
      {"cholesky_solve", of_two([](const Tensor& b, const Tensor& l, const Json& a) {
         return cholesky_solve(b, l, a["upper"]);
       })},
      {"qr",
       [](const Case& c, const Tensors& x, Device) -> Tensors {
         const QrResult result = qr(x.at(0), c.attributes["mode"] == "complete" ? QrMode::complete : QrMode::reduced);
         return {result.q, result.r};
       }},
      {"svd",  // vectors up to their signs
       [](const Case& c, const Tensors& x, Device) -> Tensors {
         const SvdResult result = svd(x.at(0), c.attributes["full"]);
         return {abs(result.u), result.s, abs(result.vh)};
       }},
      {"svdvals", plain(svdvals)},
      {"eigh",
       [](const Case& c, const Tensors& x, Device) -> Tensors {
         const EighResult result = eigh(x.at(0) + transpose(x.at(0), -1, -2), c.attributes["upper"]);
         return {result.eigenvalues, abs(result.eigenvectors)};
       }},
      {"eigvalsh", with([](const Tensor& x, const Json& a) {
         return eigvalsh(x + transpose(x, -1, -2), a["upper"]);
       })},
      {"pinv", call_pinv},
      {"lstsq", plain(lstsq)},
      {"matrix_power", with([](const Tensor& x, const Json& a) { return matrix_power(x, a["power"]); })},
      {"matrix_norm", call_matrix_norm},
      {"fft", transform(fft)},
      {"ifft", transform(ifft)},
      {"rfft", transform(rfft)},
      {"irfft", transform(irfft)},
      {"fft2", transform(fft2)},
      {"ifft2", transform(ifft2)},
      {"rfft2", transform(rfft2)},
      {"irfft2", transform(irfft2)},
      {"fftshift", with([](const Tensor& x, const Json& a) { return fftshift(x, dims(a["axes"])); })},
      {"ifftshift", with([](const Tensor& x, const Json& a) { return ifftshift(x, dims(a["axes"])); })},
      {"contiguous", plain(contiguous)},
      {"reshape", with([](const Tensor& x, const Json& a) { return reshape(x, dims(a["shape"])); })},
      {"view", with([](const Tensor& x, const Json& a) { return view(x, dims(a["shape"])); })},
      {"flatten", with([](const Tensor& x, const Json& a) { return flatten(x, a["from"], a["to"]); })},
      {"transpose", with([](const Tensor& x, const Json& a) { return transpose(x, a["a"], a["b"]); })},
      {"permute", with([](const Tensor& x, const Json& a) { return permute(x, dims(a["axes"])); })},
      {"slice",
       with([](const Tensor& x, const Json& a) { return slice(x, a["axis"], a["start"], a["end"], a["step"]); })},
      {"select", with([](const Tensor& x, const Json& a) { return select(x, a["axis"], a["index"]); })},
      {"expand", with([](const Tensor& x, const Json& a) { return expand(x, dims(a["shape"])); })},
      {"squeeze", with([](const Tensor& x, const Json& a) {
         return a.contains("axis") ? squeeze(x, a["axis"].get<std::int64_t>()) : squeeze(x);
       })},
      {"unsqueeze", with([](const Tensor& x, const Json& a) { return unsqueeze(x, a["axis"]); })},
      {"split",
       [](const Case& c, const Tensors& x, Device) {
         const Json& size = c.attributes["size"];
         const std::int64_t axis = c.attributes["axis"];
         return size.is_array() ? split(x.at(0), size.get<std::vector<std::int64_t>>(), axis)
                                : split(x.at(0), size.get<std::int64_t>(), axis);
       }},
      {"cat", [](const Case& c, const Tensors& x, Device) -> Tensors { return {cat(x, c.attributes["axis"])}; }},
      {"roll", with([](const Tensor& x, const Json& a) { return roll(x, a["shift"], a["axis"]); })},
      {"repeat", with([](const Tensor& x, const Json& a) { return repeat(x, dims(a["counts"])); })},
      {"pad", with([](const Tensor& x, const Json& a) {
         return pad(x, -1, a["before"], a["after"], number(a["value"]));
       })},
      {"flip", with([](const Tensor& x, const Json& a) { return flip(x, dims(a["axes"])); })},
      {"one_hot", with([](const Tensor& x, const Json& a) { return one_hot(x, a["classes"]); })},
      {"gather", [](const Case& c, const Tensors& x, Device) -> Tensors {
         return {gather(x.at(0), c.attributes["axis"], x.at(1))};
       }},
      {"scatter_add", [](const Case& c, const Tensors& x, Device) -> Tensors {
         return {scatter_add(x.at(0), c.attributes["axis"], x.at(1), x.at(2))};
       }},
      {"index_select", [](const Case& c, const Tensors& x, Device) -> Tensors {
         return {index_select(x.at(0), c.attributes["axis"], x.at(1))};
       }},
      {"index_add", [](const Case& c, const Tensors& x, Device) -> Tensors {
         const double alpha = number(c.attributes["alpha"]);
         return {index_add(x.at(0), c.attributes["axis"], x.at(1), alpha == 1 ? x.at(2) : x.at(2) * alpha)};
       }},
      {"masked_select", plain([](const Tensor& x, const Tensor& mask) { return masked_select(x, mask); })},
      {"sort", [](const Case& c, const Tensors& x, Device) -> Tensors {
         const SortResult result = sort(x.at(0), c.attributes["axis"], c.attributes["descending"]);
         return {result.values, result.indices};
       }},
      {"argsort", with([](const Tensor& x, const Json& a) { return argsort(x, a["axis"], a["descending"]); })},
      {"topk", [](const Case& c, const Tensors& x, Device) -> Tensors {
         const SortResult result = topk(x.at(0), c.attributes["k"], c.attributes["axis"], c.attributes["largest"]);
         return {result.values, result.indices};
       }},
      {"stack", [](const Case& c, const Tensors& x, Device) -> Tensors { return {stack(x, c.attributes["axis"])}; }},
      {"tril", with([](const Tensor& x, const Json& a) { return tril(x, a["diagonal"]); })},
      {"triu", with([](const Tensor& x, const Json& a) { return triu(x, a["diagonal"]); })},

      {"to_float64", cast(float64)},
      {"to_float32", cast(float32)},
      {"to_float16", cast(float16)},
      {"to_bfloat16", cast(bfloat16)},
      {"to_int64", cast(int64)},
      {"to_int32", cast(int32)},
      {"to_uint8", cast(uint8)},
      {"to_boolean", cast(boolean)},

      {"add_",
       [](const Case& c, const Tensors& x,
          Device) -> Tensors { return {add_(x.at(0), x.at(1), number(c.attributes.value("alpha", Json(1))))}; }},
      {"mul_", binary([](const Tensor& x, const auto& y) -> Tensor { return mul_(x, y); })},
      {"fill_", with([](const Tensor& x, const Json& a) -> Tensor { return fill_(x, number(a["value"])); })},
      {"zero_", plain([](const Tensor& x) -> Tensor { return zero_(x); })},

      {"zeros",
       creation([](const Json& a, DType dtype, Device device) { return zeros(dims(a["shape"]), dtype, device); })},
      {"ones",
       creation([](const Json& a, DType dtype, Device device) { return ones(dims(a["shape"]), dtype, device); })},
      {"full", creation([](const Json& a, DType dtype, Device device) {
         return full(dims(a["shape"]), number(a["value"]), dtype, device);
       })},
      {"arange", creation([](const Json& a, DType dtype, Device device) {
         return arange(number(a["start"]), number(a["end"]), number(a["step"]), dtype, device);
       })},
      {"zeros_like", plain(zeros_like)},
      {"ones_like", plain(ones_like)},
      {"full_like", with([](const Tensor& x, const Json& a) { return full_like(x, number(a["value"])); })},
  };
  return table;
}

}  // namespace mica::conformance
