#include <cstring>

#include <mica/core/detail/copy_kernels.h>
#include <mica/core/detail/sequence.h>
#include <mica/core/detail/wrap.h>
#include <mica/core/elementwise_cpu.h>
#include <mica/core/parallel.h>

namespace mica::kernels {

namespace {

template <class To>
struct Convert {
  template <class From>
  To operator()(From x) const {
    return static_cast<To>(x);
  }
};

template <class T>
struct Constant {
  T value;
  T operator()() const { return value; }
};

struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    return wrapping_add(a, b);
  }
};

}  // namespace

void copy(Cpu device, const Tensor& dst, const Tensor& src) {
  if (dst.dtype() == src.dtype() && dst.is_contiguous() && src.is_contiguous()) {
    constexpr std::int64_t kGrain = 1 << 18;  // bytes per thread, at least
    parallel_for(dst.bytes(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(dst.raw_data() + begin, src.raw_data() + begin, end - begin);
    });
    return;
  }
  on_dtype(AllTypes{}, dst.dtype(), "copy", [&]<class To>() {
    on_dtype(AllTypes{}, src.dtype(), "copy",
             [&]<class From>() { elementwise<To, From>(device, Convert<Accumulate<To>>{}, dst, src); });
  });
}

void fill(Cpu device, const Tensor& x, double value) {
  on_dtype(AllTypes{}, x.dtype(), "fill", [&]<class T>() {
    using V = Accumulate<T>;
    elementwise<T>(device, Constant<V>{static_cast<V>(value)}, x);
  });
}

void fill_sequence(Cpu, const Tensor& x, double start, double step) {
  on_dtype(Types<double, std::int64_t>{}, x.dtype(), "arange", [&]<class T>() {
    const Sequence<T> sequence{static_cast<T>(start), static_cast<T>(step)};
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      x.data<T>()[i] = sequence(i);
    }
  });
}

void add_into(Cpu device, const Tensor& dst, const Tensor& src) {
  on_dtype(NumericTypes{}, dst.dtype(), "add_into",
           [&]<class T>() { elementwise<T, T, T>(device, Sum{}, dst, dst, src); });
}

}  // namespace mica::kernels
