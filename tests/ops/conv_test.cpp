#include <tests/support.h>

#include <string>
#include <vector>

#include <mica/autograd/autocast.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/ops/conv/conv.h>
#include <mica/ops/conv/detail/conv_kernels.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace conv_test {

using kernels::ConvGeometry;
using kernels::ConvPart;

struct Case {
  Shape x, weight;
  Dims stride, padding, dilation;
  std::int64_t groups = 1;
  Dims more{};  // elements after the end, in addition to the padding
};

ConvGeometry geometry_of(const Case& c) {
  ConvGeometry g{.x = c.x,
                 .weight = c.weight,
                 .y = {c.x[0], c.weight[0]},
                 .stride = c.stride,
                 .dilation = c.dilation,
                 .padding = c.padding,
                 .groups = c.groups};
  for (int axis = 0; axis < g.axes(); ++axis) {
    const std::int64_t more = c.more.empty() ? 0 : c.more[axis];
    const std::int64_t reach = c.dilation[axis] * (c.weight[2 + axis] - 1);
    g.y.push_back((c.x[2 + axis] + 2 * c.padding[axis] + more - reach - 1) / c.stride[axis] + 1);
  }
  return g;
}

// Calls f(index in x, in weight, in y) for all elements that belong together.
template <class F>
void for_each_triple(const ConvGeometry& geometry, const F& f) {
  ConvGeometry g = geometry;
  while (g.axes() < 3) {
    for (Dims* const d : {&g.x, &g.weight, &g.y}) {
      d->insert(2, 1);
    }
    g.stride.insert(0, 1);
    g.dilation.insert(0, 1);
    g.padding.insert(0, 0);
  }
  const auto flat = [](const Shape& s, const std::int64_t(&at)[5]) {
    std::int64_t index = 0;
    for (int axis = 0; axis < 5; ++axis) {
      index = index * s[axis] + at[axis];
    }
    return index;
  };
  const std::int64_t channels = g.weight[1], filters = g.weight[0] / g.groups;
  for (std::int64_t n = 0; n < g.x[0]; ++n) {
    for (std::int64_t k = 0; k < g.weight[0]; ++k) {
      for (std::int64_t c = 0; c < channels; ++c) {
        for (std::int64_t place = 0; place < g.y[2] * g.y[3] * g.y[4]; ++place) {
          for (std::int64_t tap = 0; tap < g.weight[2] * g.weight[3] * g.weight[4]; ++tap) {
            const std::int64_t o[3]{place / g.y[4] / g.y[3], place / g.y[4] % g.y[3], place % g.y[4]};
            const std::int64_t r[3]{tap / g.weight[4] / g.weight[3], tap / g.weight[4] % g.weight[3],
                                    tap % g.weight[4]};
            std::int64_t i[3];
            bool inside = true;
            for (int a = 0; a < 3; ++a) {
              i[a] = o[a] * g.stride[a] + r[a] * g.dilation[a] - g.padding[a];
              inside = inside && i[a] >= 0 && i[a] < g.x[2 + a];
            }
            if (inside) {
              f(flat(g.x, {n, k / filters * channels + c, i[0], i[1], i[2]}), flat(g.weight, {k, c, r[0], r[1], r[2]}),
                flat(g.y, {n, k, o[0], o[1], o[2]}));
            }
          }
        }
      }
    }
  }
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {{2, 3, 9}, {4, 3, 3}, {1}, {1}, {1}},
      {{2, 3, 12}, {4, 3, 3}, {2}, {2}, {2}},
      {{1, 1, 5}, {1, 1, 5}, {1}, {0}, {1}},
      {{2, 3, 6, 7}, {5, 3, 3, 3}, {1, 1}, {1, 1}, {1, 1}},
      {{2, 8, 16, 20}, {16, 8, 3, 3}, {1, 1}, {1, 1}, {1, 1}},
      {{3, 4, 9, 8}, {6, 4, 3, 2}, {2, 1}, {1, 0}, {1, 2}},
      {{2, 3, 23, 19}, {8, 3, 7, 7}, {2, 2}, {3, 3}, {1, 1}},
      {{2, 16, 8, 8}, {24, 16, 1, 1}, {1, 1}, {0, 0}, {1, 1}},
      {{2, 16, 8, 8}, {24, 16, 1, 1}, {2, 2}, {0, 0}, {1, 1}},
      {{2, 4, 7, 6}, {8, 2, 3, 3}, {1, 2}, {1, 1}, {2, 1}, 2},
      {{2, 6, 10, 33}, {6, 1, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 6},
      {{2, 6, 10, 9}, {6, 1, 5, 3}, {2, 3}, {2, 1}, {1, 2}, 6},
      {{1, 3, 8, 8}, {6, 1, 3, 3}, {3, 2}, {2, 2}, {2, 3}, 3},
      {{2, 3, 6, 6}, {4, 3, 2, 4}, {1, 1}, {0, 1}, {1, 1}, 1, {1, 1}},  // "same" for filters of even length
      {{1, 2, 40, 3}, {4, 2, 3, 3}, {5, 4}, {0, 0}, {1, 1}},            // not all of x is reached
      {{2, 2, 4, 5, 6}, {3, 2, 2, 3, 3}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}},
      {{1, 4, 6, 7, 5}, {4, 2, 3, 3, 2}, {2, 1, 3}, {1, 2, 0}, {1, 2, 1}, 2},
      {{3, 2, 5, 5}, {40, 2, 3, 3}, {1, 1}, {1, 1}, {1, 1}},
      {{2, 3, 9, 20}, {4, 3, 3, 5}, {1, 1}, {2, 4}, {2, 2}},
      {{1, 512, 20, 16}, {2, 512, 3, 3}, {1, 1}, {1, 1}, {1, 1}},
      {{3, 40, 5, 5}, {2, 40, 3, 3}, {1, 1}, {1, 1}, {1, 1}},
  };
  return all;
}

