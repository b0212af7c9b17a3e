#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/detail/dlpack_abi.h>
#include <mica/core/detail/dlpack_stream.h>
#include <mica/core/dispatch.h>
#include <mica/core/dlpack.h>

namespace mica {

namespace {

constexpr const char* kExport = "to_dlpack";
constexpr const char* kImport = "from_dlpack";

DLDataType type_of(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::float64:
    case DType::float32:
    case DType::float16: return {dlpack::kFloat, bits, 1};
    case DType::bfloat16: return {dlpack::kBfloat, bits, 1};
    case DType::int64:
    case DType::int32: return {dlpack::kInt, bits, 1};
    case DType::uint8: return {dlpack::kUnsigned, bits, 1};
    case DType::boolean: return {dlpack::kBool, bits, 1};
  }
  fail("{}: unknown dtype {}", kExport, static_cast<int>(dtype));
}

DType dtype_from(const DLDataType& type) {
  for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
    const DLDataType own = type_of(dtype);
    if (own.code == type.code && own.bits == type.bits && own.lanes == type.lanes) {
      return dtype;
    }
  }
  fail("{}: mica has no dtype of code {}, {} bits and {} lanes", kImport, type.code, type.bits, type.lanes);
}

Device device_from(const DLDevice& device) {
  switch (device.device_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: return Device::cpu();
    case dlpack::kCuda: {
      const Device cuda = Device::cuda(device.device_id);
      on_device(cuda, [](auto) {});  // throws if there is no such device
      return cuda;
    }
    default:
      fail("{}: expected memory of the CPU (1), CUDA (2) or pinned by CUDA (3), got device type {}", kImport,
           device.device_type);
  }
}

/// An exported tensor: the struct, and what its pointers refer to. The struct's deleter deletes it.
template <class Managed>
struct Exported {
  explicit Exported(const Tensor& x) : tensor(x.detach()) {
    std::copy(x.shape().begin(), x.shape().end(), shape.begin());
    std::copy(x.strides().begin(), x.strides().end(), strides.begin());
    managed.manager_ctx = this;
    managed.deleter = [](Managed* self) { delete static_cast<Exported*>(self->manager_ctx); };
    managed.dl_tensor = {
        .data = x.raw_data(),
        .device = x.device().is_cuda() ? DLDevice{dlpack::kCuda, x.device().index} : DLDevice{dlpack::kCpu, 0},
        .ndim = x.dim(),
        .dtype = type_of(x.dtype()),
        .shape = shape.data(),
        .strides = strides.data(),
        .byte_offset = 0};
  }

  Managed managed{};
  Tensor tensor;
  std::array<std::int64_t, kMaxRank> shape{}, strides{};
};

template <class Managed>
Managed* exported(const Tensor& x) {
  check(x.defined(), "{}: expected a defined tensor, got an undefined one", kExport);
  check(!x.requires_grad(), "{}: the tensor requires a gradient; export x.detach()", kExport);
  return &(new Exported<Managed>(x))->managed;
}

/// The storage of an imported tensor, which owns the struct that it came in.
template <class Managed>
struct Imported {
  Imported(std::byte* data, std::size_t bytes, Device device) : storage(data, bytes, device) {}
  ~Imported() {
    if (managed != nullptr && managed->deleter != nullptr) {
      managed->deleter(managed);
    }
  }
  Imported(const Imported&) = delete;
  Imported& operator=(const Imported&) = delete;

  Storage storage;
  Managed* managed = nullptr;
};

/// Where the elements of a DLTensor are.
struct Layout {
  Shape shape;
  Strides strides;
  std::int64_t reach = 0;  // elements from the first to the end of the last
};

