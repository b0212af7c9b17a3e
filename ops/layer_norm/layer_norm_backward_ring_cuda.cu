#include <mica/ops/layer_norm/layer_norm_cuda.cuh>
#include <mica/ops/layer_norm/layer_norm_kernels.h>
#include <mica/ops/layer_norm/ring_cuda.cuh>

namespace mica::kernels::layer_norm_cuda {

namespace {

struct Choice {
  int elements = 0;  // of a row that a thread holds; 0: no ring
  int cluster = 1;   // blocks that share a row
};

// G times the blocks of a cluster: a number of its own and not the chip's, so that results do not depend on the chip.
constexpr int kTeams = 132;

/// The choice of stage 1 by row length, and by whether rows can be read in packs.
template <class T>
Choice backward_choice(std::int64_t columns, bool packed) {
  if (columns <= 256 || (!packed && sizeof(T) == 2)) {
    return {};
  }
  for (int cluster = 1; cluster <= (packed ? 4 : 1); cluster *= 2) {
    const std::int64_t slab = (columns + cluster - 1) / cluster;
    const int elements = sizeof(T) == 2 ? ring_elements(slab, {16, 24, 32}) : ring_elements(slab, {16});
    if (elements != 0) {
      return {.elements = elements, .cluster = cluster};
    }
  }
  return {};
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Both sums over a row, from those of its warps.
__device__ Sums<float> add_parts(const Sums<float>* parts, int count) {
  Sums<float> sums{0, 0};
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
    const Sums<float> part = parts[i];
    sums.g += part.g;
    sums.gx += part.gx;
  }
  return {sum_lanes<kWarp>(sums.g), sum_lanes<kWarp>(sums.gx)};
}

// mean and rstd of the group's rows, 32 rows at a time: lane l has those of row number l, and the next 32 are under
// way.
struct Statistics {
  float mean = 0;
  float rstd = 0;
  float next_mean = 0;
  float next_rstd = 0;

  /// Starts fetching those of `first` and of the 31 rows of the group after it.
  template <class T, class W>
  __device__ void fetch(const Backward<T, W>& a, std::int64_t first, const Place& at) {
    const std::int64_t row = first + threadIdx.x % kWarp * at.step;
    if (row < a.rows) {
      next_mean = a.mean[row];
      next_rstd = a.rstd[row];
    }
  }

  __device__ void turn() {
    mean = next_mean;
    rstd = next_rstd;
  }
};

// Writes the block's part of a row of partials: the sum of its groups' `mine`, added in order.
template <int V, int kElements>
__device__ void write_ring_partial(const RingPlan& p, const Place& at, float* partial, const float (&mine)[kElements],
                                   float* fold) {
  if (p.groups > 1) {
    __syncthreads();  // the memory is free
    for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        fold[at.group * at.columns + column + j] = mine[i * V + j];
      }
    });
    __syncthreads();
    for (int column = threadIdx.x; column < at.columns; column += blockDim.x) {
      float sum = 0;
      for (int group = 0; group < p.groups; ++group) {
        sum += fold[group * at.columns + column];
      }
      partial[column] = sum;
    }
  } else {
    for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        partial[column + j] = mine[i * V + j];
      }
    });
  }
}

#endif

// Whether the second look at a row's elements reads them from shared memory again, as registers hold no more.
template <int kElements>
constexpr bool kReload = kElements > 16;

