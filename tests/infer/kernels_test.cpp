#include <tests/support.h>

#include <cmath>
#include <functional>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/rng.h>
#include <mica/infer/kernels/detail/decode_linear.h>
#include <mica/infer/kernels/detail/decoder_step.h>
#include <mica/infer/sample.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/decode_attention/decode_attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/rotary/rotary.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace infer_kernels_test {

using namespace mica::infer;

double relative_error(const Tensor& got, const Tensor& expected) {
  const std::vector<double> a = to_vector<double>(got);
  const std::vector<double> b = to_vector<double>(expected);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

QuantizedWeight moved(QuantizedWeight q, Device device) {
  for (Tensor* const part : {&q.packed, &q.scale, &q.zero}) {
    *part = part->defined() ? part->to(device) : *part;
  }
  return q;
}

struct Problem {
  Tensor x;
  std::vector<DecodeWeight> weights;
  DecodeLinearOptions options;

  Tensor on(Device device) const {
    const auto there = [&](const Tensor& t) { return t.defined() ? t.to(device) : t; };
    std::vector<DecodeWeight> moved_weights;
    for (const DecodeWeight& w : weights) {
      moved_weights.push_back(
          {.matrix = there(w.matrix), .quantized = moved(w.quantized, device), .bias = there(w.bias)});
    }
    return decode_linear(there(x), moved_weights,
                         {.norm_weight = there(options.norm_weight),
                          .eps = options.eps,
                          .swiglu = options.swiglu,
                          .residual = there(options.residual)});
  }

  // The result by its definition, in float64.
  Tensor reference() const {
    const auto exact = [](const Tensor& t) { return t.to(float64); };
    Tensor input = exact(x);
    if (options.norm_weight.defined()) {
      input = rms_norm(input, {input.size(1)}, exact(options.norm_weight), options.eps);
    }
    Tensors parts;
    for (const DecodeWeight& w : weights) {
      const Tensor matrix = w.matrix.defined() ? exact(w.matrix) : transpose(dequantize(w.quantized, float64), 0, 1);
      parts.push_back(linear(input, matrix, w.bias.defined() ? exact(w.bias) : Tensor{}));
    }
    const Tensor y = options.swiglu ? swiglu(parts[0], parts[1]) : cat(parts, 1);
    return options.residual.defined() ? y + exact(options.residual) : y;
  }
};

struct Kind {
  int bits;  // 16: floating, not quantized
  std::int64_t group;
};

DecodeWeight weight_of(const Kind& kind, std::int64_t in, std::int64_t out, DType dtype, bool bias) {
  DecodeWeight w;
  const Tensor matrix = (randn({out, in}) * 0.2).to(dtype);
  if (kind.bits == 16) {
    w.matrix = matrix;
  } else {
    w.quantized = quantize(transpose(matrix, 0, 1), {.bits = kind.bits, .group_size = kind.group, .dtype = dtype});
  }
  w.bias = bias ? randn({out}).to(dtype) : Tensor{};
  return w;
}

TEST(DecodeLinear, AsItsDefinition) {
  const autograd::NoGrad no_grad;
  manual_seed(1);
  for (const Device device : test_devices()) {
    const bool cuda = device.is_cuda();
    for (const DType dtype : cuda ? std::vector{bfloat16, float16} : std::vector{float32, bfloat16}) {
      for (const Kind& kind : {Kind{16, 0}, Kind{4, 64}, Kind{8, 128}, Kind{4, kWholeColumn}}) {
        for (const std::int64_t rows :
             cuda ? std::vector<std::int64_t>{1, 3, 8, 9, 16, 17, 32, 33} : std::vector<std::int64_t>{1, 3}) {
          for (const std::int64_t in :
               cuda ? std::vector<std::int64_t>{64, 192, 896, 4864} : std::vector<std::int64_t>{128}) {
            SCOPED_TRACE(fmt::format("{} {} bits, {} rows of {} on {}", dtype, kind.bits, rows, in, device));
            const Tensor x = randn({rows, in}).to(dtype);
            const Tensor norm = (randn({in}) * 0.2 + 1).to(dtype);
            const auto w = [&](std::int64_t out, bool bias = false) { return weight_of(kind, in, out, dtype, bias); };
            const double limit = dtype == float32 ? 1e-5 : dtype == float16 ? 2e-3 : 1.2e-2;
            const Problem three{x, {w(64, true), w(128), w(192, true)}, {.norm_weight = norm, .eps = 1e-3}};
            const Problem gated{x, {w(192, true), w(192, true)}, {.swiglu = true}};
            const Problem plain{x, {w(64)}, {.residual = randn({rows, 64}).to(dtype)}};
            for (const Problem& problem : {three, gated, plain}) {
              cuda::LaunchRecord record;
              const Tensor y = problem.on(device);
              const int few = kind.bits == 4 ? 16 : kind.bits == 8 ? 8 : 1;
              const bool batch = rows > few && rows <= 32 && has_prompt_kernels(device);
              EXPECT_EQ(record.has("decode_linear_batch_kernel"), batch);
              EXPECT_EQ(record.has("decode_linear_kernel"), cuda && rows <= 32 && !batch);
              EXPECT_LE(relative_error(y, problem.reference()), limit);
            }
          }
        }
      }
    }
  }
}

TEST(DecodeLinear, WideWeights) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const autograd::NoGrad no_grad;
  manual_seed(2);
  for (const Kind& kind : {Kind{16, 0}, Kind{4, 64}, Kind{8, 64}}) {
    for (const std::int64_t rows : {1, 12, 32}) {
      const Problem problem{randn({rows, 128}).to(bfloat16), {weight_of(kind, 128, 9024, bfloat16, false)}, {}};
      EXPECT_LE(relative_error(problem.on(Device::cuda()), problem.reference()), 1e-2) << kind.bits << " " << rows;
    }
  }
}

