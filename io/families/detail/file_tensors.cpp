#include <mica/core/check.h>
#include <mica/io/families/detail/file_tensors.h>
#include <mica/ops/view/view.h>

namespace mica::io::detail {

namespace {

void replace_part(std::string& name, std::string_view from, std::string_view to) {
  const std::size_t at = from.starts_with('.') ? name.find(from) : name.starts_with(from) ? 0 : std::string::npos;
  if (at != std::string::npos) {
    name.replace(at, from.size(), to);
  }
}

}  // namespace

std::string FileTensors::own_name(std::string name, bool lacks_prefix) const {
  for (const std::string_view prefix : {prefix, outer_prefix}) {
    if (name.starts_with(prefix)) {
      name.erase(0, prefix.size());
    }
  }
  if (lacks_prefix && name != kHeadWeight) {
    name.insert(0, own_prefix);
  }
  for (const std::span<const Names> pairs : {names, old_names}) {
    for (const auto& [in_file, own] : pairs) {
      replace_part(name, in_file, own);
    }
  }
  return name;
}

std::string FileTensors::file_name(const std::string& own_name) const {
  std::string name = own_name;
  for (const auto& [in_file, own] : names) {
    replace_part(name, own, in_file);
  }
  const bool has_prefix = std::none_of(unprefixed.begin(), unprefixed.end(),
                                       [&](std::string_view begin) { return own_name.starts_with(begin); });
  return has_prefix ? std::string(prefix) + name : name;
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
      result.emplace(file_name(name), is_transposed(name, tensor) ? transpose(tensor, 0, 1) : tensor);
    }
  }
  return result;
}

}  // namespace mica::io::detail
