#include <cstring>

#include <mica/core/copy_kernels.h>
#include <mica/core/elementwise_cpu.h>
#include <mica/core/parallel.h>
#include <mica/core/wrap.h>

namespace mica::kernels {

void copy(Cpu device, const Tensor& dst, const Tensor& src) {
  if (dst.dtype() == src.dtype() && dst.is_contiguous() && src.is_contiguous()) {
    constexpr std::int64_t kGrain = 1 << 18;  // bytes per thread, at least
    parallel_for(dst.bytes(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(dst.raw_data() + begin, src.raw_data() + begin, end - begin);
    });
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
        device, [](auto a, auto b) { return wrapping_add(a, b); }, dst, dst, src);
  });
}

}  // namespace mica::kernels
