#include <mica/ops/layer_norm/layer_norm_cuda.cuh>
#include <mica/ops/layer_norm/layer_norm_kernels.h>
#include <mica/ops/layer_norm/ring_cuda.cuh>

#ifdef MICA_RING_TUNE
extern "C" int mica_forward_tune[5];
int mica_forward_tune[5] = {};
#endif

namespace mica::kernels::layer_norm_cuda {

namespace {

/// What a thread holds of a row, how many rows a block works on at once, how many blocks share one, and how many blocks
/// a multiprocessor has. elements = 0: no ring.
struct Choice {
  int elements = 0;
  int groups = 1;
  int cluster = 1;
  int blocks = 1;
  int stages = 4;
};

/// The choice of kernel by row length.
Choice forward_choice(std::int64_t columns, int element_bytes) {
#ifdef MICA_RING_TUNE
  if (mica_forward_tune[0] != 0) {
    return {mica_forward_tune[0], mica_forward_tune[1], mica_forward_tune[2], mica_forward_tune[3],
            mica_forward_tune[4]};
  }
#endif
  const bool narrow = element_bytes == 2;
  if (columns <= 256) {
    return {};
  }
  if (columns <= 2048) {
    return {.elements = narrow ? 16 : 8, .groups = 512 / 256, .blocks = narrow ? 2 : 2};
  }
  if (columns <= 8192) {
    return {.elements = 16, .blocks = 2};
  }
  if (columns <= 16384) {
    return {.elements = 16, .cluster = 2, .blocks = narrow ? 2 : 1};
  }
  for (const int elements : {16, 32}) {
    for (int cluster = 4; cluster <= kRingCluster; cluster *= 2) {
      if (columns <= std::int64_t{elements} * kRingBlock * cluster) {
        return {.elements = elements, .cluster = cluster};
      }
    }
  }
  return {};
}

// Moments relative to `shift`, which is taken from each element first: rows far from zero lose nothing then.
struct Part {
  float count;
  float mean;
  float m2;
  float shift;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The moments of a row from those of its warps, relative to the shift of the first: the same bits in every thread.
__device__ Moments<float> combine_parts(const Part* parts, int count, const Count<float>& in_row) {
  const float shift = parts[0].shift;
  const int lane = threadIdx.x % kWarp;
  const auto sum_over = [&](auto term) {
    float sum = lane < count ? term(parts[lane]) : 0.0f;
    for (int i = lane + kWarp; i < count; i += kWarp) {
      sum += term(parts[i]);
    }
    return sum_lanes<kWarp>(sum);
  };
  const float mean =
      sum_over([&](const Part& part) { return part.count * (part.mean + (part.shift - shift)); }) * in_row.reciprocal;
  const float m2 = sum_over([&](const Part& part) {
    const float difference = part.mean + (part.shift - shift) - mean;
    return part.m2 + part.count * difference * difference;
  });
  return {in_row.n, mean, m2};
}

// A row whose squares overflow, done again with all of it brought into range. Rare, so it only has to be right.
template <class T, class W, int V>
__device__ __noinline__ void forward_shrunk_row(const Forward<T, W>& a, const Place& at, Meeting<Part>& meeting,
                                                const T* slab, const W* weight, const W* bias, std::int64_t row,
                                                int threads) {
  const Count<float> in_row(static_cast<float>(a.columns));
  constexpr float kScale = kShrink<float>;
  const float shift = at.columns > 0 ? static_cast<float>(slab[0]) * kScale : 0.0f;
  const auto for_own = [&](auto f) {
#pragma unroll 1
    for (int i = 0; i < at.packs; ++i) {
#pragma unroll 1
      for (int j = 0; j < V; ++j) {
        const int column = (i * threads + at.lane) * V + j;
        f(column, static_cast<float>(slab[column]) * kScale - shift);
      }
    }
  };
  const Count<float> in_share(static_cast<float>(at.packs * V));
  float sum = 0;
  for_own([&](int, float x) { sum += x; });
  const float own_mean = sum * in_share.reciprocal;
  float m2 = 0;
  for_own([&](int, float x) { m2 += (x - own_mean) * (x - own_mean); });
  const Moments<float> warp =
      combine_lanes<kWarp>(Moments<float>{in_share.n, own_mean, m2}, Count<float>(sum_lanes<kWarp>(in_share.n)));
  const Part* const parts = meeting.swap({warp.count, warp.mean, warp.m2, shift}, at.lane);
  const Moments<float> m = combine_parts(parts, meeting.count(), in_row);
  const float mean = m.mean - (shift - parts[0].shift);
  const float rstd = rsqrt(m.m2 * in_row.reciprocal + a.eps * kScale * kScale);
  T* const y = a.y + row * a.columns + at.begin;
  for_own([&](int column, float x) {
    const float x_hat = (x - mean) * rstd;
    y[column] = static_cast<T>(x_hat * static_cast<float>(weight[column]) + static_cast<float>(bias[column]));
  });
  if (at.lane == 0 && at.rank == 0 && a.mean != nullptr) {
    a.mean[row] = (m.mean + parts[0].shift) * (1.0f / kScale);
    a.rstd[row] = rstd * kScale;
  }
}

#endif

template <class T, class W, int V, int kElements>
__global__ void __launch_bounds__(kRingBlock, kElements <= 16 ? 2 : 1)
    layer_norm_forward_ring_kernel(const Forward<T, W> a, const RingPlan p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  const Place at(p, a.columns, V);
  Ring<T, V> ring(p, at, memory);
  Meeting<Part> meeting(p, at, memory);
  const auto source = [&](std::int64_t row) { return a.x + row * a.columns + at.begin; };
  for (int stage = 0; stage < p.stages; ++stage) {
    const std::int64_t row = at.first + stage * at.step;
    if (row < a.rows) {
      ring.fetch(stage, source(row));
    }
  }
  W* const weight = reinterpret_cast<W*>(memory + p.parameter_begin());
  W* const bias = weight + p.slab;
  keep_parameter<V>(at, a.weight, 1, weight);
  keep_parameter<V>(at, a.bias, 0, bias);
  const Count<float> in_row(static_cast<float>(a.columns));
  const Count<float> in_share(static_cast<float>(at.packs * V));
  const Count<float> in_warp(sum_lanes<kWarp>(in_share.n));
  __syncthreads();  // the ring's barriers and the parameters are there
  if (p.cluster > 1) {
    cluster_sync();  // the other blocks have begun: their memory may be written
  }

  int stage = 0;
  unsigned parity = 0;
  for (std::int64_t row = at.first; row < a.rows; row += at.step) {
    ring.wait(stage, parity);
    const T* const slab = ring.slab(stage, 0, source(row));
    const float shift = at.columns > 0 ? static_cast<float>(slab[0]) : 0.0f;
    float x[kElements];
    float sum = 0;
    for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
      const Pack<T, V> pack = load<V>(slab + column);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[i * V + j] = static_cast<float>(pack.at[j]) - shift;
        sum += x[i * V + j];
      }
    });
    const float own_mean = sum * in_share.reciprocal;
    float m2 = 0;
    for_slab_packs<V, kElements>(p, at, [&](int i, int) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float difference = x[i * V + j] - own_mean;
        m2 += difference * difference;
      }
    });
    const Moments<float> warp = combine_lanes<kWarp>(Moments<float>{in_share.n, own_mean, m2}, in_warp);
    const Part* const parts = meeting.swap({warp.count, warp.mean, warp.m2, shift}, at.lane);
    const Moments<float> m = combine_parts(parts, meeting.count(), in_row);
    const float first_shift = parts[0].shift;
    const bool fits = isfinite(m.m2);
    if (!fits) {
      forward_shrunk_row<T, W, V>(a, at, meeting, slab, weight, bias, row, p.threads);
      meeting.sync_group();
    }
    // All of the group have read the stage.
    const std::int64_t next = row + p.stages * at.step;
    if (next < a.rows) {
      ring.fetch(stage, source(next));
    }
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
    if (!fits) {
      continue;
    }

    const float mean = m.mean - (shift - first_shift);
    const float rstd = rsqrt(m.m2 * in_row.reciprocal + a.eps);
    T* const y_slab = a.y + row * a.columns + at.begin;
    for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
      const Pack<W, V> weights = load<V>(weight + column);
      const Pack<W, V> biases = load<V>(bias + column);
      Pack<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x_hat = (x[i * V + j] - mean) * rstd;
        y.at[j] = static_cast<T>(x_hat * static_cast<float>(weights.at[j]) + static_cast<float>(biases.at[j]));
      }
      store(y_slab + column, y);
    });
    if (at.lane == 0 && at.rank == 0 && a.mean != nullptr) {
      a.mean[row] = first_shift + m.mean;
      a.rstd[row] = rstd;
    }
  }
  if (p.cluster > 1) {
    cluster_sync();  // nobody writes into a block that has ended
  }
