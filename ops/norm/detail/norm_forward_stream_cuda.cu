#include <climits>
#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for rows that no block holds in registers. A cluster of blocks stays with row after row, each block with the
// same columns of all of them:
//
//   x ──copies, D chunks ahead──▶ shared memory ──first look──▶ moments ──▶ warps, blocks of the cluster meet
//                                       │                                              │
//                                       └──────────second look · rstd, weight, bias ◀──┘──▶ y
//
// Between a row's two looks lies the first look at the next one, so that nobody waits for the blocks to meet. weight
// and bias of a thread's columns stay in registers.

namespace mica::kernels::norm_cuda {

namespace {

// The shifts of a team's rows, which a warp finds 32 at a time: loads in each row would wait behind its copies.
template <class T, int V>
class Shifts {
 public:
  __device__ Shifts(const T* x, int rows, std::int64_t columns, int first, int step)
      : x_(x), rows_(rows), columns_(columns), step_(step), ahead_(first + threadIdx.x % kWarp * step) {
    fetch();
  }

  /// That of the next row.
  __device__ float take() {
    const int i = taken_++ % kWarp;
    if (i == 0) {
      shift_ = shift_of(next_);
      fetch();
    }
    return __shfl_sync(kAllLanes, shift_, i);
  }

 private:
  __device__ void fetch() {
    if (ahead_ < rows_) {
      next_ = load<kFirst<T, V>>(x_ + ahead_ * columns_);
    }
    ahead_ += kWarp * step_;
  }

