// Runs each CUDA kernel once on minimal input and compares with the CPU. scripts/gpu_check runs SmallCase.* under each
// tool of compute-sanitizer; for other tests, its racecheck takes minutes. Every new kernel needs a case here;
// otherwise gpu_check fails. The test property `kernels` lists the kernels that a case launches.

#include <tests/support.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/detail/random_kernels.h>
#include <mica/core/rng.h>
#include <mica/infer/kernels/detail/decode_linear.h>
#include <mica/mica.h>

using namespace mica;
using namespace mica::testing_support;

namespace small_case_test {

class SmallCase : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "there is no GPU";
    }
    manual_seed(7);
  }
  void TearDown() override {
    std::string names;
    for (const std::string& name : kernels_) {
      names += (names.empty() ? "" : ";") + name;
    }
    RecordProperty("kernels", names);
  }

  /// Calls `results` for the CPU and for the GPU and compares: the norm of each result's difference must be at most
  /// `tolerance` times the result's norm. Inputs must be drawn before the call, so that both devices use the same.
  void compare(const std::string& what, double tolerance, const std::function<Tensors(Device)>& results) {
    const Tensors expected = results(Device::cpu());
    Tensors got;
    {
      cuda::LaunchRecord record;
      got = results(Device::cuda());
      kernels_.insert(record.names().begin(), record.names().end());
    }
    ASSERT_EQ(got.size(), expected.size()) << what;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].shape(), expected[i].shape()) << what << ", result " << i;
      const std::vector<double> a = to_vector<double>(got[i]);
      const std::vector<double> b = to_vector<double>(expected[i]);
      double error = 0;
      double norm = 0;
      for (std::size_t k = 0; k < a.size(); ++k) {
        error += (a[k] - b[k]) * (a[k] - b[k]);
        norm += b[k] * b[k];
      }
      EXPECT_GT(norm, 0) << what << ", result " << i << ": the case proves nothing";
      EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << what << ", result " << i;  // NaN fails
    }
  }

  /// Compares y = op(inputs), and the gradients of the floating inputs.
  void compare_with_gradients(const std::string& what, double tolerance, const Tensors& inputs,
                              const std::function<Tensor(const Tensors&)>& op) {
    Tensor dy;
    compare(what, tolerance, [&](Device device) {
      Tensors leaves;
      for (const Tensor& x : inputs) {
        const Tensor leaf = x.to(device).detach();
        leaves.push_back(is_floating(x.dtype()) ? leaf.requires_grad_() : leaf);
      }
      const Tensor y = op(leaves);
      if (!dy.defined()) {
        dy = randn(y.shape(), y.dtype());
      }
      y.backward(dy.to(device));
      Tensors results{y.detach()};
      for (const Tensor& leaf : leaves) {
        if (leaf.requires_grad()) {
          results.push_back(leaf.grad());
        }
      }
      return results;
    });
  }

 private:
  std::set<std::string> kernels_;
};

double tolerance_of(DType dtype) { return dtype == float64 ? 1e-12 : dtype == float32 ? 1e-5 : 1e-2; }

std::string name_of(DType dtype, std::int64_t m, std::int64_t n) { return fmt::format("{} {} x {}", dtype, m, n); }

struct Matrix {
  DType dtype;
  std::int64_t rows;
  std::int64_t columns;
};

TEST_F(SmallCase, Elementwise) {
  const Tensor x = randn({37, 41});
  const Tensor y = randn({37, 41});
  compare_with_gradients("add, packed", 1e-6, {x, y}, [](const Tensors& in) { return in[0] * in[1]; });
  compare_with_gradients("add, strided", 1e-6, {x, randn({41, 37})},
                         [](const Tensors& in) { return in[0] * transpose(in[1], 0, 1); });
  compare_with_gradients("gelu", 1e-5, {x}, [](const Tensors& in) { return gelu(in[0]); });
}

TEST_F(SmallCase, Convolution) {
  for (const DType dtype : {float64, float32, bfloat16}) {
    compare_with_gradients(
        "conv2d", 2 * tolerance_of(dtype),
        {randn({2, 8, 7, 9}, dtype), randn({16, 8, 3, 3}, dtype), randn({16}, dtype)},
        [](const Tensors& in) { return conv2d(in[0], in[1], in[2], {.padding = 1, .activation = Activation::relu}); });
    compare_with_gradients("conv_transpose1d", 2 * tolerance_of(dtype),
                           {randn({2, 6, 11}, dtype), randn({6, 4, 3}, dtype), randn({4}, dtype)},
                           [](const Tensors& in) { return conv_transpose1d(in[0], in[1], in[2], {.stride = 2}); });
  }
}

TEST_F(SmallCase, Copy) {
  const Tensor x = randn({37, 41});
  compare("to float16", 0, [&](Device device) { return Tensors{x.to(device).to(float16)}; });
  compare("transposed", 0, [&](Device device) { return Tensors{contiguous(transpose(x.to(device), 0, 1))}; });
  compare("many at once", 0, [&](Device device) {
    const Tensor wide = x.to(device);
    const Tensor narrow = wide.to(bfloat16);
    const Tensors copies{empty({37, 41}, float32, device), empty({37, 41}, float32, device),
                         empty({37, 41}, bfloat16, device)};
    copy_all_into(copies, {wide, narrow, narrow});
    return copies;
  });
}

