#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/io/detail/gguf_blocks.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/mapped_tensor.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/file.h>
#include <mica/io/gguf.h>

namespace mica::io {

namespace {

using detail::GgufTensor;
using detail::is_quantized;

constexpr std::size_t kLongestName = 63;  // GGML_MAX_NAME without the final zero
constexpr std::int64_t kChunkElements = std::int64_t{1} << 18;
constexpr const char* kQuantizationKey = "general.quantization_version";
constexpr std::uint32_t kQuantizationVersion = 2;

// Convert between dtypes and the types that are not quantized.
DType dtype_of(GgufType type) {
  switch (type) {
    case GgufType::f16: return float16;
    case GgufType::bf16: return bfloat16;
    case GgufType::f64: return float64;
    case GgufType::i32: return int32;
    case GgufType::i64: return int64;
    default: return float32;
  }
}
std::optional<GgufType> type_of(DType dtype) {
  for (const GgufType type :
       {GgufType::f32, GgufType::f16, GgufType::bf16, GgufType::f64, GgufType::i32, GgufType::i64}) {
    if (dtype_of(type) == dtype) {
      return type;
    }
  }
  return std::nullopt;
}

Tensor converted(const Tensor& x, DType dtype, Device device) {
  const Tensor result = empty(x.shape(), dtype, device);
  copy_into(result, x);
  return result;
}

std::int64_t data_bytes(const std::vector<GgufTensor>& tensors) {
  std::int64_t bytes = 0;
  for (const GgufTensor& entry : tensors) {
    bytes += static_cast<std::int64_t>(entry.bytes);
  }
  return bytes;
}

/// One call of save_gguf.
class GgufWriter {
 public:
  GgufWriter(const std::filesystem::path& path, const GgufSaveOptions& options) : path_(path), options_(options) {
    const auto is_floating_type = [](std::optional<GgufType> type) {
      return !type || is_quantized(*type) || is_floating(dtype_of(*type));
    };
    check(is_floating_type(options.matrices) && is_floating_type(options.vectors) &&
              !(options.vectors && is_quantized(*options.vectors)),
          "save_gguf: expected floating types, and not q8_0 or q4_0 for vectors");
  }

  void write(const StateDict& tensors, GgufMetadata metadata) {
    std::vector<GgufTensor> entries;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back(entry_of(name, tensor));
      if (is_quantized(entries.back().type)) {
        metadata.try_emplace(kQuantizationKey, kQuantizationVersion);
      }
    }
    for (const auto& [key, value] : metadata) {
      require(!key.empty() && is_utf8(key), key, "is not a key of metadata");
      require(key != "general.alignment", key, "is decided by save_gguf");
    }
    const std::string header = detail::gguf_header_bytes(metadata, entries);
    AtomicFile file(path_);
    file.write(header.data(), header.size());
    ProgressTask progress("writing " + path_.filename().string(), data_bytes(entries));
    std::uint64_t position = header.size();
    auto entry = entries.begin();
    for (const auto& [name, tensor] : tensors) {
      const std::string padding(entry->begin - position, '\0');
      file.write(padding.data(), padding.size());
      write_data(file, *entry, tensor);
      position = entry->begin + entry->bytes;
      progress.advance(static_cast<std::int64_t>(entry->bytes));
      ++entry;
    }
    const std::string padding((detail::kGgufAlignment - position % detail::kGgufAlignment) % detail::kGgufAlignment,
                              '\0');
    file.write(padding.data(), padding.size());
    file.commit();
  }

 private:
  static bool is_utf8(const std::string& text) { return detail::valid_utf8_length(text) == text.size(); }

  void require(bool ok, const std::string& name, const char* what) const {
    check(ok, "save_gguf: cannot write {}: \"{}\" {}", path_.string(), name, what);
  }

  GgufTensor entry_of(const std::string& name, const Tensor& tensor) const {
    require(tensor.defined(), name, "is an undefined tensor");
    require(name.size() <= kLongestName && is_utf8(name), name, "is not a name of at most 63 bytes of UTF-8");
    require(tensor.numel() > 0, name, "has no elements, which ggml does not read");
    require(static_cast<std::size_t>(tensor.shape().size()) <= detail::kMostGgufAxes, name, "has more than four axes");
    std::optional<GgufType> type = type_of(tensor.dtype());
    require(type.has_value(), name, "has a dtype that GGUF lacks");
    if (is_floating(tensor.dtype())) {
      const bool is_matrix = tensor.shape().size() >= 2;
      const std::optional<GgufType> wanted = is_matrix ? options_.matrices : options_.vectors;
      const bool fits = wanted && (!is_quantized(*wanted) || tensor.size(-1) % detail::kBlockElements == 0);
      type = fits ? wanted : type;
    }
    return {.name = name,
            .type = *type,
            .shape = tensor.shape(),
            .bytes = detail::gguf_bytes(*type, static_cast<std::uint64_t>(tensor.numel()))};
  }

