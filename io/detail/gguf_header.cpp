#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/gguf_blocks.h>
#include <mica/io/detail/gguf_entries.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

namespace {

constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kLongestHeader = std::uint64_t{256} << 20;
constexpr std::uint32_t kListCode = 9;
constexpr const char* kAlignmentKey = "general.alignment";

/// The file's number for the metadata type T.
template <class T>
constexpr std::uint32_t code_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) {
    return 0;
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    return 1;
  } else if constexpr (std::is_same_v<T, std::uint16_t>) {
    return 2;
  } else if constexpr (std::is_same_v<T, std::int16_t>) {
    return 3;
  } else if constexpr (std::is_same_v<T, std::uint32_t>) {
    return 4;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return 5;
  } else if constexpr (std::is_same_v<T, float>) {
    return 6;
  } else if constexpr (std::is_same_v<T, bool>) {
    return 7;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return 8;
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    return 10;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return 11;
  } else {
    static_assert(std::is_same_v<T, double>);
    return 12;
  }
}

/// Calls f(T()) for the type of this number; false if there is none.
template <class F>
bool with_type(std::uint32_t code, const F& f) {
  const auto offer = [&]<class... T>(std::variant<T...>) { return ((code_of<T>() == code && (f(T()), true)) || ...); };
  return offer(std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t, float,
                            bool, std::string, std::uint64_t, std::int64_t, double>());
}

constexpr std::array<GgufType, 20> kTypes{
    GgufType::f32,    GgufType::f16,  GgufType::q4_0, GgufType::q4_1, GgufType::q5_0, GgufType::q5_1, GgufType::q8_0,
    GgufType::q2_k,   GgufType::q3_k, GgufType::q4_k, GgufType::q5_k, GgufType::q6_k, GgufType::q8_k, GgufType::iq4_nl,
    GgufType::iq4_xs, GgufType::i32,  GgufType::i64,  GgufType::f64,  GgufType::bf16, GgufType::mxfp4};

/// ggml's names of all types, by their numbers; empty for numbers that are not in use.
constexpr std::array<std::string_view, 41> kTypeNames{
    "F32",   "F16",    "Q4_0",  "Q4_1", "",     "",        "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8",    "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16",  "",       "",
    "",      "TQ1_0",  "TQ2_0", "",     "",     "",        "MXFP4",  "NVFP4"};

std::uint64_t aligned(std::uint64_t position, std::uint64_t alignment) {
  return (position + alignment - 1) / alignment * alignment;
}

