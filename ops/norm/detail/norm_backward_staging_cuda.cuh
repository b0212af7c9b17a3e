#pragma once

// Copies unaligned rows through shared memory, for threads that hold rows in registers:
//
//     x, dy ──units of 16 bytes──▶ shared memory ──elements──▶ registers
//     dx    ◀──units of 16 bytes── shared memory ◀──elements── registers
//
// A row may begin inside a unit. In shared memory it begins at the same offset inside a unit. L is the block's layout;
// all threads of the block copy a row together.

#include <cstdint>

#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// For a block's rows first, first + gridDim.x, ….
template <class T, class W, class L>
class RowStaging {
 public:
  static constexpr int kDepth = 3;  // rows in shared memory, one of them in use
  using In = WarpStream<T, L::kElements, kDepth, L::kThreads>;
  using Out = WarpStream<T, L::kElements, 1, L::kThreads>;
  static constexpr int kBytes = 2 * In::kStreamBytes + Out::kStreamBytes;  // of shared memory
  static_assert(L::kRows == 1);

  __device__ RowStaging(const BackwardRows<T, W>& a, std::int64_t first, unsigned char* memory)
      : a_(a), x_(memory), dy_(memory + In::kStreamBytes), out_(memory + 2 * In::kStreamBytes) {
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) {
      fetch(first + i * gridDim.x, i);
    }
  }

  /// Waits until the next row may be loaded from shared memory, and starts copying a later one.
  __device__ void open(std::int64_t row) {
    cuda::wait_copies<kDepth - 2>();
    place_ = place_ + 1 == kDepth ? 0 : place_ + 1;
    __syncthreads();  // all threads' copies are complete, and the previous row's place is free
    fetch(row + (kDepth - 1) * gridDim.x, place_ == 0 ? kDepth - 1 : place_ - 1);
  }

  /// Loads the thread's elements of the open row; those past its end are zeros.
  __device__ void load(std::int64_t row, Pack<T, 1> (&xs)[L::kElements], Pack<T, 1> (&dys)[L::kElements]) const {
    const T* const x = &x_.at(place_, In::phase(a_.x + row * a_.columns), 0);
    const T* const dy = &dy_.at(place_, In::phase(a_.dy + row * a_.columns), 0);
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      xs[k] = {};
      dys[k] = {};
      if (inside(k)) {
        xs[k].at[0] = x[k * L::kThreads];
        dys[k].at[0] = dy[k * L::kThreads];
      }
    }
  }

  /// Writes a row of dx. value(k) is the thread's element number k.
  template <class Value>
  __device__ void write(std::int64_t row, const Value& value) const {
    T* const to = a_.dx + row * a_.columns;
    T* const out = &out_.at(0, Out::phase(to), 0);
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      if (inside(k)) {
        out[k * L::kThreads] = value(k);
      }
    }
    __syncthreads();
    out_.write(0, to, columns());
  }

 private:
  __device__ int columns() const { return static_cast<int>(a_.columns); }

  __device__ bool inside(int k) const { return k * L::kThreads + static_cast<int>(threadIdx.x) < columns(); }

  __device__ void fetch(std::int64_t row, int place) const {
    if (row < a_.rows) {
      const std::int64_t begin = row * a_.columns;
      const bool is_last = row + 1 == a_.rows;
      x_.fetch_units(place, a_.x + begin, columns(), is_last);
      dy_.fetch_units(place, a_.dy + begin, columns(), is_last);
    }
    cuda::commit_copies();  // also without copies, since open() counts the commits
  }

  const BackwardRows<T, W>& a_;
  In x_;
  In dy_;
  Out out_;
  int place_ = kDepth - 1;  // of the open row
};

}  // namespace mica::kernels::norm_cuda
