#pragma once

#include <cstdint>
#include <memory>

#include <mica/core/tensor.h>
#include <mica/io/file.h>

namespace mica::io::detail {

/// A CPU tensor whose elements begin at byte `begin` of a file that is mapped writable. Copies them only if they are
/// not aligned for the dtype. The caller has checked that they lie within the file. Each tensor has a storage of its
/// own, which keeps the file mapped and counts its own writes.
Tensor mapped_tensor(const std::shared_ptr<MappedFile>& file, std::uint64_t begin, const Shape& shape, DType dtype);

}  // namespace mica::io::detail
