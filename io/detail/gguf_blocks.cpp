#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/core/parallel.h>
#include <mica/io/detail/gguf_blocks.h>

// ggml/src/ggml-common.h of https://github.com/ggml-org/llama.cpp declares the blocks.

namespace mica::io::detail {

namespace {

constexpr std::size_t kLong = 256;   // elements of the types with two levels of scales
constexpr std::size_t kShort = 32;   // and of the others
constexpr std::size_t kGroups = 16;  // the most groups in a block

/// A block, taken apart: see gguf_blocks.h. q is in [0, 2^bits).
struct Parts {
  float d = 0, low = 0;
  std::array<std::int8_t, kGroups> scale{}, least{};
  std::array<std::uint8_t, kLong> q{};
};

using Bytes = const std::byte*;

unsigned byte_at(Bytes from, std::size_t i) { return static_cast<unsigned>(from[i]); }

template <class T>
T number_at(Bytes from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
float half_at(Bytes from) { return static_cast<float>(number_at<Float16>(from)); }

// Integers of 4 bits: in each run, the elements of the low halves of its bytes precede those of the high halves.
void read_nibbles(Bytes from, std::size_t count, std::size_t run, std::uint8_t* q) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t in_run = i % (2 * run);
    q[i] = static_cast<std::uint8_t>(byte_at(from, i / (2 * run) * run + in_run % run) >> (in_run < run ? 0 : 4) & 15);
  }
}
// Integers of 2 bits: four runs of 32 elements share 32 bytes.
void read_pairs(Bytes from, std::uint8_t* q) {
  for (std::size_t i = 0; i < kLong; ++i) {
    q[i] = static_cast<std::uint8_t>(byte_at(from, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3);
  }
}
// One more bit for each element, the one of value `bit`: byte i has those of elements i, i + 32, ….
void add_bits(Bytes from, unsigned bit, std::uint8_t* q) {
  for (std::size_t i = 0; i < kLong; ++i) {
    q[i] = static_cast<std::uint8_t>(q[i] | (byte_at(from, i % 32) >> (i / 32) & 1) * bit);
  }
}
void add_bits_of_word(Bytes from, std::uint8_t* q) {
  const auto word = number_at<std::uint32_t>(from);
  for (std::size_t i = 0; i < kShort; ++i) {
    q[i] = static_cast<std::uint8_t>(q[i] | (word >> i & 1) << 4);
  }
}
void read_signed(Bytes from, std::size_t count, std::uint8_t* q) {
  for (std::size_t i = 0; i < count; ++i) {
    q[i] = static_cast<std::uint8_t>(byte_at(from, i) ^ 128);
  }
}
// Integers of 4 bits that select one of 16 signed values.
void read_values(Bytes from, std::size_t count, const std::array<std::int8_t, 16>& values, std::uint8_t* q) {
  read_nibbles(from, count, 16, q);
  for (std::size_t i = 0; i < count; ++i) {
    q[i] = static_cast<std::uint8_t>(values[q[i]] + 128);
  }
}
constexpr std::array<std::int8_t, 16> kUneven{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr std::array<std::int8_t, 16> kFloats{0, 1,  2,  3,  4,  6,  8,  12,
                                              0, -1, -2, -3, -4, -6, -8, -12};  // e2m1, doubled

// q4_k, q5_k: 8 scales and 8 minima of 6 bits in 12 bytes.
void read_six_bits(Bytes from, Parts& p) {
  for (std::size_t g = 0; g < 4; ++g) {
    const unsigned a = byte_at(from, g), b = byte_at(from, g + 4), c = byte_at(from, g + 8);
    p.scale[g] = static_cast<std::int8_t>(a & 63);
    p.least[g] = static_cast<std::int8_t>(b & 63);
    p.scale[g + 4] = static_cast<std::int8_t>((c & 15) | (a >> 6) << 4);
    p.least[g + 4] = static_cast<std::int8_t>((c >> 4) | (b >> 6) << 4);
  }
}
void write_six_bits(const Parts& p, std::byte* to) {
  const auto bits = [](std::int8_t value) { return static_cast<unsigned>(static_cast<std::uint8_t>(value)); };
  for (std::size_t g = 0; g < 4; ++g) {
    const unsigned a = bits(p.scale[g]), b = bits(p.least[g]), c = bits(p.scale[g + 4]), d = bits(p.least[g + 4]);
    to[g] = static_cast<std::byte>(a | (c >> 4) << 6);
    to[g + 4] = static_cast<std::byte>(b | (d >> 4) << 6);
    to[g + 8] = static_cast<std::byte>((c & 15) | (d & 15) << 4);
  }
}

void read_q4_0(Bytes from, Parts& p) {
  p.d = half_at(from);
  read_nibbles(from + 2, kShort, 16, p.q.data());
}
void read_q4_1(Bytes from, Parts& p) {
  p.d = half_at(from);
  p.low = half_at(from + 2);
  read_nibbles(from + 4, kShort, 16, p.q.data());
}
void read_q5_0(Bytes from, Parts& p) {
  p.d = half_at(from);
  read_nibbles(from + 6, kShort, 16, p.q.data());
  add_bits_of_word(from + 2, p.q.data());
}
void read_q5_1(Bytes from, Parts& p) {
  p.d = half_at(from);
  p.low = half_at(from + 2);
  read_nibbles(from + 8, kShort, 16, p.q.data());
  add_bits_of_word(from + 4, p.q.data());
}
void read_q8_0(Bytes from, Parts& p) {
  p.d = half_at(from);
  read_signed(from + 2, kShort, p.q.data());
}
void read_q2_k(Bytes from, Parts& p) {
  for (std::size_t g = 0; g < 16; ++g) {
    p.scale[g] = static_cast<std::int8_t>(byte_at(from, g) & 15);
    p.least[g] = static_cast<std::int8_t>(byte_at(from, g) >> 4);
  }
  read_pairs(from + 16, p.q.data());
  p.d = half_at(from + 80);
  p.low = -half_at(from + 82);
}
void read_q3_k(Bytes from, Parts& p) {
  read_pairs(from + 32, p.q.data());
  add_bits(from, 4, p.q.data());
  const Bytes scales = from + 96;
  for (std::size_t g = 0; g < 16; ++g) {
    const unsigned low = byte_at(scales, g % 8) >> (g < 8 ? 0 : 4) & 15;
    const unsigned high = byte_at(scales, 8 + g % 4) >> (g / 4 * 2) & 3;
    p.scale[g] = static_cast<std::int8_t>(static_cast<int>(low | high << 4) - 32);
  }
  p.d = half_at(from + 108);
}
void read_q4_k(Bytes from, Parts& p) {
  p.d = half_at(from);
  p.low = -half_at(from + 2);
  read_six_bits(from + 4, p);
  read_nibbles(from + 16, kLong, 32, p.q.data());
}
void read_q5_k(Bytes from, Parts& p) {
  p.d = half_at(from);
  p.low = -half_at(from + 2);
  read_six_bits(from + 4, p);
  read_nibbles(from + 48, kLong, 32, p.q.data());
  add_bits(from + 16, 16, p.q.data());
}
void read_q6_k(Bytes from, Parts& p) {
  std::array<std::uint8_t, kLong> high;
  read_nibbles(from, kLong, 64, p.q.data());
  read_pairs(from + 128, high.data());
  for (std::size_t i = 0; i < kLong; ++i) {
    p.q[i] = static_cast<std::uint8_t>(p.q[i] | high[i] << 4);
  }
  std::memcpy(p.scale.data(), from + 192, 16);
  p.d = half_at(from + 208);
}
void read_q8_k(Bytes from, Parts& p) {
  p.d = number_at<float>(from);
  read_signed(from + 4, kLong, p.q.data());
}
void read_iq4_nl(Bytes from, Parts& p) {
  p.d = half_at(from);
  read_values(from + 2, kShort, kUneven, p.q.data());
}
void read_iq4_xs(Bytes from, Parts& p) {
  p.d = half_at(from);
  const unsigned high = number_at<std::uint16_t>(from + 2);
  for (std::size_t g = 0; g < 8; ++g) {
    const unsigned low = byte_at(from, 4 + g / 2) >> (g % 2 * 4) & 15;
    p.scale[g] = static_cast<std::int8_t>(static_cast<int>(low | (high >> (2 * g) & 3) << 4) - 32);
  }
  read_values(from + 8, kLong, kUneven, p.q.data());
}
void read_mxfp4(Bytes from, Parts& p) {
  // 2^(e − 128): half of what the format's standard says, since the values are doubled.
  const unsigned e = byte_at(from, 0);
  p.d = std::bit_cast<float>(e < 2 ? 0x00200000U << e : (e - 1) << 23);
  read_values(from + 1, kShort, kFloats, p.q.data());
}

struct BlockType {
  GgufType type;
  std::uint64_t elements, bytes;
  std::size_t group;  // elements in a group
  int zero;
  int bits;           // of a QuantizedWeight that holds q
  bool has_scales;    // else all are 1
  bool has_least;     // else all are 0
  DType scale_dtype;  // of d, without a change of value
  void (*read)(Bytes from, Parts& parts);
};

constexpr std::array<BlockType, 14> kBlockTypes{{
    {GgufType::q4_0, 32, 18, 32, 8, 4, false, false, DType::float16, read_q4_0},
    {GgufType::q4_1, 32, 20, 32, 0, 4, false, true, DType::float16, read_q4_1},
    {GgufType::q5_0, 32, 22, 32, 16, 8, false, false, DType::float16, read_q5_0},
    {GgufType::q5_1, 32, 24, 32, 0, 8, false, true, DType::float16, read_q5_1},
    {GgufType::q8_0, 32, 34, 32, 128, 8, false, false, DType::float16, read_q8_0},
    {GgufType::q2_k, 256, 84, 16, 0, 2, true, true, DType::float16, read_q2_k},
    {GgufType::q3_k, 256, 110, 16, 4, 4, true, false, DType::float16, read_q3_k},
    {GgufType::q4_k, 256, 144, 32, 0, 4, true, true, DType::float16, read_q4_k},
    {GgufType::q5_k, 256, 176, 32, 0, 8, true, true, DType::float16, read_q5_k},
    {GgufType::q6_k, 256, 210, 16, 32, 8, true, false, DType::float16, read_q6_k},
    {GgufType::q8_k, 256, 292, 128, 128, 8, false, false, DType::float32, read_q8_k},
    {GgufType::iq4_nl, 32, 18, 32, 128, 8, false, false, DType::float16, read_iq4_nl},
    {GgufType::iq4_xs, 256, 136, 32, 128, 8, true, false, DType::float16, read_iq4_xs},
    // A bfloat16 has the range of these powers of 2, which float16 lacks.
    {GgufType::mxfp4, 32, 17, 32, 128, 8, false, false, DType::bfloat16, read_mxfp4},
}};

const BlockType& type_of(GgufType type) {
  const auto* const found =
      std::find_if(kBlockTypes.begin(), kBlockTypes.end(), [=](const BlockType& t) { return t.type == type; });
  check(found != kBlockTypes.end(), "gguf: the type {} has no blocks", static_cast<std::uint32_t>(type));
  return *found;
}

// Writing.

// Returns false if the value does not fit in float16.
bool put_half(float value, std::byte* to) {
  const Float16 rounded(value);
  std::memcpy(to, &rounded, sizeof(rounded));
  return std::isfinite(static_cast<float>(rounded));
}

// The element of largest magnitude (the first of several), or NaN if there is a NaN.
float largest(std::span<const float> x) {
  float result = 0;
  for (const float value : x) {
    if (std::isnan(value)) {
      return value;
    }
    result = std::abs(value) > std::abs(result) ? value : result;
  }
  return result;
}

bool write_q8_0(std::span<const float> x, std::byte* block) {
  const float scale = std::abs(largest(x)) / 127;
  if (!put_half(scale, block)) {
    return false;
  }
  // As in ggml, elements are divided by the scale before it is rounded to float16.
  const float inverse = scale == 0 ? 0 : 1 / scale;
  for (std::size_t i = 0; i < kShort; ++i) {
    // std::round rounds ties away from zero, and the inverse of a subnormal scale is infinite, both as in ggml.
    const float q = std::round(x[i] * inverse);
    block[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::isnan(q) ? 0 : std::clamp(q, -127.F, 127.F)));
  }
  return true;
}

bool write_q4_0(std::span<const float> x, std::byte* block) {
  // The largest element becomes q = 0, which stands for −8: the negative side has one more step.
  const float scale = largest(x) / -8;
  if (!put_half(scale, block)) {
    return false;
  }
  const float inverse = scale == 0 ? 0 : 1 / scale;
  const auto quantized = [&](float value) {
    const float q = value * inverse + 8.5F;
    return static_cast<unsigned>(std::isnan(q) ? 8 : std::clamp(q, 0.F, 15.F));
  };
  for (std::size_t i = 0; i < kShort / 2; ++i) {
    block[2 + i] = static_cast<std::byte>(quantized(x[i]) | quantized(x[i + kShort / 2]) << 4);
  }
  return true;
}

double rounded(double value, double least, double most) { return std::clamp(std::nearbyint(value), least, most); }

/// x ≈ scale · q + offset.
struct Line {
  double scale = 0, offset = 0;
};

double squared_error(std::span<const float> x, const Line& line, double least, double most) {
  double error = 0;
  for (const float value : x) {
    const double q = line.scale == 0 ? 0 : rounded((value - line.offset) / line.scale, least, most);
    const double difference = line.scale * q + line.offset - value;
    error += difference * difference;
  }
  return error;
}

/// The best of several lines for integers 0 … 15 with an offset ≤ 0: the range of the elements is divided by 14 to 16
/// steps, and each division is improved by a least squares fit to its own integers.
Line fit_line(std::span<const float> x) {
  constexpr double kMost = 15;
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  const double least = std::min(*low, 0.F), range = std::max(*high, 0.F) - least;
  Line best{.scale = range / kMost, .offset = least};
  if (range == 0) {
    return best;
  }
  double best_error = squared_error(x, best, 0, kMost);
  for (double steps = 14; steps <= 16; steps += 0.125) {
    const double scale = range / steps, n = static_cast<double>(x.size());
    double q1 = 0, q2 = 0, x1 = 0, xq = 0;
    for (const float value : x) {
      const double q = rounded((value - least) / scale, 0, kMost);
      q1 += q;
      q2 += q * q;
      x1 += value;
      xq += value * q;
    }
    const double determinant = n * q2 - q1 * q1;
    if (determinant <= 0) {
      continue;
    }
    Line line{.scale = (n * xq - q1 * x1) / determinant, .offset = (q2 * x1 - q1 * xq) / determinant};
    if (line.offset > 0) {
      line = {.scale = xq / q2, .offset = 0};
    }
    const double error = squared_error(x, line, 0, kMost);
    if (line.scale > 0 && error < best_error) {
      best = line;
      best_error = error;
    }
  }
  return best;
}

/// The same for integers −32 … 31 without an offset. The scale may be negative: the negative side has one more step.
double fit_scale(std::span<const float> x) {
  constexpr double kLeast = -32, kMost = 31;
  const double most = largest(x);
  if (most == 0) {
    return 0;
  }
  double best = 0, best_error = INFINITY;
  for (double steps = -33; steps <= -30; steps += 0.25) {
    double xq = 0, q2 = 0;
    for (const float value : x) {
      const double q = rounded(value * steps / most, kLeast, kMost);
      xq += value * q;
      q2 += q * q;
    }
    const double scale = q2 > 0 ? xq / q2 : 0, error = squared_error(x, {.scale = scale}, kLeast, kMost);
    if (error < best_error) {
      best = scale;
      best_error = error;
    }
  }
  return best;
}

bool all_finite(std::span<const float> x) {
  return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}

bool write_q4_k(std::span<const float> x, std::byte* block) {
  constexpr std::size_t kSize = 32;
  if (!all_finite(x)) {
    return false;
  }
  std::array<Line, 8> lines;
  double scale = 0, low = 0;
  for (std::size_t g = 0; g < lines.size(); ++g) {
    lines[g] = fit_line(x.subspan(g * kSize, kSize));
    scale = std::max(scale, lines[g].scale);
    low = std::max(low, -lines[g].offset);
  }
  if (!put_half(static_cast<float>(scale / 63), block) || !put_half(static_cast<float>(low / 63), block + 2)) {
    return false;
  }
  const double d = half_at(block), d_low = half_at(block + 2);
  Parts p;
  for (std::size_t g = 0; g < lines.size(); ++g) {
    p.scale[g] = static_cast<std::int8_t>(d == 0 ? 0 : rounded(lines[g].scale / d, 0, 63));
    p.least[g] = static_cast<std::int8_t>(d_low == 0 ? 0 : rounded(-lines[g].offset / d_low, 0, 63));
    const double own = d * p.scale[g], offset = -d_low * p.least[g];
    for (std::size_t i = g * kSize; i < (g + 1) * kSize; ++i) {
      p.q[i] = static_cast<std::uint8_t>(own == 0 ? 0 : rounded((x[i] - offset) / own, 0, 15));
    }
  }
  write_six_bits(p, block + 4);
  for (std::size_t i = 0; i < kLong / 2; ++i) {
    const std::size_t first = i / 32 * 64 + i % 32;
    block[16 + i] = static_cast<std::byte>(p.q[first] | p.q[first + 32] << 4);
  }
  return true;
}

bool write_q6_k(std::span<const float> x, std::byte* block) {
  constexpr std::size_t kSize = 16;
  if (!all_finite(x)) {
    return false;
  }
  std::array<double, kGroups> scales;
  double most = 0;
  for (std::size_t g = 0; g < kGroups; ++g) {
    scales[g] = fit_scale(x.subspan(g * kSize, kSize));
    most = std::abs(scales[g]) > std::abs(most) ? scales[g] : most;
  }
  if (!put_half(static_cast<float>(most / -128), block + 208)) {
    return false;
  }
  const double d = half_at(block + 208);
  Parts p;
  for (std::size_t g = 0; g < kGroups; ++g) {
    p.scale[g] = static_cast<std::int8_t>(d == 0 ? 0 : rounded(scales[g] / d, -128, 127));
    const double own = d * p.scale[g];
    for (std::size_t i = g * kSize; i < (g + 1) * kSize; ++i) {
      p.q[i] = static_cast<std::uint8_t>(32 + (own == 0 ? 0 : rounded(x[i] / own, -32, 31)));
    }
  }
  std::memset(block, 0, 192);
  for (std::size_t i = 0; i < kLong; ++i) {
    const std::size_t half = i / 128, in_half = i % 128;
    block[half * 64 + in_half % 64] |= static_cast<std::byte>((p.q[i] & 15) << (in_half / 64 * 4));
    block[128 + half * 32 + in_half % 32] |= static_cast<std::byte>((p.q[i] >> 4) << (in_half / 32 * 2));
  }
  std::memcpy(block + 192, p.scale.data(), kGroups);
  return true;
}

}  // namespace

GgufBlock gguf_block(GgufType type) {
  switch (type) {
    case GgufType::f32:
    case GgufType::i32: return {1, 4};
    case GgufType::f16:
    case GgufType::bf16: return {1, 2};
    case GgufType::i64:
    case GgufType::f64: return {1, 8};
    default: {
      const BlockType& t = type_of(type);
      return {t.elements, t.bytes};
    }
  }
}

bool gguf_quantize(GgufType type, std::span<const float> x, std::byte* blocks) {
  const BlockType& t = type_of(type);
  const auto write = [&] {
    switch (type) {
      case GgufType::q8_0: return write_q8_0;
      case GgufType::q4_0: return write_q4_0;
      case GgufType::q4_k: return write_q4_k;
      case GgufType::q6_k: return write_q6_k;
      default: fail("gguf: blocks of the type {} are not written", static_cast<std::uint32_t>(type));
    }
  }();
  for (; !x.empty(); x = x.subspan(t.elements), blocks += t.bytes) {
    if (!write(x.first(t.elements), blocks)) {
      return false;
    }
  }
  return true;
}

void gguf_dequantize(GgufType type, const std::byte* blocks, std::span<float> x) {
  const BlockType& t = type_of(type);
  Parts p;
  for (; !x.empty(); x = x.subspan(t.elements), blocks += t.bytes) {
    t.read(blocks, p);
    for (std::size_t i = 0; i < t.elements; ++i) {
      const std::size_t g = i / t.group;
      const float scale = t.has_scales ? p.d * static_cast<float>(p.scale[g]) : p.d;
      const float value = scale * static_cast<float>(static_cast<int>(p.q[i]) - t.zero);
      // The product above is exact if there is an addend, so it does not matter whether the compiler fuses the two.
      x[i] = !t.has_least ? value : value + (t.has_scales ? p.low * static_cast<float>(p.least[g]) : p.low);
    }
  }
}

QuantizedWeight gguf_packed(GgufType type, const std::byte* blocks, std::int64_t out, std::int64_t in) {
  constexpr int kExcess = 128;         // QuantizedWeight's first level of scales
  constexpr std::int64_t kStrip = 16;  // columns whose words share lines of the cache
  const BlockType& t = type_of(type);
  const auto elements = static_cast<std::int64_t>(t.elements), group = static_cast<std::int64_t>(t.group);
  const std::int64_t in_row = in / elements, per_word = 32 / t.bits, words = elements / per_word;
  const std::int64_t groups = elements / group;
  const DType level = t.has_scales ? uint8 : t.scale_dtype;
  QuantizedWeight q{.packed = empty({in / per_word, out}, int32),
                    .scale = empty({in / group, out}, level),
                    .zero = t.has_least ? empty({in / group, out}, level) : full({}, t.zero, float32),
                    .rows = in,
                    .bits = t.bits,
                    .group_size = group,
                    .mode = t.has_least ? QuantizationMode::fused_multiply_add : QuantizationMode::scale_and_shift};
  if (t.has_scales) {
    q.scale_factor = empty({in_row, out}, t.scale_dtype);
    q.zero_factor = t.has_least ? empty({in_row, out}, t.scale_dtype) : Tensor{};
  }
  on_dtype(Types<float, Float16, BFloat16>{}, t.scale_dtype, "gguf", [&]<class F>() {
    auto* const packed = reinterpret_cast<std::uint32_t*>(q.packed.data<std::int32_t>());
    // Writes the scales or zeros of block b of a row.
    const auto write = [&](const Tensor& first, const Tensor& second, float d, const auto& levels, std::int64_t b,
                           std::int64_t row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t at = (b * groups + g) * out + row;
        if (t.has_scales) {
          first.data<std::uint8_t>()[at] = static_cast<std::uint8_t>(levels[static_cast<std::size_t>(g)] + kExcess);
        } else {
          first.data<F>()[at] = F(d);
        }
      }
      if (t.has_scales) {
        second.data<F>()[b * out + row] = F(d);
      }
    };
    parallel_for((out + kStrip - 1) / kStrip, 1, [&](std::int64_t begin, std::int64_t end) {
      Parts p;
      for (std::int64_t b = 0; b < (end - begin) * in_row; ++b) {
        const std::int64_t block = b % in_row, first = (begin + b / in_row) * kStrip;
        for (std::int64_t row = first; row < std::min(first + kStrip, out); ++row) {
          t.read(blocks + static_cast<std::uint64_t>(row * in_row + block) * t.bytes, p);
          for (std::int64_t w = 0; w < words; ++w) {
            std::uint32_t word = 0;
            for (std::int64_t i = 0; i < per_word; ++i) {
              word |= std::uint32_t{p.q[static_cast<std::size_t>(w * per_word + i)]} << (i * t.bits);
            }
            packed[(block * words + w) * out + row] = word;
          }
          write(q.scale, q.scale_factor, p.d, p.scale, block, row);
          if (t.has_least) {
            write(q.zero, q.zero_factor, p.low, p.least, block, row);
          }
        }
      }
    });
  });
  return q;
}

}  // namespace mica::io::detail
