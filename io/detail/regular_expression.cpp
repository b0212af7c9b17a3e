#include <utility>

#if MICA_WITH_ONIGURUMA
#include <dlfcn.h>
#include <oniguruma.h>
#endif

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/regular_expression.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

#if MICA_WITH_ONIGURUMA

namespace {

/// Oniguruma's functions. The library is loaded when it is needed and not linked: it also defines regcomp() and
/// regexec(), and would replace those of the C library in the whole program.
struct Oniguruma {
  decltype(&onig_initialize) initialize = nullptr;
  decltype(&onig_set_parse_depth_limit) set_parse_depth_limit = nullptr;
  decltype(&onig_new) create = nullptr;
  decltype(&onig_free) destroy = nullptr;
  decltype(&onig_search) search = nullptr;
  decltype(&onig_region_new) create_region = nullptr;
  decltype(&onig_region_free) destroy_region = nullptr;
  decltype(&onig_error_code_to_str) error_text = nullptr;
  OnigEncoding utf8 = nullptr;
  OnigSyntaxType** syntax = nullptr;
  bool is_ready = false;

  static const Oniguruma& get() {
    static const Oniguruma library;
    return library;
  }

 private:
  Oniguruma() {
    void* handle = nullptr;
    for (const char* const name : {"libonig.so.5", "libonig.so"}) {
      handle = handle != nullptr ? handle : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == nullptr) {
      return;
    }
    bool has_all = true;
    const auto load = [&]<class T>(const char* name, T& symbol) {
      symbol = reinterpret_cast<T>(dlsym(handle, name));
      has_all = has_all && symbol != nullptr;
    };
    load("onig_initialize", initialize);
    load("onig_set_parse_depth_limit", set_parse_depth_limit);
    load("onig_new", create);
    load("onig_free", destroy);
    load("onig_search", search);
    load("onig_region_new", create_region);
    load("onig_region_free", destroy_region);
    load("onig_error_code_to_str", error_text);
    load("OnigEncodingUTF8", utf8);
    load("OnigDefaultSyntax", syntax);
    if (has_all) {
      set_parse_depth_limit(250);
      is_ready = initialize(&utf8, 1) == ONIG_NORMAL;
    }
  }
};

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

std::string message_of(int code, const OnigErrorInfo* info) {
  std::string message(ONIG_MAX_ERROR_MESSAGE_LEN, '\0');
  auto* const out = reinterpret_cast<OnigUChar*>(message.data());
  const auto text = Oniguruma::get().error_text;
  const int length = info != nullptr ? text(out, code, info) : text(out, code);
  message.resize(static_cast<std::size_t>(length));
  return message;
}

}  // namespace

struct Searched::Compiled {
  regex_t* regex = nullptr;

  Compiled(const std::string& expression, const std::string& what) {
    const Oniguruma& library = Oniguruma::get();
    check(library.is_ready,
          "{}: the regular expression {} needs Oniguruma, which cannot be loaded. Debian: libonig-dev", what,
          in_quotes(expression));
    OnigErrorInfo error;
    const OnigUChar* const begin = bytes_of(expression);
    const int code = library.create(&regex, begin, begin + expression.size(), ONIG_OPTION_NONE, library.utf8,
                                    *library.syntax, &error);
    check(code == ONIG_NORMAL, "{}: the regular expression {} is not valid: {}", what, in_quotes(expression),
          code == ONIG_NORMAL ? "" : message_of(code, &error));
  }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() { Oniguruma::get().destroy(regex); }
};

std::optional<Span> Searched::next(std::string_view text, std::size_t from) const {
  if (compiled_ == nullptr) {
    const std::size_t at = source_.empty() ? std::string_view::npos : text.find(source_, from);
    return at == std::string_view::npos ? std::nullopt : std::optional(Span{at, at + source_.size()});
  }
  const Oniguruma& library = Oniguruma::get();
  // Freed at the end of the thread.
  thread_local const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(
      library.create_region(), [](OnigRegion* own) { Oniguruma::get().destroy_region(own, 1); });
  const OnigUChar* const begin = bytes_of(text);
  const OnigUChar* const end = begin + text.size();
  const int at = library.search(compiled_->regex, begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE);
  if (at == ONIG_MISMATCH) {
    return std::nullopt;
  }
  check(at >= 0, "encode: the regular expression {} fails: {}", in_quotes(source_), message_of(at, nullptr));
  return Span{static_cast<std::size_t>(region->beg[0]), static_cast<std::size_t>(region->end[0])};
}

#else

struct Searched::Compiled {
  Compiled(const std::string& expression, const std::string& what) {
    fail("{}: the regular expression {} needs Oniguruma, without which mica was built. Debian: libonig-dev", what,
         in_quotes(expression));
  }
};

std::optional<Span> Searched::next(std::string_view text, std::size_t from) const {
  const std::size_t at = source_.empty() ? std::string_view::npos : text.find(source_, from);
  return at == std::string_view::npos ? std::nullopt : std::optional(Span{at, at + source_.size()});
}

#endif

Searched Searched::text(std::string text) {
  Searched result;
  result.source_ = std::move(text);
  return result;
}

Searched Searched::expression(const std::string& expression, const std::string& what) {
  constexpr std::size_t longest = std::size_t{1} << 16;
  check(expression.size() <= longest, "{}: a regular expression has {} bytes, expected at most {}", what,
        expression.size(), longest);
  Searched result;
  result.source_ = expression;
  result.compiled_ = std::make_shared<const Compiled>(expression, what);
  return result;
}

std::size_t Searched::after_character(std::string_view text, std::size_t at) {
  return at + character_at(text.data() + at).length;
}

}  // namespace mica::io::detail
