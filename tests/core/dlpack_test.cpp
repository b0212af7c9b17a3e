// The structs' layout and ownership, and errors. tests/dlpack exchanges tensors with PyTorch and NumPy.

#include <gtest/gtest.h>
#include <tests/support.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/detail/dlpack_abi.h>
#include <mica/core/dlpack.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/view/view.h>

using namespace mica;
using testing_support::expect_error;
using testing_support::test_devices;

namespace dlpack_test {

constexpr std::array kDtypes{float64, float32, float16, bfloat16, int64, int32, uint8, boolean};

/// Another library's tensor: twelve floats, part of which the struct describes.
struct Foreign {
  std::array<float, 12> elements{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::array<std::int64_t, 9> shape{2, 3};
  std::array<std::int64_t, 9> strides{4, 1};
  int released = 0;
  DLManagedTensorVersioned managed{};

  Foreign() {
    managed.version = {1, 3};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) { ++static_cast<Foreign*>(self->manager_ctx)->released; };
    managed.dl_tensor = {elements.data(), {dlpack::kCpu, 0}, 2, {dlpack::kFloat, 32, 1},
                         shape.data(),    strides.data(),    0};
  }
};

TEST(Dlpack, ExportDescribesViewsAndKeepsTheirElements) {
  for (const Device device : test_devices()) {
    Tensor x = arange(0, 24).to(device, float32);
    Tensor view = slice(transpose(reshape(x, {2, 3, 4}), 0, 2), 0, 1, 3);  // (2, 3, 2)
    const std::weak_ptr<Storage> storage = x.handle()->storage;
    DLManagedTensorVersioned* const managed = to_dlpack(view);
    const DLTensor& t = managed->dl_tensor;
    EXPECT_EQ(managed->version.major, 1u);
    EXPECT_EQ(managed->flags, 0u);
    EXPECT_EQ(t.data, view.raw_data());
    EXPECT_EQ(t.byte_offset, 0u);
    EXPECT_EQ(t.device.device_type, device.is_cuda() ? 2 : 1);
    EXPECT_EQ(t.device.device_id, 0);
    EXPECT_EQ(Dims(std::span(t.shape, 3)), (Shape{2, 3, 2}));
    EXPECT_EQ(Dims(std::span(t.strides, 3)), (Strides{1, 4, 12}));
    x = {};
    view = {};
    EXPECT_FALSE(storage.expired());
    managed->deleter(managed);
    EXPECT_TRUE(storage.expired());
  }
}

TEST(Dlpack, RoundTripsShareElementsOfEveryDtype) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDtypes) {
      const Tensor x = transpose(ones({3, 2}, dtype, device), 0, 1);
      const Tensor y = from_dlpack(to_dlpack(x));
      const Tensor z = from_dlpack(to_dlpack_unversioned(y));
      EXPECT_EQ(z.raw_data(), x.raw_data());
      EXPECT_EQ(z.dtype(), dtype);
      EXPECT_EQ(z.device(), device);
      EXPECT_EQ(z.shape(), x.shape());
      EXPECT_EQ(z.strides(), x.strides());
      copy_(slice(z, 1, 2, 3), zeros({2, 1}, dtype, device));
      EXPECT_EQ(to_vector<double>(x), (std::vector<double>{1, 1, 0, 1, 1, 0}));
    }
    for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{1, 1}}) {
      const Tensor x = ones(shape, float32, device);
      const Tensor y = from_dlpack(to_dlpack(x));
      EXPECT_EQ(y.shape(), shape);
      EXPECT_TRUE(y.is_contiguous());
      EXPECT_EQ(to_vector<double>(y), to_vector<double>(x));
    }
    dlpack_wait(device, 1);
    dlpack_wait(device, -1);
  }
}

