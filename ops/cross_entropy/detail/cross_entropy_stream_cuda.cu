// In-place cross entropy of labels: computes the losses and overwrites the logits with their gradient, reading them
// from global memory only once. The kernel is persistent, with a row in the shared memory of a block or a cluster:
//
//     pass 1:  row r, part by part, as its copies arrive ──▶ sums ──▶ exchanged by the threads of the row ──▶ loss
//     pass 2:  row r in shared memory ──▶ gradient ──▶ global memory;  its stage ◀── copies of the next row
//
// Each thread copies the packs that it uses itself, so that threads synchronize only to exchange sums.

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/cross_entropy/detail/cross_entropy_cuda.cuh>
#include <mica/ops/cross_entropy/detail/cross_entropy_plan.h>

namespace mica::kernels {

namespace xent {

namespace {

/// The packs of a row that a block has in its shared memory.
template <class T>
struct Slab {
  static constexpr int kPack = rows::PeeledRow<T>::kPack;

  rows::PeeledRow<T> peeled;
  int count;  // packs
  int first;  // the first class
  T* packs;   // its address in global memory

  __device__ Slab(T* row, std::int64_t classes, int rank, int most) : peeled(row, classes) {
    const std::int64_t begin = std::int64_t{rank} * most;
    const std::int64_t left = peeled.packs - begin;
    count = static_cast<int>(left < 0 ? 0 : left < most ? left : most);
    first = static_cast<int>(peeled.first(begin));
    packs = row + first;
  }

  __device__ T* at(int i) const { return packs + std::int64_t{i} * kPack; }
};

template <class T, bool kCap, bool kCluster>
class Streamer {
  using S = Accumulate<T>;
  static constexpr int kPack = Slab<T>::kPack;
  using Packs = rows::Pack<T, kPack>;
  using FoundInRow = Found<T, Target::label, kCap, /*kInPlace=*/true>;
  using Group = rows::RowGroup<FoundInRow, kCluster ? rows::Group::cluster : rows::Group::block, rows::kWarp,
                               /*kSeveral=*/false, /*kBuffers=*/2>;

 public:
  using Exchange = typename Group::Exchange;

  /// `queue` is the number of rows that were taken from the queue.
  __device__ Streamer(const Problem<T>& p, const CrossEntropyPlan& plan, T* logits, int* queue, Exchange& exchange,
                      unsigned char* memory)
      : p_(p),
        plan_(plan),
        logits_(logits),
        queue_(queue),
        first_pack_(cuda::shared_address(memory)),
        threads_(static_cast<int>(blockDim.x)),
        rank_(Group::rank()),
        group_(exchange, plan.cluster) {}

  __device__ void run(const Incoming<T>& incoming, S* losses) {
    const S common = incoming.per_row ? S{0} : incoming(0);
    std::int64_t row = blockIdx.x / plan_.cluster;
    Label<T, Target::label> label(p_, row);
    Slab<T> none = slab_of_row(row);
    none.count = 0;
    write(none, row, label.ignored(), [](int) { return Packs{}; });
    while (row < p_.rows) {
      const Slab<T> slab = slab_of_row(row);
      T* const logits = logits_ + row * p_.classes;
      const FoundInRow found = group_.all_reduce(found_by_thread(row, slab, label));
      const bool ignores_next = found.next_row < 0;
      const std::int64_t next = ignores_next ? ~found.next_row : found.next_row;
      const Label<T, Target::label> next_label(p_, next < p_.rows ? next : 0);
      if (label.ignored()) {  // the same for all threads of the row
        if (is_leader()) {
          losses[row] = 0;
        }
        write(slab, next, ignores_next, [](int) { return Packs{}; });
        for_end(slab, [&](std::int64_t i) { logits[i] = static_cast<T>(0.0f); });
      } else {
        const Outcome<T> outcome(p_, label, found, found.label_y);
        if (is_leader()) {
          losses[row] = outcome.loss;
        }
        const Gradient<T, Target::label, kCap> gradient(p_, row, outcome.logsumexp, outcome.mass, label.u,
                                                        incoming.per_row ? incoming(row) : common);
        const int first = slab.first;
        const int label_at = static_cast<int>(label.index) - first;
        write(slab, next, ignores_next,
              [&](int i) { return gradient(kept(i), first + i * kPack, label_at - i * kPack); });
        for_end(slab, [&](std::int64_t i) {
          rows::store(logits + i, gradient(rows::load<1>(logits + i), i, label.index == i ? 0 : -1));
        });
      }
      row = next;
      label = next_label;
    }
  }

 private:
  __device__ bool is_leader() const { return rank_ == 0 && threadIdx.x == 0; }

  __device__ Slab<T> slab_of_row(std::int64_t row) const {
    return Slab<T>(logits_ + row * p_.classes, p_.classes, rank_, plan_.slab);
  }

  /// Pack i of the slab, in shared memory.
  __device__ Packs kept(int i) const {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(first_pack_ + 16 * i));
    return reinterpret_cast<const Packs&>(bits);
  }

  /// Calls f(i) with the class i of the row's unaligned ends that belongs to this thread, if there is one.
  template <class F>
  __device__ void for_end(const Slab<T>& slab, const F& f) const {
    if (rank_ == 0) {
      slab.peeled.for_end(static_cast<int>(threadIdx.x), f);
    }
  }