TEST(DecodeLinear, ManyOutputs) {
  if (!cuda_available() || !has_prompt_kernels(Device::cuda())) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(3);
  const auto expect_close = [](const Problem& problem, std::int64_t rows) {
    const bool wide = problem.weights[0].quantized.bits == 8 || problem.weights[0].matrix.defined() || rows > 16;
    cuda::LaunchRecord record;
    const Tensor y = problem.on(Device::cuda());
    EXPECT_EQ(record.has("decode_linear_wide_kernel"), wide) << rows;
    EXPECT_LE(relative_error(y, problem.reference()), y.dtype() == float16 ? 2e-3 : 1.2e-2) << rows;
    EXPECT_EQ(to_vector<float>(y), to_vector<float>(problem.on(Device::cuda()))) << rows;
  };
  for (const DType dtype : {bfloat16, float16}) {
    for (const std::int64_t rows : {2, 16, 17, 32}) {
      for (const std::int64_t in : {64, 192, 896}) {  // from one slice of K to more slices than there are stages
        SCOPED_TRACE(fmt::format("{} {}", dtype, in));
        const Tensor x = randn({rows, in}).to(dtype), norm = (randn({in}) * 0.2 + 1).to(dtype);
        const auto w = [&](std::int64_t out, bool bias) { return weight_of({16, 0}, in, out, dtype, bias); };
        expect_close({x, {w(3136, true), w(3136, true)}, {.norm_weight = norm, .eps = 1e-3, .swiglu = true}}, rows);
        expect_close({x, {w(6400, true), w(64, false), w(128, true)}, {.residual = randn({rows, 6592}).to(dtype)}},
                     rows);
      }
    }
  }
  // Quantized weights: odd numbers of slices of K and of stages; a group per column, and groups of one and of two
  // slices.
  for (const Kind& kind : {Kind{8, 64}, Kind{4, 64}, Kind{8, 128}, Kind{4, kWholeColumn}}) {
    const DType dtype = kind.bits == 8 || kind.group == 64 ? bfloat16 : float16;
    for (const std::int64_t in : {64, 192, 896}) {
      SCOPED_TRACE(fmt::format("{} bits in groups of {}, {}", kind.bits, kind.group, in));
      const auto w = [&](std::int64_t out, bool bias) { return weight_of(kind, in, out, dtype, bias); };
      const std::vector<DecodeWeight> two{w(3136, true), w(3136, true)},
          three{w(6080, true), w(64, false), w(64, true)};
      for (const std::int64_t rows : {9, 16, 17, 32}) {
        const Tensor x = randn({rows, in}).to(dtype), norm = (randn({in}) * 0.2 + 1).to(dtype);
        expect_close({x, two, {.norm_weight = norm, .eps = 1e-3, .swiglu = true}}, rows);
        expect_close({x, three, {.residual = randn({rows, 6208}).to(dtype)}}, rows);
      }
    }
  }
  // Sizes as of a model's head, with few rows, too. Blocks have several tiles of 9 stages.
  for (const Kind& kind : {Kind{16, 0}, Kind{8, 64}, Kind{4, 64}}) {
    const DecodeWeight head = weight_of(kind, 1088, std::int64_t{1} << 15, bfloat16, false);
    for (const std::int64_t rows : {1, 8, 12, 32}) {
      const Tensor x = randn({rows, 1088}).to(bfloat16), norm = (randn({1088}) * 0.2 + 1).to(bfloat16);
      expect_close({x, {head}, {.norm_weight = norm}}, rows);
    }
  }
}

bool has_kernels_for_prompts() { return cuda_available() && has_prompt_kernels(Device::cuda()); }

