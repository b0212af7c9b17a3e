#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

inline constexpr std::int64_t kMostRotaryPairs = 256;  // the CUDA kernel's arguments hold the frequencies

/// Rotates `rows` rows of `heads` heads, which have a pair of columns for each frequency. Row-major, at least one
/// element.
struct Rotary {
  const Tensor& x;
  const Tensor& positions;  // int64: (steps), repeated, or (rows); undefined: offset + row % steps
  std::int64_t rows;
  std::int64_t steps;
  std::int64_t heads;
  std::int64_t offset;
  const std::vector<float>& frequencies;
  double scale;
  bool back;        // by the negative angle
  const Tensor& y;  // out
};

void rotary(Cpu, const Rotary& args);
void rotary(Cuda, const Rotary& args);

}  // namespace mica::kernels
