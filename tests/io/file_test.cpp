#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/program.h"
#include "tests/file_calls.h"
#include "tests/files.h"
#include "tests/support.h"
#include <mica/io/file.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

template <class T>
concept GivesBytes = requires(T file) {
  std::forward<T>(file).bytes();
};
static_assert(GivesBytes<const io::MappedFile&> && !GivesBytes<io::MappedFile>);

class Files : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text = "x") const { std::ofstream(folder / name) << text; }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder)) {
      result.insert(entry.path().filename().string());
    }
    return result;
  }

  const TemporaryFolder own;
  const fs::path folder = own.path();
};

TEST_F(Files, FilesThatCannotBeOpenedExist) {
  write("file");
  fs::create_symlink("loop", folder / "loop");
  fs::create_symlink("nowhere", folder / "dangling");
  fs::create_symlink("file", folder / "link");
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  for (const char* const name : {"file", "link", "dangling", "loop", "fifo", ""}) {
    EXPECT_TRUE(io::is_there(folder / name)) << name;
  }
  for (const char* const name : {"none", "file/below", "none/below"}) {
    EXPECT_FALSE(io::is_there(folder / name)) << name;
  }
  expect_error([&] { io::InputFile{folder / "loop"}; }, "symbolic links");
  expect_error([&] { io::InputFile{folder / "dangling"}; }, "No such file");
  expect_error([&] { io::InputFile{folder / "fifo"}; }, "not a regular file");
  EXPECT_EQ(io::InputFile(folder / "link").size(), 1u);
}