TEST(DecodeLinear, ManyRows) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(4);
  for (const DType dtype : {bfloat16, float16}) {
    const auto w = [&](std::int64_t out, bool bias = false) { return weight_of({16, 0}, 200, out, dtype, bias); };
    const auto x = [&](std::int64_t rows) { return randn({rows, 200}).to(dtype); };
    const Tensor norm = (randn({200}) * 0.2 + 1).to(dtype);
    // Whole tiles of 256, 128 and 192 columns, and incomplete tiles along rows and columns.
    const Problem wide{x(1030), {w(2048, true), w(256), w(2056, true)}, {.norm_weight = norm}};
    const Problem narrow{x(1100), {w(768, true), w(128), w(136)}, {}};
    const Problem gated{x(1025), {w(1032, true), w(1032, true)}, {.norm_weight = norm, .eps = 1e-3, .swiglu = true}};
    const Problem filling{x(1930), {w(1024, true), w(256), w(256, true)}, {.norm_weight = norm}};
    const Problem added{x(1029), {w(1048, true)}, {.residual = randn({1029, 1048}).to(dtype)}};
    for (const Problem& problem : {wide, narrow, gated, filling, added}) {
      cuda::LaunchRecord record;
      const Tensor y = problem.on(Device::cuda());
      EXPECT_TRUE(record.has("decode_linear_many_kernel"));
      EXPECT_LE(relative_error(y, problem.reference()), dtype == float16 ? 2e-3 : 1.2e-2);
      EXPECT_EQ(to_vector<double>(problem.on(Device::cuda())), to_vector<double>(y)) << "the same again";
    }
  }
}

TEST(DecodeLinear, Errors) {
  const Tensor x = ones({2, 8}), w = ones({3, 8});
  expect_error([&] { decode_linear(x, {{.matrix = w}}); }, "decode_linear: works without gradients only");
  const autograd::NoGrad no_grad;
  expect_error([&] { decode_linear(ones({8}), {{.matrix = w}}); }, "expected floating x of shape (M, in)");
  expect_error([&] { decode_linear(x, {}); }, "expected from 1 to 3 weights, got 0");
  expect_error([&] { decode_linear(x, {{}}); }, "expected a floating or a quantized weight");
  expect_error([&] { decode_linear(ones({2, 7}), {{.matrix = w}}); }, "expected a weight for 7 columns, got one for 8");
  expect_error([&] { decode_linear(x, {{.matrix = w, .bias = ones({2})}}); }, "expected a bias of float32");
  expect_error([&] { decode_linear(x, {{.matrix = w}}, {.swiglu = true}); }, "swiglu takes two weights");
  expect_error([&] { decode_linear(x, {{.matrix = w}}, {.residual = ones({2, 2})}); }, "expected a residual");
  expect_error([&] { decode_linear(x, {{.matrix = w}}, {.norm_weight = ones({2})}); }, "norm_weight of shape [8]");
  if (cuda_available()) {
    const auto there = [](const Tensor& on_cpu) { return on_cpu.to(bfloat16).to(Device::cuda()); };
    const Tensor rows = there(ones({4, 128})), matrix = there(ones({64, 128}));
    expect_error([&] { decode_linear(rows, {{.matrix = matrix}}, {.norm_weight = ones({128}).to(bfloat16)}); },
                 "norm_weight of shape [128] on cuda");
    const Tensor none = there(ones({1, 0, 4, 64}));
    expect_error([&] { decode_attention({.keys = none, .values = none}); }, "expected a multiple of 0 heads");
  }
  expect_error(
      [&] {
        decode_attention({.keys = ones({1, 1, 1, 32}), .values = ones({1, 1, 1, 32})});
      },
      "decode_attention: there is no kernel for keys");
}

// The attention of each sequence separately, in float64, from the cache's contents before the step.
Tensor attention_reference(const DecodeAttention& a, const Tensor& keys, const Tensor& values, std::int64_t length,
                           const std::vector<std::int64_t>& padding) {
  const std::int64_t batch = keys.size(0), width = a.width(), capacity = keys.size(2);
  Tensors rows;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t skipped = padding.empty() ? 0 : padding[static_cast<std::size_t>(b)];
    const auto heads_of = [&](const Tensor& rows) {  // (1, T = 1, heads, D)
      return reshape(slice(rows, 0, b, b + 1).to(float64), {1, 1, -1, width});
    };
    const auto prepared = [&](const Tensor& rows, const Tensor& norm) {
      Tensor x = heads_of(rows);
      x = norm.defined() ? rms_norm(x, {width}, norm.to(float64), a.eps) : x;
      x = a.frequencies.empty() ? x : rotary(x, a.frequencies, {.offset = length - skipped, .scale = a.rotary_scale});
      return transpose(x, 1, 2);  // (1, heads, 1, D)
    };
    Tensors k, v;
    for (std::int64_t p = std::max(skipped, length - capacity + 1); p < length; ++p) {
      const std::int64_t slot = p % capacity;
      k.push_back(slice(slice(keys.to(float64), 0, b, b + 1), 2, slot, slot + 1));
      v.push_back(slice(slice(values.to(float64), 0, b, b + 1), 2, slot, slot + 1));
    }
    k.push_back(prepared(a.k, a.k_norm));
    v.push_back(transpose(heads_of(a.v), 1, 2));
    rows.push_back(
        reshape(scaled_dot_product_attention(prepared(a.q, a.q_norm), cat(k, 2), cat(v, 2)), {1, a.heads * width}));
  }
  return cat(rows, 0);
}

