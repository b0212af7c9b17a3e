#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/layer_norm_backward_cuda.cuh>

// Stage 1 of backward for rows that stream through shared memory.

namespace mica::kernels::layer_norm_cuda {

using namespace rows;

namespace {

constexpr int kMostThreads = 512;  // of a block

// P packs of a row a thread. Where registers allow, x̂ and g = dy · weight stay in them from the first look at a row,
// for its sums, to the second, for dx; else the second reads shared memory again. A cluster, whose blocks take long to
// meet, begins a row before it ends the one before.
template <class T, class W, int V, int P, Team kTeam, int C, int D>
__global__ void __launch_bounds__(kMostThreads, 1)
    layer_norm_backward_stream_kernel(const Backward<T, W> a, const StreamPlan p) {
  constexpr int kChunk = P / C;
  static_assert(C * kChunk == P);
  constexpr bool kAhead = kTeam == Team::cluster;  // a row is begun before the one before it is ended
  constexpr bool kKeep = !kAhead && C == 1 && P * V <= 16;
  constexpr bool kWeightsInRegisters = P * V <= 16;
  extern __shared__ __align__(128) unsigned char memory[];
  const StreamPlace<kTeam> at(p, a.columns, V, P);
  Meeting<kTeam> meeting(p, at.rank, memory);
  Stream<T, V, 2, kChunk, D> stream(p, memory);
  const std::int64_t first_column = at.begin + std::int64_t{at.first_pack} * V;
  // Fetches chunk after chunk.
  std::int64_t ahead_row = at.first;
  std::int64_t ahead = at.first * a.columns + first_column;
  const std::int64_t row_step = at.step * a.columns;
  const auto fetch = [&](int place, int c) {
    if (ahead_row < a.rows) {
      const std::int64_t from = ahead + c * (kChunk * kWarp * V);
      stream.fetch(place, at.packs - c * kChunk, a.x + from, a.dy + from);
    }
    cuda::commit_copies();  // also of nothing: they are counted
    if (c == C - 1) {
      ahead_row += at.step;
      ahead += row_step;
    }
  };
#pragma unroll 1
  for (int i = 0; i < D; ++i) {
    fetch(i, i % C);
  }
  RowStatistics<T, W> statistics(a, at.first, at.step);
  W* const weight_slab = reinterpret_cast<W*>(memory + p.kept_begin());
  float weights[kWeightsInRegisters ? P * V : 1] = {};
  if constexpr (kWeightsInRegisters) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < at.packs) {
        float w[V];
        unpack(load_or<V>(a.weight, first_column + i * (kWarp * V), 1), w);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          weights[i * V + j] = w[j];
        }
      }
    }
  } else {
#pragma unroll 1
    for (int column = (threadIdx.y * blockDim.x + threadIdx.x) * V; column < p.threads * (P * V);
         column += p.block() * V) {
      Pack<W, V> pack = {};
      if (column < at.columns) {
        pack = load_or<V>(a.weight, at.begin + column, 1);
      }
      store(weight_slab + column, pack);
    }
  }
  float dweight[P * V] = {};
  float dbias[P * V] = {};
  const float reciprocal = 1.0f / static_cast<float>(a.columns);
  meeting.open();
  cuda::allow_dependents();

  float x_hat[kKeep ? P * V : V];
  float g[kKeep ? P * V : V];
  // x̂, g and dy of pack i of the row at `place`.
  const auto look = [&](int place, int i, const Statistics<T>& of_row, float(&dy)[V]) {
    float x[V];
    unpack(stream.at(place, 0, i % kChunk), x);
    unpack(stream.at(place, 1, i % kChunk), dy);
    float w[V];
    if constexpr (kWeightsInRegisters) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        w[j] = weights[i * V + j];
      }
    } else {
      unpack(load<V>(weight_slab + (at.first_pack + i * kWarp) * V), w);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x_hat[(kKeep ? i * V : 0) + j] = of_row.x_hat(x[j]);
      g[(kKeep ? i * V : 0) + j] = dy[j] * w[j];
    }
  };
  // The sums of the first numbers of up to 16 members, in the lower 16 lanes, and of the second ones, in the upper.
  const auto sum_members = [](const float* numbers, int members) {
    const int lane = threadIdx.x % kWarp;
    const int member = lane % (kWarp / 2);
    return sum_lanes<kWarp / 2>(member < members ? numbers[lane / (kWarp / 2) * members + member] : 0.0f);
  };
  T* dx = a.dx + at.first * a.columns + first_column;
  // The first look at a row, of which `pending` younger chunks may still be under way: what it adds to dweight and
  // dbias, and its two sums.
  const auto begin_row = [&](int place, const Statistics<T>& of_row, int pending) {
    float g_sum = 0;
    float gx_sum = 0;
#pragma unroll
    for (int c = 0; c < C; ++c, place = stream.next(place)) {
      cuda::wait_copies(pending - (kKeep ? 0 : c));
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
        // Absent packs are zeros, but many packs without branches between them would fill the registers.
        if (P * V <= 16 || i < at.packs) {
          float dy[V];
          look(place, i, of_row, dy);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int k = (kKeep ? i * V : 0) + j;
            g_sum += g[k];
            gx_sum = fma(g[k], x_hat[k], gx_sum);
            dweight[i * V + j] = fma(dy[j], x_hat[k], dweight[i * V + j]);
            dbias[i * V + j] += dy[j];
          }
        }
      }
      if constexpr (kKeep) {
        fetch(place, (D + c) % C);
      }
    }
    return sum_pair(g_sum, gx_sum);
  };
  // The second look: dx, from the sums over the row.
  const auto end_row = [&](int place, const Statistics<T>& of_row, float sums) {
    const float rstd = of_row.rstd;
    if constexpr (kTeam != Team::warp) {
      sums = sum_members(meeting.take(), meeting.members());
    }
    // dx = g · rstd + x̂ · slope + offset
    const float offset = -__shfl_sync(kAllLanes, sums, 0) * reciprocal * rstd;
    const float slope = -__shfl_sync(kAllLanes, sums, kWarp / 2) * reciprocal * rstd;
#pragma unroll
    for (int c = 0; c < C; ++c, place = stream.next(place)) {
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
        if (i < at.packs) {
          float values[V];
          if constexpr (!kKeep) {
            look(place, i, of_row, values);
          }
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int k = (kKeep ? i * V : 0) + j;
            values[j] = fma(g[k], rstd, fma(x_hat[k], slope, offset));
          }
          store(dx + i * (kWarp * V), pack_of<T>(values));
        }
      }
      if constexpr (!kKeep) {
        fetch(place, (D + c) % C);
      }
    }
    dx += row_step;
  };
  const auto after = [&](int place) {  // a row
#pragma unroll
    for (int c = 0; c < C; ++c) {
      place = stream.next(place);
    }
    return place;
  };

  Statistics<T> of_row;
  int place = 0;
  if (kAhead && at.first < a.rows) {
    of_row = statistics.take();
    meeting.leave(begin_row(place, of_row, D - 1), sum_members);
  }
