#include <algorithm>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/add_layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/stream_norm_cuda.cuh>

// T is the type of the matrices, W that of the parameters. V is the number of columns in a pack of 16 bytes, P that of
// packs of a row that a thread has. Stage 1 writes dresidual and dx, and G rows of partial dweight and dbias; stage 2,
// layer_norm's, adds those up.

namespace mica::kernels {

using namespace rows;

namespace {

constexpr int kMostThreads = 512;  // of a block
// Rows in shared memory, one of them in use, by packs of a row that a thread has.
constexpr int depth_for(int packs) { return packs == 1 ? 4 : 2; }

template <class T, class W>
struct Arguments {
  layer_norm_cuda::Backward<T, W> norm;  // dx: dresidual
  const T* dsum;
  T* dx;  // null: not wanted
  PhiloxKey key;
  std::uint32_t threshold;
  float scale;
};

// Whether x̂ and g = dy · weight stay in registers from the sums over a row to its gradients; else they come from shared
// memory again.
template <int V, int P, bool kDrop>
constexpr bool kKeep = P* V <= (kDrop ? 8 : 16);
template <int V, int P, bool kDrop>
constexpr bool kWeightsInRegisters = P* V <= 16 && !kDrop;

// Rows stream as in layer_norm's backward, with dsum beside them. kBias: the rows of dx are summed too.
template <class T, class W, int P, bool kDrop, bool kBias>
__global__ void __launch_bounds__(kMostThreads, 1)
    add_layer_norm_backward_kernel(const Arguments<T, W> arguments, const StreamPlan p) {
  constexpr int V = 16 / sizeof(T);
  constexpr int kDepth = depth_for(P);
  constexpr bool kHeld = kKeep<V, P, kDrop>;
  extern __shared__ __align__(128) unsigned char memory[];
  const auto& a = arguments.norm;
  const StreamPlace<Team::block> at(p, a.columns, V, P);
  Meeting<Team::block> meeting(p, 0, memory);
  Stream<T, V, 3, P, kDepth> stream(p, memory);
  const std::int64_t row_step = at.step * a.columns;
  std::int64_t ahead_row = at.first;
  std::int64_t ahead = at.first * a.columns + at.first_pack * V;
  std::int64_t current = ahead;
  const auto fetch = [&](int place) {  // the next row that is not yet on its way
    if (ahead_row < a.rows) {
      stream.fetch(place, at.packs, a.x + ahead, a.dy + ahead, arguments.dsum + ahead);
    }
    cuda::commit_copies();  // also of nothing: they are counted
    ahead_row += at.step;
    ahead += row_step;
  };
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    fetch(i);
  }
  layer_norm_cuda::RowStatistics<T, W> statistics(a, at.first, at.step);
  const Weights<W, V, P, kWeightsInRegisters<V, P, kDrop>> weights(a.weight, p, at, memory);
  float dweight[P * V] = {};
  float dbias[P * V] = {};
  [[maybe_unused]] float dx_sum[kBias ? P * V : 1] = {};
  const float in_row = 1.0f / static_cast<float>(a.columns);
  [[maybe_unused]] const PhiloxKey key = kDrop ? absolute_key(arguments.key) : PhiloxKey{};
  meeting.open();
  cuda::allow_dependents();

