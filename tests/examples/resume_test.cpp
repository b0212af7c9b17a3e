// Stops train_transformer at random moments, in every possible way, resumes it, and compares the result with that of an
// undisturbed run.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

namespace fs = std::filesystem;
using mica::testing_support::contents;

namespace {

class Resume : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(program)) {
      GTEST_SKIP() << "there is no " << program;
    }
    std::ofstream text(folder / "text.txt");
    for (int i = 0; i < 100; ++i) {
      text << "the quick brown fox → jumps over the lazy dog\n";
    }
  }

  /// Starts a run of 40 steps that writes its results to OUT and its checkpoints to OUT.checkpoints. With `disk_bytes`,
  /// files cannot grow beyond it, as on a full disk.
  pid_t start(const std::string& dtype, const std::string& out, rlim_t disk_bytes = RLIM_INFINITY) const {
    const char* const device = std::getenv("MICA_KILL_DEVICE");
    std::vector<std::string> words{program.string(),
                                   "--data",
                                   "text.txt",
                                   "--device",
                                   device != nullptr ? device : "cpu",
                                   "--dtype",
                                   dtype,
                                   "--batch",
                                   "2",
                                   "--context",
                                   "16",
                                   "--layers",
                                   "1",
                                   "--heads",
                                   "2",
                                   "--width",
                                   "16",
                                   "--threads",
                                   "1",
                                   "--sample",
                                   "0",
                                   "--dropout",
                                   "0.1",
                                   "--ema",
                                   "0.9",
                                   "--steps",
                                   "40",
                                   "--eval-every",
                                   "10",
                                   "--checkpoint-every",
                                   "1",
                                   "--keep",
                                   "2",
                                   "--resume",
                                   "--out",
                                   out,
                                   "--checkpoint",
                                   out + ".checkpoints"};
    std::vector<char*> arguments;
    for (std::string& word : words) {
      arguments.push_back(word.data());
    }
    arguments.push_back(nullptr);
    const std::string log = (folder / "log.txt").string();
    const std::string inside = folder.string();
    const pid_t child = fork();
    if (child == 0) {
      const rlimit limit{disk_bytes, disk_bytes};
      const int to = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
      ::signal(SIGXFSZ, SIG_IGN);
      if (::chdir(inside.c_str()) == 0 && ::setrlimit(RLIMIT_FSIZE, &limit) == 0 && ::dup2(to, 1) == 1 &&
          ::dup2(to, 2) == 2) {
        ::execv(arguments[0], arguments.data());
      }
      _exit(127);
    }
    return child;
  }

  /// Waits for a process to end. Returns its exit status, or minus the signal that ended it.
  static int wait_for(pid_t child) {
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  /// Fills the disk so that `space` bytes are left.
  void fill_disk(std::uint64_t space) const {
    std::ofstream ballast(folder / "ballast", std::ios::binary);
    const std::string block(4096, 'x');
    for (std::uint64_t left = fs::space(folder).available; ballast && left > space + block.size();
         left -= block.size()) {
      ballast << block;
    }
  }

  std::string log() const { return contents(folder / "log.txt"); }

  std::vector<fs::path> checkpoints(const std::string& out) const {
    std::vector<fs::path> paths;
    if (fs::exists(folder / (out + ".checkpoints"))) {
      for (const auto& entry : fs::directory_iterator(folder / (out + ".checkpoints"))) {
        paths.push_back(entry.path());
      }
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }

  /// The run's metrics, without times.
  std::string metrics(const std::string& out) const {
    return std::regex_replace(contents(folder / out / "metrics.jsonl"),
                              std::regex("\"(tokens_per_second|step_ms|peak_memory_bytes|share_of_peak)\":[^,}]*"), "");
  }

  void expect_same_end(const std::string& out, const std::string& whole) const {
    EXPECT_TRUE(contents(folder / out / "model.safetensors") == contents(folder / whole / "model.safetensors"))
        << log();
    EXPECT_EQ(metrics(out), metrics(whole));
    for (const auto& entry : fs::directory_iterator(folder / out)) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path() << ": of a run that was killed";
    }
    // The last checkpoints are compared, too: master weights, optimizer, loss scale, random state, position in the
    // data.
    const std::vector<fs::path> left = checkpoints(out);
    // There may be more than two, since incomplete ones stay, and so do old ones if the run was killed before it
    // removed them.
    ASSERT_GE(left.size(), 2u);
    EXPECT_EQ(left.back().filename(), last) << log();
    EXPECT_TRUE(contents(left.back()) == contents(folder / (whole + ".checkpoints") / last));
  }

  const std::string last = "checkpoint-000000040.safetensors";
  const fs::path program =
      fs::path(mica::testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS)) / "train_transformer";
  const char* const disk = std::getenv("MICA_SMALL_DISK");
  const bool has_own_disk = disk != nullptr;
  const mica::testing_support::TemporaryFolder own{has_own_disk ? fs::path(disk) : fs::temp_directory_path()};
  const fs::path folder = own.path();
};

