#include <utility>

#if MICA_WITH_ONIGURUMA
#include <oniguruma.h>
#endif

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/regular_expression.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

#if MICA_WITH_ONIGURUMA

namespace {

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

std::string message_of(int code, const OnigErrorInfo* info) {
  std::string message(ONIG_MAX_ERROR_MESSAGE_LEN, '\0');
  auto* const out = reinterpret_cast<OnigUChar*>(message.data());
  const int length = info != nullptr ? onig_error_code_to_str(out, code, info) : onig_error_code_to_str(out, code);
  message.resize(static_cast<std::size_t>(length));
  return message;
}

}  // namespace

struct Searched::Compiled {
  regex_t* regex = nullptr;

  Compiled(const std::string& expression, const std::string& what) {
    static const bool is_ready = [] {
      OnigEncoding utf8 = ONIG_ENCODING_UTF8;
      onig_set_parse_depth_limit(250);
      return onig_initialize(&utf8, 1) == ONIG_NORMAL;
    }();
    check(is_ready, "{}: Oniguruma cannot be initialized", what);
    OnigErrorInfo error;
    const OnigUChar* const begin = bytes_of(expression);
    const int code = onig_new(&regex, begin, begin + expression.size(), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8,
                              ONIG_SYNTAX_DEFAULT, &error);
    check(code == ONIG_NORMAL, "{}: the regular expression {} is not valid: {}", what, in_quotes(expression),
          code == ONIG_NORMAL ? "" : message_of(code, &error));
  }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() { onig_free(regex); }
};

std::optional<Span> Searched::next(std::string_view text, std::size_t from) const {
  if (compiled_ == nullptr) {
    const std::size_t at = source_.empty() ? std::string_view::npos : text.find(source_, from);
    return at == std::string_view::npos ? std::nullopt : std::optional(Span{at, at + source_.size()});
  }
  // Freed at the end of the thread.
  thread_local const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(
      onig_region_new(), [](OnigRegion* own) { onig_region_free(own, 1); });
  const OnigUChar* const begin = bytes_of(text);
  const OnigUChar* const end = begin + text.size();
  const int at = onig_search(compiled_->regex, begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE);
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
