#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/io/permutation.h>
#include <mica/train/ranks.h>

namespace mica::train {

void on_rank_0(const distributed::Group& group, const std::function<void()>& f) {
  std::exception_ptr error;
  if (group.rank() == 0) {
    const distributed::LongTask task("work of rank 0 alone");  // the others wait for it in the broadcast
    try {
      f();
    } catch (...) {
      error = std::current_exception();
    }
  }
  const Tensor failed = full({}, error ? 1 : 0, boolean);
  group.broadcast(failed);
  if (error) {
    std::rethrow_exception(error);
  }
  if (failed.item() != 0) {
    throw StoppedByRank0();
  }
}

void share_cores(const distributed::Group& group) {
  // The largest number of ranks on a machine.
  const Tensor ranks = from_data({std::int64_t{distributed::local_rank() + 1}}, Shape{});
  group.all_reduce(ranks, distributed::Reduction::max);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    set_num_threads(std::max(1, num_threads() / static_cast<int>(ranks.item())));
  }
}

PhiloxKey random_stream_of(int rank, PhiloxKey key) {
  key.seed = rank == 0 ? key.seed : io::mix_seeds(key.seed, static_cast<std::uint64_t>(rank));
  return key;
}

}  // namespace mica::train