double tolerance_of(DType dtype) {
  return dtype == float64 ? 1e-12 : dtype == float32 ? 2e-5 : dtype == float16 ? 2e-3 : 1.6e-2;
}

// All three products of each case, on every device and in every dtype, against loops in float64.
TEST(Conv, ProductsAreRight) {
  for (const Case& c : cases()) {
    const ConvGeometry g = geometry_of(c);
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = randn(g.x).to(dtype), weight = randn(g.weight).to(dtype), y = randn(g.y).to(dtype);
      const Tensor bias_y = randn({g.y[1]}).to(dtype), bias_x = randn({g.x[1]}).to(dtype);
      const std::vector<double> xs = to_vector<double>(x), ws = to_vector<double>(weight), ys = to_vector<double>(y);
      std::vector<double> by_y(ys.size()), by_x(xs.size()), by_weight(ws.size());
      for_each_triple(g, [&](std::int64_t i, std::int64_t r, std::int64_t o) {
        by_y[o] += xs[i] * ws[r];
        by_x[i] += ys[o] * ws[r];
        by_weight[r] += xs[i] * ys[o];
      });
      const auto add_bias = [](std::vector<double>& sums, const Shape& shape, const Tensor& bias) {
        const std::vector<double> values = to_vector<double>(bias);
        const std::int64_t places = numel_of(shape.slice(2));
        for (std::size_t i = 0; i < sums.size(); ++i) {
          sums[i] += values[static_cast<std::int64_t>(i) / places % shape[1]];
        }
      };
      add_bias(by_y, g.y, bias_y);
      add_bias(by_x, g.x, bias_x);
      for (const Device device : test_devices()) {
        for (const bool composed : {false, true}) {
          for (const bool permuted : {false, true}) {
            if (permuted && (dtype == float64 || dtype == float16)) {
              continue;  // layouts are the same in all dtypes
            }
            const std::string what = fmt::format("x {}, weight {}, {} on {}, {}, {}", g.x, g.weight, dtype, device,
                                                 composed ? "composed" : "kernel", permuted ? "permuted" : "row-major");
            const auto placed = [&](const Tensor& t) {
              const Tensor there = t.to(device);
              return !permuted      ? there
                     : t.dim() >= 4 ? channels_last(there)
                                    : transpose(contiguous(transpose(there, 1, 2)), 1, 2);
            };
            const auto run = [&](ConvPart result, const Shape& shape) {
              const Tensor out = permuted && shape.size() >= 4 ? empty_channels_last(shape, dtype, device)
                                                               : empty(shape, dtype, device);
              kernels::Convolution args{
                  .geometry = g, .result = result, .x = placed(x), .weight = placed(weight), .y = placed(y)};
              (result == ConvPart::x ? args.x : result == ConvPart::y ? args.y : args.weight) = out;
              if (result != ConvPart::weight) {
                args.bias = (result == ConvPart::y ? bias_y : bias_x).to(device);
              }
              composed ? kernels::composed_convolve(args)
                       : on_device(device, [&](auto on) { kernels::convolve(on, args); });
              return out;
            };
            double scale = 0;
            for (const double v : by_weight) {
              scale = std::max(scale, std::abs(v));
            }
            const double tolerance = tolerance_of(dtype);
            expect_close(run(ConvPart::y, g.y), by_y, tolerance, tolerance * 8, what + ", y");
            expect_close(run(ConvPart::x, g.x), by_x, tolerance, tolerance * 8, what + ", x");
            expect_close(run(ConvPart::weight, g.weight), by_weight, tolerance, tolerance * scale, what + ", weight");
          }
        }
      }
    }
  }
}

