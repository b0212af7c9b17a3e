// Every allocation of forward, backward, clipping, optimizer step, save and load fails once: first those of tensor
// memory, then those of operator new. A failure must be a clear error, change nothing and leak nothing, and the next
// attempt must give the bits of an undisturbed run.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <new>
#include <optional>

#include "tests/files.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/core/detail/allocation_fault.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/io/adapter.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/ema.h>

namespace {

std::atomic<std::int64_t> news_left{-1};  // allocations until one fails; −1: none fails

}  // namespace

// Replaced, so that operator new can fail. Not inline: g++ would report malloc and delete as a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (news_left.load(std::memory_order_relaxed) >= 0 && news_left.fetch_sub(1) == 0) {
    throw std::bad_alloc();
  }
  if (void* const data = std::malloc(bytes == 0 ? 1 : bytes); data != nullptr) {
    return data;
  }
  throw std::bad_alloc();
}
// A sanitizer's version would not match our operator delete.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }

using namespace mica;
using namespace mica::testing_support;

namespace {

/// Makes each allocation of one kind fail in turn. happened() returns whether the last fault was reached; disarm()
/// cancels it otherwise.
struct TensorFaults {
  static constexpr std::int64_t kStep = 1;
  static constexpr const char* kName = "tensor memory";
  memory::AllocationFault& fault;
  void arm(std::int64_t n) { fault.fail_after(n); }
  bool disarm() { return fault.happened() || (fault.fail_after(INT32_MAX), false); }
};
struct NewFaults {
#if defined(MICA_ADDRESS_SANITIZER)
  static constexpr std::int64_t kStep = 3;  // testing all of the thousands would take too long under AddressSanitizer
#else
  static constexpr std::int64_t kStep = 1;
#endif
  static constexpr const char* kName = "operator new";
  void arm(std::int64_t n) { news_left = n; }
  bool disarm() { return news_left.exchange(-1) < 0; }
};

/// Calls f and returns whether it threw because memory ran out.
template <class F>
bool runs_out(const F& f) {
  try {
    f();
  } catch (const OutOfMemory&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

using Bits = std::map<std::string, std::vector<double>>;

void expect_same(const Bits& got, const Bits& expected) {
  for (const auto& [name, values] : expected) {
    const auto at = got.find(name);
    EXPECT_TRUE(at != got.end()) << name << " is missing";
    EXPECT_TRUE(at == got.end() || at->second == values) << name << " differs";
  }
  for (const auto& [name, values] : got) {
    EXPECT_TRUE(expected.contains(name)) << name << " is not expected";
  }
}

struct World {
  nn::GPT model;
  optim::AdamW optimizer;
  Tensor tokens, targets;

  static nn::GPT made(Device device) {
    manual_seed(5);
    nn::GPT model{{.vocab = 7, .context = 6, .layers = 1, .heads = 2, .width = 8, .dropout = 0.1}};
    model.to(device);
    return model;
  }

  explicit World(Device device)
      : model(made(device)),
        optimizer(optim::AdamW::decay_matrices(model.parameters(), {.lr = 0.01})),
        tokens(randint(0, 7, {2, 6}, int64, device)),
        targets(randint(0, 7, {12}, int64, device)) {}

  void backward() const {
    manual_seed(6);  // dropout
    cross_entropy(reshape(model(tokens), {12, 7}), targets).backward();
  }
  void clip() const { optim::clip_grad_norm_(model.parameters(), 0.1); }
  void step() {
    optimizer.zero_grad();
    backward();
    clip();
    optimizer.step();
  }

  Bits bits() const {
    std::vector<Named> all = tensors();
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (tensor.grad().defined()) {
        all.emplace_back(name + ".grad", tensor.grad());
      }
    }
    return bits_of(all);
  }
  Bits bits_without_gradients() const { return bits_of(tensors()); }

 private:
  using Named = std::pair<std::string, Tensor>;

  std::vector<Named> tensors() const {
    std::vector<Named> all;
    for (const auto& [name, tensor] : model.named_parameters()) {
      all.emplace_back(name, tensor.detach());
    }
    for (const auto& [name, tensor] : optimizer.state_dict()) {
      all.emplace_back(name, tensor);
    }
    return all;
  }

  /// Copies all values from a GPU at once: every copy waits for it, and other tests keep it busy.
  static Bits bits_of(const std::vector<Named>& all) {
    Bits result;
    Tensors on_gpu;
    for (const auto& [name, tensor] : all) {
      if (tensor.device().is_cuda()) {
        on_gpu.push_back(reshape(tensor.to(float64), {-1}));
      } else {
        result.emplace(name, to_vector<double>(tensor));
      }
    }
    if (on_gpu.empty()) {
      return result;
    }
    const std::vector<double> values = to_vector<double>(cat(on_gpu));
    auto next = values.begin();
    for (const auto& [name, tensor] : all) {
      if (tensor.device().is_cuda()) {
        result.emplace(name, std::vector<double>(next, next + tensor.numel()));
        next += tensor.numel();
      }
    }
    return result;
  }
};

/// Which allocations fail: number `first`, and then every step-th.
struct Part {
  std::int64_t first = 0, step = 1;
};

/// For every allocation of a part in `work`: creates a world with `prepare`, makes that allocation fail, expects `kept`
/// to be unchanged, and expects a second `work` to give `bits` as in an undisturbed run. Returns the number of
/// failures.
template <class Faults, class Prepare, class Work, class Kept>
std::int64_t fail_each(Device device, Faults faults, memory::AllocationFault& count, const Prepare& prepare,
                       const Work& work, const Kept& kept, const Part& part) {
  Bits expected;
  {
    World world(device);
    prepare(world);
    work(world);
    expected = world.bits();
  }
  std::int64_t failed = 0;
  for (std::int64_t n = part.first;; n += part.step * Faults::kStep) {
    SCOPED_TRACE(fmt::format("{} {} on {}", Faults::kName, n, device));
    const std::int64_t before_all = count.outstanding();
    {
      World world(device);
      prepare(world);
      const Bits before = kept(world);
      faults.arm(n);
      const bool threw = runs_out([&] { work(world); });
      const bool happened = faults.disarm();
      if (!happened) {
        EXPECT_FALSE(threw);
        expect_same(world.bits(), expected);
        break;
      }
      if (threw) {  // otherwise `work` succeeded without the allocation
        ++failed;
        expect_same(kept(world), before);
        work(world);
      }
      expect_same(world.bits(), expected);
    }
    EXPECT_EQ(count.outstanding(), before_all) << "tensors leaked";
    if (testing::Test::HasFailure()) {
      break;
    }
  }
  return failed;
}

template <class Prepare, class Work, class Kept>
void fail_each(const Prepare& prepare, const Work& work, const Kept& kept,
               const std::vector<Device>& devices = test_devices(), const Part& part = {}) {
  const int threads = num_threads();
  set_num_threads(1);  // so that allocations have the same order every time
  memory::AllocationFault fault;
  for (const Device device : devices) {
    World(device).step();  // creates one-time resources
    const std::int64_t of_tensors = fail_each(device, TensorFaults{fault}, fault, prepare, work, kept, part);
    const std::int64_t of_new = fail_each(device, NewFaults{}, fault, prepare, work, kept, part);
    EXPECT_GT(of_tensors + of_new, 0);
  }
  set_num_threads(threads);
}

const auto kNothing = [](World&) {};
const auto kOneStep = [](World& world) { world.step(); };
const auto kAll = [](const World& world) { return world.bits(); };

// These have thousands of allocations: each of four tests takes a quarter, so that they can run side by side.
class OutOfMemoryQuarter : public testing::TestWithParam<int> {
 protected:
  Part part() const { return {.first = GetParam(), .step = 4}; }
};
INSTANTIATE_TEST_SUITE_P(All, OutOfMemoryQuarter, testing::Range(0, 4));

TEST_P(OutOfMemoryQuarter, BackwardChangesNoGradientOrAll) {
  fail_each(
      kNothing, [](World& world) { world.backward(); }, kAll, test_devices(), part());
  // Accumulated gradients, to which a GPU's products add in place.
  fail_each([](World& world) { world.backward(); }, [](World& world) { world.backward(); }, kAll, {Device::cpu()},
            part());
}

const auto kWithoutGradients = [](const World& world) { return world.bits_without_gradients(); };

TEST_P(OutOfMemoryQuarter, FirstTrainingStep) {
  fail_each(kNothing, kOneStep, kWithoutGradients, test_devices(), part());
}

TEST_P(OutOfMemoryQuarter, LaterTrainingStep) {
  fail_each(kOneStep, kOneStep, kWithoutGradients, test_devices(), part());
}

TEST(OutOfMemory, ClippingAndOptimizerByThemselves) {
  const auto with_gradients = [](World& world) { world.backward(); };
  fail_each(
      with_gradients, [](World& world) { world.clip(); }, kAll);
  fail_each(
      with_gradients, [](World& world) { world.optimizer.step(); }, kAll);
}

TEST(OutOfMemory, MovingAModule) {
  fail_each([](World& world) { world.backward(); }, [](World& world) { world.model.to(float64); }, kAll);
}

TEST(OutOfMemory, SaveAndLoad) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "mica_out_of_memory";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::filesystem::path path = folder / "model.safetensors";
  const io::Metadata metadata{{"step", "1"}};
  const auto state = [](const World& world) {
    StateDict all = world.model.state_dict();
    all.emplace("strided", transpose(world.model.wte.weight.detach(), 0, 1));
    return all;
  };
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
  };

