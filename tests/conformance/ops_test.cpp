#include "more_calls.h"
#include "tests/support.h"
#include <mica/core/copy.h>

using namespace mica;
using namespace mica::conformance;
using testing_support::test_devices;

namespace {

/// A view with x's elements that has gaps between them and an offset in its storage. The gaps are NaN if the dtype has
/// it.
Tensor with_gaps(const Tensor& x) {
  Shape shape = x.shape();
  shape.push_back(2);
  const Tensor y = select(full(shape, is_floating(x.dtype()) ? NAN : 1, x.dtype(), x.device()), x.dim(), 1).detach();
  copy_into(y, x);
  return y;
}

double tolerance(DType dtype) {
  switch (dtype) {
    case float64: return 1e-10;
    case float32: return 1e-5;
    case float16: return 2e-3;
    case bfloat16: return 1.6e-2;
    default: return 0;
  }
}

void expect_same(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what << " is undefined";
  ASSERT_EQ(name_of(got.dtype()), name_of(expected.dtype())) << what;
  const double close = tolerance(got.dtype());
  testing_support::expect_close(got, expected, close, close, what);
}

/// The inputs of the call, as new leaves.
Tensors inputs_of(const Case& c, Device device, bool gaps) {
  Tensors inputs;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    const Tensor x = empty(c.inputs[i].shape(), c.inputs[i].dtype(), device);
    copy_into(x, c.inputs[i]);
    inputs.push_back(gaps ? with_gaps(x) : x);
    inputs.back().requires_grad_(c.needs_grad.contains(static_cast<int>(i)));
  }
  return inputs;
}

void expect_result(const Case& c, const Call& call, Device device, bool gaps) {
  const Tensors inputs = inputs_of(c, device, gaps);
  const Tensors outputs = call(c, inputs, device);
  ASSERT_EQ(outputs.size(), c.outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    ASSERT_EQ(outputs[i].device(), device);
    expect_same(outputs[i], c.outputs[i], "output " + std::to_string(i));
  }

  Tensors ys, dys, leaves, expected;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (c.dys[i].defined()) {
      ASSERT_TRUE(outputs[i].requires_grad()) << "output " << i << " carries no gradient";
      ys.push_back(outputs[i]);
      dys.push_back(c.dys[i].to(device, outputs[i].dtype()));
    }
  }
  for (const int i : c.needs_grad) {
    leaves.push_back(inputs[i]);
    expected.push_back(c.grads[i]);
  }
  if (ys.empty()) {
    return;
  }
  const Tensors grads = autograd::grad(ys, leaves, dys, {.allow_unused = true});
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (expected[i].defined()) {
      expect_same(grads[i], expected[i], "gradient " + std::to_string(i));
    } else {
      EXPECT_FALSE(grads[i].defined()) << "gradient " << i << " where PyTorch has none";
    }
  }
}

void expect_throws(const Case& c, const Call& call, Device device) {
  if (device.is_cuda() && c.raises.find("out of bounds") != std::string::npos) {
    return;  // on a GPU, mica does not wait for indices to be checked
  }
  try {
    call(c, inputs_of(c, device, false), device);
  } catch (const Error&) {
    return;
  }
  ADD_FAILURE() << (c.raises.empty() ? "expected an error: " + c.refused : "PyTorch has an error: " + c.raises);
}

class Conformance : public testing::TestWithParam<std::string> {};

TEST_P(Conformance, AgreesWithPyTorch) {
  const auto call = all_calls().find(GetParam());
  ASSERT_NE(call, all_calls().end()) << "calls.h does not say what the fixture " << GetParam() << " means";
  const Fixture fixture = load_fixture(fixture_paths(false).at(GetParam()));
  EXPECT_FALSE(fixture.cases.empty());
  for (const Device device : test_devices()) {
    for (const Case& c : fixture.cases) {
      SCOPED_TRACE(c.sample + ": " + c.attributes.dump());
      try {
        if (!c.raises.empty() || !c.refused.empty()) {
          expect_throws(c, call->second, device);
          continue;
        }
        expect_result(c, call->second, device, false);
        if (GetParam() != "view") {  // view() throws if it would have to copy
          SCOPED_TRACE("with gaps");
          expect_result(c, call->second, device, true);
        }
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    }
  }
}

std::vector<std::string> names_of(const std::map<std::string, std::filesystem::path>& paths) {
  std::vector<std::string> names;
  for (const auto& [name, path] : paths) {
    names.push_back(name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Ops, Conformance, testing::ValuesIn(names_of(fixture_paths(false))),
                         [](const auto& info) { return info.param; });

TEST(ConformanceFixtures, HaveEveryCallAndAReasonForEachSkip) {
  std::set<std::string> unused;
  for (const auto& [name, call] : all_calls()) {
    unused.insert(name);
  }
  int compared = 0, raising = 0, refused = 0, skipped = 0;
  std::map<std::string, int> reasons;
  for (const bool optim : {false, true}) {
    for (const auto& [name, path] : fixture_paths(optim)) {
      unused.erase(name);
      const Fixture fixture = load_fixture(path);
      int here = 0;
      for (const Case& c : fixture.cases) {
        EXPECT_TRUE(c.raises.empty() || c.refused.empty()) << name << ": " << c.sample;
        raising += !c.raises.empty();
        refused += !c.refused.empty();
        here += !c.outputs.empty();
      }
      EXPECT_GT(here, 0) << name << " compares no value";
      compared += here;
      for (const auto& [reason, count] : fixture.skipped) {
        EXPECT_FALSE(reason.empty()) << name;
        reasons[reason] += count;
        skipped += count;
      }
    }
  }
  EXPECT_TRUE(unused.empty()) << "no fixture for " << *unused.begin();
  std::cout << "PyTorch's samples: " << compared << " compared, " << raising << " raise in both, " << refused
            << " raise in mica only, " << skipped << " skipped:\n";
  for (const auto& [reason, count] : reasons) {
    std::cout << "  " << count << ": " << reason << "\n";
  }
}

}  // namespace
