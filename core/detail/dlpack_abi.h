#pragma once

// DLPack's structs and constants (https://dmlc.github.io/dlpack/latest/c_api.html), as in version 1.0. Their layout is
// fixed by the standard. Declared here because distributions still ship headers from before version 1.
//
// Not a public header, so that programs may include <dlpack/dlpack.h>.

#include <cstdint>

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;  // elements of a vector; 1 for plain elements
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;      // in elements; null: row-major
  std::uint64_t byte_offset;  // of the first element, from data
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);  // may be null
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);  // may be null
  std::uint64_t flags;
  DLTensor dl_tensor;
};

namespace mica::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : std::uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

inline constexpr std::uint64_t kReadOnly = 1;  // a flag
inline constexpr DLPackVersion kVersion{1, 0};

}  // namespace mica::dlpack