  memory::AllocationFault fault;
  for (const Device device : test_devices()) {
    World old_world(device), world(device);
    world.step();
    io::save(path, state(old_world), {});
    const std::string old_bytes = contents(path);
    io::save(path, state(world), metadata);
    const std::string new_bytes = contents(path);
    ASSERT_NE(old_bytes, new_bytes);
    const auto each = [&](auto faults, const auto& work) {
      std::int64_t failed = 0;
      for (std::int64_t n = 0;; ++n) {
        SCOPED_TRACE(fmt::format("{} {} on {}", faults.kName, n, device));
        const std::int64_t outstanding = fault.outstanding();
        faults.arm(n);
        const bool threw = runs_out([&] { work(); });
        if (!faults.disarm()) {
          EXPECT_FALSE(threw);
          break;
        }
        failed += threw;
        EXPECT_EQ(files(), 1);
        EXPECT_EQ(fault.outstanding(), outstanding) << "tensors leaked";
        if (testing::Test::HasFailure()) {
          return;
        }
      }
      EXPECT_GT(failed, 0);
    };

    // An existing file is either unchanged or completely replaced.
    const auto save_again = [&](auto faults) {
      std::int64_t failed = 0;
      for (std::int64_t n = 0;; ++n) {
        SCOPED_TRACE(fmt::format("save, {} {} on {}", faults.kName, n, device));
        std::ofstream(path, std::ios::binary) << old_bytes;
        const StateDict tensors = state(world);
        faults.arm(n);
        const bool threw = runs_out([&] { io::save(path, tensors, metadata); });
        const bool happened = faults.disarm();
        EXPECT_EQ(contents(path), threw ? old_bytes : new_bytes);
        EXPECT_EQ(files(), 1);
        if (!happened || testing::Test::HasFailure()) {
          break;
        }
        failed += threw;
        io::save(path, tensors, metadata);
        EXPECT_EQ(contents(path), new_bytes);
      }
      EXPECT_GT(failed, 0);
    };
    save_again(TensorFaults{fault});
    save_again(NewFaults{});
    if (HasFailure()) {
      break;
    }

    const auto load = [&] { (void)io::load(path, device); };
    each(TensorFaults{fault}, load);
    each(NewFaults{}, load);
    const StateDict loaded = io::load(path, device);
    for (const auto& [name, tensor] : state(world)) {
      expect_same_bits(loaded.at(name), tensor, name);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(OutOfMemory, LoadPretrained) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "mica_out_of_memory_pretrained";
  std::filesystem::remove_all(folder);
  manual_seed(8);
  const nn::Llama model({.vocab = 5, .layers = 1, .heads = 2, .key_heads = 1, .width = 4, .hidden = 4});
  io::save_pretrained(model, folder, {.shard_bytes = 200});
  memory::AllocationFault fault;
  const auto each = [&](auto faults, DType dtype) {
    std::int64_t failed = 0;
    for (std::int64_t n = 0;; n += faults.kStep) {
      SCOPED_TRACE(fmt::format("{} {}", faults.kName, n));
      const std::int64_t outstanding = fault.outstanding();
      faults.arm(n);
      const bool threw = runs_out([&] { (void)io::load_pretrained(folder, {.dtype = dtype}); });
      if (!faults.disarm()) {
        EXPECT_FALSE(threw);
        break;
      }
      failed += threw;
      EXPECT_EQ(fault.outstanding(), outstanding) << "tensors leaked";
      if (testing::Test::HasFailure()) {
        return;
      }
    }
    EXPECT_GT(failed, 0);
  };
  each(TensorFaults{fault}, bfloat16);
  each(NewFaults{}, bfloat16);
  each(NewFaults{}, float32);
  const nn::Llama loaded = io::load_pretrained<nn::Llama>(folder);
  for (const auto& [name, tensor] : model.state_dict()) {
    expect_same_bits(loaded.state_dict().at(name), tensor, name);
  }
  std::filesystem::remove_all(folder);
}

TEST_P(OutOfMemoryQuarter, StateDicts) {
  World source(Device::cpu());
  source.step();
  source.step();
  const StateDict model = source.model.state_dict();
  const StateDict optimizer = source.optimizer.state_dict();
  fail_each(
      kOneStep, [&](World& world) { world.model.load_state_dict(model); }, kAll, test_devices(), part());
  fail_each(
      kOneStep, [&](World& world) { world.optimizer.load_state_dict(optimizer); }, kAll, test_devices(), part());
  fail_each(
      kOneStep, [&](World& world) { (void)world.model.state_dict(), (void)world.optimizer.state_dict(); }, kAll,
      test_devices(), part());
}

/// A model's tensors by name, with whether they require a gradient.
template <class Model>
Bits registered(Model& model) {
  Bits result;
  for (const auto& [name, tensor] : model.state_dict()) {
    result.emplace(name, to_vector<double>(tensor));
  }
  for (const auto& [name, tensor] : model.named_parameters()) {
    result.emplace(name + (tensor.requires_grad() ? " is trained" : " is frozen"), std::vector<double>{});
  }
  return result;
}

/// Makes every allocation of `work` fail once, in a new model each time. A failure must change nothing in the model,
/// and a second `work` must give the result of an undisturbed one.
template <class Make, class Work>
void expect_all_or_nothing(const Make& make, const Work& work) {
  const auto seeded_work = [&](auto& model) {
    manual_seed(9);
    work(model);
  };
  memory::AllocationFault fault;
  const auto each = [&](auto faults) {
    auto undisturbed = make();
    seeded_work(undisturbed);
    const Bits expected = registered(undisturbed);
    std::int64_t failed = 0;
    for (std::int64_t n = 0;; n += faults.kStep) {
      SCOPED_TRACE(fmt::format("{} {}", faults.kName, n));
      auto model = make();
      const Bits before = registered(model);
      faults.arm(n);
      const bool threw = runs_out([&] { seeded_work(model); });
      const bool happened = faults.disarm();
      if (threw) {
        ++failed;
        expect_same(registered(model), before);
        seeded_work(model);
      }
      expect_same(registered(model), expected);
      if (!happened || testing::Test::HasFailure()) {
        EXPECT_EQ(threw, happened);
        break;
      }
    }
    EXPECT_GT(failed, 0);
  };
  const int threads = num_threads();
  set_num_threads(1);
  each(TensorFaults{fault});
  each(NewFaults{});
  set_num_threads(threads);
}

nn::GPT small_gpt() {
  manual_seed(5);
  return nn::GPT({.vocab = 5, .context = 4, .layers = 1, .heads = 1, .width = 4});
}

TEST(OutOfMemory, AddingAdapters) {
  expect_all_or_nothing(small_gpt, [](nn::GPT& gpt) { nn::add_lora(gpt, {"*"}, {.rank = 2}); });
  const auto quantized = [] {
    nn::GPT gpt = small_gpt();
    nn::quantize(gpt, {.bits = 8});
    return gpt.to(bfloat16), std::move(gpt);
  };
  expect_all_or_nothing(quantized, [](nn::GPT& gpt) { nn::add_lora(gpt, {"*c_proj"}, {.rank = 2}); });

  nn::Linear linear(3, 2);
  linear.weight.requires_grad_(true);
  memory::AllocationFault fault;
  fault.fail_after(0);
  EXPECT_TRUE(runs_out([&] { nn::LoRALinear adapted(linear, {.rank = 2}); }));
  EXPECT_TRUE(linear.weight.requires_grad());
}

TEST(OutOfMemory, ALayerOfItsOwn) {
  const auto plain = [] {
    manual_seed(5);
    return nn::Linear(32, 3);
  };
  const auto adapted = [&](DType dtype) {
    nn::Linear layer = plain();
    layer.add_lora({.rank = 2});
    layer.lora_b.set_data(ones({3, 2}));
    layer.to(dtype);
    return layer;
  };
  expect_all_or_nothing(plain, [](nn::Linear& layer) { layer.add_lora({.rank = 2}); });
  for (const int bits : {8, 1}) {  // with and without zeros
    expect_all_or_nothing(plain, [&](nn::Linear& layer) { layer.quantize({.bits = bits}); });
  }
  for (const DType dtype : {float32, bfloat16}) {
    expect_all_or_nothing([&] { return adapted(dtype); }, [](nn::Linear& layer) { layer.merge_lora(); });
  }
}

TEST(OutOfMemory, LoadingAdapters) {
  const TemporaryFolder folder;
  nn::GPT trained = small_gpt();
  nn::add_lora(trained, {"*"}, {.rank = 2});
  io::save_adapter(trained, folder.path());
  expect_all_or_nothing(small_gpt, [&](nn::GPT& gpt) { io::load_adapter(gpt, folder.path()); });
}

TEST(OutOfMemory, AssigningAStateDict) {
  manual_seed(6);
  nn::GPT other({.vocab = 5, .context = 4, .layers = 1, .heads = 1, .width = 4});
  StateDict state = other.state_dict();
  state.at("h.0.mlp.c_fc.weight") = transpose(randn({4, 16}), 0, 1);  // will be copied
  expect_all_or_nothing(small_gpt, [&](nn::GPT& gpt) { gpt.load_state_dict(state, true, true); });
}

TEST(OutOfMemory, AveragesOfWeights) {
  manual_seed(7);
  const Tensors weights{randn({3}), randn({2, 2}), randn({4}, float64)};
  optim::Ema source(weights, 0.5);
  weights[0].set_data(randn({3}));
  source.update();
  StateDict narrow;
  for (const auto& [name, tensor] : source.state_dict()) {
    narrow.emplace(name, tensor.to(bfloat16));
  }
  struct Averages {
    optim::Ema ema;
    StateDict state_dict() const { return ema.state_dict(); }
    static nn::NamedTensors named_parameters() { return {}; }
  };
  expect_all_or_nothing([&] { return Averages{optim::Ema(weights, 0.5)}; },
                        [&](Averages& averages) { averages.ema.load_state_dict(narrow); });
}

TEST(OutOfMemory, NamesTheRequestedSize) {
  memory::AllocationFault fault;
  fault.fail_after(0);
  expect_error([] { empty({1000}); }, "out of memory: asked for 4000 bytes");
  EXPECT_TRUE(fault.happened());
  EXPECT_EQ(empty({1000}).numel(), 1000);
  EXPECT_EQ(fault.outstanding(), 0);
  expect_error([] { memory::AllocationFault second; }, "AllocationFault: another one is active");
  expect_error([] { empty({std::int64_t{1} << 60}, uint8); }, "out of memory: asked for 1152921504606846976 bytes");
}

}  // namespace
