#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/device.h>
#include <mica/core/dtype.h>
#include <mica/ops/attention/attention.h>

namespace mica {

/// The properties of a call that determine its implementation.
struct AttentionProblem {
  bool cuda = false;
  bool wgmma = false;  // whether GPU and build support wgmma, so that the fast flash kernel is available
  DType dtype = float32;
  int rank = 4;                  // q's number of axes
  std::int64_t items = 0;        // B · H
  std::int64_t key_items = 0;    // B · Hkv
  std::int64_t queries = 0;      // T
  std::int64_t keys = 0;         // S
  std::int64_t width = 0;        // D
  std::int64_t value_width = 0;  // Dv
  bool masked = false;           // there is a mask tensor
  bool mask_gradient = false;    // its gradient is needed
  bool windowed = false;         // there is a window that does not reach all keys
  bool drops = false;            // there is dropout
  bool capped = false;           // the scores are capped
  bool empty = false;            // q, k or v has no elements
};

/// The implementations that support a call, best first. `composed` is always included, and alone for capped scores.
/// For a window it stands for attention by blocks of queries.
/// Whether cuDNN and the flash kernel are available, and support the strides, is checked separately.
///
/// On the CPU, the backward of the blocked kernel has one thread per key head, so composed attention is faster with few
/// key heads and small matrices of weights.
///
/// On CUDA, only the flash kernel supports dropout and masks. Without these, it is faster for heads of up to 64 columns
/// on GPUs with wgmma, and otherwise cuDNN, except for
/// - lengths that are not a multiple of 64: cuDNN compiles a kernel for each shape, which takes 50 to 800 ms;
/// - B · H · T · S elements of 16 bits that take more than 1 GiB, since cuDNN's deterministic backward stores them.
std::vector<AttentionBackend> plan_attention(const AttentionProblem& problem);

}  // namespace mica