  const T* x_;
  int rows_;
  std::int64_t columns_;
  int step_;
  int ahead_;  // the lane's next row
  unsigned taken_ = 0;
  float shift_ = 0;
  Pack<T, kFirst<T, V>> next_ = {};
};

// Of norms that are not centered.
struct NoShifts {
  template <class... Any>
  __device__ explicit NoShifts(const Any&...) {}
  __device__ float take() { return 0; }
};

// How many of `columns` member number i has, where they are dealt out in slabs of so many.
__device__ inline int dealt(int columns, int slab, int i) { return max(0, min(slab, columns - i * slab)); }

// The moments of up to 16 members together, to the same bits in each warp. `numbers` are all a, then all b; `count` is
// how many elements member number `lane % 16` has.
__device__ inline Moments<float> combine_members(const float* numbers, int members, int count, float reciprocal_n) {
  const int i = threadIdx.x % (kWarp / 2);
  const Moments<float> mine = i < members ? Moments<float>{numbers[i], numbers[members + i]} : Moments<float>{0, 0};
  return combine_lanes<kWarp / 2>(mine, static_cast<float>(count), reciprocal_n);
}

// Chunks a row, by packs a thread: one of a block of most threads has 16 KiB, or a little more.
template <class T, int V>
constexpr int chunks_of(int packs) {
  return packs * V * static_cast<int>(sizeof(T)) * kForwardBlock / (16 * 1024);
}

// Packs of single elements a thread that leave room for their differences in registers.
constexpr int kFewPacks = 20;

// P packs of a row a thread, D chunks in shared memory. weight and bias of a thread's columns stay in registers; x is
// read from shared memory for the moments, and again for y. A row is begun before the one before it is ended, so that
// nobody waits for the blocks to meet.
template <class N, class T, class W, int V, int P, int D>
__global__ void __launch_bounds__(kForwardBlock, 1)
    norm_forward_stream_kernel(const Forward<T, W> a, const StreamPlan p) {
  constexpr int C = chunks_of<T, V>(P);
  constexpr int kChunk = P / C;
  constexpr bool kWhole = V > 1;                   // each lane copies packs of its own
  constexpr bool kKeep = V > 1 || P <= kFewPacks;  // differences in registers, from the mean to the squares
  static_assert(C * kChunk == P && D % C == 0 && D > 2 * C);
  extern __shared__ __align__(128) unsigned char memory[];
  const StreamPlace<Team::cluster> at(p, a.columns, V, P);
  Meeting<Team::cluster> meeting(p, at.rank, memory);
  using Chunks = std::conditional_t<kWhole, Stream<T, V, 1, kChunk, D>, WarpStream<T, kChunk, D>>;
  Chunks stream(p, memory);
  const int rows = static_cast<int>(a.rows);
  const int columns = static_cast<int>(a.columns);
  const int first_row = static_cast<int>(at.first);
  const int row_step = static_cast<int>(at.step);
  const int first_column = static_cast<int>(at.begin) + at.first_pack * V;
  std::conditional_t<N::kCentered, Shifts<T, V>, NoShifts> shifts(a.x, rows, a.columns, first_row, row_step);
  const int warp_column = first_column - static_cast<int>(threadIdx.x) % kWarp * V;
  const int warp_left = static_cast<int>(at.begin) + at.columns - warp_column;
  // Starts copying a chunk of a row, if there is one; `packs` are the thread's.
  const auto fetch = [&](int place, int row, int c, int packs) {
    if (row < rows) {
      const int chunk = c * (kChunk * kWarp * V);
      if constexpr (kWhole) {
        stream.fetch(place, packs - c * kChunk, a.x + (row * a.columns + first_column) + chunk);
      } else {
        stream.fetch(place, a.x + (row * a.columns + warp_column) + chunk, warp_left - chunk);
      }
    }
    cuda::commit_copies();  // also of nothing: they are counted
  };
#pragma unroll 1
  for (int i = 0; i < D; ++i) {
    fetch(i, first_row + i / C * row_step, i % C, at.packs);
  }
  Pack<W, V> weights[P];
  Pack<W, V> biases[P];
#pragma unroll
  for (int i = 0; i < P; ++i) {
    weights[i] = {};
    biases[i] = {};
    if (i < at.packs) {
      weights[i] = load_or<V>(a.weight, first_column + i * (kWarp * V), 1);
      if constexpr (N::kCentered) {
        biases[i] = load_or<V>(a.bias, first_column + i * (kWarp * V), 0);
      }
    }
  }
  constexpr int kWarpColumns = P * kWarp * V;
  const float in_warp =
      reciprocal(static_cast<float>(dealt(at.columns, kWarpColumns, static_cast<int>(threadIdx.x) / kWarp)));
  meeting.open();

  const int member = threadIdx.x % (kWarp / 2);
  const auto pair_of = [](const Moments<float>& m) { return threadIdx.x % kWarp < kWarp / 2 ? m.a : m.b; };
  const auto leave = [&](const Moments<float>& warp) {
    meeting.leave(pair_of(warp), [&](const float* numbers, int warps) {
      return pair_of(combine_members(numbers, warps, dealt(at.columns, kWarpColumns, member),
                                     reciprocal(static_cast<float>(at.columns))));
    });
  };
  const auto take = [&] {
    return combine_members(meeting.take(), meeting.members(), dealt(columns, p.slab, member), a.in_row);
  };
  const auto after = [&](int place) { return place + C == D ? 0 : place + C; };  // the first chunk of the next row

  // All rows, by warps that have all of their packs, which most have, or by others.
  const auto normalize_rows = [&](auto full) {
    const int packs = full() ? P : at.packs;
    const float count = static_cast<float>(packs * V);
    const float in_thread = reciprocal(count);
    // Pack number i of a chunk. All of a warp's chunks begin at one phase.
    const auto pack_at = [&](int place, int phase, int i) {
      if constexpr (kWhole) {
        return stream.at(place, 0, i);
      } else {
        return Pack<T, 1>{stream.at(place, phase, i)};
      }
    };
    const auto phase_of = [&](const T* matrix, int row) {
      return kWhole ? 0 : WarpStream<T, kChunk, D>::phase(matrix + (row * a.columns + warp_column));
    };
    // Differences of pack number i of chunk c from `shift`; zeros if it is absent, as it is where it was copied to.
    const auto look = [&](int place, int phase, int c, int i, float shift, float(&x)[V]) {
      unpack(pack_at(place, phase, i), x);
      if constexpr (N::kCentered) {
        const float from = c * kChunk + i < packs ? shift : 0.0f;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          x[j] -= from;
        }
      }
    };
    // The first look at a row, of which `pending` chunks younger than its first may still be under way: the moments of
    // the warp's elements.
    const auto begin_row = [&](int row, int place, float shift, int pending) {
      const int phase = phase_of(a.x, row);
      float x[kKeep ? P : 1][V];
      float sums[2] = {};  // of elements in turn: one would be added to too often
      float squares[2] = {};
      if constexpr (!kWhole) {
        cuda::wait_copies(pending - C + 1);
        __syncwarp();  // for what other lanes have copied
      }
#pragma unroll(kKeep ? C : 1)
      for (int c = 0; c < C; ++c) {
        if constexpr (kWhole) {
          cuda::wait_copies(pending - c);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int k = kKeep ? c * kChunk + i : 0;
          look(place + c, phase, c, i, shift, x[k]);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int turn = (i * V + j) % 2;
            if constexpr (N::kCentered) {
              sums[turn] += x[k][j];
            }
            if constexpr (!N::kCentered || kOnePass<T, V>) {
              squares[turn] = fma(x[k][j], x[k][j], squares[turn]);
            }
          }
        }
      }
      [[maybe_unused]] const float sum = sums[0] + sums[1];
      if constexpr (!N::kCentered) {
        return Moments<float>{0, sum_lanes<kWarp>(squares[0] + squares[1])};
      } else if constexpr (kOnePass<T, V>) {
        const Moments<float> warp{sum_lanes<kWarp>(sum), sum_lanes<kWarp>(squares[0] + squares[1])};
        const float mean = warp.a * in_warp;  // as those of two passes are from here on
        const float rest = fma(-warp.a, mean, warp.b);
        return Moments<float>{mean, rest < 0 ? 0.0f : rest};
      } else {
        const float mean = sum * in_thread;
#pragma unroll(kKeep ? C : 1)
        for (int c = 0; c < C; ++c) {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) {
            const int k = kKeep ? c * kChunk + i : 0;
            if constexpr (!kKeep) {
              look(place + c, phase, c, i, shift, x[k]);
            }
            const float from = c * kChunk + i < packs ? mean : 0.0f;
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const int turn = (i * V + j) % 2;
              const float difference = x[k][j] - from;
              squares[turn] = fma(difference, difference, squares[turn]);
            }
          }
        }
        return combine_lanes<kWarp>(Moments<float>{mean, squares[0] + squares[1]}, count, in_warp);
      }
    };
    // The second look: y, from the moments of the row.
    const auto end_row = [&](int row, int place, float shift) {
      Moments<float> m = take();
      float scale = 1;
      if (N::kCentered && __any_sync(kAllLanes, !isfinite(m.b))) {  // in all threads of the row alike
        scale = kShrink<float>;
        shift *= scale;
        m = shrunk_moments<kWarp>(a.x + row * a.columns, columns, shift, a.in_row);
      }
      const float rstd = rsqrt(m.b * a.in_row + a.eps * scale * scale);
      const float offset = -m.a * rstd;
      if (threadIdx.x == 0 && at.rank == 0) {
        write_statistics<N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, scale);
      }
      const int phase = phase_of(a.x, row);
      const int y_phase = phase_of(a.y, row);
      const auto y_of = [&](int i, int from_place) {
        float values[V];
        float w[V];
        float b[V];
        unpack(pack_at(from_place, phase, i % kChunk), values);
        unpack(weights[i], w);
        unpack(biases[i], b);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          values[j] = N::kCentered ? fma(fma(fma(values[j], scale, -shift), rstd, offset), w[j], b[j])
                                   : values[j] * rstd * w[j];
        }
        return pack_of<T>(values);
      };
      T* const y = a.y + (row * a.columns + first_column);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if constexpr (kWhole || !full()) {
#pragma unroll
          for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
            const Pack<T, V> pack = y_of(i, place + c);
            if (i < packs) {
              store(y + i * (kWarp * V), pack);
            }
          }
        }
        if constexpr (!kWhole) {
          if constexpr (full()) {  // through shared memory, to be written in units as it was read
            T ys[kChunk];
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
              ys[i] = y_of(c * kChunk + i, place + c).at[0];
            }
            __syncwarp();  // all have read
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
              stream.at(place + c, y_phase, i) = ys[i];
            }
            __syncwarp();
            stream.write(place + c, a.y + (row * a.columns + warp_column) + c * (kChunk * kWarp));
          }
          __syncwarp();  // nobody reads what is copied over
        }
        fetch(place + c, row + D / C * row_step, c, packs);
      }
    };

    int place = 0;
    float shift = shifts.take();
    if (first_row < rows) {
      leave(begin_row(first_row, place, shift, D - 1));
    }
