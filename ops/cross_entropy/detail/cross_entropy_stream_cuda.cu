// Computes the losses and overwrites the logits with their gradient in one read. A row streams through the shared
// memory of a block or, if it is too long, of a cluster: the first pass sums while the row arrives; the second writes
// the gradient and starts loading the next row into the freed places. Blocks are persistent.
//
// Each thread copies the packs that it uses itself, so that threads synchronize only for sums.

#include <algorithm>
#include <climits>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/cross_entropy/detail/cross_entropy_cuda.cuh>

namespace mica::kernels {

namespace xent {

namespace {

constexpr int kMaxThreads = 512;
constexpr int kParts = 4;                        // of a row, each awaited separately
constexpr std::int64_t kHalfShared = 110 << 10;  // bytes of a row per block that allow two resident blocks
constexpr std::int64_t kMaxShared = 220 << 10;
constexpr int kMaxCluster = 8;

/// The distribution of rows of a given length.
struct Plan {
  int cluster = 0;  // blocks that share a row; 0: rows of this length need another kernel
  int threads = 0;  // of a block
  int slab = 0;     // maximum packs of a row per block
  int part = 0;     // rounds of a thread per part, an even number

  Plan(std::int64_t classes, std::int64_t pack) {
    const std::int64_t packs = classes / pack;
    for (const std::int64_t most : {kHalfShared, kMaxShared}) {
      for (int blocks = 1; blocks <= kMaxCluster && cluster == 0; blocks *= 2) {
        const std::int64_t share = (packs + blocks - 1) / blocks;
        if (share * 16 <= most) {
          cluster = blocks;
          slab = static_cast<int>(share);
        }
      }
    }
    // Three blocks of up to 72 KB fit on a multiprocessor, or two larger ones.
    threads = slab > 4608 ? kMaxThreads : slab > 1024 ? 256 : 128;
    part = 2 * ((slab + threads * kParts * 2 - 1) / (threads * kParts * 2));
  }

  int bytes() const { return slab * 16; }
};

/// A block's share of a row.
template <class T>
struct Share {
  static constexpr int kPack = Span<T>::kPack;
  using Packs = rows::Pack<T, kPack>;

  Span<T> span;
  int count;           // packs
  std::int64_t begin;  // the first of them
  T* packs;            // its address in shared memory

  __device__ Share(T* row, std::int64_t classes, int rank, int slab) : span(row, classes) {
    begin = std::int64_t{rank} * slab;
    const std::int64_t left = span.packs - begin;
    count = static_cast<int>(left < 0 ? 0 : left < slab ? left : slab);
    packs = row + span.first(begin);
  }

  __device__ T* at(int i) const { return packs + std::int64_t{i} * kPack; }
};

/// Combines the results of all blocks that share a row, in every thread. `parity` alternates from row to row: a place
/// is overwritten only after all blocks have synchronized for the row in between.
template <bool kCluster, class Found>
__device__ Found joined_blocks(const Found& own, int blocks, int parity) {
  const Found block = joined<true>(own);
  if constexpr (!kCluster) {
    return block;
  } else {
    __shared__ Found places[2];
    if (threadIdx.x == 0) {
      places[parity] = block;
    }
    __syncwarp();
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
    const int from = static_cast<int>(threadIdx.x) & (blocks - 1);  // the number of blocks is a power of two
    Found found = Found::nothing(own.unit);
    found.largest = cuda::load_from_block(&places[parity].largest, from);
    found.sum = cuda::load_from_block(&places[parity].sum, from);
    if constexpr (Found::kShares) {
      found.mass = cuda::load_from_block(&places[parity].mass, from);
      found.distance = cuda::load_from_block(&places[parity].distance, from);
    }
    return found.joined(blocks);
  }
}

template <class T, Target kTarget, bool kCap, bool kCluster>
class Streamer {
  using S = Accumulate<T>;
  static constexpr int kPack = Span<T>::kPack;
  using Packs = rows::Pack<T, kPack>;
  using FoundInRow = Found<T, kTarget, kCap>;

