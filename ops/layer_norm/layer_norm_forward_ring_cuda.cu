#include <mica/ops/layer_norm/layer_norm_cuda.cuh>
#include <mica/ops/layer_norm/layer_norm_kernels.h>
#include <mica/ops/layer_norm/ring_cuda.cuh>

namespace mica::kernels::layer_norm_cuda {

namespace {

struct Choice {
  int elements = 0;  // of a row that a thread holds; 0: no ring
  int cluster = 1;   // blocks that share a row
};

/// The choice of kernel by row length, and by whether rows can be read in packs.
template <class T>
Choice forward_choice(std::int64_t columns, bool packed) {
  if (columns <= 256 || (!packed && sizeof(T) == 2)) {
    return {};
  }
  if (!packed) {
    return {.elements = columns <= 16 * kRingBlock ? 16 : 0};
  }
  if (sizeof(T) == 4 && columns <= 2048) {
    return {.elements = 8};
  }
  for (int cluster = 1; cluster <= 4; cluster *= 2) {
    if (const int elements = ring_elements((columns + cluster - 1) / cluster, {32, 24}); elements != 0) {
      return {.elements = elements, .cluster = cluster};
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
#pragma unroll 1
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

#endif

template <class T, class W, int V, int kElements>
__global__ void __launch_bounds__(kRingBlock, 1)
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
    float x[kElements];
    float shift;
    float first_shift;
    float scale = 1;
    Moments<float> m;
#pragma unroll 1
    while (true) {
      shift = at.columns > 0 ? static_cast<float>(slab[0]) * scale : 0.0f;
      float sum = 0;
      for_slab_packs<V, kElements>(p, at, [&](int i, int column) {
        const Pack<T, V> pack = load<V>(slab + column);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          x[i * V + j] = static_cast<float>(pack.at[j]) * scale - shift;
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
      m = combine_parts(parts, meeting.count(), in_row);
      first_shift = parts[0].shift;
      if (scale != 1 || isfinite(m.m2)) {
        break;
      }
      scale = kShrink<float>;
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
    const float mean = m.mean - (shift - first_shift);
    const float rstd = rsqrt(m.m2 * in_row.reciprocal + a.eps * scale * scale);
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
      a.mean[row] = (first_shift + m.mean) * (scale == 1 ? 1.0f : 1.0f / kShrink<float>);
      a.rstd[row] = rstd * scale;
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
  if (!device_has_rings()) {
    return false;
  }
  bool launched = false;
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        const Choice choice = forward_choice<T>(a.columns, V > 1);
        if (choice.elements == 0) {
          return;
        }
        RingPlan p{.cluster = choice.cluster};
        p.slab = static_cast<int>((a.columns + p.cluster * 64 - 1) / (p.cluster * 64) * 64);
        p.threads = ring_threads(p.slab, choice.elements);
        p.groups = p.cluster > 1 ? 1 : std::max(1, ring_groups(p.threads));
        p = complete(p, sizeof(T), V > 1, meeting_bytes<Part>(p), 2 * sizeof(W), 4);
        if (p.threads == 0 || p.threads > kRingBlock) {
          return;
        }
        const std::int64_t most = cuda::multiprocessor_count() / p.cluster;
        const std::int64_t teams = std::min(most, (a.rows + p.groups - 1) / p.groups);
        const auto grid = static_cast<unsigned>(teams * p.cluster);
        const auto launch = [&]<int kElements>(std::integral_constant<int, kElements>) {
          launch_ring(layer_norm_forward_ring_kernel<T, W, V, kElements>, "layer_norm_forward_ring_kernel", p, grid, a,
                      p);
        };
        if constexpr (V == 1) {
          launch(std::integral_constant<int, 16>{});
        } else {
          switch (choice.elements) {
            case 8: launch(std::integral_constant<int, 8>{}); break;
            case 24: launch(std::integral_constant<int, 24>{}); break;
            default: launch(std::integral_constant<int, 32>{}); break;
          }
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
