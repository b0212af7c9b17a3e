#include <tests/support.h>

#include <optional>

#include <mica/autograd/function.h>
#include <mica/core/rng.h>
#include <mica/nn/init.h>
#include <mica/nn/module.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

struct Leaf : nn::Module {
  explicit Leaf(std::int64_t n) : weight(param("weight", full({n}, 2))) {}
  Tensor weight;
  Tensor mean = buffer("mean", zeros({2}));
};

struct Pair : nn::Module {
  Leaf first = child("first", Leaf{3});
  Tensor scale = param("scale", ones({1}));
  Leaf second = child("second", Leaf{4});
};

std::vector<std::string> names(const nn::NamedTensors& list) {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : list) {
    result.push_back(name);
  }
  return result;
}

// y = x · x, saving x.
struct SquareSum {
  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x);
    double sum = 0;
    for (double value : to_vector<double>(x)) {
      sum += value * value;
    }
    return full({}, sum, x.dtype(), x.device());
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    auto [x] = ctx.saved<1>();
    std::vector<double> values = to_vector<double>(x);
    for (double& value : values) {
      value *= 2 * dy.item();
    }
    return {from_data(values, x.shape()).to(x.device(), x.dtype())};
  }
};

TEST(Module, NamesAreThoseOfPyTorch) {
  const Pair pair;
  EXPECT_EQ(names(pair.named_parameters()), (std::vector<std::string>{"scale", "first.weight", "second.weight"}));
  EXPECT_EQ(names(pair.named_buffers()), (std::vector<std::string>{"first.mean", "second.mean"}));
  EXPECT_EQ(pair.state_dict().size(), 5u);
  EXPECT_TRUE(pair.named_parameters()[1].second.is_same(pair.first.weight));
  EXPECT_TRUE(pair.first.weight.requires_grad());
  EXPECT_FALSE(pair.first.mean.requires_grad());
  EXPECT_FALSE(pair.state_dict().at("scale").requires_grad());
}

TEST(Module, RegistrationSurvivesMoves) {
  std::vector<Pair> pairs;
  for (int i = 0; i < 5; ++i) {  // grows, and so moves its elements
    Pair pair;
    pairs.push_back(std::move(pair));
  }
  const std::optional<Pair> moved(std::move(pairs[1]));
  EXPECT_TRUE(moved->parameters()[1].is_same(moved->first.weight));
  EXPECT_THROW(pairs[1].parameters(), Error);

  Pair& pair = pairs[3];
  pair.to(float64);
  EXPECT_EQ(pair.first.weight.dtype(), float64);
  pair.eval();
  EXPECT_FALSE(pair.first.is_training());
  EXPECT_FALSE(pair.second.is_training());
  pair.train();
  EXPECT_TRUE(pair.second.is_training());
  EXPECT_TRUE(pairs[4].is_training());
}

TEST(Module, RefusesBadNames) {
  struct Twice : nn::Module {
    Tensor a = param("a", ones({1}));
    Leaf b = child("a", Leaf{1});
  };
  struct Dotted : nn::Module {
    Tensor a = param("a.b", ones({1}));
  };
  struct Integers : nn::Module {
    Tensor a = param("a", ones({1}, int64));
  };
  expect_error([] { Twice(); }, "\"a\" is already registered");
  expect_error([] { Dotted(); }, "has no dot");
  expect_error([] { Integers(); }, "cannot have a gradient");
}

TEST(Module, ToMovesTensorsHeldElsewhere) {
  for (const Device device : test_devices()) {
    Pair pair;
    const Tensor held = pair.first.weight;
    held.set_grad(full({3}, 5));
    pair.to(device, float64);
    for (const Tensor& tensor : {held, pair.first.weight, pair.parameters()[1]}) {
      EXPECT_EQ(tensor.dtype(), float64);
      EXPECT_EQ(tensor.device(), device);
      EXPECT_TRUE(tensor.requires_grad());
      EXPECT_TRUE(tensor.is_leaf());
      expect_close(tensor, {2, 2, 2}, 0, 0);
      expect_close(tensor.grad(), {5, 5, 5}, 0, 0);
      EXPECT_EQ(tensor.grad().dtype(), float64);
    }
    EXPECT_EQ(pair.second.mean.dtype(), float64);
    autograd::apply(SquareSum{}, held).backward();
    expect_close(held.grad(), {9, 9, 9}, 0, 0);
  }
}

TEST(Module, ToWithinALiveGraphIsAnError) {
  Pair pair;
  const Tensor loss = autograd::apply(SquareSum{}, pair.first.weight);
  pair.to(float64);
  EXPECT_THROW(loss.backward(), Error);
  EXPECT_THROW(pair.to(int64), Error);
}

TEST(Module, ToLeavesIntegerBuffersAlone) {
  struct Counter : nn::Module {
    Tensor steps = buffer("steps", arange(3));
    Tensor weight = param("weight", ones({1}));
  };
  Counter counter;
  counter.to(float64);
  EXPECT_EQ(counter.steps.dtype(), int64);
  EXPECT_EQ(counter.weight.dtype(), float64);
}

