#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/io/detail/resample.h>

namespace mica::io::detail {

namespace {

/// How the pixels of an axis of the result are computed: pixel i is the sum over k of weight(k, i) · pixel first[i] +
/// k. All have the same number of terms; those beyond a pixel's own have weight 0.
struct Taps {
  std::int64_t size, terms = 1;
  std::vector<std::int32_t> first;
  std::vector<float> weights;  // (terms, size)

  const float* row(std::int64_t k) const { return weights.data() + k * size; }

  /// A triangle of half-width max(scale, 1) around the pixel's center in the source, normalized over the source pixels
  /// in [begin, begin + length) that it covers, of which there are `most`.
  Taps(double begin, double length, std::int64_t most, std::int64_t size) : size(size) {
    const double scale = length / static_cast<double>(size), support = std::max(scale, 1.0);
    const auto lowest = static_cast<std::int64_t>(std::max(std::floor(begin + 1e-6), 0.0));
    const auto highest = std::min(static_cast<std::int64_t>(std::ceil(begin + length - 1e-6)), most);
    struct Range {
      std::int64_t low, high;
    };
    std::vector<Range> ranges;
    for (std::int64_t i = 0; i < size; ++i) {
      const double center = begin + (static_cast<double>(i) + 0.5) * scale;
      Range range{std::max(static_cast<std::int64_t>(std::floor(center - support + 0.5)), lowest),
                  std::min(static_cast<std::int64_t>(std::floor(center + support + 0.5)), highest)};
      range.low = std::clamp(range.low, lowest, highest - 1);
      range.high = std::clamp(range.high, range.low + 1, highest);
      ranges.push_back(range);
      terms = std::max(terms, range.high - range.low);
    }
    // A pixel with fewer terms must not read beyond the source either.
    weights.resize(static_cast<std::size_t>(terms * size));
    for (std::int64_t i = 0; i < size; ++i) {
      const Range& range = ranges[static_cast<std::size_t>(i)];
      const double center = begin + (static_cast<double>(i) + 0.5) * scale;
      const std::int64_t at = std::min(range.low, most - terms);
      double sum = 0;
      std::vector<double> all(static_cast<std::size_t>(terms));
      for (std::int64_t x = range.low; x < range.high; ++x) {
        const double distance = std::abs(static_cast<double>(x) + 0.5 - center) / support;
        sum += all[static_cast<std::size_t>(x - at)] = std::max(1 - distance, 0.0);
      }
      if (sum == 0) {  // at the rim of a box that begins between pixels
        sum = all[static_cast<std::size_t>(range.low - at)] = 1;
      }
      first.push_back(static_cast<std::int32_t>(at));
      for (std::int64_t k = 0; k < terms; ++k) {
        weights[static_cast<std::size_t>(k * size + i)] = static_cast<float>(all[static_cast<std::size_t>(k)] / sum);
      }
    }
  }
};

/// One row of the result before it is resized horizontally: sum[j] = Σₖ weight(k, i) · row(first[i] + k)[j].
template <class T>
void sum_rows(const T* source, std::int64_t stride, const Taps& taps, std::int64_t i, std::int64_t count, float* sum) {
  source += taps.first[static_cast<std::size_t>(i)] * stride;
  std::fill_n(sum, count, 0.0f);
  for (std::int64_t k = 0; k < taps.terms; ++k) {
    const float weight = taps.row(k)[i];
    const T* const row = source + k * stride;
    if (weight != 0) {
      MICA_INDEPENDENT
      for (std::int64_t j = 0; j < count; ++j) {
        sum[j] += weight * static_cast<float>(row[j]);
      }
    }
  }
}

/// out[x] = Σₖ weight(k, x) · row[step · (first[x] + k)].
void sum_columns(const float* row, const Taps& taps, const std::int32_t* first, std::int64_t step, float* out) {
  const std::int64_t size = taps.size;
  std::fill_n(out, size, 0.0f);
  for (std::int64_t k = 0; k < taps.terms; ++k) {
    const float* const weights = taps.row(k);
    const float* const from = row + k * step;
    MICA_INDEPENDENT
    for (std::int64_t x = 0; x < size; ++x) {
      out[x] += weights[x] * from[first[x]];
    }
  }
}

void store(const float* from, std::int64_t count, float* to) { std::copy_n(from, count, to); }
void store(const float* from, std::int64_t count, std::uint8_t* to) {
  MICA_INDEPENDENT
  for (std::int64_t x = 0; x < count; ++x) {
    // The sum of weights may exceed 1 by a rounding error.
    to[x] = static_cast<std::uint8_t>(static_cast<std::int32_t>(std::min(from[x], 255.0f) + 0.5f));
  }
}

template <class T>
void resample(const Tensor& image, const Taps& vertical, const Taps& horizontal, const Tensor& result) {
  const std::int64_t channels = image.size(0), width = image.size(2), step = image.strides()[2];
  const bool is_interleaved = step != 1;
  // Rows are summed for all channels at once if these are interleaved. Only the columns that are used are.
  const std::int64_t begin = *std::min_element(horizontal.first.begin(), horizontal.first.end());
  const std::int64_t end =
      std::min(*std::max_element(horizontal.first.begin(), horizontal.first.end()) + horizontal.terms, width);
  const std::int64_t count = (end - begin) * step;
  std::vector<std::int32_t> first;
  for (const std::int32_t x : horizontal.first) {
    first.push_back(static_cast<std::int32_t>((x - begin) * step));
  }
  std::vector<float> sum(static_cast<std::size_t>(count)), row(static_cast<std::size_t>(horizontal.size));
  T* const out = result.data<T>();
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t y = 0; y < vertical.size && !(is_interleaved && c > 0); ++y) {
      sum_rows(image.data<T>() + c * image.strides()[0] + begin * step, image.strides()[1], vertical, y, count,
               sum.data());
      for (std::int64_t of = c; of < (is_interleaved ? channels : c + 1); ++of) {
        sum_columns(sum.data() + (of - c), horizontal, first.data(), step, row.data());
        store(row.data(), horizontal.size, out + (of * vertical.size + y) * horizontal.size);
      }
    }
  }
}

