#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/files.h"
#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/token_windows.h>
#include <mica/io/training_checkpoint.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/ema.h>
#include <mica/optim/grad_scaler.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

class TrainingCheckpoints : public testing::Test {
 protected:
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string name_of(int step) { return "checkpoint-00000000" + std::to_string(step) + ".safetensors"; }

  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder / name, std::ios::binary) << bytes;
  }

  /// The step of the newest complete checkpoint, or −1, and why others were skipped.
  std::int64_t newest(const io::CheckpointFolder& checkpoints) {
    skipped.clear();
    const auto found = checkpoints.newest([this](std::string_view why) { skipped.emplace_back(why); });
    return found ? found->step : -1;
  }

  const TemporaryFolder own;
  const fs::path folder = own.path();
  std::vector<std::string> skipped;
};

io::TrainingCheckpoint small_checkpoint(std::int64_t step) {
  io::TrainingCheckpoint checkpoint{.step = step,

                                    .random = {.seed = UINT64_MAX, .offset = 44},
                                    .data = {.epoch = 2, .index = 7},
                                    .settings = {{"lr", "0.1"}, {"text", "a \"quoted\" → one"}}};
  const Tensor weight = from_data({1.5f, -2.f, static_cast<float>(step)});
  checkpoint.parts["model"] = {
      {"a.weight", weight}, {"b.weight", weight}, {"c", from_data<double>({1.0, 2.0}, {1, 2})}};
  checkpoint.parts["optimizer"] = {{"state.0.step", from_data({step}, Shape{})}};
  return checkpoint;
}

TEST_F(TrainingCheckpoints, RoundTrip) {
  const fs::path path = folder / "one.safetensors";
  const io::TrainingCheckpoint saved = small_checkpoint(3);
  io::save_training_checkpoint(path, saved);
  const io::TrainingCheckpoint got = io::load_training_checkpoint(path);
  EXPECT_EQ(got.step, 3);
  EXPECT_EQ(got.random.seed, UINT64_MAX);
  EXPECT_EQ(got.random.offset, 44u);
  EXPECT_EQ(got.data, (io::DataPosition{2, 7}));
  EXPECT_EQ(got.settings, saved.settings);
  ASSERT_EQ(got.parts.size(), 2u);
  EXPECT_EQ(to_vector<float>(got.part("model").at("a.weight")), (std::vector<float>{1.5f, -2.f, 3.f}));
  EXPECT_FALSE(got.part("model").contains("b.weight"));  // tied to a.weight
  EXPECT_EQ(got.part("model").at("c").shape(), (Shape{1, 2}));
  EXPECT_EQ(to_vector<std::int64_t>(got.part("optimizer").at("state.0.step")), (std::vector<std::int64_t>{3}));
  EXPECT_TRUE(got.part("scaler").empty());

  io::TrainingCheckpoint bad = saved;
  bad.step = -1;
  expect_error([&] { io::save_training_checkpoint(path, bad); }, "got step -1");
  bad = saved;
  bad.random.offset = 3;  // load would refuse it
  expect_error([&] { io::save_training_checkpoint(path, bad); }, "expected rng_state() as random, got a key with the");
  bad = saved;
  bad.random.start = &bad.random.seed;
  expect_error([&] { io::save_training_checkpoint(path, bad); }, "in a captured graph");
  bad = saved;
  bad.parts["a.b"] = {};
  expect_error([&] { io::save_training_checkpoint(path, bad); }, "without a dot, got \"a.b\"");
  bad = saved;
  bad.parts["model"]["none"] = {};
  expect_error([&] { io::save_training_checkpoint(path, bad); }, "\"model.none\" is an undefined tensor");
  EXPECT_EQ(io::load_training_checkpoint(path).step, 3);
}

TEST_F(TrainingCheckpoints, ListAllSettingsThatDiffer) {
  io::check_settings({{"a", "1"}, {"b", "2"}}, {{"a", "1"}, {"b", "2"}});
  expect_error(
      [] {
        io::check_settings({{"a", "1"}, {"b", "2"}, {"c", "3"}}, {{"a", "5"}, {"c", "3"}, {"d", "4"}});
      },
      "checkpoint's:\n  a: 1 in the checkpoint, 5 now\n  b: 2 in the checkpoint, not set now\n  d: not set in "
      "the checkpoint, 4 now");
}