 public:
  __device__ Streamer(const Problem<T>& p, const Plan& plan, T* logits, int* queue, unsigned char* memory)
      : p_(p),
        plan_(plan),
        logits_(logits),
        queue_(queue),
        threads_(static_cast<int>(blockDim.x)),
        place_(cuda::shared_address(memory) + 16 * threadIdx.x),
        blocks_(kCluster ? plan.cluster : 1),
        rank_(kCluster ? cuda::cluster_rank() : 0) {
    asm volatile("" : "+r"(place_));  // otherwise the compiler recomputes it at each use
  }

  __device__ void run(const Incoming<T>& incoming, S* losses) {
    std::int64_t row = blockIdx.x / blocks_;
    fetch(share_of_row(row));
    Label<T, kTarget> label(p_, row);
    while (row < p_.rows) {
      const Share<T> share = share_of_row(row);
      const int taken = is_leader() ? pop_row() : 0;  // early, to hide its latency
      if (label.ignored) {                            // uniform for all threads of the row
        publish_next(taken);
        sync();
        const std::int64_t next = published_next();
        label = label_of(next);
        cuda::wait_copies<0>();
        write(share, next, [](int, std::uint32_t) { return Packs{}; });
        for_edges(share, [&](std::int64_t i) { logits_[row * p_.classes + i] = static_cast<T>(0.0f); });
        if (is_leader()) {
          losses[row] = 0;
        }
        row = next;
      } else {
        // Read before the barrier: after it, any thread may overwrite it.
        const S label_y = threadIdx.x == 0 ? y_of_label(row, label) : S{0};
        const FoundInRow own = found_by_thread(row, share);
        publish_next(taken);
        const FoundInRow found = joined_blocks<kCluster>(own, blocks_, parity_);
        const std::int64_t next = published_next();
        const Label<T, kTarget> next_label = label_of(next);
        const Outcome<T, kTarget> outcome(p_, label, found, label_y);
        if (is_leader()) {
          losses[row] = outcome.loss;
        }
        const Gradient<T, kTarget, kCap> gradient(p_, label, found, outcome.mass, incoming(row));
        const std::int64_t first = share.span.first(share.begin);
        const int label_at = static_cast<int>(max(min(label.index - first, std::int64_t{INT_MAX}), std::int64_t{-1}));
        write(share, next, [&](int i, std::uint32_t place) {
          return gradient_of(p_, row, first + std::int64_t{i} * kPack, label_at - i * kPack, kept(place), gradient);
        });
        for_edges(share, [&](std::int64_t i) {
          T* const x = logits_ + row * p_.classes + i;
          *x = gradient_of_one(p_, row, i, label.index, *x, gradient);
        });
        row = next;
        label = next_label;
      }
      parity_ ^= 1;
    }
    if (kCluster) {  // no block exits while another reads its memory
      sync();
    }
  }

 private:
  __device__ bool is_leader() const { return rank_ == 0 && threadIdx.x == 0; }

  // Rows are taken from a queue: ignored rows cost little, so equal numbers of rows would not be equal work. The block
  // that processes a row does not affect its result.
  __device__ int pop_row() const { return static_cast<int>(gridDim.x / blocks_) + atomicAdd(queue_, 1); }
  __device__ void publish_next(int row) const {
    if (is_leader()) {
      next_rows()[parity_] = row;
    }
  }
  /// Valid after all threads of the row have synchronized.
  __device__ std::int64_t published_next() const {
    if constexpr (kCluster) {
      return cuda::load_from_block(next_rows() + parity_, 0);
    } else {
      return next_rows()[parity_];
    }
  }
  /// Two places, used alternately: one is overwritten only after all threads have synchronized for the row in between.
  __device__ static int* next_rows() {
    __shared__ int places[2];
    return places;
  }
  __device__ Label<T, kTarget> label_of(std::int64_t row) const {
    return Label<T, kTarget>(p_, row < p_.rows ? row : 0);
  }

