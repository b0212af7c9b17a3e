#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/io/detail/classic_locale.h>
#include <mica/io/detail/mapped_tensor.h>
#include <mica/io/file.h>
#include <mica/io/safetensors.h>

namespace mica::io {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

constexpr std::array<std::pair<DType, const char*>, 8> kDTypeNames{{{DType::float64, "F64"},
                                                                    {DType::float32, "F32"},
                                                                    {DType::float16, "F16"},
                                                                    {DType::bfloat16, "BF16"},
                                                                    {DType::int64, "I64"},
                                                                    {DType::int32, "I32"},
                                                                    {DType::uint8, "U8"},
                                                                    {DType::boolean, "BOOL"}}};

const char* format_name(DType dtype) {
  return std::find_if(kDTypeNames.begin(), kDTypeNames.end(), [=](const auto& entry) { return entry.first == dtype; })
      ->second;
}

std::optional<DType> dtype_named(const std::string& name) {
  for (const auto& [dtype, own] : kDTypeNames) {
    if (name == own) {
      return dtype;
    }
  }
  return std::nullopt;
}

struct Entry {
  std::string name;
  DType dtype = DType::float32;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // positions in the data section
};

struct Header {
  std::vector<Entry> entries;  // in the order of their data
  Metadata metadata;
  std::uint64_t data_start = 0;
};

/// A value in the description of a tensor, or in the metadata.
struct Field {
  std::optional<std::string> text;                    // of a string
  std::optional<std::vector<std::uint64_t>> numbers;  // of a list
  bool only_numbers = true;                           // whether the list contains only numbers
};

/// A name of the header, with its fields if it is an object.
struct Member {
  std::string name;
  std::optional<std::map<std::string, Field>> fields{};
};

/// Builds the header from the parser's events. An nlohmann::json would not do: its destructor allocates, and ends the
/// program if memory runs out. Errors are passed to `refuse`, which throws.
template <class Refuse>
class HeaderEvents final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderEvents(const Refuse& refuse) : refuse_(refuse) {}

  std::vector<Member> members() && { return std::move(members_); }

  bool start_object(std::size_t) override {
    if (depth_ >= 2) {
      refuse_("its header is nested too deeply");
    }
    if (depth_ == 1) {
      members_.back().fields.emplace();
    }
    ++depth_;
    return true;
  }
  bool key(std::string& name) override {
    bool is_new = false;
    if (depth_ == 1) {
      is_new = names_.insert(name).second;
      members_.push_back({.name = name});
    } else {
      std::tie(field_, is_new) = members_.back().fields->try_emplace(name);
    }
    if (!is_new) {  // JSON itself allows duplicate names
      refuse_(fmt::format("the name \"{}\" appears twice", name));
    }
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool start_array(std::size_t) override {
    if (depth_ >= 3) {
      refuse_("its header is nested too deeply");
    }
    if (Field* const field = current(2)) {
      field->numbers.emplace();
    }
    ++depth_;
    return true;
  }
  bool end_array() override { return --depth_, true; }

  bool string(std::string& text) override {
    if (Field* const field = current(2)) {
      field->text = text;
    }
    return other();
  }
  bool number_unsigned(std::uint64_t number) override {
    if (Field* const field = current(3)) {
      field->numbers->push_back(number);
    }
    return true;
  }
  bool null() override { return other(); }
  bool boolean(bool) override { return other(); }
  bool number_integer(std::int64_t) override { return other(); }  // negative
  bool number_float(double, const std::string&) override { return other(); }
  bool binary(Json::binary_t&) override { return other(); }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  // The field that a value at this depth belongs to, or null.
  Field* current(int depth) {
    return depth_ == depth && members_.back().fields.has_value() ? &field_->second : nullptr;
  }
  bool other() {
    if (Field* const field = current(3)) {
      field->only_numbers = false;
    }
    return true;
  }

  const Refuse& refuse_;
  int depth_ = 0;
  std::set<std::string> names_;
  std::vector<Member> members_;
  std::map<std::string, Field>::iterator field_;
};

/// Reads and checks the header of one file.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file) {}

  Header read() const {
    require(file_.size() >= kLengthBytes, "it has {} bytes, too few for a header", file_.size());
    std::uint64_t length = 0;
    file_.read(&length, kLengthBytes, 0);
    require(length <= kLongestHeader && length <= file_.size() - kLengthBytes,
            "its header claims {} bytes, the file has {}", length, file_.size());
    std::string text(length, '\0');
    file_.read(text.data(), length, kLengthBytes);
    require(!text.empty() && text[0] == '{', "its header does not start with '{{'");

    Header header;
    header.data_start = kLengthBytes + length;
    for (const Member& member : parse(text)) {
      if (member.name == kMetadataKey) {
        header.metadata = metadata_of(member);
      } else {
        header.entries.push_back(entry_of(member));
      }
    }
    check_coverage(header);
    return header;
  }

