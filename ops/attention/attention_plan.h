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
/// Of the kernels on CUDA, only the flash kernel takes dropout or a mask. Else, with wgmma the flash kernel is the
/// faster one for heads of up to 64 columns, cuDNN for wider ones and on other chips. But cuDNN compiles a kernel for
/// each shape, some 50 to 800 ms, so lengths that are no multiple of 64, as they come one after the other when text is
/// generated, go to the flash kernel; and its deterministic backward keeps B · H · T · S numbers of 16 bits meanwhile,
/// which has to stay within 1 GiB.
std::vector<AttentionBackend> plan_attention(const AttentionProblem& problem);

}  // namespace mica
