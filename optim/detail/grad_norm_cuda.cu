// The norm of all gradients:
//
//     gradients   | chunk 0 | chunk 1 | chunk 2 | …      one block per chunk: sum_of_squares_kernel, for each dtype
//                      │         │         │
//     sums        | Σ g²    | Σ g²    | Σ g²    | …      float64
//                      └─────────┼─────────┘
//                                v
//     control     norm, factor of the gradients, skip    one block, in grad_norm_kernel or in an optimizer's
//                                                        make_rules_kernel

#include <mica/optim/detail/grad_norm.cuh>
#include <mica/optim/detail/optimizer_step.cuh>

namespace mica::kernels {

namespace {

constexpr int kThreads = mica::detail::kMultiTensorThreads;

// sums[c] = Σ g² over chunk c, one block per chunk. A thread reads packs of 16 bytes at the stride of the block; if the
// gradient is not aligned, it reads the same elements one by one.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_of_squares_kernel(const MultiTensorEntry* first, std::int64_t entries, std::int64_t first_chunk, double* sums) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kChunk = static_cast<int>(MultiTensorList::kChunk);
  using Pack = cuda::Pack<T, kVector>;
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const std::int64_t chunk = first_chunk + blockIdx.x;
  const MultiTensorEntry& entry =
      mica::detail::entry_of(first, entries, chunk, [](const MultiTensorEntry& e) { return e.first_chunk; });
  const std::int64_t start = (chunk - entry.first_chunk) * kChunk;
  const int n = entry.numel - start < kChunk ? static_cast<int>(entry.numel - start) : kChunk;
  const T* const x = static_cast<const T*>(entry.grad) + start;

  double sum = 0;
  const auto add = [&](T element) {
    const auto value = static_cast<double>(static_cast<Accumulate<T>>(element));
    sum += value * value;
  };
  const bool aligned = mica::detail::has_alignment<Pack>(x);
  const int packs = n / kVector;
  if (aligned && n == kChunk) {
    constexpr int kPacks = kChunk / kVector / kThreads;
    constexpr int kAtOnce = kPacks < 8 ? kPacks : 8;
    static_assert(kPacks % kAtOnce == 0);
    for (int i = 0; i < kPacks; i += kAtOnce) {
      Pack loaded[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        loaded[k] = reinterpret_cast<const Pack*>(x)[(i + k) * kThreads + threadIdx.x];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          add(loaded[k].at[e]);
        }
      }
    }
  } else {
    for (int i = threadIdx.x; i < packs; i += kThreads) {
      if (aligned) {
        const Pack pack = reinterpret_cast<const Pack*>(x)[i];
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          add(pack.at[e]);
        }
      } else {
        for (int e = 0; e < kVector; ++e) {
          add(x[i * kVector + e]);
        }
      }
    }
    for (int i = packs * kVector + static_cast<int>(threadIdx.x); i < n; i += kThreads) {
      add(x[i]);
    }
  }
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) {
    sums[chunk] = sum;
  }
}

__global__ void __launch_bounds__(kNormThreads) grad_norm_kernel(GradNormPointers args) {
  cuda::wait_for_previous_kernel();
  finish_grad_norm_in_block(args);
}

template <class A>
struct NoConstants {
  __device__ ScaledGradient<A> operator()(const MultiTensorEntry&) const { return {}; }
};

}  // namespace

void sums_of_squares(Cuda, const MultiTensorList& list, const Tensor& sums) {
  for (const MultiTensorPart& part : list.parts()) {
    if (part.chunks == 0) {
      continue;
    }
    on_dtype(FloatTypes{}, part.dtype, "sums_of_squares", [&]<class T>() {
      cuda::Launch(static_cast<unsigned>(part.chunks), kThreads)
          .dependent()
          .run(sum_of_squares_kernel<T>, "sum_of_squares_kernel", list.table() + part.first_entry, part.entries,
               part.first_chunk, sums.data<double>());
    });
  }
}

void grad_norm(Cuda, const GradNorm& args) {
  cuda::Launch(1, kNormThreads).dependent().run(grad_norm_kernel, "grad_norm_kernel", GradNormPointers(args));
}

void scale_gradients(Cuda device, const MultiTensorList& list, const Tensor& control) {
  for (const MultiTensorPart& part : list.parts()) {
    on_part<ScaledGradient>("scale_gradients", part, [&]<class T, bool kMaster, int kStates>() {
      update_part<ScaledGradient, T, kMaster, kStates>(device, "scale_gradients", list, part, control,
                                                       NoConstants<Accumulate<T>>{});
    });
  }
}

}  // namespace mica::kernels