TEST_F(TrainingCheckpoints, FingerprintsTellTensorsApart) {
  const Tensor a = from_data({1.f, 2.f, 3.f, 4.f}, {2, 2}), b = from_data<double>({5.0});
  const std::string one = io::fingerprint({{"a", a}, {"b", b}});
  EXPECT_EQ(one.size(), 16u);
  EXPECT_EQ(one, io::fingerprint({{"a", clone(a)}, {"b", b}}));
  EXPECT_EQ(one, io::fingerprint({{"a", transpose(clone(transpose(a, 0, 1)), 0, 1)}, {"b", b}}));  // its own order
  const std::vector<StateDict> others{{},
                                      {{"a", a}},
                                      {{"a", a}, {"c", b}},
                                      {{"a", b}, {"b", a}},
                                      {{"a", transpose(a, 0, 1)}, {"b", b}},
                                      {{"a", view(a, {4})}, {"b", b}},
                                      {{"a", a.to(float64)}, {"b", b}},
                                      {{"a", from_data({1.f, 2.f, 3.f, 4.0000005f}, {2, 2})}, {"b", b}}};
  std::set<std::string> all{one, io::fingerprint({{"a", a}, {"b", b}}, {{"config", "1"}}),
                            io::fingerprint({{"a", a}, {"b", b}}, {{"config", "2"}})};
  for (const StateDict& other : others) {
    all.insert(io::fingerprint(other));
  }
  EXPECT_EQ(all.size(), others.size() + 3);
  expect_error([] { io::fingerprint({{"a", {}}}); }, "fingerprint: \"a\" is an undefined tensor");
}

// A file is refused if it is cut off anywhere or one byte is changed anywhere. Tries a sample of all positions.
TEST_F(TrainingCheckpoints, AreRefusedIfIncompleteOrDamaged) {
  const fs::path path = folder / "one.safetensors";
  io::save_training_checkpoint(path, small_checkpoint(3));
  const std::string whole = contents(path);
  ASSERT_LT(whole.size(), 2000u);
  int refused = 0;
  const auto expect_refused = [&](const std::string& bytes) {
    write("one.safetensors", bytes);
    try {
      (void)io::load_training_checkpoint(path);
    } catch (const Error& error) {
      refused += std::string(error.what()).find("one.safetensors") != std::string::npos ? 1 : 0;
    }
  };
  for (std::size_t size = 0; size < whole.size(); size += 11) {
    expect_refused(whole.substr(0, size));
  }
  EXPECT_EQ(refused, static_cast<int>((whole.size() + 10) / 11));
  refused = 0;
  int changes = 0;
  for (std::size_t at = 0; at < whole.size(); at += 7) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    if (whole[at] == ' ' || (changed[at] == ' ' && at < 8)) {
      continue;  // the header's padding: another white space would change nothing
    }
    ++changes;
    expect_refused(changed);
  }
  EXPECT_EQ(refused, changes);
  expect_refused(whole + "x");
  EXPECT_EQ(refused, changes + 1);
}

