#include <algorithm>
#include <optional>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/gguf_source.h>

namespace mica::io::detail {

GgufSource::GgufSource(const GgufFiles& files, std::string what)
    : GgufEntries(files.header.metadata, std::move(what)), files_(files), prefix_(text("general.architecture") + ".") {}

void GgufSource::require(const char* name, double expected) const {
  const std::optional<double> value = number(key(name));
  check(!value || *value == expected, "{}: mica's models need \"{}\" to be {}, got {}", what(), key(name), expected,
        value.value_or(0));
}

void GgufSource::require_plain() const {
  for (const char* const name :
       {"expert_count", "attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping",
        "final_logit_softcapping", "rope.scaling.yarn_log_multiplier"}) {
    require(name, 0);
  }
  for (const char* const name :
       {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_slow"}) {
    require(name, 1);
  }
  require("rope.scaling.yarn_beta_fast", 32);
  const bool* const causal = find<bool>(key("attention.causal"), "a truth value");
  check(causal == nullptr || *causal, "{}: mica's models need \"{}\" to be true", what(), key("attention.causal"));
}

const GgufTensor* GgufSource::tensor(std::string_view name) const {
  const std::vector<GgufTensor>& tensors = files_.header.tensors;
  const auto at =
      std::find_if(tensors.begin(), tensors.end(), [&](const GgufTensor& tensor) { return tensor.name == name; });
  return at == tensors.end() ? nullptr : &*at;
}

std::vector<float> GgufSource::floats(const GgufTensor& tensor) const {
  std::vector<float> values(tensor.bytes / sizeof(float));
  files_.files[tensor.file]->read(values.data(), tensor.bytes, tensor.begin);
  return values;
}

std::int64_t GgufSource::vocabulary() const {
  const GgufTensor* const embedding = tensor(kGgufEmbedding);
  check(embedding != nullptr && embedding->shape.size() == 2, "{}: it has no matrix \"{}\"", what(), kGgufEmbedding);
  return embedding->shape[0];
}

}  // namespace mica::io::detail
