#pragma once

// Forward of long aligned rows. As many clusters as the GPU runs at a time are persistent, and process row after row:
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
// A warp begins the next row before it takes the other warps' sums of this one, so that it does not wait for slower
// blocks.

#include <mica/ops/rows/detail/row_ring.cuh>
#include <mica/ops/softmax/detail/softmax_registers_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// How many rows are copied ahead of their use. A block of the most threads has 192 KB of them.
template <class T>
constexpr int kAhead = 12 / sizeof(T);

template <class Forward, class L>
__global__ void __launch_bounds__(L::kEntry.threads, 1)
    softmax_streamed(typename Forward::Inputs m, std::int64_t rows, std::int64_t columns, Forward rule,
                     SoftmaxPlan plan) {
  using T = typename Forward::T;
  using Found = typename Forward::Found;
  using Registers = RegisterRow<Forward, L>;
  using Ring = rows::RowRing<T, L::V, 1, L::kPacks, kAhead<T>>;
  using Threads = rows::RowGroup<Found, L::kGroup, rows::kWarp, /*kSeveral=*/false, /*kBuffers=*/4>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Threads::Exchange exchange;

  Threads threads(exchange, plan.cluster);
  const RowSlab<L::kGroup> at(plan, rows, columns, rule);
  const int clusters = static_cast<int>(gridDim.x) / plan.cluster;
  const int step = clusters * static_cast<int>(columns);                          // elements to the next row
  int left = static_cast<int>((rows - at.row + clusters - 1) / clusters);         // rows that have not ended
  std::int64_t first = at.row * columns + at.begin;                               // of the first of them
  const int packs = (at.columns - Registers::first() + L::kStep - 1) / L::kStep;  // of the thread, may be negative
  const std::uint64_t policy = cuda::read_once_policy(rows * columns * static_cast<int>(sizeof(T)));
  Ring ring(memory);
  ring.fill(packs, rows::pack_of_one<L::V>(static_cast<T>(Forward::kAbsent)));
  int stage = 0;  // of the row to be loaded next
  // Starts copying row i, counted from the first that has not ended, to the stage that was loaded last. All elements of
  // the previous row in that stage must have been used.
  const auto fetch = [&](int i) {
    if (i < left) {
      ring.fetch_present(stage, policy, packs, m.in[0] + first + Registers::first() + i * step);
    }
    cuda::commit_copies();  // also without copies, since wait_copies() counts the commits
    stage = Ring::next(stage);
  };
#pragma unroll 1
  for (int i = 0; i < kAhead<T>; ++i) {
    fetch(i);
  }

  struct Row {
    Registers in_registers;
    Found in_warp;
  };
  // Begins row i, counted from the first that has not ended.
  const auto begin = [&](Row& row, int i) {
    cuda::wait_copies<kAhead<T> - 1>();
#pragma unroll
    for (int k = 0; k < L::kPacks; ++k) {
      row.in_registers.packs().set(k, reinterpret_cast<const uint4&>(ring.at(stage, 0, k)));
    }
    row.in_warp = row.in_registers.reduced(rule, at.columns);
    fetch(kAhead<T> + i);
    threads.send(row.in_warp);
  };
  const auto end = [&](Row& row) {
    const Found found = threads.receive(row.in_warp);
    row.in_registers.write(m.out + first, rule, at.columns, at.columns, row.in_warp, found);
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
