#pragma once

// Code shared by the tests of norms: sizes, and difficult memory layouts.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/depth.h"
#include "tests/rows_close.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/tensor.h>

namespace mica::testing_support {

struct NormCase {
  DType dtype = float32;
  DType weight_dtype = float32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::string name() const {
    return fmt::format("{} with weights of {}, {} rows of {}", dtype, weight_dtype, rows, columns);
  }
};

/// Pairs of x's dtype and the weight's dtype.
inline const std::vector<std::pair<DType, DType>> kNormTypes = {{float32, float32},   {float64, float64},
                                                                {float16, float16},   {float16, float32},
                                                                {bfloat16, bfloat16}, {bfloat16, float32}};

inline const std::vector<std::int64_t> kNormRows = {0, 1, 2, 3, 67, 128, 1151, 4005, 65'537, 100'000};
inline const std::vector<std::int64_t> kNormColumns = {
    1,      2,      3,      7,      8,      31,     32,     33,     64,      127,    128,
    129,    500,    513,    768,    1000,   1600,   2001,   2048,   4005,    8117,   8192,
    10'000, 12'288, 15'872, 16'384, 16'385, 32'768, 65'536, 66'679, 123'479, 262'144};

/// 2^k − 1, 2^k and 2^k + 1 for k from 0 to `last`, sorted and without duplicates.
inline std::vector<std::int64_t> around_powers_of_2(int last) {
  std::vector<std::int64_t> sizes;
  for (int k = 0; k <= last; ++k) {
    for (const int offset : {-1, 0, 1}) {
      sizes.push_back((std::int64_t{1} << k) + offset);
    }
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

/// A name such as "float16_weights_float32" for a test's pair of dtypes.
inline std::string name_of_types(const testing::TestParamInfo<std::pair<DType, DType>>& info) {
  return fmt::format("{}_weights_{}", info.param.first, info.param.second);
}

/// The cases for one pair of kNormTypes. Each length is tested with few rows and, if that is fast enough, with many. On
/// a GPU, there are also more rows than it processes at a time, and rows that are too long for registers and shared
/// memory. Large cases take their time on the CPU, which computes what is expected, so each is tested with one pair of
/// dtypes.
inline std::vector<NormCase> norm_grid(Device device, const std::pair<DType, DType>& types) {
  std::vector<NormCase> cases;
  const auto add = [&](std::int64_t rows, std::int64_t columns) {
    cases.push_back({types.first, types.second, rows, columns});
  };
  const std::int64_t most = device.is_cuda() ? 1 << 23 : 140'000;
  // With AddressSanitizer, each size is tested with one pair of dtypes only.
  OneIn pairs(static_cast<int>(kNormTypes.size()));
  for (auto other = kNormTypes.begin(); *other != types; ++other) {
    pairs.skips();
  }
  std::size_t turn = 0;
  const auto has_turn = [&] { return kNormTypes[turn++ % kNormTypes.size()] == types; };
  constexpr std::int64_t kLarge = 1 << 19;
  for (const std::int64_t rows : kNormRows) {
    for (const std::int64_t columns : kNormColumns) {
      if ((rows == 3 || rows * columns <= most) && (rows * columns <= kLarge ? !pairs.skips() : has_turn())) {
        add(rows, columns);
      }
    }
  }
  // There are many of these, so each is tested with one pair of dtypes.
  OneIn some(7);
  for (const std::int64_t rows : around_powers_of_2(11)) {
    for (const std::int64_t columns : around_powers_of_2(14)) {
      if (columns > 0 && rows * columns <= std::min(most / 4 + 70'000, kLarge) && has_turn() && !some.skips()) {
        add(rows, columns);
      }
    }
  }
  if (device.is_cuda()) {
    for (const std::int64_t columns : {8193, 16'392, 20'001, 32'769, 50'257, 131'071, 131'073, 262'136, 262'145}) {
      add(5, columns);
    }
    // Rows of packs of 16 bytes that lanes, warps, blocks and clusters share: fewer rows than a block has row groups,
    // and so many that each group has several, and reuses its shared memory.
    for (const std::int64_t columns : {8, 24, 72, 100, 136, 200, 256, 320, 384, 512, 576, 640, 1280, 1536, 10'248}) {
      for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{37}, 2'500'000 / columns | 1}) {
        if (rows * columns <= kLarge ? !pairs.skips() : has_turn()) {
          add(rows, columns);
        }
      }
    }
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{4005, 4005},
                                        {1030, 4096},
                                        {300, 16'384},
                                        {300, 20'008},
                                        {70, 66'679},
                                        {67, 123'479},
                                        {40, 131'072},
                                        {20, 262'144},
                                        {9, 300'007},
                                        {5, 524'288}}) {
      if (has_turn()) {
        add(rows, columns);
      }
    }
  }
  return cases;
}

/// Row lengths for all kernels, for tests with fewer shapes than norm_grid(). The longest ones are only tested where
/// that is fast.
inline std::vector<std::int64_t> some_columns(Device device) {
  std::vector<std::int64_t> columns = {1, 7, 64, 100, 256, 500, 768, 1600, 4005, 9001};
  if (device.is_cuda()) {
    columns.insert(columns.end(), {77, 128, 320, 930, 1001, 1502, 8192, 12'288, 16'384, 20'001, 20'002, 20'008, 50'000,
                                   131'072, 131'073, 262'144, 262'152});
  }
  return columns;
}

/// A view with x's elements whose axes are reversed in memory, with a NaN after every element.
inline Tensor with_gaps(const Tensor& x) {
  Strides strides = x.shape();
  std::int64_t step = 2;
  for (int axis = 0; axis < x.dim(); ++axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(x.shape()[axis], 1);
  }
  const Tensor base = full({step}, NAN, x.dtype(), x.device());
  const Tensor result = as_strided(base, x.shape(), strides, 0);
  copy_into(result, x);
  return result;
}

/// A row-major view with x's elements that begins at the second element of an allocation, with NaN before and after it.
inline Tensor off_by_one(const Tensor& x) {
  const Tensor base = full({x.numel() + 2}, NAN, x.dtype(), x.device());
  const Tensor result = as_strided(base, x.shape(), x.strides(), 1);
  copy_into(result, x);
  return result;
}

/// A view of rows [begin, begin + count) of a row-major (M, N), without history.
inline Tensor rows_of(const Tensor& x, std::int64_t begin, std::int64_t count) {
  return as_strided(x, {count, x.size(1)}, x.strides(), x.handle()->offset + begin * x.size(1));
}

/// A tensor of x's shape, dtype and device with the elements `values`, rounded.
inline Tensor with_values(const std::vector<double>& values, const Tensor& x) {
  const Tensor result = empty_like(x);
  copy_into(result, from_data(values, x.shape()));
  return result;
}

}  // namespace mica::testing_support