  void write_data(AtomicFile& file, const GgufTensor& entry, const Tensor& tensor) const {
    const DType dtype = dtype_of(entry.type);
    const bool as_is = tensor.device().is_cpu() && tensor.is_contiguous() && tensor.dtype() == dtype;
    const Tensor host = as_is ? tensor : converted(tensor, dtype, Device::cpu());
    if (!is_quantized(entry.type)) {
      file.write(host.raw_data(), host.bytes());
      return;
    }
    std::vector<std::byte> blocks;
    for (std::int64_t at = 0; at < host.numel(); at += kChunkElements) {
      const std::span x(host.data<float>() + at, static_cast<std::size_t>(std::min(kChunkElements, host.numel() - at)));
      blocks.resize(detail::gguf_bytes(entry.type, x.size()));
      const bool ok =
          entry.type == GgufType::q8_0 ? detail::quantize_q8(x, blocks.data()) : detail::quantize_q4(x, blocks.data());
      require(ok, entry.name, "has elements that are not finite, or too large to be quantized");
      file.write(blocks.data(), blocks.size());
    }
  }

  const std::filesystem::path& path_;
  const GgufSaveOptions& options_;
};

Tensor read_tensor(const InputFile& file, const GgufTensor& entry) {
  const Tensor tensor = empty(entry.shape, dtype_of(entry.type));
  if (!is_quantized(entry.type)) {
    file.read(tensor.raw_data(), tensor.bytes(), entry.begin);
    return tensor;
  }
  std::vector<std::byte> blocks;
  for (std::int64_t at = 0; at < tensor.numel(); at += kChunkElements) {
    const std::span x(tensor.data<float>() + at,
                      static_cast<std::size_t>(std::min(kChunkElements, tensor.numel() - at)));
    blocks.resize(detail::gguf_bytes(entry.type, x.size()));
    file.read(blocks.data(), blocks.size(),
              entry.begin + detail::gguf_bytes(entry.type, static_cast<std::uint64_t>(at)));
    if (entry.type == GgufType::q8_0) {
      detail::dequantize_q8(blocks.data(), x);
    } else {
      detail::dequantize_q4(blocks.data(), x);
    }
  }
  return tensor;
}

}  // namespace

void save_gguf(const std::filesystem::path& path, const StateDict& tensors, const GgufMetadata& metadata,
               const GgufSaveOptions& options) {
  GgufWriter(path, options).write(tensors, metadata);
}

StateDict detail::read_gguf_tensors(const InputFile& file, const GgufHeader& header, const GgufLoadOptions& options) {
  check(is_floating(options.dequantized), "load_gguf: expected a floating dtype for quantized tensors, got {}",
        options.dequantized);
  const auto map = options.mapped ? std::make_shared<MappedFile>(file, true) : nullptr;
  ProgressTask progress("reading " + file.path().filename().string(), data_bytes(header.tensors));
  StateDict tensors;
  for (const GgufTensor& entry : header.tensors) {
    const bool is_mapped = map != nullptr && !is_quantized(entry.type);
    Tensor tensor =
        is_mapped ? mapped_tensor(map, entry.begin, entry.shape, dtype_of(entry.type)) : read_tensor(file, entry);
    progress.advance(static_cast<std::int64_t>(entry.bytes));
    const DType dtype = is_quantized(entry.type) ? options.dequantized : tensor.dtype();
    if (dtype != tensor.dtype() || !options.device.is_cpu()) {
      tensor = converted(tensor, dtype, options.device);
    }
    tensors.emplace(entry.name, tensor);
  }
  return tensors;
}

StateDict load_gguf(const std::filesystem::path& path, const GgufLoadOptions& options) {
  const InputFile file(path);
  return detail::read_gguf_tensors(file, detail::read_gguf_header(file), options);
}

GgufMetadata load_gguf_metadata(const std::filesystem::path& path) {
  const InputFile file(path);
  return detail::read_gguf_header(file).metadata;
}

std::map<std::string, GgufType> load_gguf_types(const std::filesystem::path& path) {
  const InputFile file(path);
  std::map<std::string, GgufType> types;
  for (const GgufTensor& entry : detail::read_gguf_header(file).tensors) {
    types.emplace(entry.name, entry.type);
  }
  return types;
}

}  // namespace mica::io
