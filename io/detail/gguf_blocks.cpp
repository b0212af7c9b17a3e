#include <algorithm>
#include <cmath>
#include <cstring>

#include <mica/core/half.h>
#include <mica/io/detail/gguf_blocks.h>

namespace mica::io::detail {

namespace {

constexpr std::size_t kElements = kBlockElements;

float scale_of(const std::byte* block) {
  Float16 scale;
  std::memcpy(&scale, block, sizeof(scale));
  return scale;
}

// Returns false if the scale does not fit in float16.
bool put_scale(float scale, std::byte* block) {
  const Float16 rounded(scale);
  std::memcpy(block, &rounded, sizeof(rounded));
  return std::isfinite(static_cast<float>(rounded));
}

// The element of largest magnitude (the first of several), or NaN if there is a NaN.
float largest(const float* x) {
  float result = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    if (std::isnan(x[i])) {
      return x[i];
    }
    result = std::abs(x[i]) > std::abs(result) ? x[i] : result;
  }
  return result;
}

}  // namespace

bool quantize_q8(std::span<const float> x, std::byte* blocks) {
  for (; !x.empty(); x = x.subspan(kElements), blocks += kQ8Bytes) {
    const float scale = std::abs(largest(x.data())) / 127;
    if (!put_scale(scale, blocks)) {
      return false;
    }
    // As in ggml, elements are divided by the scale before it is rounded to float16.
    const float inverse = scale == 0 ? 0 : 1 / scale;
    for (std::size_t i = 0; i < kElements; ++i) {
      // std::round rounds ties away from zero, and the inverse of a subnormal scale is infinite, both as in ggml.
      const float q = std::round(x[i] * inverse);
      blocks[2 + i] =
          static_cast<std::byte>(static_cast<std::int8_t>(std::isnan(q) ? 0 : std::clamp(q, -127.F, 127.F)));
    }
  }
  return true;
}

bool quantize_q4(std::span<const float> x, std::byte* blocks) {
  for (; !x.empty(); x = x.subspan(kElements), blocks += kQ4Bytes) {
    // The largest element becomes q = 0, which stands for −8: the negative side has one more step.
    const float scale = largest(x.data()) / -8;
    if (!put_scale(scale, blocks)) {
      return false;
    }
    const float inverse = scale == 0 ? 0 : 1 / scale;
    const auto quantized = [&](float value) {
      const float q = value * inverse + 8.5F;
      return static_cast<unsigned>(std::isnan(q) ? 8 : std::clamp(q, 0.F, 15.F));
    };
    for (std::size_t i = 0; i < kElements / 2; ++i) {
      blocks[2 + i] = static_cast<std::byte>(quantized(x[i]) | quantized(x[i + kElements / 2]) << 4);
    }
  }
  return true;
}

void dequantize_q8(const std::byte* blocks, std::span<float> x) {
  for (; !x.empty(); x = x.subspan(kElements), blocks += kQ8Bytes) {
    const float scale = scale_of(blocks);
    for (std::size_t i = 0; i < kElements; ++i) {
      x[i] = scale * static_cast<float>(static_cast<std::int8_t>(blocks[2 + i]));
    }
  }
}

void dequantize_q4(const std::byte* blocks, std::span<float> x) {
  for (; !x.empty(); x = x.subspan(kElements), blocks += kQ4Bytes) {
    const float scale = scale_of(blocks);
    for (std::size_t i = 0; i < kElements / 2; ++i) {
      const auto both = static_cast<int>(blocks[2 + i]);
      x[i] = scale * static_cast<float>((both & 15) - 8);
      x[i + kElements / 2] = scale * static_cast<float>((both >> 4) - 8);
    }
  }
}

}  // namespace mica::io::detail
