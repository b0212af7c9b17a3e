#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/distributed/detail/transport/extremum.h>
#include <mica/distributed/detail/transport/tcp.h>

namespace mica::distributed::detail {

namespace {

// Of a tensor in one message, in bytes. A multiple of all element sizes.
constexpr std::size_t largest_chunk = std::size_t{256} << 10;

template <class T>
T combined(T a, T b, Reduction reduction) {
  using A = Accumulate<T>;
  switch (reduction) {
    case Reduction::min: return extremum<true>(a, b);
    case Reduction::max: return extremum<false>(a, b);
    case Reduction::sum:
    case Reduction::mean: break;
  }
  return static_cast<T>(static_cast<A>(a) + static_cast<A>(b));
}

// Reduces the elements of all ranks, in `parts`, into `into`.
void reduce(DType dtype, Reduction reduction, const std::vector<Bytes>& parts, std::byte* into) {
  on_dtype(NumericTypes{}, dtype == boolean ? uint8 : dtype, "all_reduce", [&]<class T>() {
    using A = Accumulate<T>;
    const std::size_t count = parts[0].size() / sizeof(T);
    for (std::size_t i = 0; i < count; ++i) {
      const auto element = [&](std::size_t rank) {
        T value;
        std::memcpy(&value, parts[rank].data() + i * sizeof(T), sizeof(T));
        return value;
      };
      T result = element(0);
      for (std::size_t rank = 1; rank < parts.size(); ++rank) {
        result = combined(result, element(rank), reduction);
      }
      if (reduction == Reduction::mean) {
        result = static_cast<T>(static_cast<A>(result) / static_cast<A>(parts.size()));
      }
      std::memcpy(into + i * sizeof(T), &result, sizeof(T));
    }
  });
}

/// Sends a tensor in chunks, and calls a function for each chunk that has arrived from all ranks.
class ChunkedExchange final : public Transfer {
 public:
  using Process = std::function<void(std::size_t offset, std::vector<Bytes>& parts)>;

  /// Sends `bytes` bytes of `data`, in chunks numbered from `first`. If `data` is null, the chunks are empty.
  ChunkedExchange(const char* name, std::shared_ptr<Coordinator> coordinator, std::shared_ptr<CollectiveLog> group,
                  std::uint64_t first, const std::byte* data, std::size_t bytes, Process process)
      : name_(name),
        coordinator_(std::move(coordinator)),
        group_(std::move(group)),
        first_(first),
        count_(chunks_of(bytes)),
        process_(std::move(process)) {
    for (std::uint64_t i = 0; i < count_; ++i) {
      const std::size_t begin = i * largest_chunk, end = std::min(bytes, begin + largest_chunk);
      coordinator_->start_exchange(*group_, first_ + i, data == nullptr ? Bytes() : Bytes(data + begin, data + end));
    }
  }
  ~ChunkedExchange() override {
    for (std::uint64_t i = done_; i < count_; ++i) {
      coordinator_->forget_exchange(*group_, first_ + i);
    }
  }
  ChunkedExchange(const ChunkedExchange&) = delete;
  ChunkedExchange& operator=(const ChunkedExchange&) = delete;

  static std::uint64_t chunks_of(std::size_t bytes) { return (bytes + largest_chunk - 1) / largest_chunk; }

  void wait() override {
    const std::lock_guard lock(mutex_);
    coordinator_->check(name_);
    for (; done_ < count_; ++done_) {
      std::vector<Bytes> parts = coordinator_->finish_exchange(*group_, first_ + done_, name_);
      try {
        process_(done_ * largest_chunk, parts);
      } catch (const Error& error) {
        coordinator_->report_error(fmt::format("{}: {}", name_, error.what()));
        (void)coordinator_->finish_exchange(*group_, UINT64_MAX, name_);  // no such exchange: throws the failure
      }
    }
    process_ = {};  // frees the tensors
  }

  // Chunks complete in order.
  bool ended() const override { return coordinator_->has_exchanged(*group_, first_ + count_ - 1); }

 private:
  const char* name_;
  std::shared_ptr<Coordinator> coordinator_;
  std::shared_ptr<CollectiveLog> group_;
  const std::uint64_t first_, count_;
  std::mutex mutex_;  // guards the members below
  std::uint64_t done_ = 0;
  Process process_;
};

class TcpCollectives final : public Collectives {
 public:
  TcpCollectives(std::shared_ptr<Coordinator> coordinator, std::shared_ptr<CollectiveLog> group, int rank)
      : coordinator_(std::move(coordinator)), group_(std::move(group)), rank_(rank) {}

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    return start("all_reduce", x.raw_data(), x.bytes(), [=](std::size_t offset, std::vector<Bytes>& parts) {
      check_sizes(parts, parts[0].size());
      reduce(x.dtype(), reduction, parts, x.raw_data() + offset);
    });
  }

  std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) override {
    // The intersection of each chunk with this rank's part.
    const std::size_t begin = static_cast<std::size_t>(rank_) * into.bytes(), end = begin + into.bytes();
    return start("reduce_scatter", from.raw_data(), from.bytes(), [=](std::size_t offset, std::vector<Bytes>& parts) {
      check_sizes(parts, parts[0].size());
      const std::size_t first = std::max(begin, offset), last = std::min(end, offset + parts[0].size());
      if (first >= last) {
        return;
      }
      for (Bytes& part : parts) {
        part = Bytes(part.begin() + static_cast<std::ptrdiff_t>(first - offset),
                     part.begin() + static_cast<std::ptrdiff_t>(last - offset));
      }
      reduce(into.dtype(), reduction, parts, into.raw_data() + (first - begin));
    });
  }

  std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    return start("all_gather", from.raw_data(), from.bytes(), [=](std::size_t offset, std::vector<Bytes>& parts) {
      check_sizes(parts, parts[0].size());
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        std::memcpy(into.raw_data() + rank * from.bytes() + offset, parts[rank].data(), parts[rank].size());
      }
    });
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    return start("broadcast", rank_ == root ? x.raw_data() : nullptr, x.bytes(),
                 [=](std::size_t offset, std::vector<Bytes>& parts) {
                   const Bytes& part = parts[static_cast<std::size_t>(root)];
                   mica::check(offset + part.size() <= x.bytes(), "broadcast: rank {} sent too many bytes", root);
                   std::memcpy(x.raw_data() + offset, part.data(), part.size());
                 });
  }

 private:
  // If a rank called a different collective, the failure detector names it.
  static void check_sizes(const std::vector<Bytes>& parts, std::size_t size) {
    for (const Bytes& part : parts) {
      mica::check(part.size() == size, "the ranks called collectives of different sizes");
    }
  }

  std::shared_ptr<Transfer> start(const char* name, const std::byte* data, std::size_t bytes,
                                  ChunkedExchange::Process process) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t first = next_;
    next_ += ChunkedExchange::chunks_of(bytes);
    return std::make_shared<ChunkedExchange>(name, coordinator_, group_, first, data, bytes, std::move(process));
  }

  std::shared_ptr<Coordinator> coordinator_;
  std::shared_ptr<CollectiveLog> group_;
  int rank_;
  std::mutex mutex_;
  std::uint64_t next_ = std::uint64_t{1} << 63;  // smaller numbers belong to collectives
};

}  // namespace

std::shared_ptr<Collectives> tcp_collectives(std::shared_ptr<Coordinator> coordinator,
                                             std::shared_ptr<CollectiveLog> group, int rank) {
  return std::make_shared<TcpCollectives>(std::move(coordinator), std::move(group), rank);
}

}  // namespace mica::distributed::detail
