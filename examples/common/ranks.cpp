#include "examples/common/ranks.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "examples/common/program.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/io/permutation.h>

using namespace mica;

void join_ranks() {
  rank_of_messages = dist::world().rank();
  if (rank_of_messages > 0) {
    check(std::freopen("/dev/null", "w", stdout) != nullptr, "cannot open /dev/null: {}", std::strerror(errno));
  }
}

void refuse_ranks(const char* program) {
  if (const int ranks = dist::world().size(); ranks > 1) {
    throw UsageError(fmt::format("{} runs as one process, but was started as {} ranks", program, ranks));
  }
}

void on_rank_0(const dist::Group& group, const std::function<void()>& f) {
  std::exception_ptr error;
  if (group.rank() == 0) {
    const dist::LongTask task("work of rank 0 alone");  // the others wait for it in the broadcast
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

std::vector<bool> true_on_any(const dist::Group& group, const std::vector<bool>& conditions) {
  if (group.size() == 1) {
    return conditions;
  }
  const std::vector<std::uint8_t> own(conditions.begin(), conditions.end());
  const Tensor any = from_data(own, {static_cast<std::int64_t>(own.size())});
  group.all_reduce(any, dist::Reduction::max);
  const std::vector<std::uint8_t> all = to_vector<std::uint8_t>(any);
  return {all.begin(), all.end()};
}

std::string broadcast(const dist::Group& group, std::string text) {
  const Tensor size = from_data({static_cast<std::int64_t>(text.size())}, Shape{});
  group.broadcast(size);
  text.resize(static_cast<std::size_t>(size.item()));
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  const Tensor shared = from_data(bytes, {static_cast<std::int64_t>(bytes.size())});
  group.broadcast(shared);
  bytes = to_vector<std::uint8_t>(shared);
  return {bytes.begin(), bytes.end()};
}

void share_cores(const dist::Group& group) {
  // The largest number of ranks on a machine.
  const Tensor ranks = from_data({std::int64_t{dist::local_rank() + 1}}, Shape{});
  group.all_reduce(ranks, dist::Reduction::max);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    set_num_threads(std::max(1, num_threads() / static_cast<int>(ranks.item())));
  }
}

PhiloxKey random_stream_of(int rank, PhiloxKey key) {
  key.seed = rank == 0 ? key.seed : io::mix_seeds(key.seed, static_cast<std::uint64_t>(rank));
  return key;
}

void start_ranks_on_gpus(int count, char** argv) {
  const int ranks = dist::world().size();
  check(cuda_device_count() >= count, "--gpus: expected at most the {} usable GPUs of this machine, got {}",
        cuda_device_count(), count);
  if (ranks == count) {
    return;
  }
  check(ranks == 1, "--gpus: expected as many GPUs as mpirun started ranks, which is {}, got {}", ranks, count);
  check(MICA_WITH_MPI != 0, "--gpus: several GPUs need MPI, with which this program was not built");
  // What a user may start once, it may start several times; Open MPI wants to hear that from root.
  for (const char* const allows_root : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) {
    setenv(allows_root, "1", 0);
  }
  std::string ranks_text = std::to_string(count), program = "/proc/self/exe", mpirun = "mpirun", option = "-n";
  program.resize(4096);
  const ssize_t length = readlink("/proc/self/exe", program.data(), program.size());
  check(length > 0 && length < static_cast<ssize_t>(program.size()), "--gpus: cannot tell this program's path");
  program.resize(static_cast<std::size_t>(length));
  std::vector<char*> words{mpirun.data(), option.data(), ranks_text.data(), program.data()};
  for (char** word = argv + 1; *word != nullptr; ++word) {
    words.push_back(*word);
  }
  words.push_back(nullptr);
  std::fflush(nullptr);
  execvp(mpirun.c_str(), words.data());
  fail("--gpus: cannot start mpirun: {}", std::strerror(errno));
}
