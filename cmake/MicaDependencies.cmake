# What the library needs: from the system where it is new enough, else fetched at a pinned version.

include(FetchContent)

# fmt: error messages; part of the interface.
find_package(fmt 8 QUIET)
if(NOT fmt_FOUND)
  set(FMT_INSTALL ON)
  FetchContent_Declare(fmt URL https://github.com/fmtlib/fmt/archive/refs/tags/10.2.1.tar.gz)
  FetchContent_MakeAvailable(fmt)
endif()

# Eigen: headers only, inside *_cpu.cpp.
find_package(Eigen3 3.4 QUIET NO_MODULE)
if(TARGET Eigen3::Eigen)
  get_target_property(MICA_EIGEN_INCLUDE Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
else()
  FetchContent_Declare(eigen URL https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.gz SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(eigen)
  set(MICA_EIGEN_INCLUDE "${eigen_SOURCE_DIR}")
endif()

# JSON for Modern C++: headers only, inside io/.
find_package(nlohmann_json 3.10 QUIET)
if(TARGET nlohmann_json::nlohmann_json)
  get_target_property(MICA_JSON_INCLUDE nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
else()
  FetchContent_Declare(json URL https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(json)
  set(MICA_JSON_INCLUDE "${json_SOURCE_DIR}/include")
endif()

find_package(OpenMP QUIET COMPONENTS CXX)
find_package(Threads REQUIRED)