TEST(Dlpack, ImportsStridesAndOffsetsAndReleasesOnce) {
  Foreign foreign;
  foreign.managed.dl_tensor.byte_offset = 4;
  Tensor x = from_dlpack(&foreign.managed);
  EXPECT_EQ(to_vector<double>(x), (std::vector<double>{1, 2, 3, 5, 6, 7}));
  Tensor row = slice(x, 0, 1, 2);
  x = {};
  EXPECT_EQ(foreign.released, 0);
  fill_(row, -1);
  row = {};
  EXPECT_EQ(foreign.released, 1);
  EXPECT_EQ(foreign.elements[4], 4);
  EXPECT_EQ(foreign.elements[5], -1);

  Foreign packed;  // without strides
  packed.managed.dl_tensor.strides = nullptr;
  packed.managed.deleter = nullptr;
  EXPECT_EQ(to_vector<double>(from_dlpack(&packed.managed)), (std::vector<double>{0, 1, 2, 3, 4, 5}));

  Foreign pinned;
  pinned.managed.dl_tensor.device = {dlpack::kCudaHost, 0};
  EXPECT_EQ(from_dlpack(&pinned.managed).device(), Device::cpu());

  Foreign single;  // the stride of a single element may be anything
  single.shape = {1, 3};
  single.strides = {-77, 2};
  EXPECT_EQ(to_vector<double>(from_dlpack(&single.managed)), (std::vector<double>{0, 2, 4}));

  Foreign repeated;  // a broadcast
  repeated.strides = {0, 1};
  EXPECT_EQ(to_vector<double>(from_dlpack(&repeated.managed)), (std::vector<double>{0, 1, 2, 0, 1, 2}));

  Foreign read_only;
  read_only.managed.flags = dlpack::kReadOnly;
  EXPECT_EQ(to_vector<double>(from_dlpack(&read_only.managed, {.read_only = true}))[5], 6);
  EXPECT_EQ(read_only.released, 1);
}

TEST(Dlpack, RefusedStructsStayWithTheCaller) {
  const auto refused = [](auto&& change, const char* message) {
    Foreign foreign;
    change(foreign);
    expect_error([&] { from_dlpack(&foreign.managed); }, message);
    EXPECT_EQ(foreign.released, 0) << message;
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  refused([](Foreign& f) { f.managed.version.major = 2; }, "expected DLPack 1, got version 2.3");
  refused([](Foreign& f) { f.managed.flags = dlpack::kReadOnly; }, "read-only");
  refused([](Foreign& f) { f.managed.dl_tensor.dtype = {5, 64, 1}; }, "no dtype of code 5, 64 bits and 1 lanes");
  refused([](Foreign& f) { f.managed.dl_tensor.dtype.lanes = 4; }, "4 lanes");
  refused([](Foreign& f) { f.managed.dl_tensor.dtype.bits = 8; }, "8 bits");
  refused([](Foreign& f) { f.managed.dl_tensor.device.device_type = 10; }, "got device type 10");
  refused([](Foreign& f) { f.managed.dl_tensor.device = {dlpack::kCuda, 99}; }, "there is no device cuda:99");
  refused([](Foreign& f) { f.managed.dl_tensor.ndim = 9; }, "expected 0 to 8 axes, got 9");
  refused([](Foreign& f) { f.managed.dl_tensor.ndim = -1; }, "got -1");
  refused([](Foreign& f) { f.managed.dl_tensor.shape = nullptr; }, "expected a shape");
  refused([](Foreign& f) { f.shape[0] = -1; }, "expected sizes of at least 0, got -1");
  refused([](Foreign& f) { f.strides[1] = -1; }, "expected strides of at least 0, got -1");
  refused([](Foreign& f) { f.strides[0] = kHuge; }, "does not fit in memory");
  refused([](Foreign& f) { f.shape = {kHuge, 3}; }, "shape");
  refused([](Foreign& f) { f.managed.dl_tensor.byte_offset = 2; }, "aligned to the 4 bytes of float32");
  refused([](Foreign& f) { f.managed.dl_tensor.data = nullptr; }, "got null");
  // A bool is 0 or 1, also behind a stride; bytes between the elements do not matter.
  for (const std::uint8_t value : {1, 2, 255}) {
    std::array<std::uint8_t, 12> bytes{1, 0, 0, 77, 0, 1, value, 77};
    const auto change = [&](Foreign& f) {
      f.managed.dl_tensor.data = bytes.data();
      f.managed.dl_tensor.dtype = {dlpack::kBool, 8, 1};
    };
    if (value > 1) {
      refused(change, fmt::format("expected bools of 0 and 1, got {}", value).c_str());
    }
    Foreign foreign;
    change(foreign);
    foreign.shape = {std::int64_t{1} << 50, value > 1 ? 2 : 3};
    foreign.strides = {0, 1};
    EXPECT_EQ(to_vector<double>(select(from_dlpack(&foreign.managed), 0, 5)),
              value > 1 ? (std::vector<double>{1, 0}) : (std::vector<double>{1, 0, 0}));
  }
  expect_error([] { from_dlpack(static_cast<DLManagedTensor*>(nullptr)); }, "null pointer");
  expect_error([] { from_dlpack(static_cast<DLManagedTensorVersioned*>(nullptr)); }, "null pointer");

  expect_error([] { to_dlpack(Tensor{}); }, "undefined");
  expect_error([] { to_dlpack_unversioned(ones({2}).requires_grad_()); }, "export x.detach()");
}

}  // namespace dlpack_test