/// Reads the header sequentially, through a small buffer. Never allocates more than the file's size warrants.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file), end_(std::min(file.size(), kLongestHeader)) {}

  GgufHeader read() {
    require(file_.size() >= 4 && number<std::uint32_t>() == kMagic, "it does not start with \"GGUF\"");
    const auto version = number<std::uint32_t>();
    check((version & 0xFFFF) != 0, "load: {}: it is a big-endian GGUF file, which is not supported",
          file_.path().string());
    require(version == 2 || version == 3, "its version is {}, expected 2 or 3", version);
    const auto tensors = number<std::uint64_t>(), values = number<std::uint64_t>();
    GgufHeader header;
    for (std::uint64_t i = 0; i < values; ++i) {
      read_value(header.metadata);
    }
    for (std::uint64_t i = 0; i < tensors; ++i) {
      header.tensors.push_back(tensor());
    }
    place(header);
    return header;
  }

 private:
  template <class... Args>
  void require(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (!ok) [[unlikely]] {
      fail("load: {} is not a valid GGUF file: {}", file_.path().string(),
           fmt::format(message, std::forward<Args>(args)...));
    }
  }

  std::uint64_t left() const { return end_ - position_; }
  void require_left(std::uint64_t bytes, std::uint64_t count) const {
    require(count <= left() / bytes, "its header ends in the middle or has more than {} bytes", kLongestHeader);
  }

  void take(void* to, std::uint64_t bytes) {
    require_left(1, bytes);
    if (position_ + bytes > buffer_end_ || position_ < buffer_begin_) {
      buffer_begin_ = position_;
      buffer_end_ = std::min(end_, position_ + std::max<std::uint64_t>(bytes, 1 << 16));
      buffer_.resize(buffer_end_ - buffer_begin_);
      file_.read(buffer_.data(), buffer_.size(), buffer_begin_);
    }
    std::memcpy(to, buffer_.data() + (position_ - buffer_begin_), bytes);
    position_ += bytes;
  }

  template <class T>
  T number() {
    T value{};
    take(&value, sizeof(T));
    return value;
  }

  std::string text() {
    const auto length = number<std::uint64_t>();
    require_left(1, length);
    std::string value(length, '\0');
    if (length > 0) {
      take(value.data(), length);
    }
    return value;
  }
  std::string name() {
    std::string value = text();
    require(valid_utf8_length(value) == value.size(), "a name is not UTF-8");
    return value;
  }

  template <class T>
  T scalar() {
    if constexpr (std::is_same_v<T, std::string>) {
      return text();
    } else if constexpr (std::is_same_v<T, bool>) {
      const auto byte = number<std::uint8_t>();
      require(byte <= 1, "a bool is {}, neither 0 nor 1", byte);
      return byte == 1;
    } else {
      return number<T>();
    }
  }

  template <class T>
  std::vector<T> list(std::uint64_t count) {
    // The minimum size of an element: a string has at least its 8-byte length.
    require_left(std::is_same_v<T, std::string> ? 8 : sizeof(T), count);
    std::vector<T> values;
    for (std::uint64_t i = 0; i < count; ++i) {
      values.push_back(scalar<T>());
    }
    return values;
  }

  void read_value(GgufMetadata& metadata) {
    const std::string key = name();
    const auto [place, is_new] = metadata.try_emplace(key);
    require(is_new, "the key {} appears twice", in_quotes(key));
    auto code = number<std::uint32_t>();
    bool is_known = false;
    if (code == kListCode) {
      code = number<std::uint32_t>();
      const auto count = number<std::uint64_t>();
      is_known = with_type(code, [&, &value = place->second]<class T>(T) { value = list<T>(count); });
    } else {
      is_known = with_type(code, [&, &value = place->second]<class T>(T) { value = scalar<T>(); });
    }
    require(is_known, "the type {} of the key {} is not supported", code, in_quotes(key));
  }

  GgufTensor tensor() {
    GgufTensor result;
    result.name = name();
    require(names_.insert(result.name).second, "the tensor {} appears twice", in_quotes(result.name));
    const auto axes = number<std::uint32_t>();
    require(axes <= kMostGgufAxes, "the tensor {} has {} axes, expected at most {}", in_quotes(result.name), axes,
            kMostGgufAxes);
    std::uint64_t elements = 1, bound = 1;
    for (std::uint32_t i = 0; i < axes; ++i) {
      const auto size = number<std::uint64_t>();
      // Axes of length 0 are ignored in the bound, so that strides cannot overflow.
      require(!__builtin_mul_overflow(bound, std::max<std::uint64_t>(size, 1), &bound) && bound <= INT64_MAX / 8,
              "the tensor {} has too many elements", in_quotes(result.name));
      elements *= size;
      result.shape.push_back(static_cast<std::int64_t>(size));
    }
    const auto code = number<std::uint32_t>();
    const auto* const known = std::find(kTypes.begin(), kTypes.end(), static_cast<GgufType>(code));
    const std::string_view type_name = code < kTypeNames.size() ? kTypeNames[code] : "";
    require(!type_name.empty(), "the tensor {} has the type {}, which is unknown", in_quotes(result.name), code);
    check(known != kTypes.end(),
          "load: {}: the tensor {} has the type {}, which is not supported, only F32, F16, BF16, F64, I32, I64, Q4_0, "
          "Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, Q8_K, IQ4_NL, IQ4_XS and MXFP4",
          file_.path().string(), in_quotes(result.name), type_name);
    result.type = *known;
    const std::uint64_t row = result.shape.empty() ? 1 : static_cast<std::uint64_t>(result.shape[0]);
    require(row % gguf_block(result.type).elements == 0, "the rows of the tensor {} are no multiple of {} elements",
            in_quotes(result.name), gguf_block(result.type).elements);
    result.bytes = gguf_bytes(result.type, elements);
    result.begin = number<std::uint64_t>();  // relative to the start of the data
    std::reverse(result.shape.begin(), result.shape.end());
    return result;
  }

  // As ggml requires, tensors follow each other without overlaps, and without gaps other than padding for alignment.
  void place(GgufHeader& header) const {
    std::uint64_t alignment = kGgufAlignment;
    if (const auto found = header.metadata.find(kAlignmentKey); found != header.metadata.end()) {
      const auto* const own = std::get_if<std::uint32_t>(&found->second);
      require(own != nullptr && std::has_single_bit(*own), "{} is not a power of two of type uint32", kAlignmentKey);
      alignment = *own;
    }
    const std::uint64_t data = aligned(position_, alignment);
    std::uint64_t expected = 0;
    for (GgufTensor& tensor : header.tensors) {
      require(tensor.begin == expected, "the data of {} are at {}, expected {}", in_quotes(tensor.name), tensor.begin,
              expected);
      require(data <= file_.size() && expected <= file_.size() - data && tensor.bytes <= file_.size() - data - expected,
              "the data of {} end at {}, after the end of the file, which has {} bytes", in_quotes(tensor.name),
              data + expected + tensor.bytes, file_.size());
      tensor.begin = data + expected;
      expected = aligned(expected + tensor.bytes, alignment);
    }
  }

  const InputFile& file_;
  std::uint64_t end_;
  std::uint64_t position_ = 0, buffer_begin_ = 0, buffer_end_ = 0;
  std::string buffer_;
  std::set<std::string> names_;
};

template <class T>
void put(std::string& out, const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    put<std::uint64_t>(out, value.size());
    out += value;
  } else if constexpr (std::is_same_v<T, bool>) {
    out.push_back(value ? 1 : 0);
  } else {
    out.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
}

