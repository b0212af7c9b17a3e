#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/gguf_entries.h>
#include <mica/io/detail/gguf_header.h>

namespace mica::io::detail {

/// The GGUF files from which a family reads a configuration. Most keys of the metadata begin with the architecture.
class GgufSource : public GgufEntries {
 public:
  /// Refers to the files. Errors start with `what`.
  GgufSource(const GgufFiles& files, std::string what);

  std::string architecture() const { return prefix_.substr(0, prefix_.size() - 1); }
  std::string key(const char* name) const { return prefix_ + name; }

  /// The value of a key that must be there.
  std::int64_t count(const char* name) const { return needed(key(name), integer(key(name))); }
  double real(const char* name) const { return needed(key(name), number(key(name))); }
  /// Throws if the value is not `expected`, since mica's models cannot compute anything else.
  void require(const char* name, double expected) const;

  /// Throws if the metadata ask for what none of mica's models with rotary embeddings computes.
  void require_plain() const;

  /// Null if there is none.
  const GgufTensor* tensor(std::string_view name) const;
  /// The elements of a float32 tensor.
  std::vector<float> floats(const GgufTensor& tensor) const;
  /// The number of tokens that the embedding has.
  std::int64_t vocabulary() const;

 private:
  const GgufFiles& files_;
  std::string prefix_;
};

inline constexpr const char* kGgufEmbedding = "token_embd.weight";
inline constexpr const char* kGgufHead = "output.weight";

}  // namespace mica::io::detail
