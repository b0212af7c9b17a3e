#pragma once

// Small language models of the tests of generation and its cache.

#include <tests/support.h>

#include <cstdint>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/models/llama.h>
#include <mica/ops/elementwise/binary.h>

namespace mica::small_models {

using namespace mica::testing_support;

using Tokens = std::vector<std::int64_t>;

inline nn::GPTConfig gpt_config() {
  return {.vocab = 13, .context = 20, .layers = 2, .heads = 2, .width = 8, .dropout = 0.5};
}

inline nn::LlamaConfig llama_config() {
  return {.vocab = 13,
          .context = 20,
          .layers = 2,
          .heads = 4,
          .key_heads = 2,
          .head_width = 6,
          .width = 8,
          .hidden = 12,
          .rotary = {.theta = 100},
          .qkv_bias = true,
          .qk_norm = true};
}

inline const std::vector<Tokens> kPrompts{{3, 1, 4, 1, 5, 9, 2, 6}, {7}, {1, 2, 3, 5}};

// A model with random weights, large enough that attention and positions matter.
template <class Model>
Model randomized(Model model, DType dtype, Device device) {
  for (const Tensor& parameter : model.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.5);
  }
  model.to(device, dtype);
  model.eval();
  return model;
}

inline double tolerance_of(DType dtype) { return dtype == float64 ? 1e-12 : dtype == float32 ? 1e-4 : 5e-2; }

// With sizes for which there are decode kernels.
inline nn::LlamaConfig wide_llama_config() {
  return {.vocab = 192, .layers = 2, .heads = 4, .key_heads = 2, .head_width = 32, .width = 128, .hidden = 192};
}

}  // namespace mica::small_models