#pragma unroll 1
    for (int row = first_row; row < rows; row += row_step) {
      const float next_shift = shifts.take();
      if (row + row_step < rows) {
        leave(begin_row(row + row_step, after(place), next_shift, D - 1 - C));
      }
      end_row(row, place, shift);
      shift = next_shift;
      place = after(place);
    }
  };
  if (__all_sync(kAllLanes, at.packs == P)) {
    normalize_rows(std::true_type());
  } else {
    normalize_rows(std::false_type());
  }
  meeting.close();
}

// On the host.

template <class N, class T, class W, int V, int P, int D>
void launch(const Forward<T, W>& a, const NormForwardPlan& plan) {
  StreamPlan p{.packs = P, .cluster = plan.blocks};
  divide(p, a.columns, V, kForwardBlock);
  p.groups = 1;
  const int chunk = P / chunks_of<T, V>(P) * V * kWarp + (V == 1 ? 16 / static_cast<int>(sizeof(T)) : 0);
  p.stream_bytes = D * p.warps() * chunk * static_cast<int>(sizeof(T));
  launch_stream(norm_forward_stream_kernel<N, T, W, V, P, D>, "norm_forward_stream_kernel", p, a.rows, a);
}

}  // namespace

template <class N, class T, class W>
void forward_stream(const Forward<T, W>& a, const NormForwardPlan& plan) {
  constexpr int kFull = 16 / sizeof(T);
  if (plan.pack == 1) {
    if constexpr (sizeof(T) == 4) {
      switch (plan.packs) {
        case 20: return launch<N, T, W, 1, 20, 10>(a, plan);
        case 24: return launch<N, T, W, 1, 24, 12>(a, plan);
        case 32: return launch<N, T, W, 1, 32, 12>(a, plan);
      }
    }
  } else if (sizeof(T) == 4 && plan.packs == 8) {
    return launch < N, T, W, kFull, sizeof(T) == 4 ? 8 : 4, sizeof(T) == 4 ? 12 : 8 > (a, plan);
  } else if (plan.packs == 4) {
    return launch<N, T, W, kFull, 4, 8>(a, plan);
  }
  check(false, "norm: there is no streamed forward with {} packs of {} a thread", plan.packs, plan.pack);
}

#define MICA_INSTANTIATE(T, W)                                                            \
  template void forward_stream<Norm<true>>(const Forward<T, W>&, const NormForwardPlan&); \
  template void forward_stream<Norm<false>>(const Forward<T, W>&, const NormForwardPlan&)
MICA_FOR_FLOAT_SUM_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
