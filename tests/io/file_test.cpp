#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "examples/common/program.h"
#include "tests/files.h"
#include "tests/support.h"
#include <mica/io/file.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

std::atomic<std::vector<std::string>*> calls{nullptr};  // if not null, of fsync and rename, in order

}  // namespace

// Replaced, so that a test sees them. Tests in which memory runs out call them, too, so otherwise they allocate
// nothing.
extern "C" int fsync(int descriptor) {
  if (auto* const list = calls.load()) {
    list->push_back("fsync " + fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string());
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  if (auto* const list = calls.load()) {
    list->push_back(std::string("rename ") + from + " " + to);
  }
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace {

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
        std::exit(file.descriptor() == 0 && file.size() == 3 && names().size() == 1 ? 0 : 1);
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
    calls = &seen;
    file.write("new", 3);
    EXPECT_TRUE(seen.empty());
    file.commit();
    calls = nullptr;
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
  // A file that AtomicFile leaves behind has such a name.
  auto* const file = new io::AtomicFile(folder / "model");
  EXPECT_EQ(names().size(), others.size() + 1);
  io::remove_unfinished(folder, [](const std::string& name) { return name == "model"; });
  EXPECT_EQ(names(), others);
  delete file;
  io::remove_unfinished(folder / "none", [](const std::string&) { return true; });  // nothing to remove
}

}  // namespace
