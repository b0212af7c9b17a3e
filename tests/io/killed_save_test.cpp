// A process that is killed while it saves leaves the folder as it was before one of its renames or removals. The tests
// copy the folder before each of them, and require that every copy has the old contents or the new ones.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/depth.h"
#include "tests/file_calls.h"
#include "tests/files.h"
#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/io/adapter.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/nn/lora.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

namespace fs = std::filesystem;

/// Calls the observer, for which call_of() describes the call. Without one, allocates nothing: tests in which memory
/// runs out make these calls, too.
template <class CallOf>
void observe(const CallOf& call_of) {
  if (const auto* const observer = file_call_observer.exchange(nullptr)) {  // not for the calls that it makes itself
    (*observer)(call_of());
    file_call_observer = observer;
  }
}

/// Calls f before each rename and each removal of a file by this program, until the end of scope.
class BeforeEachChange : BeforeEachFileCall {
 public:
  explicit BeforeEachChange(const std::function<void()>& f)
      : BeforeEachFileCall([f](const std::string& call) {
          if (!call.starts_with("fsync")) {
            f();
          }
        }) {}
};

}  // namespace

// Replace the C library's functions of these names in the test program.
extern "C" int fsync(int descriptor) {
  observe([&] { return "fsync " + fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string(); });
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  observe([&] { return std::string("rename ") + from + " " + to; });
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}
extern "C" int unlink(const char* path) noexcept {
  observe([&] { return std::string("unlink ") + path; });
  return ::unlinkat(AT_FDCWD, path, 0);
}

namespace {

class KilledSaves : public testing::Test {
 protected:
  void SetUp() override { set_num_threads(1); }  // for thousands of tiny models
  void TearDown() override { set_num_threads(threads_); }

  /// Copies the folder before each change that f makes in it, and at the end.
  std::vector<fs::path> moments_of(const std::function<void()>& f) {
    std::vector<fs::path> moments;
    const auto copy = [&] {
      moments.push_back(own.path() / ("moment" + std::to_string(++count_)));
      fs::copy(folder, moments.back());
    };
    {
      const BeforeEachChange observer(copy);
      f();
    }
    copy();
    return moments;
  }

  // In memory, since the tests flush many files to disk.
  const TemporaryFolder own{::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : fs::temp_directory_path()};
  const fs::path folder = own.path() / "folder";