TEST_F(SmallCase, Random) {
  for (const DType dtype : {float32, float64, bfloat16}) {
    compare("randn", tolerance_of(dtype), [&](Device device) {
      manual_seed(3);
      return Tensors{randn({1003}, dtype, device), rand({1003}, dtype, device)};
    });
  }
  compare("store_key", 0, [](Device device) {
    const Tensor state = from_data<std::int64_t>({5, 8}).to(device);
#if MICA_WITH_CUDA
    if (device.is_cuda()) {
      fill_(state, 0);
      kernels::store_key(Cuda{}, state, {.seed = 5, .offset = 8});
    }
#endif
    return Tensors{state};
  });
  compare("randint", 0, [](Device device) {
    manual_seed(3);
    return Tensors{randint(1, 100, {1003}, int64, device)};
  });
}

TEST_F(SmallCase, BatchNorm) {
  const Shape shape{3, 24, 5, 4};
  for (const DType dtype : {float64, float32, bfloat16}) {
    const Tensor x = randn(shape, dtype), residual = randn(shape, dtype), weight = randn({24}, dtype);
    for (const bool last : {false, true}) {
      const auto norm = [&](const Tensors& in, const BatchNormOptions& options) {
        const Tensor image = last ? channels_last(in[0]) : in[0];
        return batch_norm(image, in[1], in[1] * 0.5, options);
      };
      compare_with_gradients("training", tolerance_of(dtype), {x, weight, residual}, [&](const Tensors& in) {
        const Device device = in[0].device();
        return norm(in, {.running_mean = zeros({24}, dtype, device),
                         .running_var = ones({24}, dtype, device),
                         .num_batches_tracked = zeros({}, int64, device),
                         .momentum = std::nullopt,
                         .relu = true,
                         .residual = in[2]});
      });
      compare_with_gradients("evaluation", tolerance_of(dtype), {x, weight}, [&](const Tensors& in) {
        const Device device = in[0].device();
        return norm(in, {.running_mean = zeros({24}, dtype, device),
                         .running_var = ones({24}, dtype, device),
                         .training = false,
                         .relu = true});
      });
    }
    compare_with_gradients("columns", tolerance_of(dtype), {randn({37, 11}, dtype)},
                           [](const Tensors& in) { return batch_norm(in[0]); });
    compare_with_gradients("odd rows", tolerance_of(dtype), {randn({3, 5, 7}, dtype)},
                           [](const Tensors& in) { return batch_norm(in[0], {}, {}, {.relu = true}); });
  }
}

TEST_F(SmallCase, Images) {
  for (const DType dtype : {float64, float32, bfloat16}) {
    for (const bool last : {false, true}) {
      const auto of = [&](const char* what, const Shape& shape, const std::function<Tensor(const Tensor&)>& op) {
        compare_with_gradients(what, tolerance_of(dtype), {randn(shape, dtype)},
                               [&](const Tensors& in) { return op(last ? channels_last(in[0]) : in[0]); });
      };
      const Shape shape{2, 16, 7, 6};
      of("max_pool", shape, [](const Tensor& x) { return max_pool2d(x, 3, {.stride = 2, .padding = 1}); });
      of("max_pool, long window", {1, 8, 19, 18}, [](const Tensor& x) { return max_pool2d(x, 17); });
      of("adaptive_max_pool", shape, [](const Tensor& x) { return adaptive_max_pool2d(x, {3, 4}); });
      of("avg_pool", shape, [](const Tensor& x) { return avg_pool2d(x, {3, 2}, {.stride = 2, .padding = 1}); });
      of("interpolate", shape, [](const Tensor& x) {
        return interpolate(x, {.size = PerAxis{9, 4}, .mode = Interpolation::cubic});
      });
      of("unfold", shape, [](const Tensor& x) { return unfold(x, {3, 2}, {.padding = 1, .stride = 2}); });
    }
    const Tensor x = randn({2, 16, 7, 6}, dtype);
    compare("max_pool_with_indices", 0,
            [&](Device device) { return Tensors{max_pool_with_indices(x.to(device), 2, 2).indices}; });
    compare("take_taps", tolerance_of(dtype), [&](Device device) {
      const Tensor leaf = x.to(device).detach().requires_grad_();
      const Tensor dy = ones({2, 16, 3, 3}, dtype, device).requires_grad_();
      const Tensor dx = autograd::grad({max_pool2d(leaf, 2)}, {leaf}, {dy}, {.create_graph = true})[0];
      return autograd::grad({dx}, {dy}, {leaf.detach()});
    });
  }
}

TEST_F(SmallCase, Dropout) {
  const Tensor x = randn({37, 41});
  for (const DType dtype : {float32, bfloat16}) {
    compare_with_gradients("dropout", 1e-6, {x.to(dtype)}, [](const Tensors& in) {
      manual_seed(3);
      return dropout(in[0], 0.3);
    });
  }
}

TEST_F(SmallCase, Embedding) {
  const Tensor indices = randint(0, 11, {5, 7});
  for (const DType dtype : {float32, bfloat16}) {
    compare_with_gradients("embedding", tolerance_of(dtype), {randn({11, 33}, dtype), indices},
                           [](const Tensors& in) { return embedding(in[0], in[1]); });
  }
}

