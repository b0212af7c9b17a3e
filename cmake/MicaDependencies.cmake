# Dependencies of the library: those of the system if new enough, otherwise fetched at a pinned version.

include(FetchContent)

# fmt: error messages; part of the public interface.
find_package(fmt 8 QUIET)
if(NOT fmt_FOUND)
  set(FMT_INSTALL ${MICA_INSTALL})
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  FetchContent_Declare(fmt URL https://github.com/fmtlib/fmt/archive/refs/tags/10.2.1.tar.gz
    URL_HASH SHA256=1250e4cc58bf06ee631567523f48848dc4596133e163f02615c97f78bab6c811)
  FetchContent_MakeAvailable(fmt)
endif()

# Eigen: headers only, used in *_cpu.cpp.
find_package(Eigen3 3.4 QUIET NO_MODULE)
if(TARGET Eigen3::Eigen)
  get_target_property(MICA_EIGEN_INCLUDE Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
else()
  FetchContent_Declare(eigen URL https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.gz
    URL_HASH SHA256=8586084f71f9bde545ee7fa6d00288b264a2b7ac3607b974e54d13e7162c1c72
    SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(eigen)
  set(MICA_EIGEN_INCLUDE "${eigen_SOURCE_DIR}")
endif()

# JSON for Modern C++: headers only, used in io/ and the examples.
find_package(nlohmann_json 3.10 QUIET)
if(TARGET nlohmann_json::nlohmann_json)
  get_target_property(MICA_JSON_INCLUDE nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
else()
  FetchContent_Declare(json URL https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    URL_HASH SHA256=d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d
    SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(json)
  set(MICA_JSON_INCLUDE "${json_SOURCE_DIR}/include")
endif()

# utf8proc: Unicode normalization and grapheme clusters, used in io/.
find_path(MICA_UTF8PROC_INCLUDE utf8proc.h)
find_library(MICA_UTF8PROC_LIBRARY NAMES utf8proc)
mark_as_advanced(MICA_UTF8PROC_INCLUDE MICA_UTF8PROC_LIBRARY)
if(NOT MICA_UTF8PROC_INCLUDE OR NOT MICA_UTF8PROC_LIBRARY)
  message(FATAL_ERROR "utf8proc was not found. Debian: libutf8proc-dev")
endif()

# Oniguruma: regular expressions of tokenizers; optional.
set(MICA_WITH_ONIGURUMA 0)
if(NOT MICA_ONIGURUMA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MICA_ONIGURUMA: expected AUTO, ON or OFF, got ${MICA_ONIGURUMA}")
endif()
if(NOT MICA_ONIGURUMA STREQUAL "OFF")
  find_path(MICA_ONIGURUMA_INCLUDE oniguruma.h)
  find_library(MICA_ONIGURUMA_LIBRARY NAMES onig)
  mark_as_advanced(MICA_ONIGURUMA_INCLUDE MICA_ONIGURUMA_LIBRARY)
  if(MICA_ONIGURUMA_INCLUDE AND MICA_ONIGURUMA_LIBRARY)
    set(MICA_WITH_ONIGURUMA 1)
  elseif(MICA_ONIGURUMA STREQUAL "ON")
    message(FATAL_ERROR "MICA_ONIGURUMA is ON, but Oniguruma was not found. Debian: libonig-dev")
  endif()
endif()
message(STATUS "mica: any regular expression in tokenizers ${MICA_WITH_ONIGURUMA} (MICA_ONIGURUMA=${MICA_ONIGURUMA})")

# CLI11: headers only, command-line options of examples and benchmarks.
if(MICA_EXAMPLES OR MICA_BENCHMARKS)
  find_package(CLI11 2.1 QUIET)
  if(TARGET CLI11::CLI11)
    get_target_property(MICA_CLI11_INCLUDE CLI11::CLI11 INTERFACE_INCLUDE_DIRECTORIES)
  else()
    FetchContent_Declare(cli11 URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.3.2.tar.gz
      URL_HASH SHA256=aac0ab42108131ac5d3344a9db0fdf25c4db652296641955720a4fbe52334e22
      SOURCE_SUBDIR none)
    FetchContent_MakeAvailable(cli11)
    set(MICA_CLI11_INCLUDE "${cli11_SOURCE_DIR}/include")
  endif()
endif()

find_package(Threads REQUIRED)

# libbacktrace: line numbers and local functions in the errors of anomaly mode. It comes with g++, so the compiler finds
# it; without it, the dynamic linker provides function names.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES backtrace)
check_cxx_source_compiles(
  "#include <backtrace.h>
   int main() { return backtrace_create_state(nullptr, 1, nullptr, nullptr) == nullptr; }" MICA_WITH_LIBBACKTRACE)
unset(CMAKE_REQUIRED_LIBRARIES)