template <class T, class W, int V, int kElements>
__global__ void __launch_bounds__(kRingBlock, 1)
    layer_norm_backward_ring_kernel(const Backward<T, W> a, const RingPlan p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  const Place at(p, a.columns, V);
  Ring<T, V> ring(p, at, memory);
  Meeting<Sums<float>> meeting(p, at, memory);
  const auto offset = [&](std::int64_t row) { return row * a.columns + at.begin; };
  for (int stage = 0; stage < p.stages; ++stage) {
    const std::int64_t row = at.first + stage * at.step;
    if (row < a.rows) {
      ring.fetch(stage, a.x + offset(row), a.dy + offset(row));
    }
  }
  allow_dependents();
  W* const weight = reinterpret_cast<W*>(memory + p.parameter_begin());
  keep_parameter<V>(at, a.weight, 1, weight);
  Statistics statistics;
  statistics.fetch(a, at.first, at);
  float dweight[kElements] = {};
  float dbias[kElements] = {};
  const float reciprocal = 1.0f / static_cast<float>(a.columns);
  __syncthreads();  // the ring's barriers and weight are there
  if (p.cluster > 1) {
    cluster_sync();  // the other blocks have begun: their memory may be written
  }

  int stage = 0;
  unsigned parity = 0;
  int i_row = 0;
  for (std::int64_t row = at.first; row < a.rows; row += at.step, ++i_row) {
    if (i_row % kWarp == 0) {
      statistics.turn();
      statistics.fetch(a, row + kWarp * at.step, at);
    }
    const float mean = __shfl_sync(kAllLanes, statistics.mean, i_row % kWarp);
    const float rstd = __shfl_sync(kAllLanes, statistics.rstd, i_row % kWarp);
    ring.wait(stage, parity);
    const T* const x_slab = ring.slab(stage, 0, a.x + offset(row));
    const T* const dy_slab = ring.slab(stage, 1, a.dy + offset(row));
    float x_hat[kElements];
    float g[kElements];
    const auto look = [&](int i, int column, auto f) {
      const Pack<T, V> xs = load<V>(x_slab + column);
      const Pack<T, V> dys = load<V>(dy_slab + column);
      const Pack<W, V> weights = load<V>(weight + column);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float dy = static_cast<float>(dys.at[j]);
        x_hat[i * V + j] = (static_cast<float>(xs.at[j]) - mean) * rstd;
        g[i * V + j] = dy * static_cast<float>(weights.at[j]);
        f(i * V + j, dy);
      }
    };
    Sums<float> mine{0, 0};
    for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
      look(i, column, [&](int k, float dy) {
        mine.g += g[k];
        mine.gx += g[k] * x_hat[k];
        dweight[k] += dy * x_hat[k];
        dbias[k] += dy;
      });
    });
    Sums<float> sums{0, 0};
    if (a.dx != nullptr) {
      const Sums<float> warp{sum_lanes<kWarp>(mine.g), sum_lanes<kWarp>(mine.gx)};
      const Sums<float>* const parts = meeting.swap(warp, at.lane);
      sums = add_parts(parts, meeting.count());
    } else {
      meeting.sync_group();
    }
    // All of the group have read this stage, or with kReload the one before.
    const int free_stage = !kReload<kElements> ? stage : stage == 0 ? p.stages - 1 : stage - 1;
    const std::int64_t next = row + (p.stages - (kReload<kElements> ? 1 : 0)) * at.step;
    if (next < a.rows && (!kReload<kElements> || row != at.first)) {
      ring.fetch(free_stage, a.x + offset(next), a.dy + offset(next));
    }
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }

    if (a.dx != nullptr) {
      const float g_mean = sums.g * reciprocal;
      const float gx_mean = sums.gx * reciprocal;
      T* const dx_slab = a.dx + offset(row);
      for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
        if constexpr (kReload<kElements>) {
          look(i, column, [](int, float) {});
        }
        Pack<T, V> dx;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dx.at[j] = static_cast<T>((g[i * V + j] - g_mean - x_hat[i * V + j] * gx_mean) * rstd);
        }
        store(dx_slab + column, dx);
      });
    }
  }
  const std::int64_t team = blockIdx.x / p.cluster;
  float* const fold = reinterpret_cast<float*>(memory + p.ring_begin());
  if (a.dweights != nullptr) {
    write_ring_partial<V, kElements>(p, at, a.dweights + offset(team), dweight, fold);
  }
  if (a.dbiases != nullptr) {
    write_ring_partial<V, kElements>(p, at, a.dbiases + offset(team), dbias, fold);
  }
  if (p.cluster > 1) {
    cluster_sync();  // nobody writes into a block that has ended
  }
#endif
}

// f(V, plan, choice), if there is one.
template <class T, class W, class F>
void with_backward_plan(const Backward<T, W>& a, F&& f) {
  if (a.rows == 0 || !device_has_rings()) {
    return;
  }
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V> pack) {
        const Choice choice = backward_choice<T>(a.columns, V > 1);
        if (choice.elements == 0) {
          return;
        }
        RingPlan p{.cluster = choice.cluster, .sources = 2};
        p.slab = static_cast<int>((a.columns + p.cluster * 64 - 1) / (p.cluster * 64) * 64);
        p.threads = ring_threads(p.slab, choice.elements);
        p.groups = p.cluster > 1 ? 1 : std::max(1, ring_groups(p.threads));
        p = complete(p, sizeof(T), V > 1, meeting_bytes<Sums<float>>(p), sizeof(W), 4);
        const int fold_bytes = p.groups > 1 ? p.groups * p.slab * static_cast<int>(sizeof(float)) : 0;
        if (p.threads == 0 || p.threads > kRingBlock || p.stages < (choice.elements > 16 ? 2 : 1) ||
            fold_bytes > p.groups * p.stages * p.stage_bytes()) {
          return;
        }
        f(pack, p, choice);
      },
      a.dy, a.x, a.weight, a.dx);
}

}  // namespace

template <class T, class W>
std::int64_t backward_ring_partial_rows(const Backward<T, W>& a) {
  std::int64_t result = 0;
  with_backward_plan(a, [&](auto, const RingPlan& p, const Choice&) {
    result = std::min<std::int64_t>(kTeams / p.cluster, (a.rows + p.groups - 1) / p.groups);
  });
  return result;
}

template <class T, class W>
void backward_ring(const Backward<T, W>& a, std::int64_t partial_rows) {
  with_backward_plan(a, [&]<int V>(std::integral_constant<int, V>, const RingPlan& p, const Choice& choice) {
    const auto grid = static_cast<unsigned>(partial_rows * p.cluster);
    const auto launch = [&]<int kElements>(std::integral_constant<int, kElements>) {
      launch_ring(layer_norm_backward_ring_kernel<T, W, V, kElements>, "layer_norm_backward_ring_kernel", p, grid, a,
                  p);
    };
    if constexpr (V <= 4) {
      launch(std::integral_constant<int, 16>{});
    } else {
      switch (choice.elements) {
        case 16: launch(std::integral_constant<int, 16>{}); break;
        case 24: launch(std::integral_constant<int, 24>{}); break;
        default: launch(std::integral_constant<int, 32>{}); break;
      }
    }
  });
}

#define MICA_INSTANTIATE(T, W)                                             \
  template std::int64_t backward_ring_partial_rows(const Backward<T, W>&); \
  template void backward_ring(const Backward<T, W>&, std::int64_t)
MICA_INSTANTIATE(Half, Half);
MICA_INSTANTIATE(Half, float);
MICA_INSTANTIATE(BFloat16, BFloat16);
MICA_INSTANTIATE(BFloat16, float);
MICA_INSTANTIATE(float, float);

}  // namespace mica::kernels::layer_norm_cuda
