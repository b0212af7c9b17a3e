// The step before a prompt's attention: normalizes and rotates queries and keys, and appends keys and values to the
// cache.
//
//     a row of qkv     | q0 | q1 | q2 | q3 | ... | k0 | k1 | ... | v0 | v1 | ...
//
//     a thread         has 8 pairs of columns, j and j + D / 2, of a head
//     a row group      is the D / 16 threads of a head, which add up its squares for the norm
//     a block          has kRows rows, and computes their sines and cosines while the previous kernel still runs
//
//     q --> queries (B, T, H, D)     k --> keys (B, Hkv, C, D)     v, unchanged --> values (B, Hkv, C, D)

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/ops/rotary/detail/rotation_cuda.cuh>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kPairs = 8;  // pairs per thread
constexpr int kRows = 2;   // rows per block
constexpr int kMostWidth = 256;

template <class T>
struct Arguments {
  const T* qkv;
  const T* q_norm;  // or null, like k_norm
  const T* k_norm;
  const std::int64_t* padding;  // or null
  T* queries;
  T* keys;
  T* values;
  std::int64_t rows;   // B · T
  std::int64_t steps;  // T
  std::int64_t first;  // the first position
  std::int64_t capacity;
  int heads;
  int key_heads;
  float eps;
  bool rotates;
  double rotary_scale;
  float frequencies[kMostWidth / 2];
};

// The cosines and sines for the rows of a block.
template <int kWidth>
struct Rotations {
  float sines[kRows][kWidth / 2];
  float cosines[kRows][kWidth / 2];

  // All threads of the block call it.
  template <class T>
  __device__ void fill(const Arguments<T>& a, std::int64_t first_row) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kWidth / 2; i += kThreads) {
      const int r = i / (kWidth / 2);
      const int j = i % (kWidth / 2);
      const std::int64_t row = first_row + r;
      const std::int64_t padding = a.padding == nullptr || row >= a.rows ? 0 : a.padding[row / a.steps];
      const std::int64_t position = max(a.first + row % a.steps - padding, std::int64_t{0});
      const auto [cosine, sine] =
          cosine_and_sine<float>(static_cast<float>(position), a.frequencies[j], a.rotary_scale);
      cosines[r][j] = cosine;
      sines[r][j] = sine;
    }
  }

  __device__ void apply(float (&left)[kPairs], float (&right)[kPairs], int row, int first_pair) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float u = left[i];
      const float v = right[i];
      const float sine = sines[row][first_pair + i];
      const float cosine = cosines[row][first_pair + i];
      left[i] = u * cosine - v * sine;
      right[i] = v * cosine + u * sine;
    }
  }
};

// Divides a head by its root mean square and multiplies it by the norm's weight. Rounds to T, as rms_norm does.
template <class T, int kWidth>
__device__ void normalize(float (&left)[kPairs], float (&right)[kPairs], const T* weight, int first_pair, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    squares += left[i] * left[i] + right[i] * right[i];
  }
  const float inverse = rsqrtf(cuda::sum_lanes<kWidth / (2 * kPairs)>(squares) / kWidth + eps);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const auto rounded = [&](float x, int column) {
      return static_cast<float>(static_cast<T>(x * inverse * static_cast<float>(weight[column])));
    };
    left[i] = rounded(left[i], first_pair + i);
    right[i] = rounded(right[i], kWidth / 2 + first_pair + i);
  }
}

