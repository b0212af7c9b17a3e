// The C interface that check_dlpack.py loads: mica's tensors as opaque pointers. Functions that fail return null or −1;
// mica_error() then says why.

#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include <mica/core/creation.h>
#include <mica/core/detail/dlpack_abi.h>
#include <mica/core/dlpack.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace {

thread_local std::string error;

template <class F>
auto guarded(F&& f, decltype(f()) failure) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    error = e.what();
    return failure;
  }
}

Tensor& tensor(void* x) { return *static_cast<Tensor*>(x); }

}  // namespace

extern "C" {

const char* mica_error() { return error.c_str(); }
int mica_cuda_devices() { return cuda_device_count(); }

/// A tensor of the given shape with elements 0, 1, 2, …. `dtype` is the number of a mica::DType; `device` is the number
/// of a GPU, or −1 for the CPU.
void* mica_count(const std::int64_t* shape, int axes, int dtype, int device) {
  return guarded(
      [&]() -> void* {
        const Shape sizes(std::span(shape, static_cast<std::size_t>(axes)));
        const Device place = device < 0 ? Device::cpu() : Device::cuda(device);
        const Tensor values = arange(static_cast<double>(numel_of(sizes))).to(place, static_cast<DType>(dtype));
        return new Tensor(reshape(values, sizes));
      },
      nullptr);
}
void* mica_transpose(void* x, int a, int b) {
  return guarded([&]() -> void* { return new Tensor(transpose(tensor(x), a, b)); }, nullptr);
}
/// A view of elements 1, 3, 5, … along the last axis.
void* mica_odd(void* x) {
  return guarded([&]() -> void* { return new Tensor(slice(tensor(x), tensor(x).dim() - 1, 1, tensor(x).size(-1), 2)); },
                 nullptr);
}
void* mica_twice(void* x) {
  return guarded([&]() -> void* { return new Tensor(tensor(x) + tensor(x)); }, nullptr);
}
int mica_fill(void* x, double value) {
  return guarded([&] { return fill_(tensor(x), value), 0; }, -1);
}
double mica_sum(void* x) {
  double sum = 0;
  for (const double value : to_vector<double>(tensor(x))) {
    sum += value;
  }
  return sum;
}
std::uintptr_t mica_address(void* x) { return reinterpret_cast<std::uintptr_t>(tensor(x).raw_data()); }
int mica_device(void* x) { return tensor(x).device().is_cuda() ? tensor(x).device().index : -1; }
void mica_free(void* x) { delete static_cast<Tensor*>(x); }

void* mica_to_dlpack(void* x, int versioned) {
  return guarded(
      [&]() -> void* {
        if (versioned != 0) {
          return to_dlpack(tensor(x));
        }
        return to_dlpack_unversioned(tensor(x));
      },
      nullptr);
}
void* mica_from_dlpack(void* managed, int versioned, int read_only) {
  return guarded(
      [&]() -> void* {
        return new Tensor(
            versioned != 0 ? from_dlpack(static_cast<DLManagedTensorVersioned*>(managed), {.read_only = read_only != 0})
                           : from_dlpack(static_cast<DLManagedTensor*>(managed)));
      },
      nullptr);
}
int mica_dlpack_wait(void* x, std::intptr_t stream) {
  return guarded([&] { return dlpack_wait(tensor(x).device(), stream), 0; }, -1);
}
/// Frees the tensor of a capsule that no consumer took over, as its destructor must.
void mica_release(void* managed, int versioned) {
  if (versioned != 0) {
    auto* const self = static_cast<DLManagedTensorVersioned*>(managed);
    self->deleter(self);
  } else {
    auto* const self = static_cast<DLManagedTensor*>(managed);
    self->deleter(self);
  }
}
}
