#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support.h"
#include <mica/io/graph.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

/// A separate folder, whose bin/ is the only entry of PATH.
class WriteGraph : public testing::Test {
 protected:
  void SetUp() override {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    folder = fs::path(testing::TempDir()) / (std::string("mica_graph_") + test->name());
    fs::remove_all(folder);
    fs::create_directories(folder / "bin");
    path_ = std::getenv("PATH");
    setenv("PATH", (folder / "bin").c_str(), 1);
  }
  void TearDown() override {
    setenv("PATH", path_.c_str(), 1);
    fs::remove_all(folder);
  }

  /// Installs a shell script as `dot`.
  void install_dot(const std::string& script) const {
    const fs::path program = folder / "bin" / "dot";
    std::ofstream(program) << "#!/bin/sh\nPATH=/usr/bin:/bin\n" << script;
    ASSERT_EQ(::chmod(program.c_str(), 0755), 0);
  }

  void install_real_path() const { setenv("PATH", path_.c_str(), 1); }

  static std::string contents(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  /// Expects an error with `text`, and that an existing picture is unchanged and the only file.
  void expect_failure(const std::string& text) const {
    const fs::path file = folder / "out" / "graph.svg";
    fs::create_directories(file.parent_path());
    std::ofstream(file) << "the old one";
    expect_error([&] { io::write_graph(y, file); }, text);
    EXPECT_EQ(contents(file), "the old one");
    EXPECT_EQ(std::distance(fs::directory_iterator(file.parent_path()), {}), 1);
  }

  fs::path folder;
  Tensor x = ones({3}).requires_grad_();
  Tensor y = x * x + 2;

 private:
  std::string path_;
};

TEST_F(WriteGraph, Dot) {
  io::write_graph(y, folder / "graph.dot");
  EXPECT_EQ(contents(folder / "graph.dot"), autograd::to_dot(y));
  io::write_graph(y, folder / "graph.dot", {.max_nodes = 1});
  EXPECT_EQ(contents(folder / "graph.dot"), autograd::to_dot(y, {.max_nodes = 1}));
}

TEST_F(WriteGraph, SvgIsTheOutputOfDot) {
  install_dot("echo \"<svg $#$1>\"; cat; echo 'a warning' >&2\n");
  io::write_graph(y, folder / "graph.svg");
  EXPECT_EQ(contents(folder / "graph.svg"), "<svg 1-Tsvg>\n" + autograd::to_dot(y));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);  // the picture and bin/
}

TEST_F(WriteGraph, SvgByTheRealDot) {
  install_real_path();
  if (std::system("dot -V 2>/dev/null") != 0) {
    GTEST_SKIP() << "Graphviz's dot is not installed";
  }
  Tensor deep = y;
  for (int i = 0; i < 100; ++i) {
    deep = deep * x;
  }
  io::write_graph(deep, folder / "graph.svg", {.max_nodes = 50});
  const std::string svg = contents(folder / "graph.svg");
  EXPECT_NE(svg.find("<svg "), std::string::npos);
  EXPECT_NE(svg.find("[3] float32"), std::string::npos);
  EXPECT_NE(svg.find("</svg>"), std::string::npos);
}

TEST_F(WriteGraph, DotIsNotInstalled) {
  expect_failure("write_graph: cannot run dot, which draws .svg files: No such file or directory; install Graphviz");
}

TEST_F(WriteGraph, DotFails) {
  install_dot("cat >/dev/null; echo 'Error: syntax error in line 3' >&2; exit 3\n");
  expect_failure("write_graph: dot failed with status 3: Error: syntax error in line 3");
  install_dot("kill -9 $$\n");
  expect_failure("write_graph: dot was terminated by signal 9");
  install_dot("cat >/dev/null\n");
  expect_failure("write_graph: dot wrote nothing");
}

TEST_F(WriteGraph, DotDoesNotRead) {
  install_dot("echo '<svg/>'\n");
  Tensor wide = y;
  for (int i = 0; i < 1000; ++i) {
    wide = wide + x;
  }
  io::write_graph(wide, folder / "graph.svg");
  EXPECT_EQ(contents(folder / "graph.svg"), "<svg/>\n");
}

TEST_F(WriteGraph, Errors) {
  for (const char* name : {"graph.png", "graph", "svg", ".svg"}) {
    expect_error([&] { io::write_graph(y, folder / name); },
                 "write_graph: expected a name that ends in .dot or .svg, got " + (folder / name).string());
  }
  expect_error([&] { io::write_graph(x, folder / "graph.dot"); }, "there is no graph to draw");
  expect_error([&] { io::write_graph(y, folder / "missing" / "graph.dot"); }, "graph.dot: No such file or directory");
  fs::create_directory(folder / "taken.dot");
  expect_error([&] { io::write_graph(y, folder / "taken.dot"); }, "taken.dot is a directory");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);  // taken.dot and bin/
}

}  // namespace
