#pragma once

// Work on many tensors at once: one launch on CUDA, one parallel region on the CPU.

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::kernels {

/// A parameter, its gradient and its optimizer states. All are row-major and have `numel` elements.
struct MultiTensorEntry {
  static constexpr int kMaxStates = 3;

  void* param = nullptr;  // null if only gradients are read
  void* grad = nullptr;
  void* states[kMaxStates] = {};  // of the accumulation dtype; the float32 master weights, if any, come last
  std::int64_t numel = 0;
  std::int64_t first_chunk = 0;  // chunks of all entries before this one
  std::int64_t first_block = 0;  // blocks of the part's entries before this one
  std::int32_t parameter = 0;    // index of the parameter in the optimizer
  std::int32_t group = 0;
};

/// Entries of one dtype and with the same states: the unit of one launch.
struct MultiTensorPart {
  DType dtype = float32;  // of parameters and gradients
  int states = 0;         // without the master weights
  bool master = false;

  std::int64_t first_entry = 0;
  std::int64_t entries = 0;
  std::int64_t first_chunk = 0;
  std::int64_t chunks = 0;
  std::int64_t blocks = 0;

  bool has_kind_of(const MultiTensorPart& other) const {
    return dtype == other.dtype && states == other.states && master == other.master;
  }
};

/// Tensors of one device, divided into chunks, for sums, and into smaller blocks, for updates. The order of the
/// entries, and so that of sums over chunks, depends only on the order of add() and the kinds.
class MultiTensorList {
 public:
  static constexpr std::int64_t kChunk = 16384;  // elements
  /// Elements of a block: 4 KiB of the accumulation dtype.
  static std::int64_t block(DType dtype) { return 4096 / static_cast<std::int64_t>(size_of(accumulate_dtype(dtype))); }

  /// `kind` has the first three members set. Ignores the entry's first_chunk and first_block.
  void add(const MultiTensorPart& kind, const MultiTensorEntry& entry);
  /// Divides the entries into chunks and copies them to `device`. Call it once, after the last add().
  void finish(Device device);

  bool empty() const { return entries_.empty(); }
  const std::vector<MultiTensorPart>& parts() const { return parts_; }
  std::int64_t chunks() const { return chunks_; }
  std::int64_t entries() const { return static_cast<std::int64_t>(entries_.size()); }
  /// The entries in the device's memory, part after part.
  const MultiTensorEntry* table() const;

 private:
  std::vector<MultiTensorPart> parts_;
  std::vector<std::vector<MultiTensorEntry>> by_part_;  // until finish()
  std::vector<MultiTensorEntry> entries_;
  std::int64_t chunks_ = 0;
  Tensor device_table_;  // undefined on the CPU
};

/// The effect of the gradient norm on a step, on the device: two float64.
struct StepControl {
  double factor;  // multiplies each gradient
  double skip;    // not 0: the step changes nothing
};

}  // namespace mica::kernels