TEST_F(TrainingCheckpoints, WithHostileMetadataAreRefused) {
  const fs::path path = folder / "one.safetensors";
  const io::Metadata good{{"format", "mica training checkpoint 1"},
                          {"step", "3"},
                          {"random.seed", "1"},
                          {"random.offset", "4"},
                          {"data.epoch", "0"},
                          {"data.index", "0"},
                          {"checksum", "0000000000000000"}};
  const auto expect_refused = [&](const io::Metadata& metadata, const std::string& why) {
    io::save(path, {{"model.a", zeros({2})}}, metadata);
    expect_error([&] { (void)io::load_training_checkpoint(path); }, why);
  };
  expect_refused(good, "its checksum does not match");
  expect_refused({}, "it is another kind of file");
  for (const auto& [name, value] : good) {
    io::Metadata metadata = good;
    metadata.erase(name);
    expect_refused(metadata, name == "format" ? "another kind" : "it has no " + name);
  }
  const auto with = [&](const std::string& name, const std::string& value) {
    io::Metadata metadata = good;
    metadata[name] = value;
    return metadata;
  };
  expect_refused(with("format", "mica training checkpoint 2"), "expected \"mica training checkpoint 1\"");
  for (const std::string name : {"step", "data.epoch", "data.index"}) {
    for (const std::string value : {"-1", "9223372036854775808", "", " 1", "1 ", "0x1", "1e3", "+1", "nan"}) {
      expect_refused(with(name, value), "its " + name + " is \"" + value + "\"");
    }
  }
  expect_refused(with("random.seed", "18446744073709551616"), "its random.seed is");
  expect_refused(with("random.seed", "-1"), "its random.seed is");
  expect_refused(with("random.offset", "6"), "not a multiple of 4");
  expect_refused(with("other", "1"), "it has an unexpected \"other\"");

  // Errors that the safetensors reader detects first.
  const auto expect_header_refused = [&](const std::string& header, const std::string& why) {
    const std::uint64_t length = header.size();
    write("one.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header);
    expect_error([&] { (void)io::load_training_checkpoint(path); }, why);
  };
  expect_header_refused("{\"__metadata__\":{\"step\":\"1\",\"step\":\"2\"}}", "the name \"step\" appears twice");
  expect_header_refused("{\"__metadata__\":" + std::string(100'000, '['), "nested too deeply");
  expect_header_refused("{\"__metadata__\":{\"step\":1}}", "is not a string");
}

TEST_F(TrainingCheckpoints, KeepTheNewestCompleteOnes) {
  io::CheckpointFolder checkpoints(folder, {.keep = 2});
  EXPECT_FALSE(checkpoints.has_files());
  EXPECT_EQ(newest(checkpoints), -1);
  write("notes.txt", "kept");
  for (int step = 1; step <= 5; ++step) {
    checkpoints.save(small_checkpoint(step));
    checkpoints.finish();
    EXPECT_EQ(newest(checkpoints), step);
    if (step == 3) {
      write(name_of(2), contents(folder / name_of(2)).substr(0, 300));  // torn
    }
  }
  // The incomplete file neither counts nor is removed.
  EXPECT_EQ(files(), (std::vector<std::string>{name_of(2), name_of(4), name_of(5), "notes.txt"}));
  EXPECT_TRUE(checkpoints.has_files());
  write(name_of(5), "torn");
  EXPECT_EQ(newest(checkpoints), 4);
  ASSERT_EQ(skipped.size(), 1u);
  EXPECT_NE(skipped[0].find(name_of(5)), std::string::npos) << skipped[0];
  checkpoints.save(small_checkpoint(5));  // replaces it
  checkpoints.finish();
  EXPECT_EQ(newest(checkpoints), 5);
  fs::rename(folder / name_of(5), folder / name_of(9));
  EXPECT_EQ(newest(checkpoints), 4);
  EXPECT_NE(skipped.at(0).find("is a checkpoint of step 5"), std::string::npos);
}

TEST_F(TrainingCheckpoints, ReportTheProgressOfAWriteThatIsWaitedFor) {
  std::set<std::string> tasks;
  bool finished = true;
  const std::thread::id thread = std::this_thread::get_id();
  const ProgressObserver observer([&](const ProgressReport& report) {
    EXPECT_EQ(std::this_thread::get_id(), thread);
    EXPECT_LE(report.done, report.total);
    tasks.insert(report.task);
    finished = report.finished;
  });
  io::CheckpointFolder checkpoints(folder, {.keep = 2});
  checkpoints.save({.step = 1, .parts = {{"model", {{"x", ones({1 << 25})}}}}});  // 128 MiB
  checkpoints.finish();
  EXPECT_FALSE(tasks.empty());
  EXPECT_TRUE(finished);
  for (const std::string& task : tasks) {
    EXPECT_NE(task.find("check"), std::string::npos) << task;  // of the checkpoint, or its checksum
  }
}

TEST_F(TrainingCheckpoints, SkipEntriesThatAreNotCheckpoints) {
  io::CheckpointFolder checkpoints(folder, {});
  checkpoints.save(small_checkpoint(1));
  checkpoints.finish();
  ASSERT_EQ(::mkfifo((folder / name_of(5)).c_str(), 0600), 0);
  fs::create_directory(folder / name_of(6));
  fs::create_symlink("nowhere", folder / name_of(7));
  fs::create_symlink(name_of(8), folder / name_of(8));
  write("checkpoint-99999999999999999999.safetensors", "x");
  write("checkpoint--00000003.safetensors", "x");
  write("checkpoint-.safetensors", "x");
  EXPECT_EQ(newest(checkpoints), 1);
  EXPECT_EQ(skipped.size(), 4u);
}

TEST_F(TrainingCheckpoints, NeedAFolderOfTheirOwn) {
  const fs::path fifo = folder / "fifo", file = folder / "file", link = folder / "link", loop = folder / "loop";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  write("file", "");
  fs::create_directory(folder / "target");
  fs::create_symlink("target", link);
  fs::create_symlink("loop", loop);
  for (const fs::path& path : {fifo, file, loop, file / "below"}) {
    expect_error([&] { io::CheckpointFolder(path, {}); }, "cannot open the folder " + path.string());
  }
  expect_error([&] { io::CheckpointFolder(folder, {.keep = 0}); }, "at least 1, got 0");
  const io::CheckpointFolder through_link(link, {});
  expect_error([&] { io::CheckpointFolder(folder / "target", {}); }, "another process is using the folder");
  const io::CheckpointFolder made(folder / "new/and/deep", {});
  EXPECT_TRUE(fs::is_directory(folder / "new/and/deep"));
}

TEST_F(TrainingCheckpoints, RemoveUnfinishedFilesOfEarlierProcesses) {
  write(name_of(3) + ".123-0.tmp", "unfinished");
  write("mine.tmp", "kept");
  const io::CheckpointFolder checkpoints(folder, {});
  EXPECT_EQ(files(), (std::vector<std::string>{"mine.tmp"}));
}

// In a separate process, since the limit applies to the whole process.
TEST_F(TrainingCheckpoints, AFullDiskLosesNothingAndIsReported) {
  const pid_t child = fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    int result = 1;
    {
      io::CheckpointFolder checkpoints(folder, {.keep = 1});
      checkpoints.save(small_checkpoint(1));
      checkpoints.finish();
      rlimit limit{};
      ::getrlimit(RLIMIT_FSIZE, &limit);
      const rlimit small{400, limit.rlim_max};
      ::setrlimit(RLIMIT_FSIZE, &small);
      checkpoints.save(small_checkpoint(2));
      while (checkpoints.is_writing()) {
        ::usleep(100);
      }
      const std::string error = checkpoints.take_error();
      bool ok = error.find("checkpoint of step 2: save: cannot write") == 0 && checkpoints.take_error().empty() &&
                files() == std::vector<std::string>{name_of(1)} && newest(checkpoints) == 1;
      checkpoints.save(small_checkpoint(3));
      try {
        checkpoints.finish();
        ok = false;
      } catch (const Error&) {
        ok = ok && checkpoints.take_error().empty();  // reported already
      }
      ::setrlimit(RLIMIT_FSIZE, &limit);
      checkpoints.save(small_checkpoint(4));
      checkpoints.finish();
      ok = ok && files() == std::vector<std::string>{name_of(4)} && newest(checkpoints) == 4;
      result = ok ? 0 : 1;
    }
    _exit(result);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// The tensors may change as soon as save() has returned.
TEST_F(TrainingCheckpoints, HoldTheStateAtTheCall) {
  for (const Device device : test_devices()) {
    const Tensor large = full({1 << 20}, 1, float32, device);
    io::CheckpointFolder checkpoints(folder / (device.is_cpu() ? "cpu" : "gpu"), {.keep = 1});
    for (int step = 1; step <= 4; ++step) {
      io::TrainingCheckpoint checkpoint{.step = step};
      fill_data(large, step);
      checkpoint.parts["model"] = {{"large", large}, {"strided", as_strided(large, {512, 2}, {1, 1024}, 3)}};
      checkpoints.save(checkpoint);
      fill_data(large, -1);
      checkpoints.finish();
      const auto saved = checkpoints.newest([](std::string_view why) { ADD_FAILURE() << why; });
      ASSERT_TRUE(saved.has_value());
      const std::vector<float> values = to_vector<float>(saved->part("model").at("large"));
      EXPECT_EQ(std::count(values.begin(), values.end(), static_cast<float>(step)), 1 << 20);
      EXPECT_EQ(saved->part("model").at("strided").shape(), (Shape{512, 2}));
    }
  }
}

// However long the write takes: a second save() returns only after the first checkpoint is complete.
TEST_F(TrainingCheckpoints, AreCompleteBeforeTheNextOneIsTaken) {
  io::CheckpointFolder checkpoints(folder, {.keep = 2});
  for (int step = 1; step <= 3; step += 2) {
    // 64 MiB, then 4 bytes, which are copied into the memory of the snapshot that is being written.
    const Tensor large = full({1 << 24}, step);
    checkpoints.save({.step = step, .parts = {{"model", {{"a", large}, {"b", zeros({1})}}}}});
    checkpoints.save({.step = step + 1, .parts = {{"model", {{"b", ones({1})}}}}});
    ASSERT_TRUE(fs::exists(folder / name_of(step))) << step;
    EXPECT_EQ(io::load_training_checkpoint(folder / name_of(step)).part("model").at("b").item(), 0);
    checkpoints.finish();
    EXPECT_EQ(newest(checkpoints), step + 1);
  }
}

/// A run with every kind of state: dropout, 16-bit weights with master weights, AdamW, loss scale, averages, data.
struct Training {
  Training(Device device, DType dtype)
      : model({.vocab = 29, .context = 8, .layers = 1, .heads = 2, .width = 16, .dropout = 0.2}),
        tokens([] {
          std::vector<std::int32_t> list;
          for (int i = 0; i < 300; ++i) {
            list.push_back(i * i % 29);
          }
          return list;
        }()),
        windows(tokens, {.context = 8, .seed = 4}) {
    model.to(device, dtype);
    optimizer.emplace(model.parameters(), optim::AdamWOptions{.lr = 0.01});
    ema.emplace(model.parameters(), 0.9);
    inputs = empty({3, 8}, int64, device);
    targets = empty({3, 8}, int64, device);
    begin({});
  }

  void begin(io::DataPosition at) {
    loader.emplace(windows, io::DataLoaderOptions{.batch = 3, .seed = 5, .workers = 2, .start = at});
  }

  void step() {
    const Tensors batch = loader->next();
    copy_into(inputs, batch[0]);
    copy_into(targets, batch[1]);
    const auto compute = [&] {
      optimizer->zero_grad();
      scaler.scale(model.loss(inputs, targets)).backward();
      optimizer->step({.max_grad_norm = 1.0, .scaler = &scaler});
      scaler.update();
      ema->update();
    };
    const bool replays = inputs.device().is_cuda() && ++here > 2;
    if (!replays) {
      compute();
    } else {
      if (graph.empty()) {
        graph = cuda::capture(compute);
      }
      graph.replay();
    }
    ++steps;
  }

  io::TrainingCheckpoint checkpoint() const {
    io::TrainingCheckpoint now{.step = steps, .random = rng_state(), .data = loader->position()};
    now.parts["model"] = model.state_dict();
    now.parts["optimizer"] = optimizer->state_dict();
    now.parts["scaler"] = scaler.state_dict();
    now.parts["ema"] = ema->state_dict();
    return now;
  }

  void resume(const io::TrainingCheckpoint& saved) {
    model.load_state_dict(saved.part("model"));
    optimizer->load_state_dict(saved.part("optimizer"));
    scaler.load_state_dict(saved.part("scaler"));
    ema->load_state_dict(saved.part("ema"));
    begin(saved.data);
    set_rng_state(saved.random);
    steps = saved.step;
  }

  nn::GPT model;
  std::vector<std::int32_t> tokens;
  io::TokenWindows windows;
  std::optional<optim::AdamW> optimizer;
  optim::GradScaler scaler{{.init_scale = 1024, .growth_interval = 3}};
  std::optional<optim::Ema> ema;
  std::optional<io::DataLoader> loader;
  Tensor inputs, targets;
  cuda::Graph graph;
  std::int64_t steps = 0;
  int here = 0;
};

TEST_F(TrainingCheckpoints, ResumeWithTheSameBits) {
  constexpr int total = 12;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      const fs::path end = folder / "end.safetensors";
      manual_seed(3);
      Training whole(device, dtype);
      for (int i = 0; i < total; ++i) {
        whole.step();
      }
      io::save_training_checkpoint(end, whole.checkpoint());
      const std::string expected = contents(end);
      for (int stop = 1; stop < total; stop += 5) {
        const fs::path of_run = folder / "run";
        {
          manual_seed(3);
          Training first(device, dtype);
          io::CheckpointFolder checkpoints(of_run, {.keep = 1});
          for (int i = 0; i < stop + 2; ++i) {
            if (i == stop) {
              checkpoints.save(first.checkpoint());
            }
            first.step();  // while it is being written
          }
        }
        manual_seed(99);
        Training second(device, dtype);
        io::CheckpointFolder checkpoints(of_run, {.keep = 1});
        const auto saved = checkpoints.newest([](std::string_view why) { ADD_FAILURE() << why; });
        ASSERT_TRUE(saved.has_value());
        EXPECT_EQ(saved->step, stop);
        second.resume(*saved);
        while (second.steps < total) {
          second.step();
        }
        io::save_training_checkpoint(end, second.checkpoint());
        EXPECT_TRUE(contents(end) == expected)
            << to_string(device) << " " << mica::name_of(dtype) << ", stopped after " << stop;
      }
      fs::remove_all(folder / "run");
    }
  }
}

}  // namespace