struct AttentionCase {
  DType dtype;
  std::int64_t width, heads, key_heads, length, capacity;
  bool norm = false, rotates = true, padded = false;
};

TEST(DecodeAttention, AsItsDefinition) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const autograd::NoGrad no_grad;
  manual_seed(3);
  for (const AttentionCase& c :
       {AttentionCase{bfloat16, 64, 16, 4, 300, 512}, AttentionCase{bfloat16, 64, 4, 4, 0, 64, true},
        AttentionCase{float16, 128, 14, 2, 77, 80, true, true, true}, AttentionCase{bfloat16, 32, 2, 1, 5, 9},
        AttentionCase{float32, 64, 8, 8, 40, 64, false, false, true}, AttentionCase{float32, 128, 6, 2, 700, 701},
        AttentionCase{float16, 256, 4, 2, 33, 64}, AttentionCase{float32, 32, 3, 1, 1, 2, true},
        // More positions than the cache has slots.
        AttentionCase{bfloat16, 64, 4, 2, 150, 64}, AttentionCase{float32, 64, 2, 2, 64, 64, false, true, true}}) {
    SCOPED_TRACE(
        fmt::format("{} D {} H {}/{} length {} of {}", c.dtype, c.width, c.heads, c.key_heads, c.length, c.capacity));
    const std::int64_t batch = 3;
    const auto from = [&](const Shape& shape) { return randn(shape).to(c.dtype); };
    const std::vector<std::int64_t> padding =
        c.padded ? std::vector<std::int64_t>{0, 3, 20} : std::vector<std::int64_t>{};
    std::vector<float> frequencies;
    for (std::int64_t j = 0; c.rotates && j < c.width / 2; ++j) {
      frequencies.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(j) / static_cast<float>(c.width)));
    }
    const Tensor norm = c.norm ? from({c.width}) * 0.1 + 1 : Tensor{};
    const Tensor qkv = from({batch, (c.heads + 2 * c.key_heads) * c.width});
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      return slice(qkv, 1, begin * c.width, end * c.width);
    };
    DecodeAttention a{.q = part(0, c.heads),
                      .k = part(c.heads, c.heads + c.key_heads),
                      .v = part(c.heads + c.key_heads, c.heads + 2 * c.key_heads),
                      .heads = c.heads,
                      .q_norm = norm,
                      .k_norm = norm,
                      .frequencies = frequencies,
                      .rotary_scale = 1.25,
                      .keys = from({batch, c.key_heads, c.capacity, c.width}),
                      .values = from({batch, c.key_heads, c.capacity, c.width})};
    const Tensor expected = attention_reference(a, a.keys, a.values, c.length, padding);
    const Tensor new_value = reshape(a.v, {batch, c.key_heads, 1, c.width});
    // Rows with a stride, as parts of one product, and without.
    const Tensor there = qkv.to(Device::cuda());
    a.q = slice(there, 1, 0, c.heads * c.width);
    a.k = slice(there, 1, c.heads * c.width, (c.heads + c.key_heads) * c.width);
    a.v = contiguous(a.v).to(Device::cuda());
    for (Tensor* const t : {&a.q_norm, &a.k_norm, &a.keys, &a.values}) {
      *t = t->defined() ? t->to(Device::cuda()) : *t;
    }
    a.length = full({1}, static_cast<double>(c.length), int64, Device::cuda());
    a.padding = c.padded ? from_data(padding, {batch, 1}, Device::cuda()) : Tensor{};
    const Tensor y = decode_attention(a);
    EXPECT_LE(relative_error(y, expected), c.dtype == float32 ? 1e-5 : c.dtype == float16 ? 2e-3 : 1e-2);
    const std::int64_t slot = c.length % c.capacity;
    expect_close(slice(a.values, 2, slot, slot + 1), new_value, 0, 0);
    EXPECT_EQ(to_vector<double>(decode_attention(a)), to_vector<double>(y)) << "the same again";
    a.ready_early = true;
    EXPECT_EQ(to_vector<double>(decode_attention(a)), to_vector<double>(y)) << "with early reads";
  }
}

struct AppendCase {
  std::int64_t batch, steps, capacity, first, key_heads, width;
  bool bias = false, norm = false, padded = false;
};

