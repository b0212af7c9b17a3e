// In-place cross entropy: computes the losses and overwrites the logits with their gradient, reading them from global
// memory only once. The kernel is persistent. A row is in the shared memory of a thread block or, if it is too long, of
// a cluster:
//
//     pass 1:  row r, part by part, as its copies arrive ──▶ sums ──▶ exchanged by the threads of the row ──▶ loss
//     pass 2:  row r in shared memory ──▶ gradient ──▶ global memory;  the freed places ◀── copies of the next row
//
// Each thread copies the packs that it uses itself, so that threads synchronize only to exchange sums.

#include <algorithm>
#include <climits>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/cross_entropy/detail/cross_entropy_cuda.cuh>
#include <mica/ops/cross_entropy/detail/cross_entropy_plan.h>

namespace mica::kernels {

namespace xent {

namespace {

using Plan = CrossEntropyPlan;

/// The part of a row that a block has in its shared memory.
template <class T>
struct Share {
  static constexpr int kPack = Span<T>::kPack;
  using Packs = rows::Pack<T, kPack>;

  Span<T> span;
  int count;           // packs
  std::int64_t begin;  // the first pack
  T* packs;            // its address in shared memory

  __device__ Share(T* row, std::int64_t classes, int rank, int slab) : span(row, classes) {
    begin = std::int64_t{rank} * slab;
    const std::int64_t left = span.packs - begin;
    count = static_cast<int>(left < 0 ? 0 : left < slab ? left : slab);
    packs = row + span.first(begin);
  }

  __device__ T* at(int i) const { return packs + std::int64_t{i} * kPack; }
};

/// The reductions over a row, and two numbers that the leader (the first thread of the row's first block) sends to the
/// others in the same exchange.
template <class T, Target kTarget, bool kCap>
struct FoundInPlace : Found<T, kTarget, kCap> {
  using Base = Found<T, kTarget, kCap>;
  using S = Accumulate<T>;
  static_assert(std::is_same_v<S, float>);
  static constexpr int kNumbers = Base::kNumbers + 2;

  S label_y;     // y of the label; 0 in all threads except the leader, so that sums give the leader's
  int next_row;  // the row to process next; 0 in all threads except the leader

  __device__ static FoundInPlace nothing(S unit) { return {Base::nothing(unit), S{0}, 0}; }
  __device__ FoundInPlace empty() const { return {Base::empty(), S{0}, 0}; }
  template <class F>
  __device__ void for_numbers(const F& f) {
    Base::for_numbers(f);
    f(Base::kNumbers, label_y);
    S bits = __int_as_float(next_row);
    f(Base::kNumbers + 1, bits);
    next_row = __float_as_int(bits);
  }
  __device__ void join(const FoundInPlace& other) {
    Base::join(other);
    label_y += other.label_y;
    next_row += other.next_row;
  }
  __device__ FoundInPlace over_lanes(int lanes) const {
    return {Base::over_lanes(lanes), sum_of_lanes(label_y, lanes), sum_of_lanes(next_row, lanes)};
  }
};

template <class T, Target kTarget, bool kCap, bool kCluster>
class Streamer {
  using S = Accumulate<T>;
  static constexpr int kPack = Span<T>::kPack;
  using Packs = rows::Pack<T, kPack>;
  using FoundInRow = FoundInPlace<T, kTarget, kCap>;
  using Exchange = held::Exchange<FoundInRow, kCluster ? Team::cluster : Team::block, 2>;

 public:
  using Shared = typename Exchange::Shared;

  __device__ Streamer(const Problem<T>& p, const Plan& plan, T* logits, int* queue, Shared& shared,
                      unsigned char* memory)
      : p_(p),
        plan_(plan),
        logits_(logits),
        queue_(queue),
        threads_(static_cast<int>(blockDim.x)),
        place_(cuda::shared_address(memory) + 16 * threadIdx.x),
        rank_(kCluster ? cuda::cluster_rank() : 0),
        exchange_(shared, plan.cluster) {
    asm volatile("" : "+r"(place_));  // keeps the compiler from recomputing it at each use
  }

