#pragma once

// The types of tensors and metadata in GGUF files: see gguf.h.

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace mica::io {

/// How a tensor's elements are stored; the numbers are ggml's. The types q…, iq… and mxfp4 are quantized: see
/// io/detail/gguf_blocks.h. Their rows are stored in blocks of 256 elements (q2_k to q8_k, iq4_xs) or 32.
enum class GgufType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  q8_k = 15,
  iq4_nl = 20,
  iq4_xs = 23,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  bf16 = 30,
  mxfp4 = 39,
};

/// A value of the metadata: a number, bool or text, or a list of one of these.
using GgufValue =
    std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t, float, bool,
                 std::string, std::uint64_t, std::int64_t, double, std::vector<std::uint8_t>, std::vector<std::int8_t>,
                 std::vector<std::uint16_t>, std::vector<std::int16_t>, std::vector<std::uint32_t>,
                 std::vector<std::int32_t>, std::vector<float>, std::vector<bool>, std::vector<std::string>,
                 std::vector<std::uint64_t>, std::vector<std::int64_t>, std::vector<double>>;
using GgufMetadata = std::map<std::string, GgufValue>;

}  // namespace mica::io
