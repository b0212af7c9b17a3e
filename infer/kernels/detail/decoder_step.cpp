#include <algorithm>
#include <array>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/infer/kernels/detail/decoder_step.h>
#include <mica/infer/kernels/detail/kernels.h>

namespace mica::infer {

namespace {

std::array<const DecodeWeight*, 7> weights_of(const DecoderLayer& l) {
  return {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down};
}

bool is_vector(const Tensor& x, std::int64_t size, const Tensor& like) {
  return x.defined() && x.shape() == Shape{size} && x.dtype() == like.dtype() && x.device() == like.device() &&
         kernels::is_aligned(x);
}

bool has_shape(const DecodeWeight& w, std::int64_t in, std::int64_t out) { return w.in() == in && w.out() == out; }

bool is_defined(const DecodeWeight& w) { return w.matrix.defined() || w.quantized.packed.defined(); }

// Whether the kernel supports weight w in a step whose first weight is `first`.
bool takes(const DecodeWeight& w, const DecodeWeight& first, const Tensor& like) {
  if (!is_defined(w)) {
    return false;
  }
  if (w.quantized.packed.defined()) {
    check_weight("decoder_step", w.quantized);
  }
  const Tensor& data = w.matrix.defined() ? w.matrix : w.quantized.packed;
  return data.device() == like.device() && (!w.matrix.defined() || w.matrix.dtype() == like.dtype()) &&
         (!w.bias.defined() || is_vector(w.bias, w.out(), like)) && kernels::kernel_takes(w, first, like.dtype());
}

bool takes(const DecoderStep& s, const DecoderLayer& l) {
  const Tensor& keys = l.keys;
  const DecodeWeight& first = s.layers[0].q;
  const auto weights = weights_of(l);
  if (keys.shape() != s.layers[0].keys.shape() || l.values.shape() != keys.shape() || !keys.is_contiguous() ||
      !l.values.is_contiguous() || keys.dtype() != s.norm.dtype() || l.values.dtype() != s.norm.dtype() ||
      !std::all_of(weights.begin(), weights.end(), [&](const DecodeWeight* w) { return takes(*w, first, s.norm); })) {
    return false;
  }
  const std::int64_t width = s.norm.numel();
  const std::int64_t head_width = keys.size(3);
  const std::int64_t queries = s.heads * head_width;
  const std::int64_t key_width = keys.size(1) * head_width;
  const std::int64_t hidden = s.layers[0].gate.out();
  const bool norms =
      l.q_norm.defined() == l.k_norm.defined() &&
      (!l.q_norm.defined() || (is_vector(l.q_norm, head_width, keys) && is_vector(l.k_norm, head_width, keys)));
  return norms && is_vector(l.input_norm, width, s.norm) && is_vector(l.post_norm, width, s.norm) &&
         has_shape(l.q, width, queries) && has_shape(l.k, width, key_width) && has_shape(l.v, width, key_width) &&
         has_shape(l.o, queries, width) && has_shape(l.gate, width, hidden) && has_shape(l.up, width, hidden) &&
         has_shape(l.down, hidden, width);
}

bool is_index(const Tensor& x, Device device) {
  return x.defined() && x.dtype() == int64 && x.numel() == 1 && x.device() == device;
}

bool takes_embedding(const Tensor& rows, const Tensor& norm) {
  return rows.dim() == 2 && rows.size(1) == norm.numel() && rows.dtype() == norm.dtype() &&
         rows.device() == norm.device() && kernels::is_aligned(rows);
}

void check_input(const DecoderStep& s, const char* name) {
  const Tensor& norm = s.norm;
  if (s.x.defined()) {
    check(s.x.shape() == Shape{1, norm.numel()} && s.x.dtype() == norm.dtype() && s.x.device() == norm.device() &&
              kernels::is_aligned(s.x),
          "{}: expected contiguous x of {} and shape [1, {}] on {}", name, norm.dtype(), norm.numel(), norm.device());
    check(!s.token.defined(), "{}: expected x, or a token and the embedding, not both", name);
  } else {
    check(s.embedding.defined() && is_index(s.token, norm.device()),
          "{}: expected x, or the embedding and a token as one int64 on {}", name, norm.device());
  }
}

bool fits(const DecoderStep& s) {
  return on_device(s.norm.device(), [&](auto device) {
    if constexpr (std::is_same_v<decltype(device), Cuda>) {
      return kernels::fits_decoder_step(device, s);
    } else {
      return false;
    }
  });
}

}  // namespace

bool has_decoder_step(const DecoderStep& s) {
  if (s.layers.empty() || !s.norm.defined() || s.norm.dim() != 1 || !s.norm.device().is_cuda() ||
      !(s.norm.dtype() == float16 || s.norm.dtype() == bfloat16) || !kernels::is_aligned(s.norm)) {
    return false;
  }
  const Tensor& keys = s.layers[0].keys;
  if (!keys.defined() || keys.dim() != 4 || keys.size(0) != 1 || (keys.size(3) != 64 && keys.size(3) != 128) ||
      keys.size(1) < 1 || s.heads < 1 || s.heads % keys.size(1) != 0 || !is_defined(s.layers[0].q) ||
      !is_defined(s.layers[0].gate) ||
      !(s.frequencies.empty() || static_cast<std::int64_t>(s.frequencies.size()) == keys.size(3) / 2)) {
    return false;
  }
  return (!s.embedding.defined() || takes_embedding(s.embedding, s.norm)) && takes(s.head, s.layers[0].q, s.norm) &&
         s.head.in() == s.norm.numel() &&
         std::all_of(s.layers.begin(), s.layers.end(), [&](const DecoderLayer& l) { return takes(s, l); }) && fits(s);
}

std::int64_t decoder_step_scratch(const DecoderStep& s) {
  const Tensor& keys = s.layers.at(0).keys;
  return kernels::decoder_step_words(s.norm.numel(), s.layers[0].gate.out(), s.heads, keys.size(1), keys.size(3)) *
             static_cast<std::int64_t>(s.layers.size()) +
         kernels::kDecoderStepState;
}

Tensor decoder_step(const DecoderStep& s) {
  constexpr const char* kName = "decoder_step";
  check(!autograd::grad_enabled(), "{}: works without gradients only: use autograd::NoGrad", kName);
  const Tensor& norm = s.norm;
  check_input(s, kName);
  check(is_index(s.length, norm.device()), "{}: expected the length as one int64 on {}", kName, norm.device());
  check(!s.next_token.defined() || is_index(s.next_token, norm.device()),
        "{}: expected the next token as one int64 on {}", kName, norm.device());
  check(s.tokens_on_host == nullptr || s.next_token.defined(), "{}: a token on the host is for a next token", kName);
  const std::int64_t words = decoder_step_scratch(s);
  check(s.scratch.defined() && s.scratch.dtype() == int64 && s.scratch.is_contiguous() && s.scratch.numel() >= words &&
            s.scratch.device() == norm.device(),
        "{}: expected at least {} int64 of scratch on {}", kName, words, norm.device());
  const Tensor logits = empty({1, s.head.out()}, norm.dtype(), norm.device());
  on_device(norm.device(), [&](auto device) {
    if constexpr (std::is_same_v<decltype(device), Cuda>) {
      kernels::decoder_step(device, {.problem = s, .logits = logits});
    }
  });
  return logits;
}

}  // namespace mica::infer