TEST(Module, StateDictRoundTrip) {
  Pair source, target;
  nn::init::normal_(source.first.weight);
  nn::init::uniform_(source.second.mean, 1, 2);
  const std::uint32_t version = target.first.weight.version();
  const Tensor held = target.first.weight;
  target.to(float64);
  target.load_state_dict(source.state_dict());  // converts
  for (const auto& [name, tensor] : target.state_dict()) {
    expect_close(tensor, source.state_dict().at(name), 0, 0, name);
    EXPECT_EQ(tensor.dtype(), float64);
  }
  EXPECT_TRUE(held.is_same(target.first.weight));
  EXPECT_GT(held.version(), version);
}

TEST(Module, LoadListsEverythingThatIsWrongAndWritesNothing) {
  Pair pair;
  StateDict state = Pair().state_dict();
  state.erase("second.mean");
  state["extra"] = ones({1});
  state["first.weight"] = ones({3, 1});
  state["scale"] = full({1}, 7);
  expect_error([&] { pair.load_state_dict(state); },
               "load_state_dict: missing: second.mean; unexpected: extra; shape mismatch: first.weight (expected "
               "[3], got [3, 1])");
  expect_error([&] { pair.load_state_dict(state, false); }, "shape mismatch: first.weight");
  EXPECT_EQ(pair.scale.item(), 1);

  state.erase("first.weight");
  for (const bool assign : {false, true}) {
    const nn::LoadDifferences differences = pair.load_state_dict(state, false, assign);
    EXPECT_EQ(differences.missing, (std::vector<std::string>{"first.weight", "second.mean"}));
    EXPECT_EQ(differences.unexpected, (std::vector<std::string>{"extra"}));
  }
  EXPECT_EQ(pair.scale.item(), 7);
  expect_close(pair.first.weight, {2, 2, 2}, 0, 0);
}

TEST(Module, TiedTensors) {
  struct Tied : nn::Module {
    Tensor a = param("a", ones({2}));
    Tensor b = param("b", a);
  };
  Tied tied;
  EXPECT_EQ(names(tied.named_parameters()), (std::vector<std::string>{"a"}));
  EXPECT_EQ(tied.state_dict().size(), 2u);
  tied.load_state_dict(tied.state_dict());
  tied.load_state_dict({{"b", full({2}, 3)}});
  expect_close(tied.a, {3, 3}, 0, 0);
  tied.load_state_dict({{"a", full({2}, 4)}, {"b", full({2}, 4)}});
  expect_error(
      [&] {
        tied.load_state_dict({{"a", full({2}, 5)}, {"b", full({2}, 6)}});
      },
      "shared tensors with different values: a and b");
  expect_error([&] { tied.load_state_dict({}); }, "missing: a, b");
  expect_close(tied.b, {4, 4}, 0, 0);
  tied.to(float64);
  EXPECT_EQ(tied.b.dtype(), float64);
  EXPECT_TRUE(tied.a.is_same(tied.b));
}