#pragma unroll 1
  for (std::int64_t row = at.first; row < a.rows; row += at.step) {
    float sums = 0;
    if constexpr (kAhead) {
      const Statistics<T> next = statistics.take();
      if (row + at.step < a.rows) {
        meeting.leave(begin_row(after(place), next, D - 1 - C), sum_members);
      }
      end_row(place, of_row, sums);
      of_row = next;
    } else {
      of_row = statistics.take();
      sums = begin_row(place, of_row, D - 1);
      if constexpr (kTeam != Team::warp) {
        meeting.leave(sums, sum_members);
      }
      end_row(place, of_row, sums);
    }
    place = after(place);
  }

  // The block's row of partials: its groups' sums, added in order.
  constexpr int kPart = V < 4 ? V : 4;
  cuda::wait_copies<0>();
  float* const fold = reinterpret_cast<float*>(memory + p.stream_begin());  // dweight of each group, then dbias
  const std::int64_t partial = (kTeam == Team::cluster ? blockIdx.x / p.cluster : blockIdx.x) * a.columns + at.begin;
  if (p.groups > 1) {
    __syncthreads();  // the memory is free
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float* const partials = which == 0 ? a.dweights : a.dbiases;
    float* const own = p.groups > 1 ? fold + (which * p.groups + threadIdx.y) * p.slab : partials + partial;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < at.packs && partials != nullptr) {
#pragma unroll
        for (int part = 0; part < V; part += kPart) {
          Pack<float, kPart> values;
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            values.at[j] = which == 0 ? dweight[i * V + part + j] : dbias[i * V + part + j];
          }
          store(own + at.first_pack * V + i * (kWarp * V) + part, values);
        }
      }
    }
  }
  if (p.groups > 1) {
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float* const partials = which == 0 ? a.dweights : a.dbiases;
#pragma unroll 1
      for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < at.columns && partials != nullptr;
           column += p.block()) {
        float sum = 0;
#pragma unroll 4
        for (int i = 0; i < p.groups; ++i) {
          sum += fold[(which * p.groups + i) * p.slab + column];
        }
        partials[partial + column] = sum;
      }
    }
  }
  meeting.close();
}

// On the host.

// Chunks a row, by packs a thread, which they divide evenly.
template <int V>
constexpr int chunks_of(int packs) {
  return packs * V > 16 && packs % 2 == 0 ? 2 : 1;
}