#endif
}

}  // namespace

template <class T, class W>
bool forward_ring(const Forward<T, W>& a) {
  const Choice choice = forward_choice(a.columns, sizeof(T));
  if (choice.elements == 0 || !device_has_rings()) {
    return false;
  }
  bool launched = false;
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        if (V == 1 && sizeof(T) == 2 && choice.cluster == 1) {
          return;  // two bytes at a time: the kernels without a ring are not slower
        }
        RingPlan p{.groups = choice.groups, .cluster = choice.cluster};
        p.slab = static_cast<int>((a.columns + p.cluster * 64 - 1) / (p.cluster * 64) * 64);
        p.threads = (p.slab + choice.elements * kWarp - 1) / (choice.elements * kWarp) * kWarp;
        p.groups = std::max(1, std::min(p.groups, kRingBlock / p.threads));
        p = complete(p, sizeof(T), V > 1, Meeting<Part>::bytes(p), 2 * sizeof(W), choice.blocks, choice.stages);
        if (p.threads == 0 || p.threads > kRingBlock) {
          return;
        }
        const std::int64_t most = cuda::multiprocessor_count() * choice.blocks / p.cluster;
        const std::int64_t teams = std::min(most, (a.rows + p.groups - 1) / p.groups);
        const auto grid = static_cast<unsigned>(teams * p.cluster);
        const auto launch = [&]<int kElements>(std::integral_constant<int, kElements>) {
          launch_ring(layer_norm_forward_ring_kernel<T, W, V, kElements>, "layer_norm_forward_ring_kernel", p, grid, a,
                      p);
        };
        switch (choice.elements) {
          case 16: launch(std::integral_constant<int, 16>{}); break;
          default:
            if constexpr (V > 1) {
              launch(std::integral_constant<int, 32>{});
              break;
            }
            return;
        }
        launched = true;
      },
      a.x, a.weight, a.bias, a.y);
  return launched;
}

template bool forward_ring(const Forward<BFloat16, BFloat16>&);
template bool forward_ring(const Forward<BFloat16, float>&);
template bool forward_ring(const Forward<Half, float>&);
template bool forward_ring(const Forward<Half, Half>&);
template bool forward_ring(const Forward<float, float>&);

}  // namespace mica::kernels::layer_norm_cuda
