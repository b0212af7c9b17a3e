#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/device.h>
#include <mica/core/dtype.h>
#include <mica/ops/attention/attention.h>

namespace mica {

/// The properties of a problem that determine its implementation.
struct AttentionProblem {
  bool cuda = false;
  bool wgmma = false;  // supported by the GPU and the build: the fast flash kernel is available
  DType dtype = float32;
  int rank = 4;                  // of q
  std::int64_t items = 0;        // B · H
  std::int64_t key_items = 0;    // B · Hkv
  std::int64_t queries = 0;      // T
  std::int64_t keys = 0;         // S
  std::int64_t width = 0;        // D
  std::int64_t value_width = 0;  // Dv
  bool masked = false;           // by a mask tensor
  bool mask_gradient = false;    // is needed
  bool drops = false;            // some of the weights
  bool empty = false;            // no element in q, k or v
};

/// The implementations for the problem, best first. `composed` is always included. Whether cuDNN and the flash kernel
/// are available, and support the strides, is checked separately.
///
/// The backward of the blocked kernel has one thread per key head. With few key heads and small weights, products that
/// use all threads are faster.
///
/// On CUDA, only the flash kernel supports dropout and masks. Otherwise the flash kernel is faster for heads of up to
/// 64 columns on GPUs with wgmma, and cuDNN for wider heads and on other GPUs. There are two exceptions, in favor of
/// the flash kernel. Lengths that are not a multiple of 64: cuDNN compiles a kernel for each shape, in 50 to 800 ms,
/// and generating text changes the length at every token. And B · H · T · S numbers of 16 bits that take more than 1
/// GiB: cuDNN's deterministic backward stores them.
std::vector<AttentionBackend> plan_attention(const AttentionProblem& problem);

}  // namespace mica