 private:
  template <class... Args>
  void require(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (!ok) {
      fail("load: {} is not a valid safetensors file: {}", file_.path().string(),
           fmt::format(message, std::forward<Args>(args)...));
    }
  }

  std::vector<Member> parse(const std::string& text) const {
    const auto refuse = [&](const std::string& why) { require(false, "{}", why); };
    HeaderEvents events(refuse);
    const detail::ClassicLocale locale;
    require(Json::sax_parse(text, &events), "its header is not valid JSON");
    return std::move(events).members();
  }

  Metadata metadata_of(const Member& member) const {
    require(member.fields.has_value(), "{} is not an object", kMetadataKey);
    Metadata metadata;
    for (const auto& [name, field] : *member.fields) {
      require(field.text.has_value(), "the metadata \"{}\" is not a string", name);
      metadata.emplace(name, *field.text);
    }
    return metadata;
  }

  Entry entry_of(const Member& member) const {
    const std::string& name = member.name;
    const auto field = [&](const char* key) -> const Field* {
      const auto at = member.fields->find(key);
      return at == member.fields->end() ? nullptr : &at->second;
    };
    const bool has_three = member.fields.has_value() && member.fields->size() == 3;
    const Field* const dtype = has_three ? field("dtype") : nullptr;
    const Field* const shape = has_three ? field("shape") : nullptr;
    const Field* const offsets = has_three ? field("data_offsets") : nullptr;
    require(dtype != nullptr && shape != nullptr && offsets != nullptr,
            "tensor \"{}\" must have exactly dtype, shape and data_offsets", name);
    Entry entry;
    entry.name = name;

    require(dtype->text.has_value(), "the dtype of \"{}\" is not a string", name);
    const std::optional<DType> known = dtype_named(*dtype->text);
    require(known.has_value(), "the dtype {} of \"{}\" is not supported", *dtype->text, name);
    entry.dtype = *known;

    require(shape->numbers.has_value() && shape->numbers->size() <= kMaxRank,
            "the shape of \"{}\" is not a list of at most {} sizes", name, kMaxRank);
    require(shape->only_numbers, "the shape of \"{}\" has an entry that is not a size", name);
    std::int64_t bytes = static_cast<std::int64_t>(size_of(entry.dtype));
    bool is_empty = false;
    for (const std::uint64_t size : *shape->numbers) {
      require(size <= INT64_MAX, "the shape of \"{}\" has an entry that is not a size", name);
      entry.shape.push_back(static_cast<std::int64_t>(size));
      is_empty = is_empty || size == 0;
      // Axes of length 0 are ignored, so that the strides of an empty tensor cannot overflow.
      require(!__builtin_mul_overflow(bytes, std::max<std::int64_t>(entry.shape.back(), 1), &bytes),
              "the shape [{}] of \"{}\" has too many elements", fmt::join(*shape->numbers, ","), name);
    }

    require(offsets->numbers.has_value() && offsets->only_numbers && offsets->numbers->size() == 2,
            "the data_offsets of \"{}\" are not two positions", name);
    entry.begin = offsets->numbers->front();
    entry.end = offsets->numbers->back();
    const std::uint64_t expected = is_empty ? 0 : static_cast<std::uint64_t>(bytes);
    require(entry.begin <= entry.end && entry.end - entry.begin == expected,
            "the data_offsets [{}] of \"{}\" do not hold {} of {}", fmt::join(*offsets->numbers, ","), name,
            entry.shape, entry.dtype);
    return entry;
  }

