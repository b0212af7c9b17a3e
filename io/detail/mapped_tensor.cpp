#include <algorithm>
#include <utility>

#include <mica/core/creation.h>
#include <mica/io/detail/mapped_tensor.h>

namespace mica::io::detail {

namespace {

struct MappedPart {
  MappedPart(std::shared_ptr<MappedFile> file, std::byte* data, std::size_t bytes)
      : file(std::move(file)), storage(data, bytes, Device::cpu()) {}

  std::shared_ptr<MappedFile> file;
  Storage storage;
};

}  // namespace

Tensor mapped_tensor(const std::shared_ptr<MappedFile>& file, std::uint64_t begin, const Shape& shape, DType dtype) {
  const std::byte* const data = file->bytes().data() + begin;
  if (reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) != 0) {
    const Tensor copy = empty(shape, dtype);
    std::copy_n(data, copy.bytes(), static_cast<std::byte*>(copy.raw_data()));
    return copy;
  }
  const Tensor tensor = from_blob(const_cast<std::byte*>(data), shape, dtype);
  const auto part = std::make_shared<MappedPart>(file, tensor.raw_data(), tensor.bytes());
  tensor.handle()->storage = std::shared_ptr<Storage>(part, &part->storage);
  return tensor;
}

}  // namespace mica::io::detail
