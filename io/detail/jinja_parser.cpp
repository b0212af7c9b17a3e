#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/jinja_tree.h>
#include <mica/io/detail/real_number.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail::jinja {

namespace {

constexpr std::size_t kLongestTemplate = std::size_t{4} << 20;
constexpr int kDeepestSyntax = 200;  // nested expressions; nested statements

struct Token {
  enum class Kind { text, begin_output, end_output, begin_block, end_block, name, string, integer, real, sign, end };
  Kind kind = Kind::end;
  std::string text{};
  int line = 0;
};

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

// Line ends become \n, and one at the end is dropped.
std::string with_plain_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      i += i + 1 < source.size() && source[i + 1] == '\n';
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) {
    out.pop_back();
  }
  return out;
}

/// Cuts a template into tokens.
class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(with_plain_lines(source)), rest_(source_) {}

  std::vector<Token> tokens() {
    while (!rest_.empty()) {
      const std::size_t tag = find_tag();
      if (tag == std::string_view::npos) {
        put(Token::Kind::text, std::string(rest_));
        break;
      }
      const char kind = rest_[tag + 1];
      const char sign = tag + 2 < rest_.size() ? rest_[tag + 2] : '\0';
      add_text(rest_.substr(0, tag), kind, sign);
      skip(tag + 2 + (sign == '-' || (sign == '+' && kind != '{') ? 1 : 0));
      kind == '#' ? skip_comment() : kind == '{' ? add_tokens("}}") : add_block();
    }
    put(Token::Kind::end, "");
    return std::move(tokens_);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> message, Args&&... args) const {
    fail("chat template, line {}: {}", line_, fmt::format(message, std::forward<Args>(args)...));
  }
  void put(Token::Kind kind, std::string text) {
    if (kind != Token::Kind::text || !text.empty()) {
      tokens_.push_back({kind, std::move(text), line_});
    }
  }
  void skip(std::size_t count) {
    line_ += static_cast<int>(std::count(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(count), '\n'));
    starts_line_ = count > 0 ? rest_[count - 1] == '\n' : starts_line_;
    rest_.remove_prefix(count);
  }
  std::size_t find_tag() const {
    for (std::size_t at = rest_.find('{'); at != std::string_view::npos; at = rest_.find('{', at + 1)) {
      if (at + 1 < rest_.size() && (rest_[at + 1] == '{' || rest_[at + 1] == '%' || rest_[at + 1] == '#')) {
        return at;
      }
    }
    return std::string_view::npos;
  }
  // The text before a tag: "-" removes all white space at its end; without "+", that on the line of a block or comment.
  void add_text(std::string_view text, char kind, char sign) {
    if (sign == '-') {
      while (!text.empty() && is_space(text.back())) {
        text.remove_suffix(1);
      }
    } else if (kind != '{' && sign != '+') {
      const std::size_t newline = text.rfind('\n');
      const std::size_t line = newline == std::string_view::npos ? 0 : newline + 1;
      if ((line > 0 || starts_line_) &&
          std::all_of(text.begin() + static_cast<std::ptrdiff_t>(line), text.end(), is_space)) {
        text = text.substr(0, line);
      }
    }
    put(Token::Kind::text, std::string(text));
  }
  // After the end of a tag, "-" removes all white space; without "+", one line end after a block or comment.
  void end_tag(bool strips, bool keeps) {
    std::size_t count = 0;
    while (strips && count < rest_.size() && is_space(rest_[count])) {
      ++count;
    }
    if (!strips && !keeps && rest_.starts_with('\n')) {
      count = 1;
    }
    skip(count);
  }
  void skip_comment() {
    const std::size_t end = rest_.find("#}");
    if (end == std::string_view::npos) {
      refuse("a comment does not end");
    }
    const char sign = end > 0 ? rest_[end - 1] : '\0';
    skip(end + 2);
    starts_line_ = false;
    end_tag(sign == '-', sign == '+');
  }
  void add_block() {
    // {% raw %} … {% endraw %}
    std::size_t at = spaces(0);
    if (rest_.substr(at).starts_with("raw")) {
      at = spaces(at + 3);
      const bool strips = rest_.substr(at).starts_with("-%}");
      if (strips || rest_.substr(at).starts_with("%}")) {
        skip(at + (strips ? 3 : 2));
        end_tag(strips, true);
        add_raw();
        return;
      }
    }
    add_tokens("%}");
  }
  std::size_t spaces(std::size_t at) const {
    while (at < rest_.size() && is_space(rest_[at])) {
      ++at;
    }
    return at;
  }
  void add_raw() {
    for (std::size_t tag = rest_.find("{%"); tag != std::string_view::npos; tag = rest_.find("{%", tag + 1)) {
      const char sign = tag + 2 < rest_.size() ? rest_[tag + 2] : '\0';
      std::size_t at = spaces(tag + 2 + (sign == '-' || sign == '+' ? 1 : 0));
      if (!rest_.substr(at).starts_with("endraw")) {
        continue;
      }
      at = spaces(at + 6);
      const char end = at < rest_.size() ? rest_[at] : '\0';
      at += end == '-' || end == '+' ? 1 : 0;
      if (rest_.substr(at).starts_with("%}")) {
        add_text(rest_.substr(0, tag), '%', sign);
        skip(at + 2);
        end_tag(end == '-', end == '+');
        return;
      }
    }
    refuse("raw does not end");
  }

  // The tokens of an expression or statement.
  void add_tokens(std::string_view end) {
    const bool is_block = end == "%}";
    put(is_block ? Token::Kind::begin_block : Token::Kind::begin_output, "");
    int open = 0;
    for (;;) {
      skip(spaces(0));
      if (rest_.empty()) {
        refuse("a tag does not end with {}", end);
      }
      const bool strips = rest_[0] == '-', keeps = rest_[0] == '+' && is_block;
      if (open == 0 && rest_.substr(strips || keeps ? 1 : 0).starts_with(end)) {
        skip(strips || keeps ? 3 : 2);
        starts_line_ = false;
        put(is_block ? Token::Kind::end_block : Token::Kind::end_output, "");
        end_tag(strips, keeps || !is_block);
        return;
      }
      const char c = rest_[0];
      if (c == '\'' || c == '"') {
        add_string(c);
      } else if (is_digit(c)) {
        add_number();
      } else if (is_letter(c)) {
        const auto last =
            std::find_if(rest_.begin(), rest_.end(), [](char d) { return !is_letter(d) && !is_digit(d); });
        take(Token::Kind::name, static_cast<std::size_t>(last - rest_.begin()));
      } else {
        constexpr std::array<std::string_view, 7> pairs{"//", "**", "==", "!=", ">=", "<=", "~"};
        const auto* const pair = std::find_if(pairs.begin(), pairs.end(), [&](auto p) { return rest_.starts_with(p); });
        if (pair == pairs.end() && std::string_view("+-*/%()[]{}<>=.:|,;").find(c) == std::string_view::npos) {
          refuse("unexpected character {}", in_quotes(rest_.substr(0, 1)));
        }
        open += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
        open = std::max(open, 0);
        take(Token::Kind::sign, pair == pairs.end() ? 1 : pair->size());
      }
    }
  }
  void take(Token::Kind kind, std::size_t count) {
    put(kind, std::string(rest_.substr(0, count)));
    skip(count);
  }
  void add_number() {
    const auto digits = [&](std::size_t at) {
      while (at < rest_.size() && (is_digit(rest_[at]) || rest_[at] == '_')) {
        ++at;
      }
      return at;
    };
    const auto digit_at = [&](std::size_t at) { return at < rest_.size() && is_digit(rest_[at]); };
    std::size_t end = digits(0);
    bool is_real = false;
    if (end < rest_.size() && rest_[end] == '.' && digit_at(end + 1)) {
      is_real = true;
      end = digits(end + 1);
    }
    if (end < rest_.size() && (rest_[end] == 'e' || rest_[end] == 'E')) {
      const std::size_t sign = end + 1 < rest_.size() && (rest_[end + 1] == '-' || rest_[end + 1] == '+') ? 1 : 0;
      if (digit_at(end + 1 + sign)) {
        is_real = true;
        end = digits(end + 1 + sign);
      }
    }
    std::string text(rest_.substr(0, end));
    std::erase(text, '_');
    put(is_real ? Token::Kind::real : Token::Kind::integer, std::move(text));
    skip(end);
  }
  void add_string(char quote) {
    std::string text;
    std::size_t at = 1;
    for (; at < rest_.size() && rest_[at] != quote; ++at) {
      if (rest_[at] == '\\' && at + 1 < rest_.size()) {
        at = add_escape(at + 1, text);
      } else {
        text += rest_[at];
      }
    }
    if (at == rest_.size()) {
      refuse("a text does not end");
    }
    put(Token::Kind::string, repaired_utf8(text));
    skip(at + 1);
  }
  // Appends what the character after a backslash stands for. Returns the position of the escape's last character.
  std::size_t add_escape(std::size_t at, std::string& text) const {
    const char c = rest_[at];
    constexpr std::string_view names = "ntrbfva0";
    if (const std::size_t found = names.find(c); found != std::string_view::npos) {
      text += "\n\t\r\b\f\v\a\0"[found];
      return at;
    }
    const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits > 0 && at + digits < rest_.size()) {
      std::uint32_t code = 0;
      const char* const end = rest_.data() + at + 1 + digits;
      const auto [last, error] = std::from_chars(rest_.data() + at + 1, end, code, 16);
      if (error == std::errc() && last == end && code < 0x110000) {
        append_utf8(text, code >= 0xD800 && code < 0xE000 ? 0xFFFD : static_cast<char32_t>(code));
        return at + digits;
      }
    }
    if (c != '\\' && c != '\'' && c != '"' && c != '\n') {
      text += '\\';  // as in Python, other escapes stand for themselves
    }
    if (c != '\n') {
      text += c;
    }
    return at;
  }

  std::string source_;
  std::string_view rest_;
  int line_ = 1;
  bool starts_line_ = true;
  std::vector<Token> tokens_;
};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Body parse() {
    Body body = statements({});
    return body;
  }

 private:
  using Kind = Expression::Kind;
  using Pointer = Expression::Pointer;

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> message, Args&&... args) const {
    fail("chat template, line {}: {}", now().line, fmt::format(message, std::forward<Args>(args)...));
  }
  /// Counts how deep the parser's own recursion is.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepestSyntax) {
        parser_.refuse("it is nested more than {} levels deep", kDeepestSyntax);
      }
    }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    ~Level() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  std::string next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_].text; }
  bool is(Token::Kind kind) const { return now().kind == kind; }
  bool is_sign(std::string_view sign) const { return is(Token::Kind::sign) && now().text == sign; }
  bool is_name(std::string_view name) const { return is(Token::Kind::name) && now().text == name; }
  bool take_sign(std::string_view sign) { return is_sign(sign) && (next(), true); }
  bool take_name(std::string_view name) { return is_name(name) && (next(), true); }
  void expect_sign(std::string_view sign) {
    if (!take_sign(sign)) {
      refuse("expected {}, got {}", sign, in_quotes(now().text));
    }
  }
  std::string expect_name() {
    if (!is(Token::Kind::name)) {
      refuse("expected a name, got {}", in_quotes(now().text));
    }
    return next();
  }
  void expect_end() {
    if (!is(Token::Kind::end_block)) {
      refuse("expected %}}, got {}", in_quotes(now().text));
    }
    next();
  }

  Pointer make(Kind kind, std::string name = {}) const {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->line = now().line;
    node->name = std::move(name);
    return node;
  }
  // Expressions are evaluated and freed recursively.
  void add(Expression& node, Pointer argument) const {
    if (argument != nullptr) {
      node.height = std::max(node.height, argument->height + 1);
      if (node.height > kDeepestSyntax) {
        refuse("an expression is nested more than {} levels deep", kDeepestSyntax);
      }
    }
    node.arguments.push_back(std::move(argument));
  }
  Pointer make(Kind kind, std::string name, Pointer first, Pointer second = nullptr) const {
    Pointer node = make(kind, std::move(name));
    add(*node, std::move(first));
    if (second != nullptr) {
      add(*node, std::move(second));
    }
    return node;
  }

  // Expressions, from the loosest operators to the tightest.
  Pointer expression(bool with_condition = true) {
    const Level level(*this);
    Pointer node = logical_or();
    while (with_condition && take_name("if")) {
      Pointer condition = logical_or();
      node = make(Kind::condition, {}, std::move(node), std::move(condition));
      add(*node, take_name("else") ? expression() : nullptr);
    }
    return node;
  }
  Pointer logical_or() {
    Pointer node = logical_and();
    while (take_name("or")) {
      node = make(Kind::logical_or, {}, std::move(node), logical_and());
    }
    return node;
  }
  Pointer logical_and() {
    Pointer node = negation();
    while (take_name("and")) {
      node = make(Kind::logical_and, {}, std::move(node), negation());
    }
    return node;
  }
  Pointer negation() {
    const Level level(*this);
    return take_name("not") ? make(Kind::unary, "not", negation()) : comparison();
  }
  Pointer comparison() {
    Pointer node = sum();
    Pointer chain;
    for (;;) {
      constexpr std::array<std::string_view, 6> signs{"==", "!=", "<", "<=", ">", ">="};
      std::string sign;
      if (is(Token::Kind::sign) && std::find(signs.begin(), signs.end(), now().text) != signs.end()) {
        sign = next();
      } else if (take_name("in")) {
        sign = "in";
      } else if (is_name("not") && ahead().kind == Token::Kind::name && ahead().text == "in") {
        next();
        next();
        sign = "not in";
      } else {
        break;
      }
      if (chain == nullptr) {
        chain = make(Kind::compare, {}, std::move(node));
      }
      chain->operators.push_back(std::move(sign));
      add(*chain, sum());
    }
    return chain != nullptr ? std::move(chain) : std::move(node);
  }
  Pointer sum() {
    Pointer node = joined();
    while (is_sign("+") || is_sign("-")) {
      std::string sign = next();
      node = make(Kind::binary, std::move(sign), std::move(node), joined());
    }
    return node;
  }
  Pointer joined() {
    Pointer node = product();
    if (!is_sign("~")) {
      return node;
    }
    Pointer all = make(Kind::join, {}, std::move(node));
    while (take_sign("~")) {
      add(*all, product());
    }
    return all;
  }
  Pointer product() {
    Pointer node = power();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
      std::string sign = next();
      node = make(Kind::binary, std::move(sign), std::move(node), power());
    }
    return node;
  }
  Pointer power() {
    Pointer node = unary(true);
    while (take_sign("**")) {
      node = make(Kind::binary, "**", std::move(node), unary(true));
    }
    return node;
  }
  Pointer unary(bool with_filters) {
    const Level level(*this);
    Pointer node;
    if (is_sign("-") || is_sign("+")) {
      std::string sign = next();
      node = make(Kind::unary, std::move(sign), unary(false));
    } else {
      node = postfix(primary());
    }
    return with_filters ? filters(std::move(node)) : std::move(node);
  }
  Pointer primary() {
    Pointer node = make(Kind::constant);
    if (is(Token::Kind::name)) {
      std::string name = next();
      if (name == "true" || name == "True" || name == "false" || name == "False") {
        node->constant = name == "true" || name == "True";
      } else if (name != "none" && name != "None") {
        node->kind = Kind::name;
        node->name = std::move(name);
      }
    } else if (is(Token::Kind::string)) {
      std::string text = next();
      while (is(Token::Kind::string)) {
        text += next();
      }
      node->constant = std::move(text);
    } else if (is(Token::Kind::integer)) {
      std::int64_t value = 0;
      const std::string& text = now().text;
      if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
        refuse("the number {} is too large", text);
      }
      node->constant = value;
      next();
    } else if (is(Token::Kind::real)) {
      double value = 0;
      const std::string& text = now().text;
      io::detail::real_from_chars(text.data(), text.data() + text.size(), value);
      node->constant = value;
      next();
    } else if (take_sign("(")) {
      node = tuple(")");
      expect_sign(")");
    } else if (take_sign("[")) {
      node->kind = Kind::list;
      while (!take_sign("]")) {
        add(*node, expression());
        if (!is_sign("]")) {
          expect_sign(",");
        }
      }
    } else if (take_sign("{")) {
      node->kind = Kind::dict;
      while (!take_sign("}")) {
        add(*node, expression());
        expect_sign(":");
        add(*node, expression());
        if (!is_sign("}")) {
          expect_sign(",");
        }
      }
    } else {
      refuse("expected an expression, got {}", in_quotes(now().text));
    }
    return node;
  }
  bool ends_tuple(std::string_view end) const {
    return is(Token::Kind::end_block) || is(Token::Kind::end_output) || (!end.empty() && is_sign(end));
  }
  // One expression, or several with commas between them. `end`: the sign behind it, or nothing.
  Pointer tuple(std::string_view end, bool with_condition = true) {
    Pointer all = make(Kind::tuple);
    bool has_comma = false;
    while (!ends_tuple(end) && (all->arguments.empty() || has_comma)) {
      add(*all, expression(with_condition));
      has_comma = take_sign(",");
      if (!has_comma) {
        break;
      }
    }
    if (all->arguments.size() == 1 && !has_comma) {
      return std::move(all->arguments[0]);
    }
    if (all->arguments.empty() && end.empty()) {
      refuse("expected an expression, got {}", in_quotes(now().text));
    }
    return all;
  }
  Pointer postfix(Pointer node) {
    for (;;) {
      if (take_sign(".")) {
        if (is(Token::Kind::integer)) {
          Pointer index = primary();
          node = make(Kind::item, {}, std::move(node), std::move(index));
        } else {
          std::string name = expect_name();
          node = make(Kind::attribute, std::move(name), std::move(node));
        }
      } else if (take_sign("[")) {
        node = subscript(std::move(node));
      } else if (is_sign("(")) {
        node = make(Kind::call, {}, std::move(node));
        arguments(*node);
      } else {
        return node;
      }
    }
  }
  Pointer subscript(Pointer node) {
    Pointer first = is_sign(":") ? nullptr : expression();
    if (!is_sign(":")) {
      expect_sign("]");
      return make(Kind::item, {}, std::move(node), std::move(first));
    }
    Pointer slice = make(Kind::slice, {}, std::move(node));
    add(*slice, std::move(first));
    for (int i = 0; i < 2; ++i) {
      const bool has_colon = take_sign(":");
      add(*slice, has_colon && !is_sign(":") && !is_sign("]") ? expression() : nullptr);
    }
    expect_sign("]");
    return slice;
  }
  void arguments(Expression& node) {
    expect_sign("(");
    while (!take_sign(")")) {
      if (is(Token::Kind::name) && ahead().kind == Token::Kind::sign && ahead().text == "=") {
        std::string name = next();
        next();
        Pointer value = expression();
        node.height = std::max(node.height, value->height + 1);
        node.named.emplace_back(std::move(name), std::move(value));
      } else if (is_sign("*") || is_sign("**")) {
        refuse("arguments from a list are not supported");
      } else {
        add(node, expression());
      }
      if (!is_sign(")")) {
        expect_sign(",");
      }
    }
  }
  std::string dotted_name() {
    std::string name = expect_name();
    while (take_sign(".")) {
      name += "." + expect_name();
    }
    return name;
  }
  Pointer filters(Pointer node) {
    for (;;) {
      if (take_sign("|")) {
        node = make(Kind::filter, dotted_name(), std::move(node));
        if (is_sign("(")) {
          arguments(*node);
        }
      } else if (take_name("is")) {
        const bool is_negated = take_name("not");
        node = make(Kind::test, dotted_name(), std::move(node));
        const bool has_argument = is(Token::Kind::string) || is(Token::Kind::integer) || is(Token::Kind::real) ||
                                  is_sign("[") || is_sign("{") ||
                                  (is(Token::Kind::name) && !is_name("else") && !is_name("or") && !is_name("and") &&
                                   !is_name("if") && !is_name("is") && !is_name("not") && !is_name("in"));
        if (is_sign("(")) {
          arguments(*node);
        } else if (has_argument) {
          add(*node, postfix(primary()));
        }
        if (is_negated) {
          node = make(Kind::unary, "not", std::move(node));
        }
      } else if (is_sign("(")) {
        node = make(Kind::call, {}, std::move(node));
        arguments(*node);
      } else {
        return node;
      }
    }
  }

  // Statements up to a block with one of the names, which is not consumed.
  Body statements(const std::vector<std::string_view>& ends) {
    const Level level(*this);
    Body body;
    for (;;) {
      if (is(Token::Kind::end)) {
        if (!ends.empty()) {
          refuse("expected {}, got the end", ends.back());
        }
        return body;
      }
      if (is(Token::Kind::text)) {
        Statement text{.kind = Statement::Kind::text, .line = now().line};
        text.text = next();
        body.statements.push_back(std::move(text));
      } else if (is(Token::Kind::begin_output)) {
        Statement output{.kind = Statement::Kind::output, .line = now().line};
        next();
        output.value = tuple("");
        if (!is(Token::Kind::end_output)) {
          refuse("expected }}}}, got {}", in_quotes(now().text));
        }
        next();
        body.statements.push_back(std::move(output));
      } else {
        const Token& name = ahead();
        if (std::find(ends.begin(), ends.end(), name.text) != ends.end() && name.kind == Token::Kind::name) {
          return body;
        }
        body.statements.push_back(block());
      }
    }
  }
  // A body, its end, and the rest of that block.
  Body body_until(std::string_view end) {
    Body body = statements({end});
    next();
    next();
    if (!is(Token::Kind::end_block)) {
      next();  // endmacro may repeat the name
    }
    expect_end();
    return body;
  }

  Statement block() {
    Statement own{.line = now().line};
    next();
    const std::string name = expect_name();
    if (name == "if") {
      condition(own);
    } else if (name == "for") {
      loop(own);
    } else if (name == "set") {
      set(own);
    } else if (name == "macro") {
      own.kind = Statement::Kind::macro;
      own.text = expect_name();
      parameters(own);
      expect_end();
      own.bodies.push_back(body_until("endmacro"));
    } else if (name == "call") {
      own.kind = Statement::Kind::call_block;
      if (is_sign("(")) {
        parameters(own);
      }
      own.value = expression();
      if (own.value->kind != Kind::call) {
        refuse("expected a call");
      }
      expect_end();
      own.bodies.push_back(body_until("endcall"));
    } else if (name == "filter") {
      own.kind = Statement::Kind::filter;
      own.value = block_filter();
      expect_end();
      own.bodies.push_back(body_until("endfilter"));
    } else if (name == "with") {
      own.kind = Statement::Kind::with;
      while (!is(Token::Kind::end_block)) {
        Parameter parameter{expect_name(), nullptr};
        expect_sign("=");
        parameter.otherwise = expression();
        own.parameters.push_back(std::move(parameter));
        if (!is(Token::Kind::end_block)) {
          expect_sign(",");
        }
      }
      expect_end();
      own.bodies.push_back(body_until("endwith"));
    } else if (name == "generation") {
      own.kind = Statement::Kind::scope;
      expect_end();
      own.bodies.push_back(body_until("endgeneration"));
    } else if (name == "break" || name == "continue") {
      own.kind = name == "break" ? Statement::Kind::stop : Statement::Kind::skip;
      if (loops_ == 0) {
        refuse("{} outside of a loop", name);
      }
      expect_end();
    } else {
      refuse("the statement {} is not supported", in_quotes(name));
    }
    return own;
  }
  void condition(Statement& own) {
    own.kind = Statement::Kind::condition;
    bool has_condition = true;
    for (;;) {
      if (has_condition) {
        own.conditions.push_back(tuple("", false));
      }
      expect_end();
      own.bodies.push_back(has_condition ? statements({"elif", "else", "endif"}) : statements({"endif"}));
      next();
      const std::string name = next();
      if (name == "endif") {
        expect_end();
        return;
      }
      has_condition = name == "elif";
    }
  }
  void targets(Statement& own) {
    const bool has_parenthesis = take_sign("(");
    do {
      if (!own.targets.empty() && !is(Token::Kind::name)) {
        break;  // a comma at the end
      }
      std::string name = expect_name();
      if (take_sign(".")) {
        name += "." + expect_name();
      }
      own.targets.push_back(std::move(name));
      own.unpacks = own.unpacks || is_sign(",");
    } while (take_sign(","));
    if (has_parenthesis) {
      expect_sign(")");
    }
  }
  void loop(Statement& own) {
    own.kind = Statement::Kind::loop;
    targets(own);
    if (!take_name("in")) {
      refuse("expected in, got {}", in_quotes(now().text));
    }
    own.value = tuple("", false);  // its "if" is a filter
    if (take_name("if")) {
      own.conditions.push_back(expression());
    }
    own.is_recursive = take_name("recursive");
    expect_end();
    ++loops_;
    own.bodies.push_back(statements({"else", "endfor"}));
    --loops_;
    next();
    if (next() == "else") {
      expect_end();
      own.bodies.push_back(body_until("endfor"));
    } else {
      expect_end();
    }
  }
  void set(Statement& own) {
    targets(own);
    if (take_sign("=")) {
      own.kind = Statement::Kind::set;
      own.value = tuple("");
      expect_end();
      return;
    }
    own.kind = Statement::Kind::set_block;
    if (is_sign("|")) {
      own.value = block_filter();
    }
    expect_end();
    own.bodies.push_back(body_until("endset"));
  }
  // Filters of a block, whose text is the value: name | name(…) …
  Pointer block_filter() {
    take_sign("|");
    Pointer node = make(Kind::filter, dotted_name());
    add(*node, nullptr);
    if (is_sign("(")) {
      arguments(*node);
    }
    return filters(std::move(node));
  }
  void parameters(Statement& own) {
    expect_sign("(");
    while (!take_sign(")")) {
      Parameter parameter{expect_name(), nullptr};
      if (take_sign("=")) {
        parameter.otherwise = expression();
      }
      own.parameters.push_back(std::move(parameter));
      if (!is_sign(")")) {
        expect_sign(",");
      }
    }
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

Body parse_template(std::string_view source) {
  check(source.size() <= kLongestTemplate, "chat template: it has {} bytes, expected at most {}", source.size(),
        kLongestTemplate);
  return Parser(Lexer(repaired_utf8(source)).tokens()).parse();
}

}  // namespace mica::io::detail::jinja
