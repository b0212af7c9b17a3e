// Runs the tests that need several ranks: scripts/ranks 4 mica_rank_tests. A test runs on all ranks at the same time,
// and passes if it passes on each. Only rank 0 prints. With --cuda before other options, each rank has its tensors on a
// GPU.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "tests/ranks/rank_device.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/distributed/group.h>

namespace {

using mica::Tensor;
namespace distributed = mica::distributed;

int passed = 0, failed = 0, skipped = 0;

// After each test, the ranks agree on its result.
class Agreement : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed() || (result.skipped() && distributed::world().rank() == 0)) {
      std::printf("rank %d: %s:%d: %s\n", distributed::world().rank(), result.file_name() ? result.file_name() : "?",
                  result.line_number(), result.message());
      std::fflush(stdout);
    }
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    const Tensor state = mica::from_data<std::int64_t>({test.result()->Failed()    ? 2
                                                        : test.result()->Skipped() ? 1
                                                                                   : 0},
                                                       {1});
    distributed::world().all_reduce(state, distributed::Reduction::max);
    const std::int64_t worst = mica::to_vector<std::int64_t>(state)[0];
    ++(worst == 2 ? failed : worst == 1 ? skipped : passed);
    if (worst == 2 && distributed::world().rank() == 0) {
      std::printf("FAILED: %s.%s\n", test.test_suite_name(), test.name());
      std::fflush(stdout);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  setenv("MICA_POISON", "1", 0);          // fills uninitialized memory with NaN
  setenv("MICA_DIST_TIMEOUT", "300", 0);  // long, since ranks may be late on a busy machine
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new Agreement);
  const distributed::Group world = distributed::world();
  std::optional<mica::DeviceGuard> current;
  if (argc > 1 && std::strcmp(argv[1], "--cuda") == 0) {
    mica::check(distributed::local_rank() < mica::cuda_device_count(), "expected a GPU for each rank, got {}",
                mica::cuda_device_count());
    mica::distributed::rank_device() = mica::Device::cuda(distributed::local_rank());
    current.emplace(mica::distributed::rank_device());
  }
  const bool all_well = RUN_ALL_TESTS() == 0;
  if (world.rank() == 0) {
    std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  }
  return all_well && failed == 0 ? 0 : 1;
}