TEST(Conv, FirstAndSecondDerivatives) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 4, 5, 4}, float64, device).requires_grad_();
    const Tensor weight = randn({6, 2, 3, 2}, float64, device).requires_grad_();
    const Tensor bias = randn({6}, float64, device).requires_grad_();
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu}) {
      const ConvOptions options{
          .stride = {2, 1}, .padding = 1, .dilation = {1, 2}, .groups = 2, .activation = activation};
      const auto f = [&](const Tensor& a, const Tensor& w, const Tensor& b) { return conv2d(a, w, b, options); };
      EXPECT_TRUE(autograd::gradcheck(f, {x, weight, bias}));
      EXPECT_TRUE(autograd::gradgradcheck(f, {x, weight, bias}));
    }
    for (const PaddingMode mode : {PaddingMode::reflect, PaddingMode::replicate, PaddingMode::circular}) {
      const auto f = [&](const Tensor& a, const Tensor& w) {
        return conv2d(a, w, {}, {.padding = {1, 2}, .groups = 2, .padding_mode = mode});
      };
      EXPECT_TRUE(autograd::gradcheck(f, {x, weight}));
      EXPECT_TRUE(autograd::gradgradcheck(f, {x, weight}));
    }
    const Tensor up = randn({4, 3, 3, 2}, float64, device).requires_grad_();
    const Tensor up_bias = randn({6}, float64, device).requires_grad_();
    const auto g = [&](const Tensor& a, const Tensor& w, const Tensor& b) {
      return conv_transpose2d(a, w, b, {.stride = 2, .padding = 1, .output_padding = 1, .groups = 2});
    };
    EXPECT_TRUE(autograd::gradcheck(g, {x, up, up_bias}));
    EXPECT_TRUE(autograd::gradgradcheck(g, {x, up, up_bias}));
    const Tensor line = randn({2, 3, 6}, float64, device).requires_grad_();
    const Tensor filter = randn({4, 3, 3}, float64, device).requires_grad_();
    const auto h = [](const Tensor& a, const Tensor& w) { return conv1d(a, w, {}, {.padding = "same"}); };
    EXPECT_TRUE(autograd::gradcheck(h, {line, filter}));
    EXPECT_TRUE(autograd::gradgradcheck(h, {line, filter}));
  }
}