/// The choice for rows of a length that can be read in packs of V. packs = 0: there is none.
template <int V>
StreamChoice choose(std::int64_t columns) {
  if (columns <= 256) {
    return {};
  }
  if (V == 8) {
    if (columns <= 16384) {
      return columns <= 1536    ? StreamChoice{.packs = 1, .depth = 2, .cluster = 1}
             : columns <= 8192  ? StreamChoice{.packs = 2, .depth = 2, .cluster = 1}
             : columns <= 10240 ? StreamChoice{.packs = 2, .depth = 4, .cluster = 4}
             : columns <= 12288 ? StreamChoice{.packs = 3, .depth = 2, .cluster = 1}
                                : StreamChoice{.packs = 2, .depth = 4, .cluster = 2};
    }
  } else if (columns <= 8192) {
    return {.packs = V == 1 ? 16 : columns <= 1024 ? 2 : 4, .depth = 2, .cluster = 1};
  }
  constexpr int kClusterPacks = V == 1 ? 16 : 4;
  for (const int cluster : {8, 16}) {
    if (columns <= std::int64_t{cluster} * kMostThreads * kClusterPacks * V) {
      return {.packs = kClusterPacks, .depth = V == 8 ? 6 : 3, .cluster = cluster};
    }
  }
  return {};
}

template <class T, class W, int V>
StreamPlan plan_of(const StreamChoice& choice, std::int64_t columns) {
  StreamPlan p{.packs = choice.packs, .cluster = choice.cluster};
  divide(p, columns, V, kMostThreads);
  p.kept_bytes = p.packs * V <= 16 ? 0 : p.threads * p.packs * V * static_cast<int>(sizeof(W));
  const int fold_bytes = p.groups > 1 ? 2 * p.groups * p.slab * static_cast<int>(sizeof(float)) : 0;
  const int chunk_bytes = p.block() * (p.packs / chunks_of<V>(p.packs)) * 2 * V * static_cast<int>(sizeof(T));
  p.stream_bytes = std::max(fold_bytes, choice.depth * chunk_bytes);
  if (p.block() > kMostThreads || p.shared_bytes() > kStreamShared) {
    p.packs = 0;
  }
  return p;
}

// f.operator()<V>(choice, plan), if there is one.
template <class T, class W, class F>
void with_plan(const Backward<T, W>& a, F&& f) {
  if (a.rows == 0 || !cuda::device_has_clusters()) {
    return;
  }
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        if constexpr (V > 1 || sizeof(T) == 4) {
          const StreamChoice choice = choose<V>(a.columns);
          if (choice.packs != 0) {
            const StreamPlan p = plan_of<T, W, V>(choice, a.columns);
            if (p.packs != 0) {
              f.template operator()<V>(choice, p);
            }
          }
        }
      },
      a.dy, a.x, a.weight, a.dx);
}

}  // namespace

template <class T, class W>
std::int64_t stream_partial_rows(const Backward<T, W>& a) {
  std::int64_t result = 0;
  with_plan(a, [&]<int V>(const StreamChoice&, const StreamPlan& p) { result = stream_teams(p, a.rows); });
  return result;
}

template <class T, class W>
void backward_stream(const Backward<T, W>& a) {
  with_plan(a, [&]<int V>(const StreamChoice& choice, const StreamPlan& p) {
    const Team team = p.cluster > 1 ? Team::cluster : p.threads == kWarp ? Team::warp : Team::block;
    bool found = false;
    const auto run = [&]<int P, Team kTeam, int D>() {
      if (choice.packs == P && team == kTeam && choice.depth == D) {
        constexpr int C = chunks_of<V>(P);
        found = true;
        launch_stream(layer_norm_backward_stream_kernel<T, W, V, P, kTeam, C, D>, "layer_norm_backward_stream_kernel",
                      p, a.rows, a);
      }
    };
    // What choose() may return.
    if constexpr (V == 8) {
      run.template operator()<1, Team::block, 2>();
      run.template operator()<2, Team::block, 2>();
      run.template operator()<3, Team::block, 2>();
      run.template operator()<2, Team::cluster, 4>();
      run.template operator()<4, Team::cluster, 6>();
    } else if constexpr (V == 4) {
      run.template operator()<2, Team::block, 2>();
      run.template operator()<4, Team::block, 2>();
      run.template operator()<4, Team::cluster, 3>();
    } else {
      run.template operator()<16, Team::warp, 2>();
      run.template operator()<16, Team::block, 2>();
      run.template operator()<16, Team::cluster, 3>();
    }
    check(found, "layer_norm: there is no backward kernel with {} packs a thread", choice.packs);
  });
}

#define MICA_INSTANTIATE(T, W)                                      \
  template std::int64_t stream_partial_rows(const Backward<T, W>&); \
  template void backward_stream(const Backward<T, W>&)
MICA_FOR_FLOAT_SUM_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::layer_norm_cuda