// Where a row's head is stored: among the queries, the keys or the values.
template <class T, int kWidth>
__device__ T* address_of(const Arguments<T>& a, std::int64_t row, std::int64_t sequence, std::int64_t index, int head) {
  if (head < a.heads) {
    return a.queries + (row * a.heads + head) * kWidth;
  }
  const bool is_key = head < a.heads + a.key_heads;
  const int key_head = head - a.heads - (is_key ? 0 : a.key_heads);
  return (is_key ? a.keys : a.values) + ((sequence * a.key_heads + key_head) * a.capacity + index) * kWidth;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) decode_append_kernel(const __grid_constant__ Arguments<T> a) {
  constexpr int kRowGroup = kWidth / (2 * kPairs);
  __shared__ Rotations<kWidth> rotations;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kRows;
  if (a.rotates) {
    rotations.fill(a, first_row);
  }
  __syncthreads();
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const int heads = a.heads + 2 * a.key_heads;
  const int first_pair = static_cast<int>(threadIdx.x) % kRowGroup * kPairs;
  for (int first = 0; first < kRows * heads; first += kThreads / kRowGroup) {
    const int item = min(first + static_cast<int>(threadIdx.x) / kRowGroup, kRows * heads - 1);
    const int r = item / heads;
    const int head = item % heads;
    // Several row groups share a warp and its shuffles, so no thread may leave the loop early. A row group without a
    // head or row of its own repeats the last one.
    const std::int64_t row = min(first_row + r, a.rows - 1);
    const T* const from = a.qkv + (row * heads + head) * kWidth + first_pair;
    cuda::Pack<T, kPairs> packs[2] = {cuda::load<kPairs>(from), cuda::load<kPairs>(from + kWidth / 2)};
    float left[kPairs];
    float right[kPairs];
    cuda::unpack(packs[0], left);
    cuda::unpack(packs[1], right);
    if (a.q_norm != nullptr) {
      normalize<T, kWidth>(left, right, head < a.heads ? a.q_norm : a.k_norm, first_pair, a.eps);
    }
    if (a.rotates) {
      rotations.apply(left, right, static_cast<int>(row - first_row), first_pair);
    }
    if (head < a.heads + a.key_heads) {
      packs[0] = cuda::pack_of<T>(left);
      packs[1] = cuda::pack_of<T>(right);
    }
    T* const to = address_of<T, kWidth>(a, row, row / a.steps, a.first + row % a.steps, head) + first_pair;
    cuda::store(to, packs[0]);
    cuda::store(to + kWidth / 2, packs[1]);
  }
}

struct Frequencies {
  float values[kMostWidth / 2];
};

__global__ void decode_rotations_kernel(const __grid_constant__ Frequencies frequencies, int pairs, double scale,
                                        std::int64_t first, std::int64_t count, float2* rotations) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) {
    const auto [cosine, sine] =
        cosine_and_sine<float>(static_cast<float>(first + i / pairs), frequencies.values[i % pairs], scale);
    rotations[i] = {cosine, sine};
  }
}

template <class T, int kWidth>
void launch(const DecodeAppendArgs& args) {
  const DecodeAttention& p = args.problem;
  const std::int64_t rows = args.qkv.size(0);
  Arguments<T> a{.qkv = args.qkv.data<T>(),
                 .q_norm = p.q_norm.data_or_null<T>(),
                 .k_norm = p.k_norm.data_or_null<T>(),
                 .padding = p.padding.data_or_null<std::int64_t>(),
                 .queries = args.queries.data<T>(),
                 .keys = p.keys.data<T>(),
                 .values = p.values.data<T>(),
                 .rows = rows,
                 .steps = rows / p.keys.size(0),
                 .first = args.first,
                 .capacity = p.keys.size(2),
                 .heads = static_cast<int>(p.heads),
                 .key_heads = static_cast<int>(p.key_heads()),
                 .eps = static_cast<float>(p.eps),
                 .rotates = !p.frequencies.empty(),
                 .rotary_scale = p.rotary_scale,
                 .frequencies = {}};
  std::copy(p.frequencies.begin(), p.frequencies.end(), a.frequencies);
  cuda::Launch(static_cast<unsigned>((rows + kRows - 1) / kRows), kThreads)
      .dependent()
      .run(decode_append_kernel<T, kWidth>, "decode_append_kernel", a);
}

}  // namespace

void decode_rotations(Cuda, const DecodeRotationsArgs& args) {
  Frequencies frequencies{};
  std::copy(args.frequencies.begin(), args.frequencies.end(), frequencies.values);
  const std::int64_t count = args.rotations.numel() / 2;
  cuda::Launch(static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads)
      .run(decode_rotations_kernel, "decode_rotations_kernel", frequencies, static_cast<int>(args.frequencies.size()),
           args.scale, args.first, count, reinterpret_cast<float2*>(args.rotations.data<float>()));
}

void decode_append(Cuda, const DecodeAppendArgs& args) {
  on_dtype(Types<Float16, BFloat16>{}, args.queries.dtype(), "decode_append", [&]<class T>() {
    switch (args.problem.width()) {
      case 32: return launch<T, 32>(args);
      case 64: return launch<T, 64>(args);
      case 128: return launch<T, 128>(args);
      default: return launch<T, 256>(args);
    }
  });
}

}  // namespace mica::kernels
