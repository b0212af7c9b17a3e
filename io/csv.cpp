#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <type_traits>

#include <mica/io/csv.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/real_number.h>
#include <mica/io/file.h>

namespace mica::io {

namespace {

std::string_view trimmed(std::string_view text) {
  const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_blank(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_blank(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

// Whether all of the text is a number that T holds. A real number may lose digits, but not become infinite.
template <class T>
bool to_number(std::string_view text, T& value) {
  text = trimmed(text);
  if (text.starts_with('+') && !text.starts_with("+-")) {
    text.remove_prefix(1);
  }
  std::conditional_t<std::is_floating_point_v<T>, double, T> number{};
  std::from_chars_result read{};
  if constexpr (std::is_floating_point_v<T>) {
    read = detail::real_from_chars(text.data(), text.data() + text.size(), number);
  } else {
    read = std::from_chars(text.data(), text.data() + text.size(), number);
  }
  value = static_cast<T>(number);
  return read.ec == std::errc() && read.ptr == text.data() + text.size() &&
         (!std::is_floating_point_v<T> ||
          std::isinf(static_cast<double>(value)) == std::isinf(static_cast<double>(number)));
}

}  // namespace

/// Splits a text into fields.
class CsvTable::Parser {
 public:
  Parser(std::string_view text, const CsvOptions& options, CsvTable& table)
      : left_(text), options_(options), table_(table) {
    if (left_.starts_with("\xEF\xBB\xBF")) {  // a byte order mark
      left_.remove_prefix(3);
    }
    table_.text_.reserve(left_.size());
  }

  void parse() {
    while (!left_.empty()) {
      const std::int64_t line = line_;
      const std::size_t before = table_.fields_.size();
      if (end_of_line()) {
        continue;
      }
      read_line();
      const auto count = static_cast<std::int64_t>(table_.fields_.size() - before);
      if (columns_ == 0) {
        columns_ = count;
      }
      check(count == columns_, "{}, line {}: expected {} fields, got {}", table_.name_, line, columns_, count);
      table_.lines_.push_back(line);
    }
    check(columns_ > 0, "{}: expected a CSV file with at least one line, got an empty one", table_.name_);
  }

 private:
  // Whether a line ends here; then it is passed.
  bool end_of_line() {
    const std::size_t length = left_.starts_with("\r\n") ? 2 : left_.starts_with('\n') ? 1 : 0;
    line_ += length > 0 ? 1 : 0;
    left_.remove_prefix(length);
    return length > 0;
  }

  void read_line() {
    const std::size_t first = table_.fields_.size();
    for (;;) {
      const auto column = static_cast<std::int64_t>(table_.fields_.size() - first) + 1;
      Field field{table_.text_.size(), 0, left_.starts_with('"')};
      if (field.quoted) {
        read_quoted(column);
      } else {
        const std::size_t length = std::min(left_.find_first_of(ends_), left_.size());
        // A CR alone is a part of the text.
        const std::size_t cut =
            length > 0 && left_[length - 1] == '\r' && length < left_.size() && left_[length] == '\n';
        table_.text_.append(left_.substr(0, length - cut));
        left_.remove_prefix(length - cut);
      }
      field.size = table_.text_.size() - field.begin;
      table_.fields_.push_back(field);
      if (left_.empty() || end_of_line()) {
        return;
      }
      check(left_.front() == options_.separator, "{}, line {}, column {}: there is text behind the quotation mark",
            table_.name_, line_, column);
      left_.remove_prefix(1);
      if (left_.empty()) {  // the file ends with a separator: one more field, which is empty
        table_.fields_.push_back({table_.text_.size(), 0, false});
        return;
      }
    }
  }

  void read_quoted(std::int64_t column) {
    const std::int64_t line = line_;
    left_.remove_prefix(1);
    for (;;) {
      const std::size_t length = left_.find('"');
      check(length != std::string_view::npos, "{}, line {}, column {}: the quotation mark is not closed", table_.name_,
            line, column);
      line_ += std::count(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(length), '\n');
      table_.text_.append(left_.substr(0, length));
      left_.remove_prefix(length + 1);
      if (!left_.starts_with('"')) {
        return;
      }
      table_.text_.push_back('"');
      left_.remove_prefix(1);
    }
  }

  std::string_view left_;
  const CsvOptions& options_;
  CsvTable& table_;
  const std::string ends_{options_.separator, '\n'};
  std::int64_t line_ = 1, columns_ = 0;
};

CsvTable CsvTable::read(const std::filesystem::path& path, const CsvOptions& options) {
  const InputFile file(path);
  check(file.size() <= options.max_bytes, "{}: expected a CSV file of at most {} bytes, got {}", path.string(),
        options.max_bytes, file.size());
  std::string text(file.size(), '\0');
  file.read(text.data(), text.size(), 0);
  return parse(text, options, path.string());
}

CsvTable CsvTable::parse(std::string_view text, const CsvOptions& options, const std::string& name) {
  check(options.separator != '"' && options.separator != '\n' && options.separator != '\r',
        "CsvTable: expected a separator other than a quotation mark or the end of a line");
  CsvTable table;
  table.name_ = name;
  table.missing_ = options.missing;
  Parser(text, options, table).parse();
  const auto columns = static_cast<std::ptrdiff_t>(table.fields_.size() / table.lines_.size());
  table.names_.reserve(static_cast<std::size_t>(columns));
  std::set<std::string_view> distinct;
  for (std::ptrdiff_t i = 0; i < columns; ++i) {
    table.names_.push_back(options.header ? std::string(table.text_, table.fields_[static_cast<std::size_t>(i)].begin,
                                                        table.fields_[static_cast<std::size_t>(i)].size)
                                          : fmt::format("{}", i + 1));
  }
  for (const std::string& column : table.names_) {
    check(distinct.insert(column).second, "{}: there are two columns named {}", name, detail::in_quotes(column));
  }
  if (options.header) {
    table.fields_.erase(table.fields_.begin(), table.fields_.begin() + columns);
    table.lines_.erase(table.lines_.begin());
  }
  return table;
}

std::int64_t CsvTable::column(std::string_view name) const {
  const auto at = std::find(names_.begin(), names_.end(), name);
  if (at == names_.end()) {
    std::vector<std::string> some;
    for (std::size_t i = 0; i < std::min<std::size_t>(names_.size(), 20); ++i) {
      some.push_back(detail::in_quotes(names_[i]));
    }
    fail("{}: there is no column {}, but {}{}", name_, detail::in_quotes(name), fmt::join(some, ", "),
         some.size() < names_.size() ? ", …" : "");
  }
  return at - names_.begin();
}

const CsvTable::Field& CsvTable::field(std::int64_t row, std::int64_t column) const {
  check(row >= 0 && row < rows() && column >= 0 && column < columns(),
        "{}: expected a row in [0, {}) and a column in [0, {}), got {} and {}", name_, rows(), columns(), row, column);
  return fields_[static_cast<std::size_t>(row * columns() + column)];
}

std::string_view CsvTable::text(std::int64_t row, std::int64_t column) const {
  const Field& at = field(row, column);
  return std::string_view(text_).substr(at.begin, at.size);
}

bool CsvTable::is_missing(std::int64_t row, std::int64_t column) const {
  const std::string_view value = trimmed(text(row, column));
  return !field(row, column).quoted &&
         (value.empty() || std::find(missing_.begin(), missing_.end(), value) != missing_.end());
}

std::string CsvTable::place(std::int64_t row, std::int64_t column) const {
  return fmt::format("{}, line {}, column {} {}", name_, lines_[static_cast<std::size_t>(row)], column + 1,
                     detail::in_quotes(names_[static_cast<std::size_t>(column)]));
}

CsvTable::Type CsvTable::type(std::string_view name) const {
  const std::int64_t at = column(name);
  Type type = Type::integer;
  for (std::int64_t row = 0; row < rows() && type != Type::text; ++row) {
    std::int64_t integer = 0;
    double real = 0;
    if (is_missing(row, at) || (type == Type::integer && to_number(text(row, at), integer))) {
      continue;
    }
    type = to_number(text(row, at), real) ? Type::real : Type::text;
  }
  return type;
}

template <class T>
void CsvTable::read_numbers(std::span<const std::int64_t> columns, T* to) const {
  for (std::int64_t row = 0; row < rows(); ++row) {
    for (const std::int64_t column : columns) {
      if (is_missing(row, column)) {
        check(std::is_floating_point_v<T>, "{}: the value is missing, which an integer cannot be", place(row, column));
        *to++ = std::numeric_limits<T>::quiet_NaN();
      } else {
        check(to_number(text(row, column), *to++), "{}: expected {} that {} holds, got {}", place(row, column),
              std::is_floating_point_v<T> ? "a number" : "an integer", dtype_of<T>,
              detail::in_quotes(text(row, column)));
      }
    }
  }
}

Tensor CsvTable::matrix(const std::vector<std::string>& names, DType dtype) const {
  std::vector<std::int64_t> columns;
  columns.reserve(names.size());
  for (const std::string& name : names) {
    columns.push_back(column(name));
  }
  Tensor x = empty({rows(), static_cast<std::int64_t>(columns.size())}, dtype);
  switch (dtype) {
    case DType::float64: read_numbers(columns, x.data<double>()); break;
    case DType::float32: read_numbers(columns, x.data<float>()); break;
    case DType::int64: read_numbers(columns, x.data<std::int64_t>()); break;
    case DType::int32: read_numbers(columns, x.data<std::int32_t>()); break;
    default: fail("CsvTable: expected float64, float32, int64 or int32, got {}", dtype);
  }
  return x;
}

Tensor CsvTable::numbers(std::string_view column, DType dtype) const {
  const Tensor x = matrix({std::string(column)}, dtype);
  return as_strided(x, {rows()}, {1}, 0);
}

CsvTable::Categories CsvTable::categories(std::string_view name) const {
  const std::int64_t at = column(name);
  std::map<std::string_view, std::int64_t> numbers;
  for (std::int64_t row = 0; row < rows(); ++row) {
    check(!is_missing(row, at), "{}: the value is missing", place(row, at));
    numbers.emplace(text(row, at), 0);
  }
  Categories result{empty({rows()}, int64), {}};
  for (auto& [text, number] : numbers) {
    number = static_cast<std::int64_t>(result.names.size());
    result.names.emplace_back(text);
  }
  for (std::int64_t row = 0; row < rows(); ++row) {
    result.labels.data<std::int64_t>()[row] = numbers.at(text(row, at));
  }
  return result;
}

}  // namespace mica::io
