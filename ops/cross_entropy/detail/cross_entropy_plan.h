#pragma once

// How in-place cross entropy on CUDA distributes rows among thread blocks.

#include <cstdint>

namespace mica::kernels {

struct CrossEntropyPlan {
  static constexpr int kMostThreads = 512;  // per block
  static constexpr int kParts = 4;          // groups of a row's copies, for each of which a thread waits

  int cluster = 0;  // blocks that share a row; 0: a kernel that reads rows twice
  int threads = 0;  // per block
  int slab = 0;     // packs of 16 bytes of a row that a block has, at most
  int part = 0;     // packs per thread and part, an even number

  int bytes() const { return slab * 16; }
  bool operator==(const CrossEntropyPlan&) const = default;
};

CrossEntropyPlan plan_cross_entropy_in_place(std::int64_t classes, int element_size, bool clusters);

}  // namespace mica::kernels
