#include <mica/core/detail/blocks_cpu.h>
#include <mica/core/detail/half_cpu.h>

namespace mica {

namespace {

template <class T, class V>
void gather(const std::byte* from_bytes, const Patch& patch, std::byte* to_bytes) {
  const T* from = reinterpret_cast<const T*>(from_bytes);
  V* to = reinterpret_cast<V*>(to_bytes);
  const std::int64_t stride = patch.stride;
  for (std::int64_t row = 0; row < patch.rows; ++row, from += patch.row_stride, to += patch.n) {
    if (stride != 1) {
      const T* x = from;
      for (std::int64_t i = 0; i < patch.n; ++i, x += stride) {
        to[i] = static_cast<V>(*x);
      }
    } else {
      widen(from, patch.n, to);
    }
  }
}

template <class T, class V>
void scatter(const std::byte* from_bytes, const Patch& patch, std::byte* to_bytes) {
  const V* from = reinterpret_cast<const V*>(from_bytes);
  T* to = reinterpret_cast<T*>(to_bytes);
  for (std::int64_t row = 0; row < patch.rows; ++row, from += patch.n, to += patch.row_stride) {
    if (patch.stride != 1) {
      for (std::int64_t i = 0; i < patch.n; ++i) {
        to[i * patch.stride] = static_cast<T>(from[i]);
      }
    } else {
      narrow(from, patch.n, to);
    }
  }
}

template <class T, class V = T>
constexpr ElementFormat kFormat{sizeof(T), sizeof(V), &gather<T, V>, &scatter<T, V>};

}  // namespace

const ElementFormat& element_format(DType dtype) {
  if (dtype == DType::float16) {
    return kFormat<Float16, float>;
  }
  if (dtype == DType::bfloat16) {
    return kFormat<BFloat16, float>;
  }
  switch (size_of(dtype)) {
    case 1: return kFormat<std::uint8_t>;
    case 4: return kFormat<std::uint32_t>;
    default: return kFormat<std::uint64_t>;
  }
}

}  // namespace mica
