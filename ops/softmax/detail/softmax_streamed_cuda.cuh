#pragma once

// Forward of long aligned rows. As many clusters as the GPU runs at a time stay on their multiprocessors, and each of
// them processes row after row:
//
//     global memory ──▶ shared memory ──▶ registers ──▶ maximum and sum of the warp ──▶ other warps of the cluster
//                       (several rows     (two rows)                                                 │
//                        ahead)               │                  maximum and sum of the row ◀────────┘
//                                             ▼                                │
//                                          results ◀───────────────────────────┘
//                                             │
//                                             ▼
//                                       global memory
//
// A warp begins the next row before it takes the other warps' sums of this one. So it does not wait for slower blocks,
// and rows are copied all the time.
//
// Each thread copies the packs that it uses itself. So the copies need no synchronization between threads.

#include <limits>

#include <mica/ops/softmax/detail/softmax_held_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// A thread's packs of the next `plan.ahead` rows, in shared memory.
template <class L, class T>
class PacksAhead {
 public:
  static constexpr int kPackBytes = 16;
  static constexpr int kStepBytes = rows::kWarp * kPackBytes;  // from a thread's pack to its next one
  static constexpr int kRowBytes = L::kPacks * kStepBytes;     // of a warp
  static_assert(L::V * sizeof(T) == kPackBytes);

  /// `columns` is the number of columns of the block's slab. `absent` is the value of elements past its end. The matrix
  /// has `elements` elements.
  __device__ PacksAhead(unsigned char* memory, const RowPlan& plan, int columns, std::int64_t elements, T absent)
      : ahead_(plan.ahead),
        policy_(cuda::read_once_policy(elements * static_cast<int>(sizeof(T)))),
        left_(columns - L::first()) {
    const int thread = static_cast<int>(threadIdx.x);
    slot_ = cuda::shared_address(memory) + thread / rows::kWarp * bytes() + thread % rows::kWarp * kPackBytes;
    end_ = slot_ + bytes();
    // Absent packs are never copied, so that they need to be written only once.
    const Pack<T, L::V> past = pack_of_one<L::V>(absent);
    const uint4 words = reinterpret_cast<const uint4&>(past);
#pragma unroll 1
    for (std::uint32_t slot = slot_; slot != end_; slot += kRowBytes) {
#pragma unroll
      for (int i = 0; i < L::kPacks; ++i) {
        if (i * L::kStep >= left_) {
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slot + i * kStepBytes), "r"(words.x),
                       "r"(words.y), "r"(words.z), "r"(words.w)
                       : "memory");
        }
      }
    }
  }

  /// Starts copying the next row, if `present`. `from` is the thread's first pack. The row takes the slot of the one
  /// that was loaded last: call it only when all of that row's elements have been used, since loads from shared memory
  /// may otherwise still be under way.
  __device__ void fetch(bool present, const T* from) {
    if (present) {
#pragma unroll
      for (int i = 0; i < L::kPacks; ++i) {
        if (i * L::kStep < left_) {
          cuda::copy_async<kPackBytes>(slot_ + i * kStepBytes, from + i * L::kStep, policy_);
        }
      }
    }
    cuda::commit_copies();  // also without copies, since load() counts the commits
    slot_ += kRowBytes;
    if (slot_ == end_) {
      slot_ -= bytes();
    }
  }

  /// Waits for the first of the fetched rows and loads its packs into registers.
  template <class Packs>
  __device__ void load(Packs& packs) const {
    cuda::wait_copies(ahead_ - 1);
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      uint4 words;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(slot_ + i * kStepBytes)
                   : "memory");
      packs.set(i, reinterpret_cast<const Pack<T, L::V>&>(words));
    }
  }

 private:
  __device__ int bytes() const { return ahead_ * kRowBytes; }

  const int& ahead_;  // in the kernel's parameters, to save a register
  std::uint64_t policy_;
  int left_;            // columns of the slab from the thread's first column on
  std::uint32_t slot_;  // of the row to be loaded next: its first pack
  std::uint32_t end_;   // of the slots
};

template <class Forward, class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    softmax_streamed(Matrices<typename Forward::T, 1> m, std::int64_t rows, std::int64_t columns, Forward rule,
                     RowPlan plan) {
  using T = typename Forward::T;
  using Found = typename Forward::Found;
  using Threads = rows::RowGroup<Found, L::kGroup, rows::kWarp, /*kSeveral=*/false, /*kBuffers=*/4>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Threads::Shared shared;

  const T* const x = m.in[0];
  T* const y = m.out;
  Threads threads(shared, plan.cluster);
  const Place<L::kGroup> at(plan, rows, columns);
  const int clusters = static_cast<int>(gridDim.x) / plan.cluster;
  const int step = clusters * static_cast<int>(columns);                   // elements to the next row
  int left = static_cast<int>((rows - at.row + clusters - 1) / clusters);  // rows that have not ended
  std::int64_t first = at.row * columns + at.begin;                        // of the first of them
  PacksAhead<L, T> ahead(memory, plan, at.columns, rows * columns,
                         static_cast<T>(-std::numeric_limits<Accumulate<T>>::infinity()));
  const auto fetch = [&](int i) { ahead.fetch(i < left, x + first + L::first() + i * step); };
#pragma unroll 1
  for (int i = 0; i < plan.ahead; ++i) {
    fetch(i);
  }

  struct Row {
    HeldRow<Forward, L> held;
    Found in_warp;
  };
  // Begins row i, counted from the first that has not ended.
  const auto begin = [&](Row& row, int i) {
    ahead.load(row.held.packs());
    row.in_warp = row.held.reduced(rule, at.columns);
    fetch(plan.ahead + i);
    threads.send(row.in_warp);
  };
  const auto end = [&](Row& row) {
    const Found found = threads.receive(row.in_warp);
    row.held.write(y + first, rule, at.columns, at.columns, row.in_warp, found);
    first += step;
    --left;
  };
  // Begins the next row, ends this one, and returns whether there is a next one.
  const auto advance = [&](Row& row, Row& next) {
    if (left > 1) {
      begin(next, 1);
    }
    end(row);
    return left > 0;
  };
  Row even;
  Row odd;
  begin(even, 0);
#pragma unroll 1
  while (advance(even, odd) && advance(odd, even)) {
  }
}

}  // namespace mica::kernels::softmax_rows
