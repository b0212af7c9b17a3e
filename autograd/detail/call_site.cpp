#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/core.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#if MICA_WITH_LIBBACKTRACE
#include <backtrace.h>
#endif

#include <mica/autograd/detail/call_site.h>

namespace mica::autograd {

namespace {

// Symbol information of one address. Inlined functions share an address, innermost first.
struct Frame {
  std::string function;  // mangled where available; empty if unknown
  std::string file;      // empty without debug information
  int line = 0;
};

#if MICA_WITH_LIBBACKTRACE

void ignore_error(void*, const char*, int) {}

std::vector<Frame> look_up(void* address) {
  // Reads the program's debug information once and keeps it; libbacktrace cannot free it.
  static backtrace_state* const state = backtrace_create_state(nullptr, /*threaded=*/1, ignore_error, nullptr);
  const std::uintptr_t pc = reinterpret_cast<std::uintptr_t>(address) - 1;  // inside the call instruction
  std::vector<Frame> frames;
  backtrace_pcinfo(
      state, pc,
      [](void* to, std::uintptr_t, const char* file, int line, const char* function) {
        if (file != nullptr || function != nullptr) {
          static_cast<std::vector<Frame>*>(to)->push_back({function ? function : "", file ? file : "", line});
        }
        return 0;
      },
      ignore_error, &frames);
  if (frames.empty()) {
    frames.emplace_back();
  }
  // The symbol of the outermost, not inlined function includes its namespaces, which debug information omits.
  backtrace_syminfo(
      state, pc,
      [](void* to, std::uintptr_t, const char* symbol, std::uintptr_t, std::uintptr_t) {
        if (symbol != nullptr) {
          *static_cast<std::string*>(to) = symbol;
        }
      },
      ignore_error, &frames.back().function);
  return frames;
}

#else

std::vector<Frame> look_up(void*) { return {Frame{}}; }

#endif

// Fallback without libbacktrace, or if it finds nothing.
void complete(Frame& frame, void* address) {
  Dl_info info{};
  if (!frame.function.empty() || dladdr(address, &info) == 0) {
    return;
  }
  if (info.dli_sname != nullptr) {
    frame.function = info.dli_sname;
  } else if (info.dli_fname != nullptr) {
    frame.function =
        fmt::format("{}(+{:#x})", info.dli_fname,
                    reinterpret_cast<std::uintptr_t>(address) - 1 - reinterpret_cast<std::uintptr_t>(info.dli_fbase));
  }
}

std::string readable(const std::string& function) {
  int status = 0;
  // Compilers append ".isra.0", ".cold" and the like to copies of a function.
  const std::string symbol = function.starts_with("_Z") ? function.substr(0, function.find('.')) : function;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? demangled.get() : function;
}

// Whether a mangled name belongs to mica or the standard library: a function, or an entity local to one.
bool is_in_library(std::string_view symbol) {
  if (!symbol.starts_with("_Z")) {
    return symbol.starts_with("_") || symbol == "clone" || symbol == "start_thread";  // start-up code before main
  }
  symbol.remove_prefix(2);
  while (symbol.starts_with("Z")) {  // local to …
    symbol.remove_prefix(1);
  }
  const bool nested = symbol.starts_with("N");
  if (nested) {
    symbol.remove_prefix(1);
    while (!symbol.empty() && std::string_view("KVrRO").find(symbol.front()) != std::string_view::npos) {
      symbol.remove_prefix(1);
    }
  }
  return symbol.starts_with("St") || symbol.starts_with("Sa") || symbol.starts_with("Ss") ||
         (nested && (symbol.starts_with("4mica") || symbol.starts_with("9__gnu_cxx")));
}

bool is_library_file(std::string_view file) {
  if (file.starts_with("/usr/include/") || file.find("/include/mica/") != std::string_view::npos) {
    return true;
  }
  static constexpr std::string_view own = __FILE__;
  static constexpr std::string_view root =
      own.substr(0, own.size() - std::string_view("autograd/detail/call_site.cpp").size());
  if (root.empty() || !file.starts_with(root)) {
    return false;
  }
  file.remove_prefix(root.size());
  for (const std::string_view folder : {"core/", "autograd/", "ops/", "nn/", "optim/", "io/"}) {
    if (file.starts_with(folder)) {
      return true;
    }
  }
  return false;
}

bool is_users(const Frame& frame) {
  return !frame.function.empty() && !is_in_library(frame.function) && !is_library_file(frame.file);
}

}  // namespace

CallSite CallSite::here() {
  std::array<void*, 64> addresses;
  const int count = backtrace(addresses.data(), static_cast<int>(addresses.size()));
  CallSite result;
  result.addresses_.assign(addresses.begin(), addresses.begin() + count);
  return result;
}

std::vector<std::string> CallSite::user_functions(std::size_t most) const {
  std::vector<std::string> result;
  std::size_t unnamed = 0;  // some may be mica's, so more of them are shown
  for (void* const address : addresses_) {
    for (Frame& frame : look_up(address)) {
      complete(frame, address);
      if (result.size() - unnamed == most || unnamed == 2 * most) {
        return result;
      }
      if (is_users(frame)) {
        const std::string name = readable(frame.function);
        unnamed += name.find("(+0x") != std::string::npos;
        result.push_back(frame.file.empty() ? name : fmt::format("{} at {}:{}", name, frame.file, frame.line));
        if (frame.function == "main") {
          return result;
        }
      }
    }
  }
  return result;
}

}  // namespace mica::autograd