/// A box of whole pixels that keeps its size.
template <class T>
void copy_part(const Tensor& image, std::int64_t top, std::int64_t left, const Tensor& result) {
  const std::int64_t channels = result.size(0), height = result.size(1), width = result.size(2);
  const std::int64_t step = image.strides()[2];
  T* to = result.data<T>();
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t y = 0; y < height; ++y, to += width) {
      const T* const from = image.data<T>() + c * image.strides()[0] + (top + y) * image.strides()[1] + left * step;
      MICA_INDEPENDENT
      for (std::int64_t x = 0; x < width; ++x) {
        to[x] = from[x * step];
      }
    }
  }
}

bool is_copy(double begin, double length, std::int64_t size) {
  return begin == std::floor(begin) && length == static_cast<double>(size);
}

}  // namespace

Tensor resample(const Tensor& image, const Box& box, std::int64_t height, std::int64_t width) {
  Tensor result = empty({image.size(0), height, width}, image.dtype());
  const bool is_float = image.dtype() == float32;
  if (is_copy(box.top, box.height, height) && is_copy(box.left, box.width, width)) {
    (is_float ? copy_part<float> : copy_part<std::uint8_t>)(image, static_cast<std::int64_t>(box.top),
                                                            static_cast<std::int64_t>(box.left), result);
    return result;
  }
  const Taps vertical(box.top, box.height, image.size(1), height),
      horizontal(box.left, box.width, image.size(2), width);
  (is_float ? resample<float> : resample<std::uint8_t>)(image, vertical, horizontal, result);
  return result;
}

}  // namespace mica::io::detail
