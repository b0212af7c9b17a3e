#include <gtest/gtest.h>
#include <sys/resource.h>
#include <tests/files.h>
#include <tests/support.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include <mica/core/creation.h>
#include <mica/io/tensorboard.h>

using namespace mica;
using testing_support::contents;
using testing_support::expect_error;
using testing_support::test_devices;
namespace fs = std::filesystem;

namespace {

// tests/tensorboard/make_fixture.py: the bytes that TensorBoard's own writer gives.
constexpr const char* kExpected =
    "1800000000000000a37f4b22090000000000448f401a0d627261696e2e4576656e743a32aba333451e00000000000000"
    "d9dc12320900000000004c8f402a130a110a0a6c6f73732f747261696e15000020408f52995b200000000000000029ed"
    "a950090000000000548f4010012a130a110a0a6c6f73732f747261696e150000c07f77a58faa1e00000000000000d9dc"
    "12320900000000005c8f4010ac022a100a0e0a076772c3b6c39f651500000000b5a823414300000000000000b18525a0"
    "090000000000648f4010ffffffffffffffffff012a2d0a2b0a046e6f746542190807120412020801420f2a2a626f6c64"
    "2a2a20e28692206f6b4a080a060a0474657874465773f324020000000000003ecb5fbc0900000000006c8f4010072a96"
    "040a93040a0472616d702a8a04110000000000003e40190000000000003f40210000000000107d4029000000008077c2"
    "4032f001000000000000f03f000000000000004000000000000008400000000000001040000000000000144000000000"
    "000018400000000000001c40000000000000204000000000000022400000000000002440000000000000264000000000"
    "000028400000000000002a400000000000002c400000000000002e400000000000003040000000000000314000000000"
    "000032400000000000003340000000000000344000000000000035400000000000003640000000000000374000000000"
    "0000384000000000000039400000000000003a400000000000003b400000000000003c400000000000003d4000000000"
    "00003e403af001000000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f00"
    "0000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f00"
    "0000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f00"
    "0000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f00"
    "0000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f000000000000f03f00"
    "0000000000004091c49a795c00000000000000c9cdf98f090000000000748f4010082a4f0a4d0a08636f6e7374616e74"
    "2a4109000000000000104011000000000000104019000000000000004021000000000000204029000000000000404032"
    "0800000000000010403a0800000000000000402c82fc192b00000000000000861bc34b0900000000007c8f4010092a1e"
    "0a1c0a046e6f6e652a14320800000000000000003a080000000000000000f517d6e2";
constexpr const char* kExpectedOfResumed =
    "1800000000000000a37f4b22090000000000469f401a0d627261696e2e4576656e743a322f481a1e0f00000000000000"
    "6d532b090900000000004a9f4010073a0208016a89b4d8";

class EventWriterTest : public testing::Test {
 protected:
  static std::string hexadecimal(const std::string& bytes) {
    std::string text;
    for (const char c : bytes) {
      text += fmt::format("{:02x}", static_cast<unsigned char>(c));
    }
    return text;
  }

  const testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
};

TEST_F(EventWriterTest, WritesTheBytesOfTensorBoard) {
  double now = 998.5;  // the first time is for the file's name
  io::EventWriter events(folder / "new/run", {.clock = [&] { return ++now; }});
  EXPECT_NE(events.path().filename().string().find("tfevents.0000000999."), std::string::npos) << events.path();
  events.scalar("loss/train", 2.5, 0);
  events.scalar("loss/train", NAN, 1);
  events.scalar("größe", 0, 300);
  events.text("note", "**bold** → ok", -1);
  events.histogram("ramp", arange(31), 7);
  events.histogram("constant", full({2}, 4.0, bfloat16), 8);
  events.histogram("none", full({1, 3}, NAN), 9);
  EXPECT_EQ(hexadecimal(contents(events.path())), kExpected);
}

TEST_F(EventWriterTest, AResumedRunReplacesItsLaterSteps) {
  double now = 1999.5;
  const io::EventWriter events(folder, {.clock = [&] { return ++now; }, .resumed_at = 7});
  EXPECT_EQ(hexadecimal(contents(events.path())), kExpectedOfResumed);
}

TEST_F(EventWriterTest, HistogramsOfAnyTensor) {
  const double infinity = std::numeric_limits<double>::infinity();
  io::EventWriter a(folder, {.clock = [] { return 1.0; }}), b(folder, {.clock = [] { return 1.0; }});
  EXPECT_NE(a.path(), b.path());
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      a.histogram("x", from_data<double>({0, 1, 2, 3, 4, 5}, {2, 3}).to(device, dtype), 0);
      b.histogram("x", from_data<double>({5, 3, 1, 0, 2, 4}, {6}), 0);
    }
    a.histogram("x", from_data<double>({1, infinity, 2, NAN, -infinity}, {5}).to(device, float32), 0);
    b.histogram("x", from_data<double>({1, 2}, {2}), 0);
  }
  EXPECT_EQ(contents(a.path()), contents(b.path()));
  const double most = std::numeric_limits<double>::max();
  a.histogram("wide", from_data<double>({-most, most}, {2}), 0);
  a.histogram("empty", empty({0}), 0);
}

TEST_F(EventWriterTest, AFullDiskLeavesTheEventsBefore) {
  io::EventWriter events(folder, {.clock = [] { return 1.0; }});
  events.scalar("a", 1, 1);
  const std::string before = contents(events.path());
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // else a file that grows beyond the limit ends the program
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{.rlim_cur = before.size() + 20, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    events.scalar("b", 2, 2);
  } catch (const Error& error) {
    message = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("EventWriter: cannot write " + events.path().string()), std::string::npos) << message;
  EXPECT_EQ(contents(events.path()), before);
  events.scalar("a", 1, 1);
  EXPECT_EQ(contents(events.path()).size(), before.size() + (before.size() - 40));
}

TEST_F(EventWriterTest, Refuses) {
  std::ofstream(folder / "file") << "x";
  expect_error([&] { io::EventWriter events(folder / "file"); }, "cannot create the folder");
  io::EventWriter events(folder);
  const std::string before = contents(events.path());
  expect_error([&] { events.scalar("\xff", 1, 0); }, "a tag in UTF-8");
  expect_error([&] { events.text("a", "\xc3", 0); }, "a text in UTF-8");
  expect_error([&] { events.histogram("a", {}, 0); }, "undefined");
  EXPECT_EQ(contents(events.path()), before);
}

}  // namespace