  __device__ void run(const Incoming<T>& incoming, S* losses) {
    const S common = incoming.per_row ? S{0} : incoming(0);
    std::int64_t row = blockIdx.x / plan_.cluster;
    Label<T, kTarget> label(p_, row);
    fetch(share_of_row(row), label.ignored);
    while (row < p_.rows) {
      const Share<T> share = share_of_row(row);
      const int taken = is_leader() ? pop_row() : 0;  // early, to hide the latency of the atomic operation
      // The label's logit is read before the exchange, since afterwards its thread may overwrite it.
      const S label_y = is_leader() ? y_of_label(row, label) : S{0};
      FoundInRow found = label.ignored ? FoundInRow::nothing(p_.unit()) : found_by_thread(row, share);
      found.next_row = is_leader() ? marked_if_ignored(taken) : 0;
      found.label_y = label_y;
      found = exchange_.joined(found, rank_);
      const bool ignores_next = found.next_row < 0;
      const std::int64_t next = ignores_next ? ~found.next_row : found.next_row;
      const Label<T, kTarget> next_label(p_, next < p_.rows ? next : 0);
      if (label.ignored) {  // the same for all threads of the row
        if (is_leader()) {
          losses[row] = 0;
        }
        write(share, next, ignores_next, [](int, std::uint32_t) { return Packs{}; });
        for_edges(share, [&](std::int64_t i) { logits_[row * p_.classes + i] = static_cast<T>(0.0f); });
      } else {
        const Outcome<T, kTarget> outcome(p_, label, found, found.label_y);
        if (is_leader()) {
          losses[row] = outcome.loss;
        }
        const Gradient<T, kTarget, kCap> gradient(p_, label, found, outcome.mass,
                                                  incoming.per_row ? incoming(row) : common);
        const std::int64_t first = share.span.first(share.begin);
        const int label_at = static_cast<int>(max(min(label.index - first, std::int64_t{INT_MAX}), std::int64_t{-1}));
        write(share, next, ignores_next, [&](int i, std::uint32_t place) {
          return gradient_of(p_, row, first + std::int64_t{i} * kPack, label_at - i * kPack, kept(place), gradient);
        });
        for_edges(share, [&](std::int64_t i) {
          T* const x = logits_ + row * p_.classes + i;
          *x = gradient_of_one(p_, row, i, label.index, *x, gradient);
        });
      }
      row = next;
      label = next_label;
    }
  }

 private:
  __device__ std::uint64_t policy() const {
    return cuda::read_once_policy(p_.rows * p_.classes * static_cast<int>(sizeof(T)));
  }

  __device__ bool is_leader() const { return rank_ == 0 && threadIdx.x == 0; }

  // Blocks take rows from a queue, since ignored rows take little time and equal numbers of rows would not be equal
  // work. The result of a row does not depend on which block processes it.
  __device__ int pop_row() const { return static_cast<int>(gridDim.x / plan_.cluster) + atomicAdd(queue_, 1); }

  /// `row`, or its bitwise complement, which is negative, if the row is ignored and need not be loaded.
  __device__ int marked_if_ignored(int row) const {
    return row < p_.rows && Label<T, kTarget>(p_, row).ignored ? ~row : row;
  }

  __device__ Share<T> share_of_row(std::int64_t row) const {
    return Share<T>(logits_ + row * p_.classes, p_.classes, rank_, plan_.slab);
  }

  __device__ S y_of_label(std::int64_t row, const Label<T, kTarget>& label) const {
    const bool look = kTarget != Target::given && label.valid && !label.ignored;
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

  /// Adds N of the thread's packs, from pack i on. If it adds more packs at a time, sums are rescaled less often.
  template <int N>
  __device__ void add_packs(std::int64_t row, const Share<T>& share, int i, std::uint32_t place,
                            FoundInRow& found) const {
    if constexpr (N > 1 && kTarget == Target::given) {  // probabilities take registers, too: one pack at a time
      add_packs<1>(row, share, i, place, found);
      add_packs<N - 1>(row, share, i + threads_, place + 16 * threads_, found);
    } else {
      S y[N * kPack];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        unpack_capped<kCap>(p_, kept(place + n * 16 * threads_), reinterpret_cast<S(&)[kPack]>(y[n * kPack]));
      }
      found.raise_to(y);
      found.add(y, [&](int j) {
        return share_of<kTarget>(p_, row, share.span.first(share.begin + i + j / kPack * threads_) + j % kPack);
      });
    }
  }

  /// Calls f(i) for each class i among the edges that belongs to this thread.
  template <class F>
  __device__ void for_edges(const Share<T>& share, const F& f) const {
    const int edges = rank_ == 0 ? share.span.edges() : 0;
    for (int e = static_cast<int>(threadIdx.x); e < edges; e += static_cast<int>(blockDim.x)) {
      f(share.span.edge(e));
    }
  }

