#pragma once

// The decoder step's products: how outputs are split among blocks, and the stages of weights. See decoder_step_sm90.cu.

#include <cstdint>

#include <mica/core/cuda/detail/ring.cuh>
#include <mica/infer/kernels/detail/decoder_step.cuh>

namespace mica::kernels::decoder {

/// A phase that computes a product: out = f(norm(in) · Wᵀ + bias) + residual.
template <class T>
struct Product {
  const Weight<T>* weights;  // one, or several side by side
  int depth;
  int outputs;  // of the product; with swiglu, half of the weights' outputs
  bool swiglu;
  bool adds_residual;
  bool is_spread;              // blocks take groups of rows round-robin; else a block has adjacent rows
  const T* norm;               // or null
  const std::uint32_t* in;     // null: the step's x. This pointer and those below are for even steps
  std::uint32_t* out;          // null: the logits
  const std::uint32_t* parts;  // the parts of `in` if attention is split; null if `in` is not from attention
  const std::uint32_t* stats;
};

inline constexpr int kLayerProducts = 4;

/// Product number `number`: four of each layer in order, then the head's. `layers` and `head` are in shared memory,
/// since kernel parameters are in constant memory, whose cache is too small for them.
template <class T>
__device__ Product<T> product(const Arguments<T>& a, const Layer<T>* layers, const Weight<T>* head, int number) {
  const int layer = number / kLayerProducts;
  const Words words(a, a.words, layer);
  const std::uint32_t* const in = number == 0 ? nullptr : words.previous_out(a.layer_words);
  Product<T> p{};
  p.depth = a.width;
  p.outputs = a.width;
  if (layer == a.layer_count) {
    p.weights = head;
    p.outputs = head->outputs;
    p.is_spread = true;
    p.norm = a.norm;
    p.in = in;
    return p;
  }
  const Layer<T>& l = layers[layer];
  switch (number % kLayerProducts) {
    case 0:
      p.weights = l.qkv;
      p.outputs = (a.heads + 2 * a.key_heads) * a.head_width;
      p.norm = l.input_norm;
      p.in = in;
      p.out = words.qkv;
      break;
    case 1:
      p.weights = &l.o;
      p.depth = a.heads * a.head_width;
      p.adds_residual = true;
      p.in = words.attention;
      p.out = words.sum;
      p.parts = words.parts;
      p.stats = words.stats;
      break;
    case 2:
      p.weights = l.gate_up;
      p.outputs = a.hidden;
      p.swiglu = true;
      p.norm = l.post_norm;
      p.in = words.sum;
      p.out = words.hidden;
      break;
    default:
      p.weights = &l.down;
      p.depth = a.hidden;
      p.adds_residual = true;
      p.in = words.hidden;
      p.out = words.out;
  }
  return p;
}

/// This block's outputs of a product, in whole units, and the weight rows for them. With swiglu, 8 rows of gate
/// alternate with the same 8 rows of up.
template <class T>
struct OutputSplit {
  int first;
  int outputs;
  int stride;  // from a group of 8 rows to the next

  __device__ OutputSplit(const Product<T>& p, int unit) {
    const auto blocks = static_cast<int>(gridDim.x);
    const auto block = static_cast<int>(blockIdx.x);
    if (p.is_spread) {
      first = block * kStageRows;
      stride = blocks * kStageRows;
      const int rounds = p.outputs / stride;
      outputs = rounds * kStageRows + min(max(p.outputs - rounds * stride - first, 0), kStageRows);
    } else {
      const auto units = static_cast<unsigned>(p.outputs / unit);
      first = static_cast<int>(units * blockIdx.x / gridDim.x) * unit;
      outputs = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * unit - first;
      stride = kStageRows;
    }
  }

  __device__ int groups(const Product<T>& p) const {
    return (outputs + kStageRows - 1) / kStageRows * (p.swiglu ? 2 : 1);
  }

  struct Row {
    const Weight<T>* weight;  // null: none
    int row;                  // of the weight
    int output;               // of the product
  };
  __device__ Row row(const Product<T>& product, int index) const {
    const int local = product.swiglu ? index / (2 * kStageRows) * kStageRows + index % kStageRows : index;
    if (local >= outputs) {
      return {nullptr, 0, 0};
    }
    const int output = first + local / kStageRows * stride + local % kStageRows;
    int part = product.swiglu ? index / kStageRows % 2 : 0;
    int row = output;
    if (!product.swiglu) {
      while (row >= product.weights[part].outputs) {
        row -= product.weights[part++].outputs;
      }
    }
    return {product.weights + part, row, output};
  }
};

/// A block's part of a product. A copying warp prepares the jobs, since the consumers and finishers have no time for
/// it.
template <class T>
struct Job {
  Product<T> product;
  OutputSplit<T> split;
  int groups;
  int segments;

  __device__ Job(const Arguments<T>& a, const Layer<T>* layers, const Weight<T>* head, int number, int unit)
      : product(decoder::product(a, layers, head, number)),
        split(product, unit),
        groups(split.groups(product)),
        segments((product.depth + kSegment - 1) / kSegment) {}
};

/// The stages in shared memory. A wait tells the phases of a barrier apart only by their parity, so a warp that is late
/// by a whole phase would wait for the next one, perhaps forever. A copying warp therefore waits only for stages that
/// it fills itself, since these cannot advance without it; if two warps copy alternately, each has stages of its own.
struct Ring : cuda::VariableRing {
  char* memory;
  std::uint64_t* full;
  std::uint64_t* empty;
  int bytes;  // of a stage

  __device__ char* here() const { return memory + stage * bytes; }
};

}  // namespace mica::kernels::decoder