 private:
  const int threads_ = num_threads();
  int count_ = 0;
};

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Exactly the files that readers use.
std::set<std::string> used_files(const fs::path& folder) {
  if (fs::exists(folder / "model.safetensors")) {
    return {"config.json", "model.safetensors"};
  }
  const std::string index = "model.safetensors.index.json";
  std::set<std::string> names{"config.json", index};
  for (const auto& [tensor, file] : io::weight_map(io::read_json(folder / index, 1 << 20), "index")) {
    names.insert(file);
  }
  return names;
}

/// Models of the same shapes, but with different weights and different configurations.
nn::Llama model_of(double eps) {
  nn::Llama model(
      {.vocab = 11, .context = 8, .layers = 2, .heads = 2, .key_heads = 1, .width = 8, .hidden = 16, .norm_eps = eps});
  for (const Tensor& parameter : model.parameters()) {
    fill_data(parameter, eps);
  }
  return model;
}

/// The value from which a folder's model was made; 0 if it is a mixture.
double made_from(const fs::path& folder) {
  const nn::Llama model = io::load_pretrained<nn::Llama>(folder);
  const double eps = model.config.norm_eps;
  for (const Tensor& parameter : model.parameters()) {
    for (const float x : to_vector<float>(parameter)) {
      if (x != static_cast<float>(eps)) {
        return 0;
      }
    }
  }
  return std::get<nn::LlamaConfig>(io::load_pretrained_config(folder)).norm_eps == eps ? eps : 0;
}

TEST_F(KilledSaves, LeaveTheOldModelOrTheNewOne) {
  constexpr double before = 0.25, after = 0.5, later = 0.125;
  constexpr std::uint64_t whole = 1 << 20, some = 1500, many = 300;
  OneIn five(5);
  for (const auto& [from, to] : {std::pair{whole, whole}, std::pair{whole, some}, std::pair{some, whole},
                                 std::pair{some, some}, std::pair{some, many}, std::pair{many, some}}) {
    SCOPED_TRACE(fmt::format("from {} to {} bytes", from, to));
    fs::remove_all(folder);
    io::save_pretrained(model_of(before), folder, {.shard_bytes = from});
    ASSERT_EQ(made_from(folder), before);
    const nn::Llama model = model_of(after);
    const std::vector<fs::path> moments =
        moments_of([&, shard_bytes = to] { io::save_pretrained(model, folder, {.shard_bytes = shard_bytes}); });
    ASSERT_GE(moments.size(), 4u);
    bool is_new = false;
    for (const fs::path& moment : moments) {
      SCOPED_TRACE(moment);
      const double made = made_from(moment);
      is_new = is_new || made == after;
      EXPECT_EQ(made, is_new ? after : before);
      // The next save may also be killed; if not, it leaves nothing of the first one.
      for (const std::uint64_t next : {whole, some}) {
        if (five.skips()) {
          continue;
        }
        const fs::path copy = own.path() / "copy";
        fs::copy(moment, copy);
        int changes = 0, mixtures = 0;
        const nn::Llama last = model_of(later);
        {
          const BeforeEachChange observer([&] {
            double now = 0;
            EXPECT_EQ(message_of([&] { now = made_from(copy); }), "no error");
            mixtures += now == made || now == later ? 0 : 1;
            ++changes;
          });
          io::save_pretrained(last, copy, {.shard_bytes = next});
        }
        EXPECT_GE(changes, 3);
        EXPECT_EQ(mixtures, 0);
        EXPECT_EQ(made_from(copy), later);
        EXPECT_EQ(names_in(copy), used_files(copy));
        fs::remove_all(copy);
      }
    }
    EXPECT_TRUE(is_new);
    EXPECT_EQ(names_in(folder), used_files(folder));
    // Readers that know only the names: config.json is that of the weights.
    EXPECT_EQ(*io::read_json(folder / "config.json", 1 << 20).find("rms_norm_eps")->as<double>(), after);
  }
}

TEST_F(KilledSaves, OfANewFolderLeaveNothingThatLoads) {
  const nn::Llama model = model_of(0.5);
  fs::create_directory(folder);
  const std::vector<fs::path> moments = moments_of([&] { io::save_pretrained(model, folder, {.shard_bytes = 1500}); });
  for (const fs::path& moment : moments) {
    if (fs::exists(moment / "config.json")) {
      EXPECT_EQ(made_from(moment), 0.5);
    } else {
      EXPECT_THROW((void)io::load_pretrained(moment), Error);
    }
    io::save_pretrained(model_of(0.25), moment);
    EXPECT_EQ(made_from(moment), 0.25);
    EXPECT_EQ(names_in(moment), used_files(moment));
  }
  EXPECT_EQ(made_from(folder), 0.5);
}

TEST_F(KilledSaves, LeaveTheOldAdapterOrTheNewOne) {
  const auto adapted = [](double alpha) {
    nn::Llama model = model_of(0.5);
    nn::add_lora(model, {"*q_proj"}, {.rank = 2, .alpha = alpha});
    for (const nn::AdaptedLayer& each : nn::adapted_layers(model)) {
      fill_data(each.layer->lora_b, alpha);
    }
    return model;
  };
  const auto alpha_in = [](const fs::path& path) {
    nn::Llama model = model_of(0.5);
    io::load_adapter(model, path);
    const nn::Linear& layer = *nn::adapted_layers(model).at(0).layer;
    const double alpha = layer.lora_options().alpha;
    return to_vector<float>(layer.lora_b)[0] == static_cast<float>(alpha) ? alpha : 0;
  };
  nn::Llama old = adapted(4), now = adapted(8);
  io::save_adapter(old, folder);
  const std::vector<fs::path> moments = moments_of([&] { io::save_adapter(now, folder); });
  ASSERT_GE(moments.size(), 4u);
  double at_least = 4;
  for (const fs::path& moment : moments) {
    const double alpha = alpha_in(moment);
    EXPECT_TRUE(alpha == 4 || alpha == 8) << moment;
    EXPECT_GE(alpha, at_least);
    at_least = alpha;
    io::save_adapter(old, moment);
    EXPECT_EQ(alpha_in(moment), 4);
    EXPECT_EQ(names_in(moment), (std::set<std::string>{"adapter_config.json", "adapter_model.safetensors"}));
  }
  EXPECT_EQ(alpha_in(folder), 8);
}

TEST_F(KilledSaves, TwoWritersOfAFolderAreNoticed) {
  nn::Llama model = model_of(0.5);
  const nn::Llama other = model_of(0.25);
  nn::add_lora(model, {"*q_proj"});
  std::set<std::string> messages;
  {
    const BeforeEachChange observer([&] {
      messages.insert(message_of([&] { io::save_pretrained(other, folder, {.shard_bytes = 1500}); }));
      io::save_pretrained(other, own.path() / "another folder");
    });
    io::save_pretrained(model_of(0.125), folder, {.shard_bytes = 1500});
  }
  const std::string problem = ": another thread or process is saving to " + folder.string();
  EXPECT_EQ(messages, (std::set<std::string>{"save_pretrained" + problem}));
  EXPECT_EQ(made_from(folder), 0.125);
  messages.clear();
  {
    const BeforeEachChange observer([&] { messages.insert(message_of([&] { io::save_adapter(model, folder); })); });
    io::save_adapter(model, folder);
  }
  EXPECT_EQ(messages, (std::set<std::string>{"save_adapter" + problem}));
}

// An error is not a killed process: nothing is left at all.
TEST_F(KilledSaves, AnErrorLeavesTheFolderAsItWas) {
  io::save_pretrained(model_of(0.25), folder, {.shard_bytes = 1500});
  const std::set<std::string> files = names_in(folder);
  fs::remove(folder / "config.json");
  fs::create_directory(folder / "config.json");
  expect_error([&] { io::save_pretrained(model_of(0.5), folder); }, "config.json is a directory");
  EXPECT_EQ(names_in(folder), files);
  fs::remove(folder / "config.json");
  io::save_pretrained(model_of(0.25), folder, {.shard_bytes = 1500});
  EXPECT_EQ(made_from(folder), 0.25);
}

}  // namespace