TEST_F(Files, TruncatedMappingsAreReported) {
  std::ofstream(folder / "mapped") << std::string(100'000, 'x');
  const fs::path path = folder / "mapped";
  const std::byte* end = nullptr;
  {
    const io::MappedFile mapped(path);
    end = mapped.bytes().data() + mapped.bytes().size();
    EXPECT_EQ(io::mapped_path_at(mapped.bytes().data()), mapped.path().string());
    EXPECT_EQ(io::mapped_path_at(end - 1), mapped.path().string());
    EXPECT_EQ(io::mapped_path_at(&mapped), nullptr);
    EXPECT_EXIT(
        {
          report_mapping_faults("test");
          fs::resize_file(path, 10);
          std::exit(static_cast<int>(mapped.bytes()[90'000]));
        },
        testing::ExitedWithCode(1),
        "^test: cannot read " + path.string() + ": it was truncated while it was in use, or its disk failed\n$");
    // Other faults end the process as without the handler.
    EXPECT_EXIT(
        {
          report_mapping_faults("test");
          std::raise(SIGBUS);
          std::raise(SIGBUS);
        },
        testing::KilledBySignal(SIGBUS), "");
  }
  EXPECT_EQ(io::mapped_path_at(end - 1), nullptr);
}

// Without standard input, the next file that is opened has the descriptor 0.
TEST_F(Files, MayHaveTheDescriptorZero) {
  EXPECT_EXIT(
      {
        ::close(0);
        {
          io::AtomicFile file(folder / "model");
          file.write("new", 3);
          file.commit();
        }
        const io::InputFile file(folder / "model");
        // Without a search for leaks: a forked process lacks the threads to which some memory belongs.
        std::_Exit(file.descriptor() == 0 && file.size() == 3 && names().size() == 1 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(Files, MakesFolders) {
  io::make_folder(folder / "a/b/c", "test");
  io::make_folder(folder / "a/b/c", "test");
  EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
  write("file");
  fs::create_symlink("loop", folder / "loop");
  expect_error([&] { io::make_folder(folder / "file", "test"); }, "test: cannot create the folder");
  expect_error([&] { io::make_folder(folder / "file/below", "test"); }, "Not a directory");
  expect_error([&] { io::make_folder(folder / "loop/below", "test"); }, "symbolic links");
}

// Otherwise a file could be empty after a power cut, although the rename is on the disk.
TEST_F(Files, AreOnTheDiskBeforeTheyReplaceOthers) {
  write("model", "old");
  std::vector<std::string> seen;
  std::string temporary;
  {
    io::AtomicFile file(folder / "model");
    for (const std::string& name : names()) {
      temporary = name == "model" ? temporary : (folder / name).string();
    }
    const BeforeEachFileCall observer([&](const std::string& call) { seen.push_back(call); });
    file.write("new", 3);
    EXPECT_TRUE(seen.empty());
    file.commit();
  }
  const std::string model = (folder / "model").string();
  EXPECT_EQ(seen, (std::vector<std::string>{"fsync " + temporary, "rename " + temporary + " " + model,
                                            "fsync " + folder.string()}));
  EXPECT_EQ(contents(model), "new");
}

TEST_F(Files, RemovesFilesOfKilledWriters) {
  const std::set<std::string> others{"model",     "model.tmp",     "model.1.tmp", "model.a-0.tmp",
                                     "model.1-0", "other.1-0.tmp", ".tmp",        "..tmp"};
  for (const std::string& name : others) {
    write(name);
  }
  write("model.1-0.tmp");
  write("model.4194304-17.tmp");
  io::remove_unfinished(folder, [](const std::string& name) { return name == "model"; });
  EXPECT_EQ(names(), others);
  io::remove_unfinished(folder / "none", [](const std::string&) { return true; });  // nothing to remove
}

TEST_F(Files, KilledWritersLeaveNothingForLong) {
  const auto remove_all = [&] { io::remove_unfinished(folder, [](const std::string&) { return true; }); };
  for (const bool by_writing : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      io::AtomicFile file(folder / "model");
      io::AtomicFile other(folder / "other");
      file.write("abc", 3);
      _exit(0);  // without destructors, as if killed
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    ASSERT_EQ(names().size(), 2u);
    if (by_writing) {
      io::write_text(folder / "model", "new");
      EXPECT_EQ(contents(folder / "model"), "new");
      EXPECT_EQ(names().size(), 2u);  // another file's is kept
    } else {
      remove_all();
      EXPECT_EQ(names(), std::set<std::string>());
    }
  }
}

// A file may then have the descriptor 0.
TEST_F(Files, WorkWithoutStandardInput) {
  const pid_t child = fork();
  if (child == 0) {
    ::close(STDIN_FILENO);
    int result = 1;
    try {
      io::write_text(folder / "model", "abc");
      std::string text(3, ' ');
      io::InputFile(folder / "model").read(text.data(), 3, 0);
      result = text == "abc" && names() == std::set<std::string>{"model"} ? 0 : 1;
    } catch (const Error&) {
    }
    _exit(result);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Files, UnfinishedFilesOfLivingWritersAreKept) {
  io::AtomicFile first(folder / "model"), second(folder / "model");
  io::remove_unfinished(folder, [](const std::string&) { return true; });
  first.write("first", 5);
  second.write("second", 6);
  EXPECT_EQ(names().size(), 2u);
  second.commit();
  EXPECT_EQ(contents(folder / "model"), "second");
  first.commit();
  EXPECT_EQ(contents(folder / "model"), "first");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Files, AppendWritesAllOrNothing) {
  const fs::path path = folder / "lines";
  write("lines", "one\n");
  const int file = ::open(path.c_str(), O_WRONLY | O_APPEND);
  ASSERT_GE(file, 0);
  io::append("test", file, "two\n", path);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // else a file that grows beyond the limit ends the program
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{.rlim_cur = 10, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    io::append("test", file, "three\n", path);  // only "th" fits
  } catch (const Error& error) {
    message = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, "test: cannot write " + path.string() + ": File too large");
  EXPECT_EQ(contents(path), "one\ntwo\n");
  io::append("test", file, "three\n", path);
  ::close(file);
  EXPECT_EQ(contents(path), "one\ntwo\nthree\n");

  const int full = ::open("/dev/full", O_WRONLY);
  if (full >= 0) {
    expect_error([&] { io::append("test", full, "x", "/dev/full"); },
                 "test: cannot write /dev/full: No space left on device");
    ::close(full);
  }
}

}  // namespace