  __device__ void sync() const {
    if constexpr (kCluster) {
      __syncwarp();
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    } else {
      __syncthreads();
    }
  }

  __device__ Share<T> share_of_row(std::int64_t row) const {
    return Share<T>(logits_ + row * p_.classes, p_.classes, rank_, plan_.slab);
  }

  __device__ S y_of_label(std::int64_t row, const Label<T, kTarget>& label) const {
    const bool look = kTarget != Target::given && label.valid;
    return look ? capped<kCap>(p_, static_cast<S>(logits_[row * p_.classes + label.index])) : S{0};
  }

  /// The pack at `place` in shared memory.
  __device__ static Packs kept(std::uint32_t place) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(place));
    return reinterpret_cast<const Packs&>(bits);
  }

  /// Adds N of the thread's packs, from number i on: with more at a time, sums are rescaled less often.
  template <int N>
  __device__ void add_packs(std::int64_t row, const Share<T>& share, int i, std::uint32_t place,
                            FoundInRow& found) const {
    S y[N * kPack];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unpack_capped<kCap>(p_, kept(place + n * 16 * threads_), reinterpret_cast<S(&)[kPack]>(y[n * kPack]));
    }
    found.add(y, [&](int j) {
      return share_of<kTarget>(p_, row, share.span.first(share.begin + i + j / kPack * threads_) + j % kPack);
    });
  }

  /// Calls f(i) for this thread's classes among the edges.
  template <class F>
  __device__ void for_edges(const Share<T>& share, const F& f) const {
    const int edges = rank_ == 0 ? share.span.edges() : 0;
    for (int e = static_cast<int>(threadIdx.x); e < edges; e += static_cast<int>(blockDim.x)) {
      f(share.span.edge(e));
    }
  }

  /// Starts loading a row, in kParts groups of copies.
  __device__ void fetch(const Share<T>& share) {
    int i = threadIdx.x;
    std::uint32_t place = place_;
    for (int part = 0; part < kParts; ++part) {
      for (int round = 0; round < plan_.part; ++round, i += threads_, place += 16 * threads_) {
        if (i < share.count) {
          cuda::copy_async<16>(place, share.at(i));
        }
      }
      cuda::commit_copies();
    }
  }

  __device__ FoundInRow found_by_thread(std::int64_t row, const Share<T>& share) {
    auto found = FoundInRow::nothing(p_.unit());
    for_edges(share, [&](std::int64_t i) {
      const S y[1] = {capped<kCap>(p_, static_cast<S>(logits_[row * p_.classes + i]))};
      found.add(y, [&](int) { return share_of<kTarget>(p_, row, i); });
    });
    int i = threadIdx.x;
    std::uint32_t place = place_;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      cuda::wait_copies(kParts - 1 - part);
      for (int round = 0; round < plan_.part; round += 2, i += 2 * threads_, place += 2 * 16 * threads_) {
        if (i + threads_ < share.count) {
          add_packs<2>(row, share, i, place, found);
        } else if (i < share.count) {
          add_packs<1>(row, share, i, place, found);
        }
      }
    }
    return found;
  }

  /// Overwrites the packs of a row with make(i, its place), and starts loading the next row into the freed places.
  template <class Make>
  __device__ void write(const Share<T>& share, std::int64_t next_row, const Make& make) {
    const bool more = next_row < p_.rows;
    const Share<T> next = more ? share_of_row(next_row) : share;
    const int next_count = more ? next.count : 0;
    int i = threadIdx.x;
    std::uint32_t place = place_;
    T* to = share.at(i);
    const T* from = next.at(i);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
      for (int round = 0; round < plan_.part; ++round) {
        if (i < share.count) {
          rows::store_whole(to, make(i, place));
        }
        if (i < next_count) {
          cuda::copy_async<16>(place, from);
        }
        i += threads_;
        place += 16 * threads_;
        to += threads_ * kPack;
        from += threads_ * kPack;
      }
      cuda::commit_copies();
    }
  }

  const Problem<T>& p_;
  const Plan& plan_;
  T* logits_;
  int* queue_;  // number of rows taken, after the first of each block
  int threads_;
  std::uint32_t place_;  // the thread's first pack in shared memory; the next is 16 · threads_ bytes further
  int blocks_;
  int rank_;
  int parity_ = 0;
};

