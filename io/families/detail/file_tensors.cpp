#include <mica/core/check.h>
#include <mica/io/families/detail/file_tensors.h>
#include <mica/ops/view/view.h>

namespace mica::io::detail {

std::string FileTensors::own_name(std::string name, bool lacks_prefix) const {
  for (const std::string_view prefix : {prefix, outer_prefix}) {
    if (name.starts_with(prefix)) {
      name.erase(0, prefix.size());
    }
  }
  if (lacks_prefix && name != kHeadWeight) {
    name.insert(0, own_prefix);
  }
  for (const auto& [from, to] : old_endings) {
    if (name.ends_with(from)) {
      name.replace(name.size() - from.size(), from.size(), to);
    }
  }
  return name;
}

StateDict FileTensors::of_files(const StateDict& own, bool tied_head, const char* op) const {
  constexpr std::string_view kAdapter = ".lora_a", kQuantized = ".packed";
  StateDict result;
  for (const auto& [name, tensor] : own) {
    check(!name.ends_with(kAdapter),
          "{}: {} is part of an adapter: save it by io::save_adapter, or add it to the weights by nn::merge_lora", op,
          name);
    check(!name.ends_with(kQuantized), "{}: the weight of {} is quantized: save the model before nn::quantize", op,
          name.substr(0, name.size() - kQuantized.size()));
    if (!tied_head || name != kHeadWeight) {
      result.emplace(std::string(prefix) + name, is_transposed(name, tensor) ? transpose(tensor, 0, 1) : tensor);
    }
  }
  return result;
}

}  // namespace mica::io::detail