// decode_linear_append() gives the same as decode_linear() and decode_append().
TEST(DecodeLinearAppend, AsAppend) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(7);
  const Device gpu = Device::cuda();
  for (const DType dtype : {bfloat16, float16}) {
    for (const AppendCase& c :
         {AppendCase{1, 1999, 2100, 77, 4, 64, true}, AppendCase{2, 704, 750, 0, 2, 64},
          AppendCase{1, 1100, 1100, 0, 8, 64}, AppendCase{2, 600, 700, 3, 4, 64},
          AppendCase{1, 1024, 1030, 5, 2, 128, true}, AppendCase{1, 1030, 1030, 0, 4, 64, false, true},
          AppendCase{2, 640, 640, 0, 4, 64, false, false, true}}) {
      SCOPED_TRACE(
          fmt::format("{} {} x {} positions, {} key heads of {}", dtype, c.batch, c.steps, c.key_heads, c.width));
      constexpr std::int64_t kHeads = 8, kIn = 200;
      const auto w = [&](std::int64_t heads) {
        DecodeWeight weight = weight_of({16, 0}, kIn, heads * c.width, dtype, c.bias);
        weight.matrix = weight.matrix.to(gpu);
        weight.bias = c.bias ? weight.bias.to(gpu) : Tensor{};
        return weight;
      };
      const std::vector<DecodeWeight> weights{w(kHeads), w(c.key_heads), w(c.key_heads)};
      const Tensor x = randn({c.batch * c.steps, kIn}).to(dtype).to(gpu);
      const DecodeLinearOptions options{.norm_weight = (randn({kIn}) * 0.2 + 1).to(dtype).to(gpu), .eps = 1e-3};
      const Shape cache{c.batch, c.key_heads, c.capacity, c.width};
      DecodeAttention a{.heads = kHeads};
      for (std::int64_t i = 0; i < c.width / 2; ++i) {
        a.frequencies.push_back(std::pow(500.0f, -static_cast<float>(i) / 32));
      }
      a.rotary_scale = 1.25;
      if (c.norm) {
        a.q_norm = randn({c.width}).to(dtype).to(gpu);
        a.k_norm = randn({c.width}).to(dtype).to(gpu);
      }
      a.padding = c.padded ? from_data(std::vector<std::int64_t>{3, 0}, {2, 1}, gpu) : Tensor{};
      const auto results = [&](bool together, bool* in_one_kernel) {
        a.keys = ones(cache, dtype, gpu);
        a.values = ones(cache, dtype, gpu);
        Tensor queries;
        cuda::LaunchRecord record;
        if (together) {
          queries = decode_linear_append(x, weights, options, a, c.first,
                                         decode_rotations(a.frequencies, a.rotary_scale, c.first, c.steps, gpu));
        } else {
          queries = decode_append(decode_linear(x, weights, options), a, c.first);
        }
        *in_one_kernel = !record.has("decode_append_kernel");
        EXPECT_EQ(queries.shape(), (Shape{c.batch, c.steps, kHeads, c.width}));
        return std::array{to_vector<double>(queries), to_vector<double>(a.keys), to_vector<double>(a.values)};
      };
      bool in_one_kernel = false;
      const auto separate = results(false, &in_one_kernel);
      EXPECT_FALSE(in_one_kernel);
      EXPECT_TRUE(results(true, &in_one_kernel) == separate);
      EXPECT_EQ(in_one_kernel, c.width == 64 && !c.norm && !c.padded && (c.batch == 1 || c.steps % 64 == 0));
    }
  }
}

TEST(DecodeLinearAppend, Errors) {
  const autograd::NoGrad no_grad;
  const Tensor x = ones({4, 8});
  const std::vector<DecodeWeight> weights(3, {.matrix = ones({32, 8})});
  expect_error([&] { decode_linear_append(x, weights, {}, {}, 0, {}); }, "expected contiguous keys and values");
  expect_error(
      [&] {
        decode_linear_append(x, weights, {}, {.keys = ones({3, 1, 9, 32}), .values = ones({3, 1, 9, 32})}, 0, {});
      },
      "expected contiguous keys and values of one shape (B, Hkv, C, D), and rows of B sequences");
  expect_error([&] { decode_rotations({1}, 1, 0, 1, Device::cpu()); }, "decode_rotations: expected CUDA");
}

