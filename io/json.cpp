#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/classic_locale.h>
#include <mica/io/file.h>
#include <mica/io/json.h>

namespace mica::io {

namespace {

using Json = nlohmann::json;

/// Builds a JsonValue from the parser's events. nlohmann::json itself keeps the last of two members with the same name,
/// and its destructor allocates.
class ValueBuilder final : public nlohmann::json_sax<Json> {
 public:
  explicit ValueBuilder(const std::string& what) : what_(what) {}

  JsonValue result() && { return std::move(root_); }

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_integer(std::int64_t value) override { return add({value}); }
  bool number_unsigned(std::uint64_t value) override {
    return value <= INT64_MAX ? add({static_cast<std::int64_t>(value)}) : add({static_cast<double>(value)});
  }
  bool number_float(double value, const std::string&) override { return add({value}); }
  bool string(std::string& value) override { return add({std::move(value)}); }
  bool binary(Json::binary_t&) override { return false; }

  bool start_object(std::size_t) override { return open({JsonValue::Object{}}); }
  bool start_array(std::size_t) override { return open({JsonValue::Array{}}); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    const auto [member, is_new] = std::get<JsonValue::Object>(open_.back()->value).try_emplace(name);
    check(is_new, "{}: the name \"{}\" appears twice", what_, name);
    member_ = &member->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    fail("{}: it is not valid JSON, at byte {}", what_, position);
  }

 private:
  // Places a value at the root, at the current name of an object or at the end of an array.
  JsonValue* place(JsonValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (auto* const array = std::get_if<JsonValue::Array>(&open_.back()->value)) {
      array->push_back(std::move(value));  // may move earlier elements, but no pointer in open_ refers to one
      return &array->back();
    }
    *member_ = std::move(value);
    return member_;
  }
  bool add(JsonValue value) { return place(std::move(value)), true; }
  bool open(JsonValue value) {
    check(open_.size() < kDeepestJson, "{}: it is nested more than {} levels deep", what_, kDeepestJson);
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() { return open_.pop_back(), true; }

  const std::string& what_;
  JsonValue root_;
  std::vector<JsonValue*> open_;  // the objects and arrays that contain the current position
  JsonValue* member_ = nullptr;   // the value of the last name
};

std::string quoted(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    fail("to_json: a text is not valid UTF-8");
  }
}

struct Writer {
  std::string out;
  int depth = 0;

  void line() { out += '\n' + std::string(static_cast<std::size_t>(2 * depth), ' '); }
  template <class Container, class Item>
  void write_all(const Container& items, char first, char last, const Item& item) {
    out += first;
    ++depth;
    bool is_first = true;
    for (const auto& each : items) {
      out += std::exchange(is_first, false) ? "" : ",";
      line();
      item(each);
    }
    --depth;
    if (!items.empty()) {
      line();
    }
    out += last;
  }

  void operator()(std::nullptr_t) { out += "null"; }
  void operator()(bool value) { out += value ? "true" : "false"; }
  void operator()(std::int64_t value) { out += std::to_string(value); }
  void operator()(double value) {
    check(std::isfinite(value), "to_json: JSON cannot represent {}", value);
    const std::string text = fmt::format("{}", value);
    out += text;
    out += text.find_first_of(".e") == std::string::npos ? ".0" : "";  // so that it is read as a double again
  }
  void operator()(const std::string& value) { out += quoted(value); }
  void operator()(const JsonValue::Array& items) {
    write_all(items, '[', ']', [this](const JsonValue& item) { std::visit(*this, item.value); });
  }
  void operator()(const JsonValue::Object& members) {
    write_all(members, '{', '}', [this](const auto& member) {
      out += quoted(member.first) + ": ";
      std::visit(*this, member.second.value);
    });
  }
};

}  // namespace

const JsonValue* JsonValue::find(const std::string& name) const {
  const auto* const object = as<Object>();
  if (object == nullptr) {
    return nullptr;
  }
  const auto at = object->find(name);
  return at == object->end() ? nullptr : &at->second;
}

JsonValue parse_json(std::string_view text, const std::string& what) {
  ValueBuilder builder(what);
  const detail::ClassicLocale locale;
  Json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder).result();
}

JsonValue read_json(const std::filesystem::path& path, std::uint64_t most_bytes) {
  const InputFile file(path);
  check(file.size() <= most_bytes, "load: {} has {} bytes, expected at most {}", path.string(), file.size(),
        most_bytes);
  std::string text(file.size(), '\0');
  file.read(text.data(), text.size(), 0);
  return parse_json(text, "load: " + path.string());
}

std::string to_json(const JsonValue& value) {
  Writer writer;
  std::visit(writer, value.value);
  return writer.out + "\n";
}

}  // namespace mica::io