TEST_F(SmallCase, Index) {
  for (const DType dtype : {float32, bfloat16}) {
    const Tensor x = randn({3, 7, 5}, dtype);
    const double tolerance = tolerance_of(dtype);
    compare_with_gradients("gather", tolerance, {x, randint(0, 7, {3, 90, 5})},
                           [](const Tensors& in) { return gather(in[0], 1, in[1]); });
    compare_with_gradients("index_select", tolerance, {x, randint(0, 7, {90})},
                           [](const Tensors& in) { return index_select(in[0], 1, in[1]); });
    compare_with_gradients("scatter_add", tolerance, {x, randint(0, 5, {3, 7, 60}), randn({3, 7, 60}, dtype)},
                           [](const Tensors& in) { return scatter_add(in[0], 2, in[1], in[2]); });
    compare_with_gradients("index_add", tolerance, {x, randint(0, 3, {60}), randn({60, 7, 5}, dtype)},
                           [](const Tensors& in) { return index_add(in[0], 0, in[1], in[2]); });
    compare_with_gradients("masked_select", tolerance, {x},
                           [](const Tensors& in) { return masked_select(in[0], gt(in[0], 0)); });
  }
  compare("whole numbers", 0, [x = randint(0, 100, {4, 8})](Device device) {
    const Tensor t = x.to(device), index = from_data<std::int64_t>({3, 0, 3}, device);
    return Tensors{index_select(t, 0, index), index_add(t, 0, index, slice(t, 0, 0, 3)), flip(t.to(uint8))};
  });
}

TEST_F(SmallCase, Sort) {
  for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
    const Tensor x = randint(0, dtype == boolean ? 2 : 40, {5, 67}).to(dtype);
    compare(fmt::format("sort {}", dtype), 0, [&](Device device) {
      const auto [y, at] = sort(x.to(device), -1, true);
      const auto [top, top_at] = topk(x.to(device), 3, 0, dtype == float32);
      return Tensors{y, at, top.to(int64) + 1, top_at};
    });
  }
}

TEST_F(SmallCase, Cumsum) {
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    compare_with_gradients(fmt::format("{}", dtype), tolerance_of(dtype), {randn({3, 8200}, dtype)},
                           [](const Tensors& in) { return cumsum(in[0], 1); });
  }
  compare("int64", 0, [x = randint(-9, 9, {3, 1030})](Device device) { return Tensors{cumsum(x.to(device), 1)}; });
}

TEST_F(SmallCase, Scans) {
  const Tensor x = rand({2, 8200}, float64) * 0.01 + 0.995;  // two chunks
  compare_with_gradients("cumprod", 1e-10, {x}, [](const Tensors& in) { return cumprod(in[0], 1); });
  compare_with_gradients("logcumsumexp", 1e-10, {x}, [](const Tensors& in) { return logcumsumexp(in[0], 1); });
  compare("cummax", 0, [&](Device device) {
    return Tensors{cummax(x.to(device), 1).indices, cummin(x.to(device, float16), 1).indices};
  });
}

TEST_F(SmallCase, SearchAndScatter) {
  const Tensor index = randint(0, 9, {8200}), src = randn({8200}), x = arange(-4, 5, 1, float32),
               sorted = sort(randn({50}), 0).values;
  compare("searchsorted", 0, [&](Device device) {
    return Tensors{searchsorted(sorted.to(device), src.to(device)), unique(index.to(device)).inverse};
  });
  compare_with_gradients("amax", 1e-5, {x, src, index}, [](const Tensors& in) {
    return scatter_reduce(in[0], 0, in[2], in[1], ScatterReduction::amax);
  });
  compare("scatter", 0,
          [&](Device device) { return Tensors{scatter(x.to(device), 0, index.to(device), src.to(device))}; });
}

TEST_F(SmallCase, IntegerMatmul) {
  const Tensor a = randint(-9, 9, {2, 18, 35}), b = randint(-9, 9, {35, 19});
  compare("int64", 0, [&](Device device) { return Tensors{matmul(a.to(device), b.to(device))}; });
}

TEST_F(SmallCase, Ctc) {
  const Tensor x = log_softmax(randn({9, 2, 5}), -1), targets = randint(1, 5, {2, 3});
  const Tensor times = from_data<std::int64_t>({9, 7}), lengths = from_data<std::int64_t>({3, 2});
  compare_with_gradients("ctc_loss", 1e-5, {x, targets, times, lengths},
                         [](const Tensors& in) { return ctc_loss(in[0], in[1], in[2], in[3]); });
}

TEST_F(SmallCase, AddEmbedding) {
  const Tensor indices = randint(0, 11, {3, 5});
  for (const Matrix& c : {Matrix{float32, 11, 136}, Matrix{bfloat16, 11, 264}}) {
    for (const double p : {0.0, 0.3}) {
      compare_with_gradients(name_of(c.dtype, c.rows, c.columns), tolerance_of(c.dtype),
                             {randn({c.rows, c.columns}, c.dtype), indices, randn({5, c.columns}, c.dtype)},
                             [&](const Tensors& in) {
                               manual_seed(3);
                               return add_embedding(in[0], in[1], in[2], {.p = p});
                             });
    }
  }
}

TEST_F(SmallCase, Gated) {
  for (const Matrix& c : {Matrix{float32, 5, 33}, Matrix{bfloat16, 5, 64}}) {
    const Tensors inputs{randn({c.rows, c.columns}, c.dtype), randn({c.rows, c.columns}, c.dtype)};
    const double tolerance = tolerance_of(c.dtype);
    compare_with_gradients("swiglu", tolerance, inputs, [](const Tensors& in) { return swiglu(in[0], in[1]); });
    compare_with_gradients("geglu", tolerance, inputs, [](const Tensors& in) { return geglu(in[0], in[1]); });
  }
}

