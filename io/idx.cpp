#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include <mica/core/check.h>
#include <mica/io/detail/zlib.h>
#include <mica/io/file.h>
#include <mica/io/idx.h>

namespace mica::io {

namespace {

// The most that deflate can compress.
constexpr std::uint64_t kMaxDeflate = 1032;

/// The bytes of a file, compressed or not, in order.
class IdxBytes {
 public:
  explicit IdxBytes(const std::filesystem::path& path) : name(path.string()), file_(path) {
    if (detail::is_gzip(file_.bytes())) {
      gunzip_.emplace(file_.bytes(), name);
    }
  }

  /// An upper bound of the number of bytes.
  std::uint64_t most() const { return file_.bytes().size() * (gunzip_ ? kMaxDeflate : 1); }

  std::size_t read(std::span<std::byte> to) {
    if (gunzip_) {
      return gunzip_->read(to);
    }
    const std::size_t count = std::min(to.size(), file_.bytes().size() - at_);
    std::copy_n(file_.bytes().data() + at_, count, to.data());
    at_ += count;
    return count;
  }
  void read_all(std::span<std::byte> to) { check(read(to) == to.size(), "{}: the IDX file is truncated", name); }

  const std::string name;

 private:
  MappedFile file_;
  std::size_t at_ = 0;
  std::optional<detail::Gunzip> gunzip_;
};

std::uint32_t big_endian(const std::byte* at) {
  return std::to_integer<std::uint32_t>(at[0]) << 24 | std::to_integer<std::uint32_t>(at[1]) << 16 |
         std::to_integer<std::uint32_t>(at[2]) << 8 | std::to_integer<std::uint32_t>(at[3]);
}

struct IdxType {
  int code;
  std::size_t bytes;
  DType dtype;
};

constexpr std::array kIdxTypes{IdxType{0x08, 1, uint8}, IdxType{0x09, 1, int32},   IdxType{0x0B, 2, int32},
                               IdxType{0x0C, 4, int32}, IdxType{0x0D, 4, float32}, IdxType{0x0E, 8, float64}};

// Numbers of the file, in its order of bytes, to elements of the tensor.
void convert(std::span<const std::byte> from, const IdxType& type, std::byte* to) {
  const std::size_t width = size_of(type.dtype);
  for (std::size_t i = 0; i < from.size() / type.bytes; ++i) {
    const std::byte* const at = from.data() + i * type.bytes;
    if (type.bytes < width) {
      const std::int32_t value =
          type.bytes == 1 ? static_cast<std::int8_t>(at[0])
                          : static_cast<std::int16_t>(std::to_integer<int>(at[0]) << 8 | std::to_integer<int>(at[1]));
      std::memcpy(to + i * width, &value, width);
    } else if constexpr (std::endian::native == std::endian::little) {
      std::reverse_copy(at, at + width, to + i * width);
    } else {
      std::copy_n(at, width, to + i * width);
    }
  }
}

}  // namespace

Tensor read_idx(const std::filesystem::path& path, std::uint64_t max_bytes) {
  IdxBytes file(path);
  std::array<std::byte, 4> magic;
  file.read_all(magic);
  const auto* const type = std::find_if(kIdxTypes.begin(), kIdxTypes.end(), [&](const IdxType& known) {
    return known.code == std::to_integer<int>(magic[2]);
  });
  const int axes = std::to_integer<int>(magic[3]);
  check(magic[0] == std::byte{0} && magic[1] == std::byte{0} && type != kIdxTypes.end() && axes <= kMaxRank,
        "{}: expected an IDX file, got one that begins with the bytes {:02x} {:02x} {:02x} {:02x}", file.name,
        std::to_integer<int>(magic[0]), std::to_integer<int>(magic[1]), std::to_integer<int>(magic[2]), axes);
  std::array<std::byte, 4 * kMaxRank> sizes;
  file.read_all(std::span(sizes).first(4 * static_cast<std::size_t>(axes)));
  Shape shape;
  std::uint64_t numel = 1;
  for (int i = 0; i < axes; ++i) {
    const std::uint32_t size = big_endian(&sizes[4 * static_cast<std::size_t>(i)]);
    shape.push_back(size);
    check(size == 0 || numel <= file.most() / type->bytes / size, "{}: the IDX file is truncated: its sizes are {}",
          file.name, shape);
    numel *= size;
  }
  check(numel <= max_bytes / size_of(type->dtype), "{}: expected an IDX file of at most {} bytes, got one of shape {}",
        file.name, max_bytes, shape);
  Tensor x = empty(shape, type->dtype);
  std::array<std::byte, std::size_t{1} << 16> part;
  for (std::uint64_t done = 0, bytes = numel * type->bytes; done < bytes;) {
    const std::span<std::byte> now = std::span(part).first(std::min<std::uint64_t>(part.size(), bytes - done));
    file.read_all(now);
    convert(now, *type, x.raw_data() + done / type->bytes * size_of(type->dtype));
    done += now.size();
  }
  check(file.read(std::span(part).first(1)) == 0, "{}: the IDX file is longer than its shape {}", file.name, shape);
  return x;
}

}  // namespace mica::io
