#pragma once

// How cross entropy in place distributes rows over blocks on CUDA.

#include <cstdint>

namespace mica::kernels {

struct CrossEntropyPlan {
  static constexpr int kMostThreads = 512;  // of a block
  static constexpr int kParts = 4;          // of a row, each awaited separately

  int cluster = 0;  // blocks that share a row; 0: rows of this length are read twice
  int threads = 0;  // of a block
  int slab = 0;     // packs of 16 bytes of a row that a block has, at most
  int part = 0;     // rounds of a thread per part, an even number

  int bytes() const { return slab * 16; }
  bool operator==(const CrossEntropyPlan&) const = default;
};

CrossEntropyPlan plan_cross_entropy_in_place(std::int64_t classes, int element_size, bool clusters);

}  // namespace mica::kernels
