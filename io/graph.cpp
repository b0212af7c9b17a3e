#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <system_error>

#include <mica/core/check.h>
#include <mica/io/file.h>
#include <mica/io/graph.h>

extern char** environ;

namespace mica::io {

namespace {

// An unnamed temporary file, for the input and output of a program.
class ScratchFile {
 public:
  ScratchFile() : file_(std::tmpfile()) {
    check(file_ != nullptr, "write_graph: cannot make a temporary file: {}", error_text(errno));
  }

  int descriptor() const { return ::fileno(file_.get()); }

  void write(const std::string& text) {
    check(std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0,
          "write_graph: cannot write a temporary file: {}", error_text(errno));
    std::rewind(file_.get());
  }

  std::string read() {
    std::rewind(file_.get());
    std::string text;
    std::array<char, 1 << 14> part;
    while (const std::size_t count = std::fread(part.data(), 1, part.size(), file_.get())) {
      text.append(part.data(), count);
    }
    return text;
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
};

/// The outcome of running a program on `input`.
struct Run {
  int status = 0;  // from waitpid
  std::string output, errors;
};

// Runs a program from PATH, without a shell. Throws if it does not exist.
Run run_program(std::array<const char*, 3> arguments, const std::string& input) {
  ScratchFile in, out, err;
  in.write(input);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.descriptor(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out.descriptor(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.descriptor(), STDERR_FILENO);
  pid_t child = 0;
  const int failed =
      ::posix_spawnp(&child, arguments[0], &actions, nullptr, const_cast<char* const*>(arguments.data()), environ);
  posix_spawn_file_actions_destroy(&actions);
  check(failed == 0,
        "write_graph: cannot run {}, which draws .svg files: {}; install Graphviz (on Debian and Ubuntu: apt install "
        "graphviz) or write a .dot file",
        arguments[0], error_text(failed));
  Run run;
  while (::waitpid(child, &run.status, 0) < 0) {
    check(errno == EINTR, "write_graph: cannot wait for {}: {}", arguments[0], error_text(errno));
  }
  run.output = out.read();
  run.errors = err.read();
  return run;
}

std::string svg_of(const std::string& dot) {
  const Run run = run_program({"dot", "-Tsvg", nullptr}, dot);
  check(WIFEXITED(run.status) && WEXITSTATUS(run.status) == 0, "write_graph: dot {}: {}",
        WIFEXITED(run.status) ? fmt::format("failed with status {}", WEXITSTATUS(run.status))
                              : fmt::format("was terminated by signal {}", WTERMSIG(run.status)),
        run.errors);
  check(!run.output.empty(), "write_graph: dot wrote nothing: {}", run.errors);
  return run.output;
}

}  // namespace

void write_graph(const Tensor& output, const std::filesystem::path& path, autograd::GraphPictureOptions options) {
  const std::filesystem::path extension = path.extension();
  check(extension == ".dot" || extension == ".svg", "write_graph: expected a name that ends in .dot or .svg, got {}",
        path.string());
  const std::string dot = autograd::to_dot(output, options);
  AtomicFile file(path);  // fails before dot runs if the file cannot be written
  const std::string picture = extension == ".dot" ? dot : svg_of(dot);
  file.write(picture.data(), picture.size());
  file.commit();
}

}  // namespace mica::io
