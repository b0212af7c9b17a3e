#pragma once

#include <cstdint>
#include <filesystem>

#include <mica/core/tensor.h>

namespace mica::io {

/// Reads a file in the IDX format, in which MNIST and Fashion-MNIST are published: numbers of one type, in row-major
/// order. uint8, int32, float32 and float64 become tensors of that dtype, int8 and int16 become int32. A file that was
/// compressed by gzip is decompressed, if mica was built with zlib.
///
/// Throws an Error that names the file if it is truncated, damaged or longer than its header says, or if it would take
/// more than `max_bytes` of memory; that is known before it is allocated.
Tensor read_idx(const std::filesystem::path& path, std::uint64_t max_bytes = std::uint64_t{1} << 34);

}  // namespace mica::io