  /// Starts loading a row, unless it is ignored, in Plan::kParts groups of copies.
  __device__ void fetch(const Share<T>& share, bool ignored) {
    const int count = ignored ? 0 : share.count;
    int i = threadIdx.x;
    std::uint32_t place = place_;
    for (int part = 0; part < Plan::kParts; ++part) {
      for (int round = 0; round < plan_.part; ++round, i += threads_, place += 16 * threads_) {
        if (i < count) {
          cuda::copy_async<16>(place, share.at(i), policy());
        }
      }
      cuda::commit_copies();
    }
  }

  __device__ FoundInRow found_by_thread(std::int64_t row, const Share<T>& share) {
    auto found = FoundInRow::nothing(p_.unit());
    for_edges(share, [&](std::int64_t i) {
      const S y[1] = {capped<kCap>(p_, static_cast<S>(logits_[row * p_.classes + i]))};
      found.raise_to(y);
      found.add(y, [&](int) { return share_of<kTarget>(p_, row, i); });
    });
    int i = threadIdx.x;
    std::uint32_t place = place_;
#pragma unroll
    for (int part = 0; part < Plan::kParts; ++part) {
      cuda::wait_copies(Plan::kParts - 1 - part);
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

  /// Overwrites each pack i of a row in global memory with make(i, its place in shared memory), and starts loading the
  /// next row into the freed places.
  template <class Make>
  __device__ void write(const Share<T>& share, std::int64_t next_row, bool ignores_next, const Make& make) {
    const bool more = next_row < p_.rows && !ignores_next;
    const Share<T> next = more ? share_of_row(next_row) : share;
    const int next_count = more ? next.count : 0;
    int i = threadIdx.x;
    std::uint32_t place = place_;
    T* to = share.at(i);
    const T* from = next.at(i);
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part) {
#pragma unroll 1
      for (int round = 0; round < plan_.part; ++round) {
        if (i < share.count) {
          rows::store_whole(to, make(i, place));
        }
        if (i < next_count) {
          cuda::copy_async<16>(place, from, policy());
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
  int* queue_;  // the number of rows that were taken from the queue
  int threads_;
  std::uint32_t place_;  // the thread's first pack in shared memory; the next one is 16 · threads_ bytes after it
  int rank_;
  Exchange exchange_;
};

/// At least 2 blocks per multiprocessor (__launch_bounds__), which limits the registers per thread.
template <class T, Target kTarget, bool kCap, bool kCluster>
__global__ void __launch_bounds__(Plan::kMostThreads, 2)
    cross_entropy_stream(Problem<T> p, Plan plan, Incoming<T> incoming, T* logits, int* queue, Accumulate<T>* losses) {
  using Rows = Streamer<T, kTarget, kCap, kCluster>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Rows::Shared shared;
  Rows(p, plan, logits, queue, shared, memory).run(incoming, losses);
}

// On the host.

template <class T, Target kTarget, bool kCap, bool kCluster>
void stream(const CrossEntropyInPlace& args, const Plan& plan) {
  const auto kernel = cross_entropy_stream<T, kTarget, kCap, kCluster>;
  const Problem<T> problem(args.terms);
  const Tensor queue = empty({1}, int32, args.losses.device());
  cuda::check(cudaMemsetAsync(queue.raw_data(), 0, queue.bytes(), cuda::current_stream()), "cudaMemsetAsync");
  cuda::Launch launch(plan.cluster, plan.threads, plan.bytes());
  launch.cluster(plan.cluster);
  const auto groups = std::min<std::int64_t>(problem.rows, launch.resident(kernel));
  launch.grid(static_cast<unsigned>(groups * plan.cluster))
      .run(kernel, kCluster ? "cross_entropy_stream<cluster>" : "cross_entropy_stream<block>", problem, plan,
           Incoming<T>(args.dloss, args.denominator), args.terms.logits.data<T>(), queue.data<std::int32_t>(),
           args.losses.data<Accumulate<T>>());
}

/// Processes rows of any length and alignment, reading them twice.
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
  const Tensor& logits = args.terms.logits;
  const CrossEntropyPlan plan = plan_cross_entropy_in_place(logits.size(1), static_cast<int>(size_of(logits.dtype())),
                                                            cuda::device_has_clusters());
  if (plan.cluster == 0) {
    return xent::pass_twice(args);
  }
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    if constexpr (!std::is_same_v<T, double>) {
      if (plan.cluster == 1) {
        xent::stream<T, kTarget, kCap, false>(args, plan);
      } else {
        xent::stream<T, kTarget, kCap, true>(args, plan);
      }
    }
  });
}

}  // namespace mica::kernels