TEST(Conv, ShapesAndOptions) {
  const Tensor x = randn({2, 3, 8, 9}), weight = randn({4, 3, 3, 4}), bias = randn({4});
  EXPECT_EQ(conv2d(x, weight).shape(), (Shape{2, 4, 6, 6}));
  EXPECT_EQ(conv2d(x, weight, bias, {.stride = 2, .padding = {2, 1}}).shape(), (Shape{2, 4, 5, 4}));
  EXPECT_EQ(conv2d(x, weight, bias, {.padding = "same", .dilation = 2}).shape(), (Shape{2, 4, 8, 9}));
  EXPECT_EQ(conv2d(x, weight, bias, {.padding = "valid"}).shape(), (Shape{2, 4, 6, 6}));
  EXPECT_EQ(conv3d(randn({2, 3, 4, 5, 6}), randn({7, 3, 2, 2, 2})).shape(), (Shape{2, 7, 3, 4, 5}));
  EXPECT_EQ(conv_transpose2d(x, randn({3, 5, 3, 4}), {}, {.stride = 2, .padding = 1, .output_padding = 1}).shape(),
            (Shape{2, 5, 16, 19}));
  // Without a batch.
  const Tensor one = select(x, 0, 1);
  expect_close(conv2d(one, weight, bias), select(conv2d(x, weight, bias), 0, 1), 0, 0);
  const Tensor signal = select(one, 1, 0), filters = randn({4, 3, 2});
  expect_close(conv1d(signal, filters), squeeze(conv1d(unsqueeze(signal, 0), filters), 0), 0, 0);
  // No images, and no filters.
  EXPECT_EQ(conv2d(empty({0, 3, 8, 9}), weight, bias).shape(), (Shape{0, 4, 6, 6}));
  const Tensor w = randn({4, 3, 3, 4}).requires_grad_();
  sum(conv2d(empty({0, 3, 8, 9}), w)).backward();
  expect_close(w.grad(), zeros({4, 3, 3, 4}), 0, 0);
  EXPECT_EQ(conv2d(x, empty({0, 3, 3, 4})).shape(), (Shape{2, 0, 6, 6}));
  // The padded input, written out.
  const Tensor line = from_data<float>({1, 2, 3, 4}, {1, 1, 4}), delta = from_data<float>({1, 0, 0}, {1, 1, 3});
  const auto shifted = [&](PaddingMode mode) { return conv1d(line, delta, {}, {.padding = 2, .padding_mode = mode}); };
  expect_close(shifted(PaddingMode::zeros), {0, 0, 1, 2, 3, 4}, 0, 0);
  expect_close(shifted(PaddingMode::reflect), {3, 2, 1, 2, 3, 4}, 0, 0);
  expect_close(shifted(PaddingMode::replicate), {1, 1, 1, 2, 3, 4}, 0, 0);
  expect_close(shifted(PaddingMode::circular), {3, 4, 1, 2, 3, 4}, 0, 0);
}

TEST(Conv, ActivationsAreThoseOfTheOps) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 5, 5}, float32, device), weight = randn({4, 3, 3, 3}, float32, device);
    const Tensor bias = randn({4}, float32, device);
    const auto with = [&](Activation f) { return conv2d(x, weight, bias, {.padding = 1, .activation = f}); };
    const Tensor y = with(Activation::none);
    expect_close(with(Activation::relu), relu(y), 1e-5, 1e-5);
    expect_close(with(Activation::leaky_relu), leaky_relu(y, 0.01), 1e-5, 1e-5);
    expect_close(with(Activation::gelu), gelu(y), 1e-5, 1e-5);
    expect_close(with(Activation::gelu_tanh), gelu(y, GeluApproximation::tanh), 1e-5, 1e-5);
  }
}

TEST(Conv, AutocastComputesIn16Bits) {
  const Tensor x = randn({2, 3, 6, 6}), w = randn({4, 3, 3, 3}).requires_grad_(), bias = randn({4});
  const autograd::Autocast guard;
  const Tensor y = conv2d(x, w, bias);
  EXPECT_EQ(y.dtype(), bfloat16);
  EXPECT_EQ(conv_transpose2d(x, randn({3, 2, 3, 3})).dtype(), bfloat16);
  sum(y).backward();
  EXPECT_EQ(w.grad().dtype(), float32);
}

TEST(Conv, ResultsOnGpusAreChannelsLast) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 6, 6}, float32, device).requires_grad_();
    const Tensor w = randn({4, 3, 3, 3}, float32, device).requires_grad_();
    const Tensor y = conv2d(x, w);
    EXPECT_EQ(is_channels_last(y), device.is_cuda());
    EXPECT_EQ(y.is_contiguous(), device.is_cpu());
    const Tensors grads = autograd::grad({y}, {x, w}, {y.detach()}, {.retain_graph = true});
    EXPECT_EQ(is_channels_last(grads[0]), device.is_cuda());
    y.backward(y.detach());
    EXPECT_TRUE(w.grad().is_contiguous());
  }
}

