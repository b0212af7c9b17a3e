#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/ops/decode_attention/detail/decode_attention_kernels.h>

namespace mica {

void detail::check_cache(const char* op, const DecodeAttention& a) {
  check(!autograd::grad_enabled(), "{}: works without gradients only: use autograd::NoGrad", op);
  check(a.keys.defined() && a.keys.dim() == 4 && a.values.shape() == a.keys.shape() && a.keys.is_contiguous() &&
            a.values.is_contiguous() && a.values.dtype() == a.keys.dtype(),
        "{}: expected contiguous keys and values of one shape (B, Hkv, C, D)", op);
  const DType dtype = a.keys.dtype();
  const Device device = a.keys.device();
  check(has_decode_attention(dtype, a.width(), device), "{}: there is no kernel for keys {} of {} on {}", op,
        a.keys.shape(), dtype, device);
  check(a.key_heads() >= 1 && a.heads >= 1 && a.heads % a.key_heads() == 0,
        "{}: expected a multiple of {} heads, got {}", op, a.key_heads(), a.heads);
  for (const Tensor& norm : {a.q_norm, a.k_norm}) {
    check(!norm.defined() || (norm.shape() == Shape{a.width()} && norm.dtype() == dtype && norm.device() == device &&
                              norm.is_contiguous()),
          "{}: expected norms of shape [{}] and {}", op, a.width(), dtype);
  }
  check(a.frequencies.empty() || static_cast<std::int64_t>(a.frequencies.size()) == a.width() / 2,
        "{}: expected {} frequencies, got {}", op, a.width() / 2, a.frequencies.size());
  check(!a.padding.defined() || (a.padding.dtype() == int64 && a.padding.numel() == a.keys.size(0) &&
                                 a.padding.device() == device && a.padding.is_contiguous()),
        "{}: expected the padding as {} int64 on {}", op, a.keys.size(0), device);
}

bool has_decode_attention(DType dtype, std::int64_t width, Device device) {
  const bool is_16_bit = dtype == float16 || dtype == bfloat16;
  return device.is_cuda() && (dtype == float32 || is_16_bit) &&
         (width == 32 || width == 64 || width == 128 || (width == 256 && is_16_bit));
}

Tensor decode_attention(const DecodeAttention& a) {
  constexpr const char* kName = "decode_attention";
  detail::check_cache(kName, a);
  const DType dtype = a.keys.dtype();
  const Device device = a.keys.device();
  const auto check_rows = [&](const char* what, const Tensor& x, std::int64_t heads) {
    const Shape expected{a.keys.size(0), heads * a.width()};
    check(x.defined() && x.shape() == expected && x.dtype() == dtype && x.device() == device && x.strides()[1] == 1,
          "{}: expected {} of {} and shape {} on {}, with contiguous rows", kName, what, dtype, expected, device);
  };
  check_rows("q", a.q, a.heads);
  check_rows("k", a.k, a.key_heads());
  check_rows("v", a.v, a.key_heads());
  check(a.length.defined() && a.length.dtype() == int64 && a.length.numel() == 1 && a.length.device() == device,
        "{}: expected the length as one int64 on {}", kName, device);
  const Tensor y = empty(a.q.shape(), dtype, device);
  const kernels::DecodeAttentionArgs args{.problem = a, .y = y};
  on_device(device, [&](auto kind) {
    if constexpr (std::is_same_v<decltype(kind), Cuda>) {
      kernels::decode_attention(kind, args);
    }
  });
  return y;
}

}  // namespace mica
