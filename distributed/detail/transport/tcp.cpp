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

// The largest part of a tensor in one message, in bytes. A multiple of all element sizes.
constexpr std::size_t largest_piece = std::size_t{256} << 10;

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

/// A tensor that is being exchanged in pieces, and a function that processes each piece when it has arrived from all
/// ranks.
class Exchange final : public Transfer {
 public:
  using Take = std::function<void(std::size_t offset, std::vector<Bytes>& parts)>;

  /// Sends `bytes` bytes of `data`, in pieces numbered from `first`. If `data` is null, this rank takes part in as many
  /// pieces, but sends empty ones.
  Exchange(const char* name, std::shared_ptr<Control> control, std::shared_ptr<Journal> group, std::uint64_t first,
           const std::byte* data, std::size_t bytes, Take take)
      : name_(name),
        control_(std::move(control)),
        group_(std::move(group)),
        first_(first),
        count_(pieces_of(bytes)),
        take_(std::move(take)) {
    for (std::uint64_t i = 0; i < count_; ++i) {
      const std::size_t begin = i * largest_piece, end = std::min(bytes, begin + largest_piece);
      control_->start_exchange(*group_, first_ + i, data == nullptr ? Bytes() : Bytes(data + begin, data + end));
    }
  }
  ~Exchange() override {
    for (std::uint64_t i = taken_; i < count_; ++i) {
      control_->forget_exchange(*group_, first_ + i);
    }
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  static std::uint64_t pieces_of(std::size_t bytes) { return (bytes + largest_piece - 1) / largest_piece; }

  void wait() override {
    const std::lock_guard lock(mutex_);
    control_->check(name_);
    for (; taken_ < count_; ++taken_) {
      std::vector<Bytes> parts = control_->finish_exchange(*group_, first_ + taken_, name_);
      try {
        take_(taken_ * largest_piece, parts);
      } catch (const Error& error) {
        control_->report_trouble(fmt::format("{}: {}", name_, error.what()));
        (void)control_->finish_exchange(*group_, UINT64_MAX, name_);  // always throws: the verdict
      }
    }
    take_ = {};  // frees the tensors
  }

  // Pieces complete in order, so the last one tells.
  bool ended() const override { return control_->has_exchanged(*group_, first_ + count_ - 1); }

 private:
  const char* name_;
  std::shared_ptr<Control> control_;
  std::shared_ptr<Journal> group_;
  const std::uint64_t first_, count_;
  std::mutex mutex_;  // guards the members below
  std::uint64_t taken_ = 0;
  Take take_;
};

class Host final : public Collectives {
 public:
  Host(std::shared_ptr<Control> control, std::shared_ptr<Journal> group, int rank)
      : control_(std::move(control)), group_(std::move(group)), rank_(rank) {}

  std::shared_ptr<Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    return start("all_reduce", x.raw_data(), x.bytes(), [=](std::size_t offset, std::vector<Bytes>& parts) {
      check_sizes(parts, parts[0].size());
      reduce(x.dtype(), reduction, parts, x.raw_data() + offset);
    });
  }

  std::shared_ptr<Transfer> reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction) override {
    // The intersection of each piece with this rank's part.
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
  // If a rank called a different collective, the verdict that follows names it.
  static void check_sizes(const std::vector<Bytes>& parts, std::size_t size) {
    for (const Bytes& part : parts) {
      mica::check(part.size() == size, "the ranks called collectives of different sizes");
    }
  }

  std::shared_ptr<Transfer> start(const char* name, const std::byte* data, std::size_t bytes, Exchange::Take take) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t first = next_;
    next_ += Exchange::pieces_of(bytes);
    return std::make_shared<Exchange>(name, control_, group_, first, data, bytes, std::move(take));
  }

  std::shared_ptr<Control> control_;
  std::shared_ptr<Journal> group_;
  int rank_;
  std::mutex mutex_;
  std::uint64_t next_ = std::uint64_t{1} << 63;  // smaller numbers belong to collectives
};

}  // namespace

std::shared_ptr<Collectives> host_collectives(std::shared_ptr<Control> control, std::shared_ptr<Journal> group,
                                              int rank) {
  return std::make_shared<Host>(std::move(control), std::move(group), rank);
}

}  // namespace mica::distributed::detail