  /// Adds N of the thread's packs, from pack i on. With more packs at a time, sums are rescaled less often.
  template <int N>
  __device__ void add_packs(int i, FoundInRow& found) const {
    S y[N * kPack];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unpack_capped<kCap>(p_, kept(i + n * threads_), reinterpret_cast<S(&)[kPack]>(y[n * kPack]));
    }
    found.add(y, [](int) { return S{0}; });
  }

  /// The reductions of the thread's packs, which are added as they arrive, and the leader's numbers.
  __device__ FoundInRow found_by_thread(std::int64_t row, const Slab<T>& slab,
                                        const Label<T, Target::label>& label) const {
    // Blocks take rows from a queue, since ignored rows take little time. They do so early, to hide the latency of the
    // atomic operation.
    const int next = is_leader() ? static_cast<int>(gridDim.x / plan_.cluster) + atomicAdd(queue_, 1) : 0;
    // The label's logit is read before the exchange, since afterwards its thread may overwrite it.
    const bool look = is_leader() && label.is_class();
    const S label_y = look ? capped<kCap>(p_, static_cast<S>(logits_[row * p_.classes + label.index])) : S{0};
    auto found = FoundInRow::nothing(p_.unit());
    if (!label.ignored()) {
      add_row(row, slab, found);
    }
    found.label_y = label_y;
    // The complement, which is negative, of a row that is ignored and need not be loaded.
    found.next_row = is_leader() && next < p_.rows && Label<T, Target::label>(p_, next).ignored() ? ~next : next;
    return found;
  }

  __device__ void add_row(std::int64_t row, const Slab<T>& slab, FoundInRow& found) const {
    for_end(slab, [&](std::int64_t i) { add_pack(p_, row, i, rows::load<1>(logits_ + row * p_.classes + i), found); });
    int i = threadIdx.x;
#pragma unroll
    for (int part = 0; part < CrossEntropyPlan::kParts; ++part) {
      cuda::wait_copies(CrossEntropyPlan::kParts - 1 - part);
      for (int round = 0; round < plan_.part; round += 2, i += 2 * threads_) {
        if (i + threads_ < slab.count) {
          add_packs<2>(i, found);
        } else if (i < slab.count) {
          add_packs<1>(i, found);
        }
      }
    }
  }

  /// Overwrites each pack i of a row in global memory with make(i), and starts loading the
  /// next row in its place, in CrossEntropyPlan::kParts groups of copies.
  template <class Make>
  __device__ void write(const Slab<T>& slab, std::int64_t next_row, bool ignores_next, const Make& make) {
    const bool more = next_row < p_.rows && !ignores_next;
    const Slab<T> next = more ? slab_of_row(next_row) : slab;
    const int next_count = more ? next.count : 0;
    const std::uint64_t policy = cuda::read_once_policy(p_.rows * p_.classes * static_cast<int>(sizeof(T)));
    int i = threadIdx.x;
    T* to = slab.at(i);
    const T* from = next.at(i);
#pragma unroll 1
    for (int part = 0; part < CrossEntropyPlan::kParts; ++part) {
#pragma unroll 1
      for (int round = 0; round < plan_.part; ++round) {
        if (i < slab.count) {
          rows::store_whole(to, make(i));
        }
        if (i < next_count) {
          cuda::copy_async<16>(first_pack_ + 16 * i, from, policy);
        }
        i += threads_;
        to += threads_ * kPack;
        from += threads_ * kPack;
      }
      cuda::commit_copies();
    }
  }

  const Problem<T>& p_;
  const CrossEntropyPlan& plan_;
  T* logits_;
  int* queue_;
  std::uint32_t first_pack_;  // the address in shared memory of the first pack; pack i belongs to thread i % threads_
  int threads_;
  int rank_;
  Group group_;
};

/// At least 2 blocks per multiprocessor (__launch_bounds__), which limits the registers per thread.
template <class T, bool kCap, bool kCluster>
__global__ void __launch_bounds__(CrossEntropyPlan::kMostThreads, 2)
    cross_entropy_stream(Problem<T> p, CrossEntropyPlan plan, Incoming<T> incoming, T* logits, int* queue,
                         Accumulate<T>* losses) {
  using Rows = Streamer<T, kCap, kCluster>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Rows::Exchange exchange;
  Rows(p, plan, logits, queue, exchange, memory).run(incoming, losses);
}

// On the host.

template <class T, bool kCap, bool kCluster>
void stream(const CrossEntropyInPlace& args, const CrossEntropyPlan& plan) {
  const auto kernel = cross_entropy_stream<T, kCap, kCluster>;
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

/// Processes rows of any length and alignment, and any targets, reading the logits twice.
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
  if (plan.cluster == 0 || target_of(args.terms) != CrossEntropyTarget::label) {
    return xent::pass_twice(args);
  }
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    if constexpr (!std::is_same_v<T, double> && kTarget == xent::Target::label) {
      if (plan.cluster == 1) {
        xent::stream<T, kCap, false>(args, plan);
      } else {
        xent::stream<T, kCap, true>(args, plan);
      }
    }
  });
}

}  // namespace mica::kernels