  float x_hat[kHeld ? P * V : V];
  float g[kHeld ? P * V : V];
  // x̂, g and dy of pack i of the row at `place`.
  const auto look = [&](int place, int i, const layer_norm_cuda::Statistics<T>& of_row, float(&dy)[V]) {
    float x[V];
    float w[V];
    unpack(stream.at(place, 0, i), x);
    unpack(stream.at(place, 1, i), dy);
    weights.at(i, w);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x_hat[(kHeld ? i * V : 0) + j] = of_row.x_hat(x[j]);
      g[(kHeld ? i * V : 0) + j] = dy[j] * w[j];
    }
  };
  int place = 0;
#pragma unroll 1
  for (std::int64_t row = at.first; row < a.rows; row += at.step) {
    const layer_norm_cuda::Statistics<T> of_row = statistics.take();
    cuda::wait_copies<kDepth - 1>();
    float g_sum = 0;
    float gx_sum = 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < at.packs) {
        float dy[V];
        look(place, i, of_row, dy);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = (kHeld ? i * V : 0) + j;
          g_sum += g[k];
          gx_sum = fma(g[k], x_hat[k], gx_sum);
          dweight[i * V + j] = fma(dy[j], x_hat[k], dweight[i * V + j]);
          dbias[i * V + j] += dy[j];
        }
      }
    }
    meeting.leave(sum_pair(g_sum, gx_sum), [](const float*, int) { return 0.0f; });
    const float* const numbers = meeting.take();
    const int lane = threadIdx.x % kWarp;
    const int member = lane % (kWarp / 2);
    const float sums = sum_lanes<kWarp / 2>(
        member < meeting.members() ? numbers[lane / (kWarp / 2) * meeting.members() + member] : 0.0f);
    // dresidual = dsum + g · rstd + x̂ · slope + offset
    const float offset = -__shfl_sync(kAllLanes, sums, 0) * in_row * of_row.rstd;
    const float slope = -__shfl_sync(kAllLanes, sums, kWarp / 2) * in_row * of_row.rstd;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < at.packs) {
        const std::int64_t element = current + i * (kWarp * V);
        float values[V];
        if constexpr (!kHeld) {
          look(place, i, of_row, values);
        }
        unpack(stream.at(place, 2, i), values);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = (kHeld ? i * V : 0) + j;
          values[j] += fma(g[k], of_row.rstd, fma(x_hat[k], slope, offset));
        }
        if (a.dx != nullptr) {
          store(a.dx + element, pack_of<T>(values));
        }
        if constexpr (kDrop) {
          if (arguments.dx != nullptr) {
            drop_pack(values, element, key, arguments.threshold, arguments.scale);
            store(arguments.dx + element, pack_of<T>(values));
          }
        }
        if constexpr (kBias) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dx_sum[i * V + j] += values[j];
          }
        }
      }
    }
    fetch(place);
    place = stream.next(place);
    current += row_step;
  }

  cuda::wait_copies<0>();
  __syncthreads();  // the memory is free
  float* const fold = reinterpret_cast<float*>(memory + p.stream_begin());
  if (a.dweights != nullptr) {
    write_partials<V, P>(dweight, a.dweights + blockIdx.x * a.columns, p, at, fold);
  }
  if (a.dbiases != nullptr) {
    write_partials<V, P>(dbias, a.dbiases + blockIdx.x * a.columns, p, at, fold + p.groups * p.slab);
  }
  if constexpr (kBias) {
    write_partials<V, P>(dx_sum, a.dx_sums + blockIdx.x * a.columns, p, at, fold + 2 * p.groups * p.slab);
  }
}

// On the host.

/// Packs a thread, by row length; 0: such rows do not stream.
template <int V>
int packs_for(std::int64_t columns, bool drops) {
  if (columns <= 256 || (drops && columns > 8192)) {
    return 0;
  }
  if (V == 8) {
    const int least = columns <= 1536 ? 1 : columns <= 8192 ? 2 : 3;
    return columns <= 12288 ? least : 0;
  }
  return columns > 8192 ? 0 : columns <= 1024 ? 2 : 4;
}

template <class T, class W, bool kDrop>
StreamPlan plan_of(std::int64_t columns, int packs) {
  constexpr int V = 16 / sizeof(T);
  StreamPlan p{.packs = packs};
  divide(p, columns, V, kMostThreads);
  const bool in_registers = packs * V <= 16 && !kDrop;
  p.kept_bytes = in_registers ? 0 : p.threads * packs * V * static_cast<int>(sizeof(W));
  const int fold_bytes = p.groups > 1 ? 3 * p.groups * p.slab * static_cast<int>(sizeof(float)) : 0;
  p.stream_bytes = std::max(fold_bytes, depth_for(packs) * p.block() * packs * 3 * V * static_cast<int>(sizeof(T)));
  return p;
}