/// Blocks per multiprocessor, which limits the registers per thread.
template <class T, Target kTarget, bool kCap, bool kCluster>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_stream(Problem<T> p, Plan plan, Incoming<T> incoming, T* logits, int* queue, Accumulate<T>* losses) {
  extern __shared__ __align__(16) unsigned char memory[];
  Streamer<T, kTarget, kCap, kCluster>(p, plan, logits, queue, memory).run(incoming, losses);
}

// On the host.

/// The number of groups of blocks, each sharing rows, that the device can run concurrently.
template <class Kernel>
int resident_groups(Kernel kernel, const Plan& plan) {
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes()),
              "cudaFuncSetAttribute");
  int groups = 0;
  if (plan.cluster == 1) {
    cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&groups, kernel, plan.threads, plan.bytes()),
                "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(groups * cuda::multiprocessor_count(), 1);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.cluster);
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.bytes();
  config.attrs = &attribute;
  config.numAttrs = 1;
  cuda::check(cudaOccupancyMaxActiveClusters(&groups, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return std::max(groups, 1);
}

template <class T, Target kTarget, bool kCap, bool kCluster>
void stream(const CrossEntropyInPlace& args, const Plan& plan) {
  const auto kernel = cross_entropy_stream<T, kTarget, kCap, kCluster>;
  const Problem<T> problem(args.terms);
  const auto groups =
      static_cast<unsigned>(std::min<std::int64_t>(problem.rows, resident_groups(kernel, plan)) * plan.cluster);
  const Tensor queue = empty({1}, int32, args.losses.device());
  cuda::check(cudaMemsetAsync(queue.raw_data(), 0, queue.bytes(), cuda::current_stream()), "cudaMemsetAsync");
  cuda::Launch(groups, plan.threads, plan.bytes())
      .cluster(plan.cluster)
      .run(kernel, kCluster ? "cross_entropy_stream<cluster>" : "cross_entropy_stream<block>", problem, plan,
           Incoming<T>(args.dloss, args.denominator), args.terms.logits.data<T>(), queue.data<std::int32_t>(),
           args.losses.data<Accumulate<T>>());
}

/// Rows of any kind, in two passes over memory.
void pass_twice(const CrossEntropyInPlace& args) {
  const Tensor logsumexp = empty(args.losses.shape(), args.losses.dtype(), args.losses.device());
  const Tensor mass = empty(args.losses.shape(), args.losses.dtype(), args.losses.device());
  cross_entropy_forward(Cuda{}, {.terms = args.terms, .logsumexp = logsumexp, .mass = mass, .losses = args.losses});
  cross_entropy_backward(Cuda{}, {.terms = args.terms,
                                  .logsumexp = logsumexp,
                                  .mass = mass,
                                  .dloss = args.dloss,
                                  .denominator = args.denominator,
                                  .dlogits = args.terms.logits});
}

}  // namespace

}  // namespace xent

void cross_entropy_in_place(Cuda, const CrossEntropyInPlace& args) {
  const std::int64_t classes = args.terms.logits.size(1);
  if (classes <= kWarpRow || !cuda::device_has_clusters()) {
    xent::pass_twice(args);
    return;
  }
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    const xent::Plan plan(classes, xent::Span<T>::kPack);
    if constexpr (std::is_same_v<T, double>) {
      xent::pass_twice(args);
    } else if (plan.cluster == 0) {
      xent::pass_twice(args);
    } else if (plan.cluster == 1) {
      xent::stream<T, kTarget, kCap, false>(args, plan);
    } else {
      xent::stream<T, kTarget, kCap, true>(args, plan);
    }
  });
}

}  // namespace mica::kernels
