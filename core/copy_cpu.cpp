#include <cstring>

#include <mica/core/copy_kernels.h>
#include <mica/core/elementwise_cpu.h>

namespace mica::kernels {

void copy(Cpu device, const Tensor& dst, const Tensor& src) {
  if (dst.dtype() == src.dtype() && dst.is_contiguous() && src.is_contiguous()) {
    if (dst.numel() > 0) {
      std::memcpy(dst.raw_data(), src.raw_data(), dst.bytes());
    }
    return;
  }
  on_dtype(AllTypes{}, dst.dtype(), "copy", [&]<class To>() {
    on_dtype(AllTypes{}, src.dtype(), "copy", [&]<class From>() {
      elementwise<To, From>(
          device, [](auto x) { return static_cast<To>(x); }, dst, src);
    });
  });
}

void fill(Cpu device, const Tensor& x, double value) {
  on_dtype(AllTypes{}, x.dtype(), "fill", [&]<class T>() {
    const T element = static_cast<T>(static_cast<Accumulate<T>>(value));
    elementwise<T>(
        device, [element] { return element; }, x);
  });
}

void add_into(Cpu device, const Tensor& dst, const Tensor& src) {
  on_dtype(NumericTypes{}, dst.dtype(), "add_into", [&]<class T>() {
    elementwise<T, T, T>(
        device, [](auto a, auto b) { return a + b; }, dst, dst, src);
  });
}

}  // namespace mica::kernels
