#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/device.h>
#include <mica/core/dtype.h>
#include <mica/ops/attention/attention.h>

namespace mica {

/// What the choice of an implementation depends on.
struct AttentionProblem {
  bool cuda = false;
  bool wgmma = false;  // the chip and the build have it: the flash kernel is its fast one
  DType dtype = float32;
  int rank = 4;                  // of q
  std::int64_t items = 0;        // B · H
  std::int64_t key_items = 0;    // B · Hkv
  std::int64_t queries = 0;      // T
  std::int64_t keys = 0;         // S
  std::int64_t width = 0;        // D
  std::int64_t value_width = 0;  // Dv
  bool masked = false;           // by a tensor
  bool mask_gradient = false;    // is wanted
  bool drops = false;            // some of the weights
  bool empty = false;            // no element in q, k or v
};

/// The implementations that take it, best first. `composed` is always among them. Whether cuDNN and the flash kernel
/// are there, and take the strides, they are asked themselves.
///
/// The blocked kernel has a thread for each key head in its backward, so where there are few of them, and their weights
/// do not take much memory, products that all threads work on are faster.
///
/// On CUDA, only the flash kernel takes dropout or a mask. Otherwise the flash kernel is faster for heads of up to 64
/// columns on chips with wgmma, and cuDNN for wider heads and on other chips. Two cases go to the flash kernel all the
/// same. Lengths that are no multiple of 64: cuDNN compiles a kernel for each shape, in 50 to 800 ms, and generating
/// text changes the length at every token. And B · H · T · S numbers of 16 bits that take more than 1 GiB: cuDNN's
/// deterministic backward stores them.
std::vector<AttentionBackend> plan_attention(const AttentionProblem& problem);

}  // namespace mica