// MICA_KILLS is the number of times that the run is stopped, and MICA_KILL_DEVICE the device, by default the CPU.
// MICA_SMALL_DISK is a folder on a disk of a few megabytes that the test may fill up. scripts/kill_test sets the first
// and the last.
TEST_F(Resume, EndsWithTheSameBitsHoweverItIsStopped) {
  const auto began = std::chrono::steady_clock::now();
  // The dtypes take turns; float16 also has a loss scale.
  const std::vector<std::string> dtypes{"bfloat16", "float16"};
  for (const std::string& dtype : dtypes) {
    ASSERT_EQ(wait_for(start(dtype, "whole." + dtype)), 0) << log();
    const std::string checkpoint = contents(folder / ("whole." + dtype + ".checkpoints") / last);
    EXPECT_EQ(checkpoint.find("growth_tracker") != std::string::npos, dtype == "float16");
  }
  const std::chrono::duration<double> whole = (std::chrono::steady_clock::now() - began) / 2;

  const char* const wanted = std::getenv("MICA_KILLS");
#if defined(MICA_ADDRESS_SANITIZER)
  constexpr int few = 5;  // since each takes seconds
#else
  constexpr int few = 12;
#endif
  const int most = wanted != nullptr ? std::atoi(wanted) : few;
  std::mt19937_64 random(20);
  const auto chance = [&](double p) { return std::uniform_real_distribution<>(0, 1)(random) < p; };
  int kills = 0, runs = 0, torn = 0, full = 0, ends = 0;
  while (kills < most || ends < static_cast<int>(dtypes.size())) {
    const std::string& dtype = dtypes[static_cast<std::size_t>(ends) % dtypes.size()];
    fs::remove_all(folder / "run");
    fs::remove_all(folder / "run.checkpoints");
    for (bool done = false; !done;) {
      ++runs;
      // A checkpoint needs about 85 KB, the model 10 KB.
      const bool is_full = chance(0.1);
      full += is_full ? 1 : 0;
      const auto space = std::uniform_int_distribution<std::uint64_t>(0, 200'000)(random);
      if (is_full && has_own_disk) {
        fill_disk(space);
      }
      const pid_t child = start(dtype, "run", is_full && !has_own_disk ? space : RLIM_INFINITY);
      ASSERT_GT(child, 0);
      const bool is_killed = kills < most;
      if (is_killed) {
        const double moment = std::uniform_real_distribution<>(0, 1.2 * whole.count())(random);
        std::this_thread::sleep_for(std::chrono::duration<double>(moment));
        ::kill(child, SIGKILL);
      }
      const int status = wait_for(child);
      fs::remove(folder / "ballast");
      kills += status == -SIGKILL ? 1 : 0;
      ASSERT_TRUE(status == 0 || status == -SIGKILL || is_full) << status << "\n" << log();
      done = status == 0;
      if (!done && chance(0.2)) {
        // Damages the newest checkpoint: it is cut off, or a part of it never reached the disk.
        const std::vector<fs::path> all = checkpoints("run");
        if (!all.empty()) {
          ++torn;
          const fs::path& path = all.back();
          const auto size = static_cast<std::int64_t>(fs::file_size(path));
          const auto at = std::uniform_int_distribution<std::int64_t>(0, std::max<std::int64_t>(size - 1, 0))(random);
          if (chance(0.5)) {
            fs::resize_file(path, static_cast<std::uintmax_t>(at));
          } else {
            std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(at);
            file << std::string(static_cast<std::size_t>(std::min<std::int64_t>(512, size - at)), '\0');
          }
        }
      }
    }
    ++ends;
    expect_same_end("run", "whole." + dtype);
    if (HasFailure()) {
      break;
    }
  }
  if (wanted != nullptr) {
    std::cout << ends << " runs, started " << runs << " times: " << kills << " kills, " << full
              << " times a full disk, " << torn << " torn checkpoints; each ended with the same bits\n";
  }
  EXPECT_GE(kills, most);
}

}  // namespace