TEST_F(SmallCase, Rotary) {
  const Tensor positions = from_data<std::int64_t>({3, 1, 100000, 0, 5, 6}, {2, 3});
  const std::vector<float> frequencies = nn::rotary_frequencies(10, {});
  for (const DType dtype : {float64, float32, bfloat16}) {
    const Tensor x = randn({2, 3, 5, 10}, dtype);
    compare_with_gradients("rotary", tolerance_of(dtype), {x},
                           [&](const Tensors& in) { return rotary(in[0], frequencies, {.offset = 7}); });
    // The kernel converts an angle to a multiple of π in float64, which rounds.
    const double of_angles = dtype == float64 ? 4 * std::numeric_limits<double>::epsilon() * 100000 : 0;
    compare_with_gradients(
        "rotary, positions", tolerance_of(dtype) + of_angles, {x, positions},
        [&](const Tensors& in) { return rotary(in[0], frequencies, {.positions = in[1], .scale = 1.2}); });
  }
}

TEST_F(SmallCase, LayerNorm) {
  // There are few rows of 140,001 elements of 16 bits: if two blocks of clusters of 16 share a multiprocessor,
  // synccheck reports a missing wait where a barrier is initialized.
  for (const Matrix& c : {Matrix{float32, 67, 7},       Matrix{float32, 9, 128},       Matrix{float32, 9, 301},
                          Matrix{float32, 9, 1604},     Matrix{float32, 9, 1601},      Matrix{float32, 5, 8196},
                          Matrix{float32, 3, 20001},    Matrix{float32, 3, 70'001},    Matrix{float32, 2, 140'000},
                          Matrix{float32, 2, 140'001},  Matrix{float32, 2, 300'007},   Matrix{bfloat16, 9, 768},
                          Matrix{bfloat16, 9, 301},     Matrix{bfloat16, 9, 1001},     Matrix{bfloat16, 5, 4097},
                          Matrix{bfloat16, 3, 20'008},  Matrix{bfloat16, 3, 20'001},   Matrix{float16, 5, 9000},
                          Matrix{float16, 5, 14'000},   Matrix{bfloat16, 515, 257},    Matrix{float64, 9, 1000},
                          Matrix{float64, 3, 20001},    Matrix{bfloat16, 67, 7},       Matrix{float16, 67, 101},
                          Matrix{bfloat16, 67, 201},    Matrix{float16, 35, 401},      Matrix{bfloat16, 5, 9001},
                          Matrix{float16, 5, 13'001},   Matrix{bfloat16, 3, 40'001},   Matrix{float16, 2, 100'001},
                          Matrix{bfloat16, 2, 140'001}, Matrix{bfloat16, 263, 1101},   Matrix{float32, 265, 128},
                          Matrix{float32, 265, 516},    Matrix{bfloat16, 2115, 1501},  Matrix{float16, 35, 302},
                          Matrix{bfloat16, 5, 1502},    Matrix{float16, 3, 20'002},    Matrix{float32, 9, 801},
                          Matrix{bfloat16, 2843, 369},  Matrix{float16, 2275, 461},    Matrix{bfloat16, 4090, 513},
                          Matrix{float32, 4081, 257},   Matrix{float32, 1030, 1019},   Matrix{bfloat16, 70, 11'001},
                          Matrix{float16, 17, 20'001},  Matrix{bfloat16, 5, 140'001},  Matrix{bfloat16, 46, 20'008},
                          Matrix{float32, 46, 20'001},  Matrix{bfloat16, 265, 1502},   Matrix{float16, 61, 40'002},
                          Matrix{float16, 265, 1501},   Matrix{bfloat16, 110, 11'001}, Matrix{float16, 46, 20'001},
                          Matrix{float32, 20, 70'001},  Matrix{bfloat16, 2200, 1001},  Matrix{float16, 21'000, 101},
                          Matrix{bfloat16, 4300, 64},   Matrix{float32, 4300, 64},     Matrix{float32, 4241, 272},
                          Matrix{bfloat16, 2172, 1560}, Matrix{bfloat16, 800, 4104},   Matrix{bfloat16, 140, 20'008},
                          Matrix{float16, 4100, 1025},  Matrix{float16, 2115, 2001}}) {
    const Tensors inputs{randn({c.rows, c.columns}, c.dtype), randn({c.columns}, c.dtype), randn({c.columns}, c.dtype)};
    const std::string what = name_of(c.dtype, c.rows, c.columns);
    compare_with_gradients(what, tolerance_of(c.dtype), inputs,
                           [&](const Tensors& in) { return layer_norm(in[0], {c.columns}, in[1], in[2]); });
    compare_with_gradients(
        what + ", without dx", tolerance_of(c.dtype), {inputs[1], inputs[2]},
        [&](const Tensors& in) { return layer_norm(inputs[0].to(in[0].device()), {c.columns}, in[0], in[1]); });
  }
  // Parameters are in shared memory. A row belongs to some lanes, a warp or a block; some rows are read by single
  // elements.
  for (const std::int64_t columns : {48, 120, 768, 4096, 801, 301, 61}) {
    compare_with_gradients(name_of(bfloat16, 300, columns) + ", weights of float32", tolerance_of(bfloat16),
                           {randn({300, columns}, bfloat16), randn({columns}), randn({columns})},
                           [&](const Tensors& in) { return layer_norm(in[0], {columns}, in[1], in[2]); });
  }
}

TEST_F(SmallCase, RMSNorm) {
  for (const Matrix& c : {Matrix{float32, 67, 7},       Matrix{float32, 9, 300},     Matrix{bfloat16, 9, 768},
                          Matrix{bfloat16, 67, 128},    Matrix{bfloat16, 9, 1001},   Matrix{float16, 67, 61},
                          Matrix{bfloat16, 35, 301},    Matrix{float16, 5, 9001},    Matrix{bfloat16, 3, 20'001},
                          Matrix{float32, 3, 8193},     Matrix{float32, 3, 40'000},  Matrix{float64, 9, 1000},
                          Matrix{bfloat16, 265, 768},   Matrix{float32, 265, 1028},  Matrix{float16, 67, 62},
                          Matrix{bfloat16, 1500, 354},  Matrix{float16, 5, 5002},    Matrix{bfloat16, 3, 20'002},
                          Matrix{bfloat16, 2843, 369},  Matrix{float16, 17, 40'001}, Matrix{bfloat16, 46, 20'008},
                          Matrix{float32, 46, 40'001},  Matrix{bfloat16, 265, 1502}, Matrix{float16, 265, 1501},
                          Matrix{float16, 90, 12'003},  Matrix{bfloat16, 4300, 64},  Matrix{bfloat16, 5301, 528},
                          Matrix{bfloat16, 300, 20'008}}) {
    compare_with_gradients(name_of(c.dtype, c.rows, c.columns), tolerance_of(c.dtype),
                           {randn({c.rows, c.columns}, c.dtype), randn({c.columns}, c.dtype)},
                           [&](const Tensors& in) { return rms_norm(in[0], {c.columns}, in[1]); });
  }
}

TEST_F(SmallCase, AddLayerNorm) {
  for (const Matrix& c : {Matrix{float32, 9, 128}, Matrix{bfloat16, 9, 768}, Matrix{float32, 5, 4096}}) {
    for (const double p : {0.0, 0.3}) {
      compare_with_gradients(name_of(c.dtype, c.rows, c.columns), tolerance_of(c.dtype),
                             {randn({c.rows, c.columns}, c.dtype), randn({c.rows, c.columns}, c.dtype),
                              randn({c.columns}, c.dtype), randn({c.columns}, c.dtype), randn({c.columns}, c.dtype)},
                             [&](const Tensors& in) {
                               manual_seed(3);
                               const auto [sum, y] =
                                   add_layer_norm(in[0], in[1], {c.columns}, in[2], in[3], {.p = p, .x_bias = in[4]});
                               return sum + y;
                             });
    }
  }
}

TEST_F(SmallCase, AddRMSNorm) {
  for (const Matrix& c : {Matrix{float32, 9, 128}, Matrix{bfloat16, 9, 768}, Matrix{float32, 5, 4096}}) {
    for (const double p : {0.0, 0.3}) {
      compare_with_gradients(name_of(c.dtype, c.rows, c.columns), tolerance_of(c.dtype),
                             {randn({c.rows, c.columns}, c.dtype), randn({c.rows, c.columns}, c.dtype),
                              randn({c.columns}, c.dtype), randn({c.columns}, c.dtype)},
                             [&](const Tensors& in) {
                               manual_seed(3);
                               const auto [sum, y] =
                                   add_rms_norm(in[0], in[1], {c.columns}, in[2], {.p = p, .x_bias = in[3]});
                               return sum + y;
                             });
    }
  }
}

TEST_F(SmallCase, Softmax) {
  for (const DType dtype : {float32, bfloat16, float64}) {
    // Rows that are multiples of 16 bytes, for a part of a warp, a warp, a block, a cluster that holds one row, and one
    // that streams rows; and rows that are not.
    for (const std::int64_t n : {8, 768, 3080, 20'480, 65'536, 5, 301, 3001, 40'001}) {
      const Tensor x = randn({5, n}, dtype);
      const std::string what = name_of(dtype, 5, n);
      const double tolerance = tolerance_of(dtype);
      compare_with_gradients(what, tolerance, {x}, [](const Tensors& in) { return softmax(in[0], 1); });
      compare_with_gradients(what + ", log", tolerance, {x}, [](const Tensors& in) { return log_softmax(in[0], 1); });
    }
    // Rows that are too long for registers.
    compare_with_gradients("long", tolerance_of(dtype), {randn({1, 300'000}, dtype)},
                           [](const Tensors& in) { return softmax(in[0], 1); });
    compare_with_gradients("columns", tolerance_of(dtype), {randn({9, 33}, dtype)},
                           [](const Tensors& in) { return softmax(in[0], 0); });
    compare_with_gradients("columns, log", tolerance_of(dtype), {randn({9, 33}, dtype)},
                           [](const Tensors& in) { return log_softmax(in[0], 0); });
  }
}

TEST_F(SmallCase, CrossEntropy) {
  // A row for a warp, one for a block, and rows that stream through the shared memory of a block and of a cluster.
  for (const Matrix& c : {Matrix{float32, 5, 33}, Matrix{float32, 5, 3080}, Matrix{bfloat16, 5, 3080},
                          Matrix{float32, 3, 100'000}, Matrix{float64, 5, 33}}) {
    const Tensors inputs{randn({c.rows, c.columns}, c.dtype), randint(0, c.columns, {c.rows})};
    for (const bool in_place : {false, true}) {
      for (const double smoothing : {0.0, 0.1}) {
        compare_with_gradients(name_of(c.dtype, c.rows, c.columns) + (in_place ? ", in place" : ""),
                               tolerance_of(c.dtype), inputs, [&](const Tensors& in) {
                                 return 3 * cross_entropy(in[0] * 1.5, in[1],
                                                          {.label_smoothing = smoothing, .in_place = in_place});
                               });
      }
    }
  }
}

TEST_F(SmallCase, Reduce) {
  for (const DType dtype : {float32, bfloat16}) {
    const double tolerance = tolerance_of(dtype);
    struct Case {
      Shape shape;
      int axis;
    };
    for (const Case& c :
         {Case{{9, 100}, 1}, Case{{3, 3000}, 1}, Case{{2, 40'000}, 1}, Case{{300, 33}, 0}, Case{{1100, 33}, 0}}) {
      const int axis = c.axis;
      const Tensor x = randn(c.shape, dtype);
      compare_with_gradients("sum", tolerance, {x}, [&](const Tensors& in) { return sum(in[0] * in[0], {axis}); });
      compare_with_gradients("var", tolerance, {x}, [&](const Tensors& in) { return var(in[0], {axis}); });
      compare_with_gradients("max", tolerance, {x}, [&](const Tensors& in) { return max(in[0], axis).values; });
      compare("argmax", 0, [&](Device device) { return Tensors{argmax(x.to(device), axis)}; });
    }
  }
}

TEST_F(SmallCase, Linear) {
  for (const DType dtype : {float32, bfloat16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu}) {
      compare_with_gradients("linear", tolerance_of(dtype),
                             {randn({300, 24}, dtype), randn({40, 24}, dtype), randn({40}, dtype)},
                             [&](const Tensors& in) { return linear(in[0], in[1], in[2], activation); });
    }
  }
}

TEST_F(SmallCase, Mlp) {
  // As many tiles as a GPU has multiprocessors, so that the kernel with an epilogue runs.
  for (const DType dtype : {float16, bfloat16}) {
    compare_with_gradients(
        "mlp", tolerance_of(dtype),
        {randn({1413, 16}, dtype), randn({1528, 16}, dtype), randn({1528}, dtype), randn({16, 1528}, dtype),
         randn({16}, dtype)},
        [](const Tensors& in) { return mlp(in[0], in[1], in[2], in[3], in[4], Activation::gelu_tanh); });
  }
}

TEST_F(SmallCase, TiledMatmul) {
  // Rows that are aligned as the kernel for compute capability 9.0 requires, rows that are not, and a dtype without
  // tensor cores.
  for (const auto& [dtype, k] : {std::pair{bfloat16, 72}, std::pair{bfloat16, 37}, std::pair{float32, 37}}) {
    compare_with_gradients("tiled_matmul", tolerance_of(dtype), {randn({40, k}, dtype), randn({k, 48}, dtype)},
                           [](const Tensors& in) { return tiled_matmul(in[0], in[1]); });
  }
}

TEST_F(SmallCase, QuantizedMatmul) {
  struct Case {
    DType dtype;
    std::int64_t m, k, n;
  };
  // A kernel without tensor cores; dequantizing first; few rows on tensor cores; many rows; and many rows, with K split
  // into so many parts that their sums go through global memory.
  for (const Case& c : {Case{float32, 4, 600, 40}, Case{float32, 20, 96, 40}, Case{bfloat16, 4, 512, 64},
                        Case{bfloat16, 40, 512, 64}, Case{bfloat16, 20, 12'288, 128}}) {
    const Tensor weight = randn({c.k, c.n});
    const QuantizedWeight q = quantize(weight);
    const Tensor row_scales = rand({c.m}) + 0.5;
    compare_with_gradients(name_of(c.dtype, c.m, c.k), tolerance_of(c.dtype), {randn({c.m, c.k}, c.dtype)},
                           [&](const Tensors& in) {
                             const Device device = in[0].device();
                             QuantizedWeight there = q;
                             there.packed = q.packed.to(device);
                             there.scale = q.scale.to(device);
                             there.zero = q.zero.to(device);
                             return quantized_matmul(in[0], there, {.rows = row_scales.to(device)});
                           });
  }
}

// Groups of 16, and scales and zeros of two levels.
TEST_F(SmallCase, QuantizedMatmulOfTwoLevels) {
  const QuantizedWeight q{.packed = pack_bits(randint(0, 16, {272, 40}, uint8), 4),
                          .scale = randint(0, 256, {17, 40}, uint8),
                          .zero = randint(0, 256, {17, 40}, uint8),
                          .scale_factor = rand({2, 40}, float16) * 0.01,
                          .zero_factor = rand({2, 40}, float16) * 0.01,
                          .rows = 272,
                          .group_size = 16,
                          .mode = QuantizationMode::fused_multiply_add};
  for (const std::int64_t m : {4, 20}) {
    compare_with_gradients(name_of(float32, m, q.rows), tolerance_of(float32), {randn({m, q.rows})},
                           [&](const Tensors& in) {
                             QuantizedWeight there = q;
                             for (const auto& [name, part] : quantized_parts()) {
                               there.*part = (q.*part).to(in[0].device());
                             }
                             return quantized_matmul(in[0], there);
                           });
  }
}

TEST_F(SmallCase, Attention) {
  // 16-bit and float32; rows of scores that fit into a warp's registers and longer ones; with and without a mask.
  struct Case {
    DType dtype;
    std::int64_t keys, depth;
  };
  for (const auto& [dtype, keys, depth] : {Case{float32, 40, 64}, Case{float32, 1100, 64}, Case{float32, 1101, 64},
                                           Case{float32, 41, 64}, Case{bfloat16, 96, 64}, Case{float16, 96, 72}}) {
    for (const bool causal : {false, true}) {
      compare_with_gradients(
          fmt::format("{} with {} keys of {}", dtype, keys, depth), 2 * tolerance_of(dtype),
          {randn({1, 2, 40, depth}, dtype), randn({1, 2, keys, depth}, dtype), randn({1, 2, keys, depth}, dtype)},
          [&](const Tensors& in) { return scaled_dot_product_attention(in[0], in[1], in[2], {.causal = causal}); });
    }
  }
  // With a mask, the kernels for all GPUs run.
  const Tensor mask = randn({1, 1, 40, 96}, bfloat16);
  compare_with_gradients(
      "mask", 2 * tolerance_of(bfloat16),
      {randn({1, 2, 40, 64}, bfloat16), randn({1, 2, 96, 64}, bfloat16), randn({1, 2, 96, 64}, bfloat16)},
      [&](const Tensors& in) {
        return scaled_dot_product_attention(in[0], in[1], in[2], {.mask = mask.to(in[0].device())});
      });
}

TEST_F(SmallCase, Optimizers) {
  for (const DType dtype : {float32, bfloat16}) {
    const Tensors start{randn({33, 17}, dtype), randn({5}, dtype)};
    const Tensors gradients{randn({33, 17}, dtype), randn({5}, dtype)};
    const auto train = [&](Device device, const auto& make) {
      Tensors parameters;
      for (std::size_t i = 0; i < start.size(); ++i) {
        parameters.push_back(clone(start[i]).to(device).detach().requires_grad_());
        parameters.back().set_grad(clone(gradients[i]).to(device));
      }
      auto optimizer = make(parameters);
      optim::clip_grad_norm_(parameters, 1.0);
      optimizer.step();
      optimizer.step();
      return parameters;
    };
    compare("AdamW", tolerance_of(dtype), [&](Device device) {
      return train(device, [](const Tensors& p) { return optim::AdamW(p, {.lr = 0.1}); });
    });
    compare("AdamW with a GradScaler", tolerance_of(dtype), [&](Device device) {
      const Tensor p = clone(start[0]).to(device).detach().requires_grad_();
      optim::AdamW optimizer({p}, {.lr = 0.1});
      optim::GradScaler scaler({.init_scale = 16});
      scaler.scale(sum(p * p)).backward();
      optimizer.step({.max_grad_norm = 1.0, .scaler = &scaler});
      scaler.update();
      return Tensors{p};
    });
    compare("Adam", tolerance_of(dtype), [&](Device device) {
      return train(device, [](const Tensors& p) { return optim::Adam(p, {.lr = 0.1, .weight_decay = 0.1}); });
    });
    compare("Lion", tolerance_of(dtype),
            [&](Device device) { return train(device, [](const Tensors& p) { return optim::Lion(p, {.lr = 0.1}); }); });
    compare("SGD", tolerance_of(dtype), [&](Device device) {
      return train(device, [](const Tensors& p) { return optim::SGD(p, {.lr = 0.1, .momentum = 0.9}); });
    });
  }
}

TEST_F(SmallCase, DrawTokens) {
  for (const DType dtype : {float32, bfloat16}) {
    const Tensor logits = (randn({3, 3000}) * 2).to(dtype);
    const Tensor seen = lt(rand({3, 3000}), 0.3);
    for (const infer::SamplingOptions& options :
         {infer::SamplingOptions{.temperature = 0}, infer::SamplingOptions{.top_k = 50},
          infer::SamplingOptions{.temperature = 0.8, .top_p = 0.9, .repetition_penalty = 1.3}}) {
      compare(fmt::format("{}, top_k {}, top_p {}", dtype, options.top_k, options.top_p), 0, [&](Device device) {
        infer::Sampler sampler(options);
        return Tensors{sampler.draw(logits.to(device), seen.to(device))};
      });
    }
  }
}

TEST_F(SmallCase, Recurrent) {
  for (const Recurrence kind : {Recurrence::rnn_tanh, Recurrence::rnn_relu, Recurrence::gru, Recurrence::lstm}) {
    const std::int64_t gates = gates_of(kind) * 5;
    const Tensor x = randn({3, 2, 4}), input = randn({gates, 4}) * 0.5, hidden = randn({gates, 5}) * 0.4;
    const Tensor bias = randn({gates});
    for (const DType dtype : {float32, bfloat16}) {
      compare(fmt::format("kind {} {}", static_cast<int>(kind), dtype), dtype == float32 ? 1e-4 : 0.05,
              [&](Device device) {
                const auto leaf = [&](const Tensor& t) { return t.to(device, dtype).detach().requires_grad_(); };
                const RecurrentWeights weights{leaf(input), leaf(hidden), leaf(bias), leaf(bias)};
                const RecurrentResult r =
                    recurrent(kind, leaf(x), weights, {}, {}, {.lengths = from_data<std::int64_t>({3, 2}, device)});
                sum(r.y * r.y).backward();
                return Tensors{r.y, r.h, weights.input.grad(), weights.hidden.grad(), weights.hidden_bias.grad()};
              });
    }
  }
}

TEST_F(SmallCase, DecodeSteps) {
  const autograd::NoGrad no_grad;
  nn::Llama llama({.vocab = 64, .layers = 1, .heads = 2, .key_heads = 1, .head_width = 32, .width = 64, .hidden = 64});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.3);
  }
  llama.to(bfloat16);
  const Tensor tokens = randint(0, 64, {2, 5});
  for (const int bits : {16, 4}) {
    if (bits == 4) {
      nn::quantize(llama, {.bits = bits}, bits);
    }
    compare(fmt::format("{} bits", bits), 0.05, [&](Device device) {
      llama.to(device);
      infer::LlamaDecoder decoder(llama, {.batch = 2});
      const Tensor there = tokens.to(device);
      decoder.prefill(slice(there, 1, 0, 3));
      decoder.step(select(there, 1, 3));
      return Tensors{decoder.step(select(there, 1, 4))};
    });
  }
}

TEST_F(SmallCase, DecodeLinears) {
  const autograd::NoGrad no_grad;
  const auto from = [](const Shape& shape) { return (randn(shape) * 0.3).to(bfloat16); };
  const Tensor w = from({1024, 64}), v = from({1024, 64}), norm = from({64});
  for (const std::int64_t rows : {3, 12}) {
    const Tensor x = from({rows, 64}), residual = from({rows, 1024});
    compare(fmt::format("{} rows", rows), 0.05, [&](Device device) {
      const Tensor there = x.to(device);
      const infer::DecodeWeight a{.matrix = w.to(device)}, b{.matrix = v.to(device)};
      return Tensors{infer::decode_linear(there, {a, b}, {.norm_weight = norm.to(device)}),
                     infer::decode_linear(there, {a, b}, {.swiglu = true}),
                     infer::decode_linear(there, {a}, {.residual = residual.to(device)})};
    });
  }
  const Tensor wide = from({3136, 64}), x = from({12, 64});
  compare("many outputs", 0.05, [&](Device device) {
    const infer::DecodeWeight a{.matrix = wide.to(device)};
    return Tensors{infer::decode_linear(x.to(device), {a, a}, {.norm_weight = norm.to(device), .swiglu = true})};
  });
  for (const int bits : {8, 4}) {
    const auto packed = [&](const Tensor& matrix) {
      return quantize(transpose(matrix, 0, 1), {.bits = bits, .dtype = bfloat16});
    };
    const QuantizedWeight p = packed(w), q = packed(from({256, 384})), many = packed(wide);
    for (const std::int64_t rows : {3, 12, 20}) {
      const Tensor short_rows = from({rows, 64}), long_rows = from({rows, 384}), residual = from({rows, 256});
      compare(fmt::format("{} bits, {} rows", bits, rows), 0.05, [&](Device device) {
        const auto on = [&](const QuantizedWeight& weight) {
          QuantizedWeight there = weight;
          there.packed = weight.packed.to(device);
          there.scale = weight.scale.to(device);
          there.zero = weight.zero.to(device);
          return infer::DecodeWeight{.quantized = there};
        };
        const infer::DecodeWeight a = on(p), b = on(q), c = on(many);
        const Tensor there = short_rows.to(device), norms = norm.to(device);
        return Tensors{infer::decode_linear(there, {a, a}, {.norm_weight = norms}),
                       infer::decode_linear(there, {a, a}, {.swiglu = true}),
                       infer::decode_linear(long_rows.to(device), {b}, {.residual = residual.to(device)}),
                       infer::decode_linear(there, {c, c}, {.norm_weight = norms, .swiglu = true}),
                       infer::decode_linear(there, {c, c}, {})};
      });
    }
  }
}

TEST_F(SmallCase, DecodePrompt) {
  const autograd::NoGrad no_grad;
  const auto from = [](const Shape& shape) { return (randn(shape) * 0.3).to(bfloat16); };
  const Tensor w = from({1024, 64}), v = from({1024, 64}), norm = from({64});
  const Tensor x = from({1024, 64}), residual = from({1024, 1024});
  compare("products", 0.05, [&](Device device) {
    const Tensor there = x.to(device);
    const infer::DecodeWeight a{.matrix = w.to(device)}, b{.matrix = v.to(device)};
    return Tensors{infer::decode_linear(there, {a, b}, {.norm_weight = norm.to(device)}),
                   infer::decode_linear(there, {a, b}, {.swiglu = true}),
                   infer::decode_linear(there, {a}, {.residual = residual.to(device)})};
  });
  // A prompt, for which the product's kernel appends keys and values to the cache.
  nn::Llama llama(
      {.vocab = 64, .layers = 1, .heads = 8, .key_heads = 4, .head_width = 64, .width = 64, .hidden = 1024});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.3);
  }
  llama.to(bfloat16);
  const Tensor tokens = randint(0, 64, {1, 1030});
  compare("a prompt", 0.05, [&](Device device) {
    llama.to(device);
    infer::LlamaDecoder decoder(llama);
    return Tensors{decoder.prefill(tokens.to(device))};
  });
}

TEST_F(SmallCase, DecoderStep) {
  const autograd::NoGrad no_grad;
  nn::Llama llama(
      {.vocab = 64, .layers = 2, .heads = 2, .key_heads = 1, .head_width = 64, .width = 128, .hidden = 192});
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.3);
  }
  llama.to(bfloat16);
  const Tensor tokens = randint(0, 64, {1, 5});
  for (const int bits : {16, 4}) {
    if (bits == 4) {
      nn::quantize(llama, {.bits = bits}, bits);
    }
    compare(fmt::format("{} bits", bits), 0.05, [&](Device device) {
      llama.to(device);
      infer::LlamaDecoder decoder(llama);
      const Tensor there = tokens.to(device);
      decoder.prefill(slice(there, 1, 0, 3));
      const Tensor token = clone(select(there, 1, 3));
      decoder.replace(token);
      return Tensors{decoder.step(select(there, 1, 4))};
    });
  }
}

}  // namespace small_case_test