TEST(DecodeAppend, AsSeparateOps) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(5);
  for (const AttentionCase& c :
       {AttentionCase{bfloat16, 64, 4, 2, 3, 20}, AttentionCase{float16, 128, 3, 1, 0, 17, true},
        AttentionCase{bfloat16, 32, 5, 5, 1, 18, true, true, true},
        AttentionCase{float16, 256, 2, 1, 0, 17, false, false}}) {
    SCOPED_TRACE(fmt::format("{} D {} H {}/{}", c.dtype, c.width, c.heads, c.key_heads));
    constexpr std::int64_t kBatch = 2, kSteps = 17;
    const Device cuda = Device::cuda();
    const auto from = [&](const Shape& shape) { return randn(shape).to(cuda, c.dtype); };
    const std::vector<std::int64_t> padding{2, 0};
    std::vector<float> frequencies;
    for (std::int64_t j = 0; c.rotates && j < c.width / 2; ++j) {
      frequencies.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(j) / static_cast<float>(c.width)));
    }
    const Tensor norm = c.norm ? from({c.width}) * 0.1 + 1 : Tensor{};
    const Shape cache{kBatch, c.key_heads, c.capacity, c.width};
    const Tensor qkv = from({kBatch * kSteps, (c.heads + 2 * c.key_heads) * c.width});
    const DecodeAttention a{.heads = c.heads,
                            .q_norm = norm,
                            .k_norm = norm,
                            .frequencies = frequencies,
                            .rotary_scale = 1.25,
                            .keys = from(cache),
                            .values = from(cache),
                            .padding = c.padded ? from_data(padding, {kBatch, 1}, cuda) : Tensor{}};
    const Tensor old_keys = clone(a.keys);
    const Tensor heads = reshape(qkv, {kBatch, kSteps, -1, c.width});
    Tensor positions = reshape(arange(static_cast<double>(c.length + kSteps), int64, cuda), {1, -1});
    positions = slice(positions, 1, c.length, c.length + kSteps);
    positions = c.padded ? maximum(positions - a.padding, 0) : expand(positions, {kBatch, kSteps});
    const auto prepared = [&](std::int64_t begin, std::int64_t end) {
      Tensor x = contiguous(slice(heads, 2, begin, end));
      x = norm.defined() ? rms_norm(x, {c.width}, norm, a.eps) : x;
      return c.rotates ? rotary(x, frequencies, {.positions = positions, .scale = 1.25}) : x;
    };
    const Tensor queries = decode_append(qkv, a, c.length);
    const double tolerance = c.dtype == float16 ? 2e-3 : 1.6e-2;  // about one unit in the last place
    expect_close(queries, prepared(0, c.heads), tolerance, tolerance);
    const auto stored = [&](const Tensor& list) { return slice(list, 2, c.length, c.length + kSteps); };
    expect_close(stored(a.keys), transpose(prepared(c.heads, c.heads + c.key_heads), 1, 2), tolerance, tolerance);
    expect_close(stored(a.values), transpose(slice(heads, 2, c.heads + c.key_heads, c.heads + 2 * c.key_heads), 1, 2),
                 0, 0);
    expect_close(slice(a.keys, 2, 0, c.length), slice(old_keys, 2, 0, c.length), 0, 0);
    expect_error([&] { decode_append(qkv, a, c.capacity - kSteps + 1); },
                 "decode_append: expected slots for the positions");
  }
}

struct StepCase {
  Kind kind;
  DType dtype;
  std::int64_t width, hidden, heads, key_heads, head_width, length, capacity;
  bool extras = false;  // with biases, and norms of queries and keys
};

DecoderStep step_of(const StepCase& c, Device device) {
  const auto from = [&](const Shape& shape, double scale) { return (randn(shape) * scale).to(c.dtype).to(device); };
  const auto weight = [&](std::int64_t in, std::int64_t out) {
    DecodeWeight w = weight_of(c.kind, in, out, c.dtype, c.extras);
    return DecodeWeight{.matrix = w.matrix.defined() ? w.matrix.to(device) : w.matrix,
                        .quantized = moved(w.quantized, device),
                        .bias = w.bias.defined() ? w.bias.to(device) : w.bias};
  };
  const auto norm = [&](std::int64_t size) { return (randn({size}) * 0.2 + 1).to(c.dtype).to(device); };
  DecoderStep s{.x = from({1, c.width}, 1), .norm = norm(c.width), .head = weight(c.width, 192), .heads = c.heads};
  for (int i = 0; i < 2; ++i) {
    const Shape cache{1, c.key_heads, c.capacity, c.head_width};
    s.layers.push_back({.input_norm = norm(c.width),
                        .post_norm = norm(c.width),
                        .q = weight(c.width, c.heads * c.head_width),
                        .k = weight(c.width, c.key_heads * c.head_width),
                        .v = weight(c.width, c.key_heads * c.head_width),
                        .o = weight(c.heads * c.head_width, c.width),
                        .gate = weight(c.width, c.hidden),
                        .up = weight(c.width, c.hidden),
                        .down = weight(c.hidden, c.width),
                        .q_norm = c.extras ? norm(c.head_width) : Tensor{},
                        .k_norm = c.extras ? norm(c.head_width) : Tensor{},
                        .keys = from(cache, 1),
                        .values = from(cache, 1)});
  }
  for (std::int64_t j = 0; j < c.head_width / 2; ++j) {
    s.frequencies.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(j) / static_cast<float>(c.head_width)));
  }
  s.length = full({1}, static_cast<double>(c.length), int64, device);
  s.scratch = zeros({decoder_step_scratch(s)}, int64, device);
  return s;
}