template <class T, class W, bool kDrop>
void launch_backward(Arguments<T, W> a, int packs, Device device) {
  const StreamPlan p = plan_of<T, W, kDrop>(a.norm.columns, packs);
  const std::int64_t G = stream_teams(p, a.norm.rows);
  const Tensor partials = allocate_partials(a.norm, G, device);
  const auto launch = [&]<int P>() {
    const auto run = [&](auto kernel) { launch_stream(kernel, "add_layer_norm_backward_kernel", p, a.norm.rows, a); };
    if constexpr (sizeof(T) == 2 && P == 1) {
      if (a.norm.dx_sum != nullptr) {
        return run(add_layer_norm_backward_kernel<T, W, P, kDrop, true>);
      }
    }
    run(add_layer_norm_backward_kernel<T, W, P, kDrop, false>);
  };
  if constexpr (sizeof(T) == 4) {
    packs == 2 ? launch.template operator()<2>() : launch.template operator()<4>();
  } else {
    switch (packs) {
      case 1: launch.template operator()<1>(); break;
      case 2: launch.template operator()<2>(); break;
      default:
        if constexpr (!kDrop) {
          launch.template operator()<3>();
        }
    }
  }
  layer_norm_cuda::add_partials(a.norm, G);
}

template <class T, class W>
bool backward(const AddLayerNormBackward& args) {
  constexpr int V = 16 / sizeof(T);
  const Arguments<T, W> a{.norm = {.rows = args.rows,
                                   .columns = args.columns,
                                   .dy = args.dy.data<T>(),
                                   .x = args.sum.data<T>(),
                                   .weight = args.weight.data_or_null<W>(),
                                   .mean = args.mean.data<float>(),
                                   .mean_rest = mean_rest_of<float>(args.mean),
                                   .rstd = args.rstd.data<float>(),
                                   .dx = args.dresidual.data_or_null<T>(),
                                   .dweight = args.dweight.data_or_null<W>(),
                                   .dbias = args.dbias.data_or_null<W>(),
                                   .dx_sum = args.dx_bias.data_or_null<T>()},
                          .dsum = args.dsum.data<T>(),
                          .dx = args.dx.data_or_null<T>(),
                          .key = args.dropout.key,
                          .threshold = args.dropout.threshold,
                          .scale = static_cast<float>(args.dropout.scale())};
  int packs = cuda::device_has_clusters() ? packs_for<V>(args.columns, args.dx.defined()) : 0;
  with_pack_size<T>(
      args.columns, [&]<int kPack>(std::integral_constant<int, kPack>) { packs = kPack == V ? packs : 0; }, a.dsum,
      a.norm.dy, a.norm.x, a.norm.weight, a.norm.dx, a.dx);
  if (packs > 0) {
    a.dx != nullptr ? launch_backward<T, W, true>(a, packs, args.sum.device())
                    : launch_backward<T, W, false>(a, packs, args.sum.device());
  }
  return packs > 0;
}

}  // namespace

bool add_layer_norm_backward(Cuda, const AddLayerNormBackward& args) {
  const Tensor& parameter = args.weight.defined()    ? args.weight
                            : args.dweight.defined() ? args.dweight
                            : args.dbias.defined()   ? args.dbias
                                                     : args.sum;
  bool done = false;
  on_row_types(args.sum.dtype(), parameter.dtype(), "add_layer_norm", [&]<class T, class W>() {
    if constexpr (sizeof(T) <= sizeof(float)) {
      done = backward<T, W>(args);
    }
  });
  return done;
}

}  // namespace mica::kernels
