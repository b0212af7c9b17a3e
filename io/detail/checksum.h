#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include <mica/core/tensor.h>

namespace mica::io::detail {

/// A checksum against accidental damage: four running products over the bytes, eight at a time.
class Checksum {
 public:
  void add(std::span<const std::byte> bytes) {
    std::size_t at = 0;
    for (; bytes.size() - at >= sizeof(lanes_); at += sizeof(lanes_)) {
      add_block(bytes.data() + at);
    }
    // The rest, padded with zeros, and the length, which distinguishes padding from zeros in the data.
    std::array<std::byte, sizeof(lanes_)> last{};
    std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end(), last.begin());
    add_block(last.data());
    add_word(lanes_[0], bytes.size());
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  /// Adds a contiguous tensor on the CPU.
  void add(std::string_view name, const Tensor& tensor) {
    add(fmt::format("{} {} {}", name, tensor.dtype(), tensor.shape()));
    add({tensor.raw_data(), tensor.bytes()});
  }

  std::string text() const {
    std::uint64_t all = 0;
    for (const std::uint64_t lane : lanes_) {
      add_word(all, lane);
    }
    return fmt::format("{:016x}", all);
  }

 private:
  static void add_word(std::uint64_t& lane, std::uint64_t word) {
    lane = (lane ^ word) * 0x9E3779B97F4A7C15;  // the factor is odd, so no bit of the word is lost
    lane ^= lane >> 32;
  }
  void add_block(const std::byte* block) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, block + i * sizeof(word), sizeof(word));
      add_word(lanes_[i], word);
    }
  }

  std::array<std::uint64_t, 4> lanes_{1, 2, 3, 4};
};

}  // namespace mica::io::detail