TEST(Conv, GradientsRepeatTheirBits) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({5, 8, 17, 17}, float32, device).requires_grad_();
    const Tensor w = randn({16, 8, 3, 3}, float32, device).requires_grad_();
    const auto run = [&] {
      const Tensor y = conv2d(x, w, {}, {.stride = 2, .padding = 1});
      Tensors results = autograd::grad({y}, {x, w}, {y.detach()});
      results.push_back(y.detach());
      return results;
    };
    const int threads = num_threads();
    const Tensors first = run();
    set_num_threads(threads == 1 ? 3 : 1);
    const Tensors again = run();
    set_num_threads(threads);
    for (std::size_t i = 0; i < first.size(); ++i) {
      expect_close(again[i], first[i], 0, 0);
    }
  }
}

TEST(Conv, Errors) {
  const Tensor x = zeros({2, 4, 8, 9}), w = zeros({6, 4, 3, 3}), bias = zeros({6});
  const auto expect = [&](const std::string& text, const Tensor& a, const Tensor& b, const Tensor& c,
                          const ConvOptions& options) { expect_error([&] { conv2d(a, b, c, options); }, text); };
  expect("conv2d: expected x of 4 axes (N, C and 2 spatial ones) or without N, got [2, 4]", zeros({2, 4}), w, {}, {});
  expect("conv2d: expected a weight of 4 axes, got shape [6, 4, 3]", x, zeros({6, 4, 3}), {}, {});
  expect("conv2d: expected x and weight of one floating dtype, got float32 and float64", x, w.to(float64), {}, {});
  expect("conv2d: expected x and weight of one floating dtype, got int32 and int32", x.to(int32), w.to(int32), {}, {});
  expect("conv2d: expected a weight (K, C / groups, …) for 4 channels in 1 groups, got shape [6, 3, 3, 3]", x,
         zeros({6, 3, 3, 3}), {}, {});
  expect("conv2d: expected a weight (K, C / groups, …) for 4 channels in 2 groups, got shape [6, 4, 3, 3]", x, w, {},
         {.groups = 2});
  expect("conv2d: expected numbers of channels that 4 groups divide, got 4 and 6", x, zeros({6, 1, 3, 3}), {},
         {.groups = 4});
  expect("conv2d: expected at least one group, got 0", x, w, {}, {.groups = 0});
  expect("conv2d: expected filters of at least one element, got shape [6, 4, 0, 3]", x, zeros({6, 4, 0, 3}), {}, {});
  expect("conv2d: expected bias of shape [6], got [5]", x, w, zeros({5}), {});
  expect("conv2d: expected bias of float32 on cpu, got float64 on cpu", x, w, bias.to(float64), {});
  expect("conv2d: expected a stride of at least 1, got [0, 1]", x, w, bias, {.stride = {0, 1}});
  expect("conv2d: expected a stride for each of 2 axes, or one number, got [1, 1, 1]", x, w, bias,
         {.stride = {1, 1, 1}});
  expect("conv2d: expected a padding of at least 0, got [-1]", x, w, bias, {.padding = -1});
  expect("conv2d: expected a dilation of at least 1, got [0]", x, w, bias, {.dilation = 0});
  expect("conv2d: expected a padded input of at least 9 elements along spatial axis 0, got 8", x, w, bias,
         {.dilation = {4, 1}});
  expect("conv2d: expected a stride of 1 with the padding \"same\", got [2, 2]", x, w, bias,
         {.stride = 2, .padding = "same"});
  expect("conv2d: expected a padding by reflection below 8, got 8", x, w, bias,
         {.padding = 8, .padding_mode = PaddingMode::reflect});
  expect("conv2d: expected a circular padding of at most 8, got 9", x, w, bias,
         {.padding = 9, .padding_mode = PaddingMode::circular});
  expect_error([] { ConvPadding("full"); }, "conv: expected a padding of numbers, \"same\" or \"valid\", got \"full\"");
  const auto expect_up = [&](const std::string& text, const Tensor& b, const ConvTransposeOptions& options) {
    expect_error([&] { conv_transpose2d(x, b, {}, options); }, text);
  };
  expect_up("conv_transpose2d: expected a weight (C, K / groups, …) for 4 channels, got shape [6, 4, 3, 3]", w, {});
  expect_up(
      "conv_transpose2d: expected an output padding less than stride or dilation, got [1, 1] for [1, 1] and [1, 1]",
      zeros({4, 6, 3, 3}), {.output_padding = 1});
  expect_up("conv_transpose2d: expected an output with elements, got length -2 for spatial axis 0", zeros({4, 6, 3, 3}),
            {.padding = 6});
}

}  // namespace conv_test
