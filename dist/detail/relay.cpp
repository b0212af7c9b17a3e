#include <algorithm>
#include <cstring>
#include <utility>

#include <mica/core/check.h>
#include <mica/dist/detail/control.h>
#include <mica/dist/detail/journal.h>
#include <mica/dist/detail/relay.h>

namespace mica::dist::detail {

namespace {

class Ended final : public Transfer {
 public:
  void wait() override {}
};

class Relayed final : public Collectives {
 public:
  Relayed(std::shared_ptr<Control> control, std::shared_ptr<Journal> journal)
      : control_(std::move(control)), journal_(std::move(journal)) {
    const std::vector<int>& members = journal_->members();
    rank_ = static_cast<std::size_t>(std::find(members.begin(), members.end(), control_->rank()) - members.begin());
  }

  std::shared_ptr<Transfer> all_reduce(const Tensor&, Reduction) override { refuse("all_reduce"); }
  std::shared_ptr<Transfer> reduce_scatter(const Tensor&, const Tensor&, Reduction) override {
    refuse("reduce_scatter");
  }

  std::shared_ptr<Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    const std::size_t bytes = from.bytes();
    for_each_piece(bytes, [&](std::size_t at, std::size_t size) {
      const std::byte* const own = from.raw_data() + at;
      const std::vector<Bytes> all = exchanged("all_gather", Bytes(own, own + size));
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        check(all[rank].size() == size, "all_gather: expected {} bytes of rank {}, got {}", size, rank,
              all[rank].size());
        std::memcpy(into.raw_data() + rank * bytes + at, all[rank].data(), size);
      }
    });
    return std::make_shared<Ended>();
  }

  std::shared_ptr<Transfer> broadcast(const Tensor& x, int root) override {
    const auto from = static_cast<std::size_t>(root);
    for_each_piece(x.bytes(), [&](std::size_t at, std::size_t size) {
      std::byte* const own = x.raw_data() + at;
      const std::vector<Bytes> all = exchanged("broadcast", rank_ == from ? Bytes(own, own + size) : Bytes());
      check(all[from].size() == size, "broadcast: expected {} bytes of rank {}, got {}", size, root, all[from].size());
      std::memcpy(own, all[from].data(), size);
    });
    return std::make_shared<Ended>();
  }

 private:
  [[noreturn]] static void refuse(const char* op) {
    fail("{}: tensors on the CPU need MPI: build mica with MPI and start the program with mpirun", op);
  }

  std::vector<Bytes> exchanged(const char* op, const Bytes& mine) const {
    control_->check(op);
    return control_->exchange(*journal_, mine);
  }

  template <class Piece>
  static void for_each_piece(std::size_t bytes, const Piece& piece) {
    for (std::size_t at = 0; at < bytes; at += Control::largest_exchange) {
      piece(at, std::min(bytes - at, Control::largest_exchange));
    }
  }

  std::shared_ptr<Control> control_;
  std::shared_ptr<Journal> journal_;
  std::size_t rank_ = 0;
};

}  // namespace

std::shared_ptr<Collectives> relayed_collectives(std::shared_ptr<Control> control, std::shared_ptr<Journal> journal) {
  return std::make_shared<Relayed>(std::move(control), std::move(journal));
}

}  // namespace mica::dist::detail
