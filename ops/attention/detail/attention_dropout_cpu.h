#pragma once

// Computes, row by row, which weights dropout keeps. Included by *_cpu.cpp only.

#include <cstdint>

#include <mica/ops/attention/detail/attention_dropout.h>

namespace mica::kernels {

/// kept[i * stride + j] = 1 if the weight of query i (of a block of 16) and key first + j is kept, else 0. `first` is a
/// multiple of 16, and the number of keys is rounded up to a multiple of 16. `row_of_blocks` is as for
/// detail::draw_dropout_group().
inline void draw_kept_rows(const WeightDropout& dropout, std::int64_t row_of_blocks, std::int64_t first,
                           std::int64_t keys, std::uint8_t* kept, std::int64_t stride) {
  constexpr int kBlock = detail::kDropoutBlock;
  for (std::int64_t key = 0; key < keys; key += kBlock) {
    for (int group = 0; group < 16; ++group) {
      const int u = group / 4, v = group % 4;
      const std::uint32_t bits = detail::kept_of_dropout_group(
          detail::draw_dropout_group(dropout.key, static_cast<std::uint32_t>(row_of_blocks),
                                     static_cast<std::uint32_t>((first + key) / kBlock), static_cast<std::uint32_t>(u),
                                     static_cast<std::uint32_t>(v)),
          dropout.threshold);
      for (int element = 0; element < 16; ++element) {
        kept[detail::query_of_dropout_group(u, element) * stride + key + detail::key_of_dropout_group(v, element)] =
            bits >> element & 1;
      }
    }
  }
}

}  // namespace mica::kernels