Tensor by_other_ops(const DecoderStep& s) {
  Tensor x = s.x;
  for (const DecoderLayer& l : s.layers) {
    const Tensor qkv = decode_linear(x, {l.q, l.k, l.v}, {.norm_weight = l.input_norm, .eps = s.eps});
    const std::int64_t q_width = s.heads * l.keys.size(3), kv_width = l.keys.size(1) * l.keys.size(3);
    const Tensor y = decode_attention({.q = slice(qkv, 1, 0, q_width),
                                       .k = slice(qkv, 1, q_width, q_width + kv_width),
                                       .v = slice(qkv, 1, q_width + kv_width, q_width + 2 * kv_width),
                                       .heads = s.heads,
                                       .q_norm = l.q_norm,
                                       .k_norm = l.k_norm,
                                       .eps = s.eps,
                                       .frequencies = s.frequencies,
                                       .rotary_scale = s.rotary_scale,
                                       .keys = l.keys,
                                       .values = l.values,
                                       .length = s.length});
    const Tensor sum = decode_linear(y, {l.o}, {.residual = x});
    const Tensor hidden =
        decode_linear(sum, {l.gate, l.up}, {.norm_weight = l.post_norm, .eps = s.eps, .swiglu = true});
    x = decode_linear(hidden, {l.down}, {.residual = sum});
  }
  return decode_linear(x, {s.head}, {.norm_weight = s.norm, .eps = s.eps});
}

TEST(DecoderStep, AsOtherOps) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(4);
  for (const StepCase& c : {StepCase{{16, 0}, bfloat16, 256, 512, 4, 2, 64, 0, 64},
                            StepCase{{16, 0}, float16, 576, 1536, 9, 3, 64, 70, 64, true},  // more positions than slots
                            StepCase{{16, 0}, bfloat16, 1088, 4864, 14, 2, 128, 300, 512, true},
                            StepCase{{4, 64}, bfloat16, 576, 1536, 9, 3, 64, 1000, 1024, true},
                            StepCase{{4, kWholeColumn}, float16, 1024, 192, 4, 4, 128, 2500, 2501},
                            StepCase{{8, 128}, bfloat16, 256, 2112, 4, 1, 128, 7, 8, true},
                            StepCase{{8, 64}, float16, 128, 128, 2, 2, 64, 1, 64}}) {
    SCOPED_TRACE(
        fmt::format("{} {} bits, width {}, length {} of {}", c.dtype, c.kind.bits, c.width, c.length, c.capacity));
    const DecoderStep step = step_of(c, Device::cuda());
    ASSERT_TRUE(has_decoder_step(step));
    cuda::LaunchRecord record;
    const Tensor logits = decoder_step(step);
    EXPECT_TRUE(record.has("decoder_step_kernel"));
    EXPECT_EQ(record.names().size(), 1u);
    const Tensor keys = clone(step.layers[1].keys);
    EXPECT_EQ(to_vector<double>(decoder_step(step)), to_vector<double>(logits)) << "the same again";
    DecoderStep by_token = step;
    by_token.x = {};
    by_token.embedding = cat({randn({3, c.width}).to(c.dtype).to(Device::cuda()), step.x}, 0);
    by_token.token = by_token.next_token = full({1}, 3, int64, Device::cuda());
    by_token.length = clone(step.length);
    by_token.adds_to_length = true;
    ASSERT_TRUE(has_decoder_step(by_token));
    EXPECT_EQ(to_vector<double>(decoder_step(by_token)), to_vector<double>(logits)) << "from the embedding";
    EXPECT_EQ(by_token.length.item(), static_cast<double>(c.length + 1));
    EXPECT_EQ(step.length.item(), static_cast<double>(c.length));
    EXPECT_EQ(by_token.token.item(), sample(logits, {.temperature = 0}, {}).item());
    const Tensor expected = by_other_ops(step);
    EXPECT_LE(relative_error(logits, expected), c.dtype == float16 ? 5e-3 : 3e-2);
    EXPECT_LE(relative_error(keys, step.layers[1].keys), c.dtype == float16 ? 5e-3 : 3e-2);
  }
}

