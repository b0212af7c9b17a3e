#pragma once

#include <nlohmann/json.hpp>
#include <tests/folders.h>
#include <tests/paths.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/io/safetensors.h>

namespace mica::conformance {

using Json = nlohmann::json;

/// A number from the attributes of a call, which fixture.py wrote.
inline double number(const Json& value) {
  if (value.is_boolean()) {
    return value.get<bool>() ? 1 : 0;
  }
  return value.is_string() ? std::stod(value.get<std::string>()) : value.get<double>();  // "inf", "-inf", "nan"
}
inline Dims dims(const Json& value) { return std::span<const std::int64_t>(value.get<std::vector<std::int64_t>>()); }

inline DType dtype_named(const std::string& name) {
  for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
    if (name_of(dtype) == name) {
      return dtype;
    }
  }
  fail("conformance: no dtype is called {}", name);
}

/// One call of PyTorch and its results.
struct Case {
  std::string sample;           // the name of PyTorch's sample
  Json about;                   // the fixture's description of the case
  Json attributes;              // the arguments that are not tensors
  std::string raises;           // PyTorch's error, if the call is invalid; mica must throw an error, too
  std::string refused;          // why mica throws although PyTorch does not, if so
  std::set<int> needs_grad;     // the inputs that have a gradient in PyTorch
  Tensors inputs{}, outputs{};  // on the CPU
  Tensors dys{}, grads{};       // one per output and input; undefined if PyTorch has none
  bool has(const char* attribute) const { return attributes.contains(attribute); }
};

struct Fixture {
  std::vector<Case> cases;
  std::map<std::string, int> skipped;  // skipped samples, counted by reason
};

inline Fixture load_fixture(const std::filesystem::path& path) {
  const auto tensors = io::load(path);
  const Json about = Json::parse(io::load_metadata(path).at("conformance"));
  Fixture fixture;
  std::set<std::string> used;
  for (const Json& entry : about.at("cases")) {
    Case c{.sample = entry.at("sample"),
           .about = entry,
           .attributes = entry.at("attributes"),
           .raises = entry.value("raises", ""),
           .refused = entry.value("refused", ""),
           .needs_grad = entry.value("needs_grad", std::set<int>{})};
    const auto tensor = [&](const char* kind, std::size_t i) {
      const auto found = tensors.find(std::to_string(fixture.cases.size()) + "." + kind + std::to_string(i));
      if (found == tensors.end()) {
        return Tensor{};
      }
      used.insert(found->first);
      return found->second;
    };
    for (Tensor x; (x = tensor("input", c.inputs.size())).defined();) {
      c.inputs.push_back(x);
      c.grads.push_back(tensor("grad", c.grads.size()));
    }
    for (Tensor y; (y = tensor("output", c.outputs.size())).defined();) {
      c.outputs.push_back(y);
      c.dys.push_back(tensor("dy", c.dys.size()));
    }
    fixture.cases.push_back(std::move(c));
  }
  check(used.size() == tensors.size(), "conformance: {} has tensors that belong to no case", path.string());
  for (const Json& entry : about.at("skipped")) {
    ++fixture.skipped[entry.at("reason")];
  }
  return fixture;
}

/// The files of fixtures, by name. If `optim`, only those whose names start with `optim_`, else all others.
inline std::map<std::string, std::filesystem::path> fixture_paths(bool optim) {
  std::map<std::string, std::filesystem::path> paths;
  for (const auto& file :
       std::filesystem::directory_iterator(testing_support::folder_from("MICA_FIXTURES", MICA_FIXTURES))) {
    const std::string name = file.path().stem().string();
    if (name.starts_with("optim_") == optim) {
      paths[name] = file.path();
    }
  }
  return paths;
}

}  // namespace mica::conformance
