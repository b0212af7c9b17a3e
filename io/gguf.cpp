#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
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
          "save_gguf: expected floating types, and none that is quantized for vectors");
    check_written(options.matrices);
    for (const auto& [name, type] : options.types) {
      check(is_floating_type(type), "save_gguf: expected a floating type for {}", name);
      check_written(type);
    }
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
  static void check_written(std::optional<GgufType> type) {
    check(!type || !is_quantized(*type) || *type == GgufType::q8_0 || *type == GgufType::q4_0 ||
              *type == GgufType::q6_k || *type == GgufType::q4_k,
          "save_gguf: of the quantized types, only q8_0, q4_0, q6_k and q4_k are written");
  }

  // The type of a floating tensor, unless it keeps its dtype.
  std::optional<GgufType> wanted_type(const std::string& name, const Tensor& tensor) const {
    const bool is_matrix = tensor.shape().size() >= 2;
    const auto own = options_.types.find(name);
    std::optional<GgufType> wanted = !is_matrix                    ? options_.vectors
                                     : own != options_.types.end() ? own->second
                                                                   : options_.matrices;
    const auto fits = [&](GgufType type) {
      return !is_quantized(type) ||
             static_cast<std::uint64_t>(tensor.size(-1)) % detail::gguf_block(type).elements == 0;
    };
    if (wanted && !fits(*wanted)) {
      wanted = fits(GgufType::q8_0) ? std::optional(GgufType::q8_0) : std::nullopt;
    }
    return wanted;
  }

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
      const std::optional<GgufType> wanted = wanted_type(name, tensor);
      type = wanted ? wanted : type;
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
      require(detail::gguf_quantize(entry.type, x, blocks.data()), entry.name,
              "has elements that are not finite, or too large to be quantized");
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
    detail::gguf_dequantize(entry.type, blocks.data(), x);
  }
  return tensor;
}

}  // namespace

void save_gguf(const std::filesystem::path& path, const StateDict& tensors, const GgufMetadata& metadata,
               const GgufSaveOptions& options) {
  GgufWriter(path, options).write(tensors, metadata);
}

Tensor detail::dequantized(const GgufMatrix& matrix, DType dtype) {
  const std::int64_t rows = matrix.bytes.size(0), of_row = matrix.bytes.size(1);
  const Tensor bytes = contiguous_data(matrix.bytes), result = empty({rows, matrix.columns}, dtype);
  std::vector<float> row(static_cast<std::size_t>(matrix.columns));
  on_dtype(FloatTypes{}, dtype, "load_gguf", [&]<class T>() {
    for (std::int64_t i = 0; i < rows; ++i) {
      gguf_dequantize(matrix.type, static_cast<const std::byte*>(bytes.raw_data()) + i * of_row, row);
      std::transform(row.begin(), row.end(), result.data<T>() + i * matrix.columns,
                     [](float value) { return static_cast<T>(value); });
    }
  });
  return result;
}

QuantizedWeight detail::packed(const GgufMatrix& matrix) {
  const Tensor bytes = contiguous_data(matrix.bytes);
  return gguf_packed(matrix.type, static_cast<const std::byte*>(bytes.raw_data()), bytes.size(0), matrix.columns);
}

StateDict detail::read_gguf_tensors(const GgufFiles& files, const GgufLoadOptions& options,
                                    std::map<std::string, GgufMatrix>* matrices) {
  check(is_floating(options.dequantized), "load_gguf: expected a floating dtype for quantized tensors, got {}",
        options.dequantized);
  std::vector<std::shared_ptr<MappedFile>> maps;
  for (const auto& file : files.files) {
    maps.push_back(options.mapped || matrices != nullptr ? std::make_shared<MappedFile>(*file, true) : nullptr);
  }
  const std::vector<GgufTensor>& entries = files.header.tensors;
  ProgressTask progress("reading " + files.files[0]->path().filename().string(), data_bytes(entries));
  StateDict tensors;
  for (const GgufTensor& entry : entries) {
    if (matrices != nullptr && is_quantized(entry.type) && entry.shape.size() == 2 && entry.bytes > 0) {
      const std::int64_t rows = entry.shape[0];
      const Shape shape{rows, static_cast<std::int64_t>(entry.bytes) / rows};
      matrices->emplace(entry.name, GgufMatrix{.type = entry.type,
                                               .columns = entry.shape[1],
                                               .bytes = mapped_tensor(maps[entry.file], entry.begin, shape, uint8)});
      progress.advance(static_cast<std::int64_t>(entry.bytes));
      continue;
    }
    const bool is_mapped = options.mapped && !is_quantized(entry.type);
    Tensor tensor = is_mapped ? mapped_tensor(maps[entry.file], entry.begin, entry.shape, dtype_of(entry.type))
                              : read_tensor(*files.files[entry.file], entry);
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
  return detail::read_gguf_tensors(detail::GgufFiles(path), options);
}

GgufMetadata load_gguf_metadata(const std::filesystem::path& path) {
  const InputFile file(path);
  return detail::read_gguf_header(file).metadata;
}

std::map<std::string, GgufType> load_gguf_types(const std::filesystem::path& path) {
  std::map<std::string, GgufType> types;
  for (const GgufTensor& entry : detail::GgufFiles(path).header.tensors) {
    types.emplace(entry.name, entry.type);
  }
  return types;
}

}  // namespace mica::io