// The head's weight is zero, so that its bias determines the logits.
TEST(DecoderStep, NextToken) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(6);
  constexpr std::int64_t kVocab = 20480;  // more than the blocks process at once
  const Device cuda = Device::cuda();
  for (const DType dtype : {float16, bfloat16}) {
    DecoderStep step = step_of({{16, 0}, dtype, 128, 128, 2, 2, 64, 3, 64}, cuda);
    step.head = {.matrix = zeros({kVocab, 128}, dtype, cuda)};
    step.next_token = full({1}, 7, int64, cuda);
    using Entries = std::vector<std::pair<std::int64_t, double>>;
    struct Case {
      double others;  // the value of all logits that are not in `some`
      Entries some;
      std::int64_t token;
    };
    const double inf = INFINITY;
    for (const Case& c :
         {Case{0, {}, 0}, Case{-2, {{5, -1.5}, {9, -1.5}}, 5}, Case{-2, {{kVocab - 1, -0.0}, {9000, 0.0}}, 9000},
          Case{-2, {{9001, -0.0}, {kVocab - 8, 0.0}}, 9001}, Case{1, {{8447, 3}, {8448, 3}, {8449, 3}}, 8447},
          Case{-1, {{kVocab - 1, -0.5}}, kVocab - 1}, Case{-inf, {{17, -60000}}, 17}, Case{-inf, {}, -1},
          Case{0, {{1063, inf}}, -1}, Case{0, {{12, 100}, {13000, NAN}}, -1}, Case{-inf, {{2, NAN}}, -1},
          Case{0, {{3, -NAN}, {4, 9}}, -1}, Case{-inf, {{4, -inf}, {20000, 1}}, 20000}}) {
      std::vector<double> values(kVocab, c.others);
      for (const auto& [token, value] : c.some) {
        values[static_cast<std::size_t>(token)] = value;
      }
      step.head.bias = from_data(values, {kVocab}, cuda).to(dtype);
      ASSERT_TRUE(has_decoder_step(step));
      const Tensor logits = decoder_step(step);
      EXPECT_EQ(step.next_token.item(), static_cast<double>(c.token)) << fmt::format("{}", dtype);
      EXPECT_EQ(sample(logits, {.temperature = 0}, {}).item(), static_cast<double>(c.token))
          << fmt::format("{}", dtype);
    }
    // Scores that become equal by rounding.
    for (int i = 0; i < 20; ++i) {
      step.head = {.matrix = (randn({kVocab, 128}) * 0.2).to(dtype).to(cuda)};
      const Tensor logits = decoder_step(step);
      EXPECT_EQ(step.next_token.item(), sample(logits, {.temperature = 0}, {}).item());
      decoder_step(step);
      EXPECT_EQ(step.next_token.item(), sample(logits, {.temperature = 0}, {}).item()) << "again";
    }
  }
}

TEST(DecoderStep, TokenOutOfRange) {
  if (!has_kernels_for_prompts()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  const autograd::NoGrad no_grad;
  manual_seed(7);
  const Device cuda = Device::cuda();
  for (const Kind kind : {Kind{16, 0}, Kind{8, 64}, Kind{4, 64}}) {
    for (const DType dtype : {float16, bfloat16}) {
      DecoderStep step = step_of({kind, dtype, 128, 192, 2, 1, 64, 300, 512}, cuda);
      step.x = {};
      step.embedding = randn({5, 128}).to(dtype).to(cuda);
      step.token = full({1}, 4, int64, cuda);
      step.next_token = full({1}, 0, int64, cuda);
      const std::vector<double> expected = to_vector<double>(decoder_step(step));
      for (const double token : {-1.0, 5.0, 1e15, -1e15}) {
        DecoderStep other = step;
        other.token = full({1}, token, int64, cuda);
        const std::vector<double> logits = to_vector<double>(decoder_step(other));
        EXPECT_TRUE(std::all_of(logits.begin(), logits.end(), [](double x) { return std::isnan(x); })) << token;
        EXPECT_EQ(step.next_token.item(), -1);
      }
      EXPECT_EQ(to_vector<double>(decoder_step(step)), expected) << "the same as before";
    }
  }
}

TEST(DecoderStep, Errors) {
  const autograd::NoGrad no_grad;
  const StepCase c{{16, 0}, bfloat16, 128, 128, 2, 2, 64, 0, 4};
  const DecoderStep on_host = step_of(c, Device::cpu());
  EXPECT_FALSE(has_decoder_step(on_host));
  EXPECT_FALSE(has_decoder_step({}));
  if (!has_kernels_for_prompts()) {
    return;
  }
  const DecoderStep step = step_of(c, Device::cuda());
  const auto with = [&](const std::function<void(DecoderStep&)>& change) {
    DecoderStep changed = step;
    change(changed);
    return changed;
  };
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.layers[1].up.bias = slice(s.norm, 0, 0, 64); })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.heads = 1; })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.layers[1].down = {}; })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.layers.assign(65, s.layers[0]); })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.norm = s.norm.to(float32); })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.frequencies.pop_back(); })));
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.x = s.norm; })); },
               "decoder_step: expected contiguous x of");
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.token = s.length; })); },
               "decoder_step: expected x, or a token and the embedding, not both");
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.x = {}, s.token = s.length; })); },
               "decoder_step: expected x, or the embedding and a token as one int64");
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.embedding = s.layers[0].keys; })));
  EXPECT_FALSE(has_decoder_step(with([](DecoderStep& s) { s.embedding = zeros({4, 128}, float32, s.x.device()); })));
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.next_token = s.x; })); },
               "decoder_step: expected the next token as");
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.length = {}; })); },
               "decoder_step: expected the length as");
  expect_error([&] { decoder_step(with([](DecoderStep& s) { s.scratch = slice(s.scratch, 0, 1, 9); })); },
               "decoder_step: expected at least");
}

}  // namespace infer_kernels_test
