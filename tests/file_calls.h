#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>

// The test program replaces fsync(), rename() and unlink() (in io/killed_save_test.cpp), so that tests see the calls.

namespace mica::testing_support {

/// If not null, called before each of these calls with its name and its paths, such as "rename FROM TO".
inline std::atomic<const std::function<void(const std::string& call)>*> file_call_observer = nullptr;

/// Calls f before each fsync, rename and unlink of this program, but not before those that f makes, until the end of
/// scope.
class BeforeEachFileCall {
 public:
  explicit BeforeEachFileCall(std::function<void(const std::string& call)> f) : f_(std::move(f)) {
    file_call_observer = &f_;
  }
  ~BeforeEachFileCall() { file_call_observer = nullptr; }
  BeforeEachFileCall(const BeforeEachFileCall&) = delete;
  BeforeEachFileCall& operator=(const BeforeEachFileCall&) = delete;

 private:
  std::function<void(const std::string& call)> f_;
};

}  // namespace mica::testing_support
