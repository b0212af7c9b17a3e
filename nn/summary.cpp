#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <vector>

#include <mica/autograd/function.h>
#include <mica/nn/summary.h>

namespace mica::nn {

namespace {

// 38,633,472
std::string grouped(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

// In powers of 1000, as usual for the sizes of disks and models.
std::string size_text(std::uint64_t bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  if (bytes < 1000) {
    return fmt::format("{} B", bytes);
  }
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

// The number of characters, since one may take several bytes of UTF-8.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

constexpr std::size_t kColumns = 5;
using Row = std::array<std::string, kColumns>;

// The last two columns are numbers and right-aligned.
std::string table_of(const std::vector<Row>& rows) {
  std::array<std::size_t, kColumns> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      widths[i] = std::max(widths[i], width_of(row[i]));
    }
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < kColumns; ++i) {
      const std::string space(widths[i] - width_of(row[i]), ' ');
      line += i == 0 ? "" : "  ";
      line += i < kColumns - 2 ? row[i] + space : space + row[i];
    }
    text += line + "\n";
  }
  return text;
}

struct Owned {
  std::string name;
  Tensor tensor;
};

}  // namespace

std::string summary(Module& model) {
  std::map<std::string, std::vector<Owned>> of_module;
  std::int64_t parameters = 0, trained = 0, buffered = 0;
  std::uint64_t bytes = 0;
  std::set<std::string> devices;
  const auto add = [&](const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) {
      const std::size_t dot = name.rfind('.');
      const std::string module = dot == std::string::npos ? "" : name.substr(0, dot);
      of_module[module].push_back({dot == std::string::npos ? name : name.substr(dot + 1), tensor});
      bytes += tensor.bytes();
      devices.insert(to_string(tensor.device()));
    }
  };
  const NamedTensors own_parameters = model.named_parameters();
  add(own_parameters);
  for (const auto& [name, tensor] : own_parameters) {
    parameters += tensor.numel();
    trained += tensor.requires_grad() ? tensor.numel() : 0;
  }
  const NamedTensors own_buffers = model.named_buffers();
  add(own_buffers);
  for (const auto& [name, tensor] : own_buffers) {
    buffered += tensor.numel();
  }

  std::vector<Row> rows{Row{"module", "class", "tensors", "elements", "bytes"}};
  for (const NamedModule& module : model.named_modules()) {
    const auto owned = of_module.find(module.name);
    if (owned == of_module.end()) {
      continue;
    }
    bool first = true;
    for (const auto& [name, tensor] : owned->second) {
      rows.push_back({first ? module.name : "",
                      first && module.type != nullptr ? autograd::detail::short_name(*module.type) : "",
                      fmt::format("{} {} {}", name, tensor.shape(), tensor.dtype()), grouped(tensor.numel()),
                      size_text(tensor.bytes())});
      first = false;
    }
  }
  std::string places;
  for (const std::string& device : devices) {
    places += places.empty() ? " on " : ", ";
    places += device;
  }
  const std::string buffers = buffered == 0 ? "" : fmt::format("; {} elements in buffers", grouped(buffered));
  return table_of(rows) + fmt::format("{} parameters, {} of them trained{}; {}{}\n", grouped(parameters),
                                      grouped(trained), buffers, size_text(bytes), places);
}

std::int64_t parameter_count(const Module& model) {
  std::int64_t count = 0;
  for (const Tensor& parameter : model.parameters()) {
    count += parameter.numel();
  }
  return count;
}

}  // namespace mica::nn