TEST(Module, ZeroGrad) {
  Pair pair;
  pair.scale.set_grad(ones({1}));
  pair.second.weight.set_grad(ones({4}));
  pair.zero_grad();
  for (const Tensor& parameter : pair.parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(Init, Distributions) {
  manual_seed(1);
  const std::vector<double> normal = to_vector<double>(nn::init::normal_(empty({40000}), 1, 0.5));
  const std::vector<double> uniform = to_vector<double>(nn::init::uniform_(empty({40000}, bfloat16), -2, 4));
  const auto moments = [](const std::vector<double>& x) {
    double sum = 0, squares = 0;
    for (double value : x) {
      sum += value;
      squares += value * value;
    }
    const double mean = sum / static_cast<double>(x.size());
    return std::pair(mean, std::sqrt(squares / static_cast<double>(x.size()) - mean * mean));
  };
  EXPECT_NEAR(moments(normal).first, 1, 0.01);
  EXPECT_NEAR(moments(normal).second, 0.5, 0.01);
  EXPECT_NEAR(moments(uniform).first, 1, 0.05);
  EXPECT_NEAR(moments(uniform).second, 6 / std::sqrt(12.0), 0.05);
  expect_close(nn::init::constant_(empty({3}, float64), 0.5), {0.5, 0.5, 0.5}, 0, 0);
  expect_error([] { nn::init::constant_(empty({3}, int32), 3e9); },
               "constant_: 3000000000 is not representable in int32");
}

TEST(Init, SameNumbersOnEveryDevice) {
  for (const Device device : test_devices()) {
    manual_seed(3);
    const Tensor here = nn::init::normal_(empty({1001}));
    manual_seed(3);
    expect_close(nn::init::normal_(empty({1001}, float32, device)), here, 0, 0);
  }
}

TEST(Module, LoadsViewsOfItsOwnTensors) {
  struct Net : nn::Module {
    Tensor a = param("a", from_data<float>({1, 2, 3, 4, 5, 6, 7, 8, 9}, {3, 3}));
    Tensor b = param("b", full({3, 3}, 10));
    Tensor mean = buffer("mean", full({3}, 20));
  };
  for (const Device device : test_devices()) {
    Net net;
    net.to(device);
    StateDict state = net.state_dict();
    state["a"] = transpose(net.a.detach(), 0, 1);
    net.load_state_dict(state);
    expect_close(net.a, {1, 4, 7, 2, 5, 8, 3, 6, 9}, 0, 0);

    state = net.state_dict();
    std::swap(state["a"], state["b"]);
    state["mean"] = select(net.a.detach(), 0, 1);
    net.load_state_dict(state);
    expect_close(net.a, full({3, 3}, 10), 0, 0);
    expect_close(net.b, {1, 4, 7, 2, 5, 8, 3, 6, 9}, 0, 0);
    expect_close(net.mean, {2, 5, 8}, 0, 0);

    // Shifted by one element: copying front to back would read elements that were overwritten.
    const Tensor line = arange(0, 10, 1, float32, device);
    net.a.set_data(as_strided(line, {3, 3}, {3, 1}, 1));
    state = net.state_dict();
    state["a"] = as_strided(line, {3, 3}, {3, 1}, 0);
    net.load_state_dict(state);
    expect_close(net.a, {0, 1, 2, 3, 4, 5, 6, 7, 8}, 0, 0);
  }
  // The same memory in another storage.
  std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8, 9};
  Net net;
  net.a.set_data(from_blob(values.data(), {3, 3}, float32));
  StateDict state = net.state_dict();
  state["a"] = transpose(from_blob(values.data(), {3, 3}, float32), 0, 1);
  net.load_state_dict(state);
  EXPECT_EQ(values, (std::vector<float>{1, 4, 7, 2, 5, 8, 3, 6, 9}));
}

TEST(Module, LoadsItsOwnState) {
  Pair pair;
  nn::init::normal_(pair.first.weight);
  const std::vector<float> before = to_vector<float>(pair.first.weight);
  const std::uint32_t version = pair.first.weight.version();
  pair.load_state_dict(pair.state_dict());
  EXPECT_EQ(to_vector<float>(pair.first.weight), before);
  EXPECT_GT(pair.first.weight.version(), version);
}

TEST(Module, TiedTensorsMayHoldNaN) {
  struct Tied : nn::Module {
    Tensor a = param("a", ones({2}));
    Tensor b = param("b", a);
  };
  Tied tied;
  tied.load_state_dict({{"a", full({2}, NAN)}, {"b", full({2}, NAN)}});
  EXPECT_TRUE(std::isnan(to_vector<float>(tied.a)[1]));
}

TEST(Module, AssignsInsteadOfCopying) {
  Pair pair;
  StateDict state = pair.state_dict();
  state["first.weight"] = full({3}, 7, bfloat16);
  state["second.weight"] = slice(arange(8, float32), 0, 0, 8, 2);  // not contiguous
  state["second.mean"] = ones({2});
  pair.first.weight.set_grad(ones({3}));
  pair.load_state_dict(state, true, true);
  EXPECT_EQ(pair.first.weight.raw_data(), state["first.weight"].raw_data());
  EXPECT_EQ(pair.first.weight.dtype(), bfloat16);
  EXPECT_TRUE(pair.first.weight.requires_grad());
  EXPECT_FALSE(pair.first.weight.grad().defined());
  EXPECT_TRUE(pair.second.weight.is_contiguous());
  expect_close(pair.second.weight, {0, 2, 4, 6}, 0, 0);
  EXPECT_EQ(pair.second.mean.raw_data(), state["second.mean"].raw_data());
  state.erase("scale");
  state["first.weight"] = zeros({3});
  expect_error([&] { pair.load_state_dict(state, true, true); }, "load_state_dict: missing: scale");
  StateDict integers = pair.state_dict();
  const auto replaced = integers.rbegin();  // the last one, so the others would already be assigned when it fails
  const std::string last = replaced->first;
  replaced->second = replaced->second.to(int64);
  for (auto& [name, tensor] : integers) {
    tensor = clone(tensor);
  }
  const StateDict before = pair.state_dict();
  expect_error([&] { pair.load_state_dict(integers, true, true); },
               "load_state_dict: expected a floating dtype: " + last + " (int64)");
  for (const auto& [name, tensor] : pair.state_dict()) {
    EXPECT_EQ(tensor.raw_data(), before.at(name).raw_data()) << name;
  }
  expect_close(pair.first.weight, {7, 7, 7}, 0, 0);
  pair.load_state_dict(state, false, true);
  expect_close(pair.first.weight, {0, 0, 0}, 0, 0);
  expect_close(pair.scale, {1}, 0, 0);
}

TEST(Init, CanBeSkipped) {
  const Tensor x = full({4}, 3);
  {
    const nn::init::Skip outer;
    { const nn::init::Skip inner; }
    nn::init::normal_(x);
    nn::init::uniform_(x, 0, 1);
    nn::init::constant_(x, 5);
    expect_close(x, {3, 3, 3, 3}, 0, 0);
    expect_error([&] { nn::init::uniform_(x, 1, 0); }, "expected low <= high");
  }
  nn::init::constant_(x, 5);
  expect_close(x, {5, 5, 5, 5}, 0, 0);
}

}  // namespace