  // Every byte of the data must belong to exactly one tensor.
  void check_coverage(Header& header) const {
    std::sort(header.entries.begin(), header.entries.end(),
              [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    std::uint64_t position = 0;
    for (const Entry& entry : header.entries) {
      require(entry.begin == position, "the data of \"{}\" starts at {}, expected {}", entry.name, entry.begin,
              position);
      position = entry.end;
    }
    const std::uint64_t data = file_.size() - header.data_start;
    require(position == data, "its tensors need {} bytes of data, it has {}", position, data);
  }

  const InputFile& file_;
};

std::string header_text(const std::filesystem::path& path, const std::vector<StateDict::const_iterator>& order,
                        const Metadata& metadata) {
  std::string text = "{";
  const auto add = [&text](const std::string& name, const std::string& value) {
    text += fmt::format("{}{}:{}", text.size() > 1 ? "," : "", Json(name).dump(), value);
  };
  try {
    if (!metadata.empty()) {
      // Only strings are Json here: an object allocates in its destructor, which ends the program if memory runs out.
      std::string entries = "{";
      for (const auto& [key, value] : metadata) {
        entries += fmt::format("{}{}:{}", entries.size() > 1 ? "," : "", Json(key).dump(), Json(value).dump());
      }
      add(kMetadataKey, entries + "}");
    }
    std::uint64_t position = 0;
    for (const auto& at : order) {
      const Tensor& tensor = at->second;
      const std::uint64_t end = position + tensor.bytes();
      add(at->first, fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", format_name(tensor.dtype()),
                                 fmt::join(tensor.shape().begin(), tensor.shape().end(), ","), position, end));
      position = end;
    }
  } catch (const Json::exception&) {
    fail("save: cannot write {}: a name or the metadata is not valid UTF-8", path.string());
  }
  text += "}";
  // The data begins at a multiple of 8, so that readers can map the file into memory.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  check(text.size() <= kLongestHeader, "save: cannot write {}: its header would have {} bytes, at most {} are allowed",
        path.string(), text.size(), kLongestHeader);
  return text;
}

void check_booleans(const std::filesystem::path& path, const Entry& entry, const std::byte* data) {
  check(entry.dtype != boolean ||
            std::all_of(data, data + (entry.end - entry.begin), [](std::byte byte) { return byte <= std::byte{1}; }),
        "load: {} is not a valid safetensors file: \"{}\" has a bool that is neither 0 nor 1", path.string(),
        entry.name);
}

}  // namespace

void save(const std::filesystem::path& path, const StateDict& tensors, const Metadata& metadata) {
  std::vector<StateDict::const_iterator> order;
  for (auto at = tensors.begin(); at != tensors.end(); ++at) {
    check(at->second.defined(), "save: \"{}\" is an undefined tensor", at->first);
    check(at->first != kMetadataKey, "save: a tensor cannot be named {}", kMetadataKey);
    order.push_back(at);
  }
  // Wide elements first, so that each tensor is aligned for its dtype.
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return size_of(a->second.dtype()) > size_of(b->second.dtype());
  });

  const std::string header = header_text(path, order, metadata);
  const std::uint64_t length = header.size();
  AtomicFile file(path);
  file.write(&length, kLengthBytes);
  file.write(header.data(), length);
  std::int64_t total = 0;
  for (const auto& at : order) {
    total += static_cast<std::int64_t>(at->second.bytes());
  }
  ProgressTask progress("writing " + path.filename().string(), total);
  for (const auto& at : order) {
    Tensor host = at->second;
    if (!host.device().is_cpu() || !host.is_contiguous()) {
      host = empty(host.shape(), host.dtype());
      copy_into(host, at->second);
    }
    file.write(host.raw_data(), host.bytes());
    progress.advance(static_cast<std::int64_t>(host.bytes()));
  }
  file.commit();
}

StateDict load(const std::filesystem::path& path, Device device) {
  const InputFile file(path);
  const Header header = HeaderReader(file).read();
  StateDict result;
  ProgressTask progress("reading " + path.filename().string(),
                        static_cast<std::int64_t>(file.size() - header.data_start));
  for (const Entry& entry : header.entries) {
    Tensor tensor = empty(entry.shape, entry.dtype);
    file.read(tensor.raw_data(), tensor.bytes(), header.data_start + entry.begin);
    progress.advance(static_cast<std::int64_t>(tensor.bytes()));
    check_booleans(path, entry, tensor.raw_data());
    if (!device.is_cpu()) {
      const Tensor moved = empty(entry.shape, entry.dtype, device);
      copy_into(moved, tensor);
      tensor = moved;
    }
    result.emplace(entry.name, tensor);
  }
  return result;
}

StateDict load_mapped(const std::filesystem::path& path) {
  const InputFile input(path);
  const Header header = HeaderReader(input).read();
  const auto file = std::make_shared<MappedFile>(input, true);
  StateDict result;
  for (const Entry& entry : header.entries) {
    const std::byte* const data = file->bytes().data() + header.data_start + entry.begin;
    check_booleans(path, entry, data);
    result.emplace(entry.name, detail::mapped_tensor(file, header.data_start + entry.begin, entry.shape, entry.dtype));
  }
  return result;
}

Metadata load_metadata(const std::filesystem::path& path) {
  const InputFile file(path);
  return HeaderReader(file).read().metadata;
}

}  // namespace mica::io