Layout layout_from(const DLTensor& from, DType dtype) {
  check(from.ndim >= 0 && from.ndim <= kMaxRank, "{}: expected 0 to {} axes, got {}", kImport, kMaxRank, from.ndim);
  check(from.ndim == 0 || from.shape != nullptr, "{}: expected a shape, got a null pointer", kImport);
  Layout layout;
  for (int axis = 0; axis < from.ndim; ++axis) {
    check(from.shape[axis] >= 0, "{}: expected sizes of at least 0, got {}", kImport, from.shape[axis]);
    layout.shape.push_back(from.shape[axis]);
  }
  const std::int64_t count = numel_of(layout.shape);
  layout.strides = contiguous_strides(layout.shape);
  if (count == 0) {
    return layout;
  }
  const auto most = INT64_MAX / static_cast<std::int64_t>(size_of(dtype));
  layout.reach = 1;
  for (int axis = 0; axis < from.ndim; ++axis) {
    const std::int64_t steps = layout.shape[axis] - 1;
    if (steps == 0) {
      continue;  // the stride is never used, and may be anything
    }
    if (from.strides != nullptr) {
      layout.strides[axis] = from.strides[axis];
    }
    const std::int64_t stride = layout.strides[axis];
    check(stride >= 0, "{}: expected strides of at least 0, got {}; copy the tensor first", kImport, stride);
    std::int64_t way = 0;
    check(!__builtin_mul_overflow(steps, stride, &way) && !__builtin_add_overflow(layout.reach, way, &layout.reach) &&
              layout.reach <= most,
          "{}: shape {} with its strides does not fit in memory", kImport, layout.shape);
  }
  return layout;
}

// Any other byte would be undefined behavior in a bool, and count as itself in a sum.
void check_booleans(const Tensor& x) {
  if (x.dtype() != boolean || x.numel() == 0) {
    return;
  }
  auto impl = std::make_shared<detail::TensorImpl>(*x.handle());
  impl->dtype = uint8;
  Shape distinct = x.shape();
  for (int axis = 0; axis < x.dim(); ++axis) {
    distinct[axis] = x.strides()[axis] == 0 ? 1 : distinct[axis];
  }
  const std::vector<std::uint8_t> bytes =
      to_vector<std::uint8_t>(as_strided(Tensor(std::move(impl)), distinct, x.strides(), 0));
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte > 1; });
  check(bad == bytes.end(), "{}: expected bools of 0 and 1, got {}; convert them by `!= 0` first", kImport,
        bad == bytes.end() ? 0 : *bad);
}

template <class Managed>
Tensor imported(Managed* managed) {
  const DLTensor& from = managed->dl_tensor;
  const DType dtype = dtype_from(from.dtype);
  const Device device = device_from(from.device);
  const Layout layout = layout_from(from, dtype);
  auto* const data = static_cast<std::byte*>(from.data) + (from.data == nullptr ? 0 : from.byte_offset);
  check(layout.reach == 0 || data != nullptr, "{}: expected a pointer to the elements, got null", kImport);
  check(reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) == 0,
        "{}: expected elements aligned to the {} bytes of {}", kImport, size_of(dtype), dtype);

  const auto bytes = static_cast<std::size_t>(layout.reach) * size_of(dtype);
  const auto owner = std::make_shared<Imported<Managed>>(data, bytes, device);
  auto impl = std::make_shared<detail::TensorImpl>();
  impl->storage = std::shared_ptr<Storage>(owner, &owner->storage);
  impl->dtype = dtype;
  const Tensor result = as_strided(Tensor(std::move(impl)), layout.shape, layout.strides, 0);
  check_booleans(result);
  owner->managed = managed;  // nothing can throw any more
  return result;
}

}  // namespace

DLManagedTensorVersioned* to_dlpack(const Tensor& x) {
  auto* const managed = exported<DLManagedTensorVersioned>(x);
  managed->version = dlpack::kVersion;
  return managed;
}

DLManagedTensor* to_dlpack_unversioned(const Tensor& x) { return exported<DLManagedTensor>(x); }

Tensor from_dlpack(DLManagedTensorVersioned* managed, FromDlpackOptions options) {
  check(managed != nullptr, "{}: expected a tensor, got a null pointer", kImport);
  check(managed->version.major == dlpack::kVersion.major, "{}: expected DLPack {}, got version {}.{}", kImport,
        dlpack::kVersion.major, managed->version.major, managed->version.minor);
  check(options.read_only || (managed->flags & dlpack::kReadOnly) == 0,
        "{}: the memory is read-only; copy it, or accept it by FromDlpackOptions::read_only and do not write", kImport);
  return imported(managed);
}

Tensor from_dlpack(DLManagedTensor* managed) {
  check(managed != nullptr, "{}: expected a tensor, got a null pointer", kImport);
  return imported(managed);
}

void dlpack_wait(Device device, std::intptr_t stream) {
  on_device(device, [&](auto d) { dlpack::make_wait(d, stream); });
}

}  // namespace mica