struct ValueWriter {
  std::string& out;

  template <class T>
  void operator()(const T& value) const {
    put(out, code_of<T>());
    put(out, value);
  }
  template <class T>
  void operator()(const std::vector<T>& values) const {
    put(out, kListCode);
    put(out, code_of<T>());
    put<std::uint64_t>(out, values.size());
    for (const T& value : values) {
      put<T>(out, value);
    }
  }
};

}  // namespace

GgufHeader read_gguf_header(const InputFile& file) { return HeaderReader(file).read(); }

std::string gguf_header_bytes(const GgufMetadata& metadata, std::vector<GgufTensor>& tensors) {
  std::string out;
  put(out, kMagic);
  put(out, kVersion);
  put<std::uint64_t>(out, tensors.size());
  put<std::uint64_t>(out, metadata.size());
  for (const auto& [key, value] : metadata) {
    put(out, key);
    std::visit(ValueWriter{out}, value);
  }
  std::uint64_t position = 0;
  for (GgufTensor& tensor : tensors) {
    put(out, tensor.name);
    put(out, static_cast<std::uint32_t>(tensor.shape.size()));
    for (std::size_t i = tensor.shape.size(); i-- > 0;) {  // GGUF lists the innermost axis first
      put(out, static_cast<std::uint64_t>(tensor.shape[i]));
    }
    put(out, static_cast<std::uint32_t>(tensor.type));
    put(out, position);
    tensor.begin = position;
    position = aligned(position + tensor.bytes, kGgufAlignment);
  }
  out.resize(aligned(out.size(), kGgufAlignment), '\0');
  for (GgufTensor& tensor : tensors) {
    tensor.begin += out.size();
  }
  return out;
}

std::uint64_t gguf_bytes(GgufType type, std::uint64_t elements) {
  const GgufBlock block = gguf_block(type);
  return elements / block.elements * block.bytes;
}

bool is_quantized(GgufType type) { return gguf_block(type).elements > 1; }

namespace {

// The keys of a split model. llama.cpp's names of its files: prefix-00001-of-00003.gguf.
constexpr const char* kSplitNumber = "split.no";
constexpr const char* kSplitCount = "split.count";
constexpr const char* kSplitTensors = "split.tensors.count";
constexpr std::int64_t kMostFiles = 4096;

std::string part_name(const std::string& prefix, std::int64_t part, std::int64_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, part + 1, count);
}

// The number of tensors in all files of a split model, if the metadata say.
void check_count(const GgufEntries& entries, std::size_t tensors) {
  const std::optional<std::int64_t> expected = entries.integer(kSplitTensors);
  check(!expected.has_value() || *expected == static_cast<std::int64_t>(tensors),
        "{}: the files of the model have {} tensors, but \"{}\" is {}", entries.what(), tensors, kSplitTensors,
        expected.value_or(0));
}

}  // namespace

GgufFiles::GgufFiles(const std::filesystem::path& path) {
  files.push_back(std::make_unique<InputFile>(path));
  header = read_gguf_header(*files[0]);
  const std::string what = "load: " + path.string();
  const GgufEntries entries(header.metadata, what);
  const std::int64_t count = entries.integer(kSplitCount).value_or(1);
  check(count >= 0 && count <= kMostFiles, "{}: expected \"{}\" from 0 to {}, got {}", what, kSplitCount, kMostFiles,
        count);
  if (count <= 1) {
    return;
  }
  const std::string name = path.filename().string(), ending = part_name("", 0, count);
  check(entries.integer(kSplitNumber).value_or(-1) == 0 && name.size() > ending.size() && name.ends_with(ending),
        "{}: the model is split into {} files, expected the first one, with a name that ends in \"{}\"", what, count,
        ending);
  const std::string prefix = name.substr(0, name.size() - ending.size());
  std::set<std::string> names;
  for (const GgufTensor& tensor : header.tensors) {
    names.insert(tensor.name);
  }
  for (std::int64_t part = 1; part < count; ++part) {
    files.push_back(std::make_unique<InputFile>(path.parent_path() / part_name(prefix, part, count)));
    GgufHeader next = read_gguf_header(*files.back());
    const std::string file = files.back()->path().string();
    const GgufEntries own(next.metadata, "load: " + file);
    check(own.integer(kSplitNumber) == part && own.integer(kSplitCount) == count,
          "load: {}: expected part {} of {}: \"{}\" {} and \"{}\" {}", file, part + 1, count, kSplitNumber, part,
          kSplitCount, count);
    for (GgufTensor& tensor : next.tensors) {
      check(names.insert(tensor.name).second, "load: {}: the tensor {} is in another file, too", file,
            in_quotes(tensor.name));
      tensor.file = static_cast<std::size_t>(part);
      header.tensors.push_back(std::move(tensor));
    }
  }
  check_count(entries, header.tensors.size());
}

}  // namespace mica::io::detail
