// Reads any text as a CSV file: a table or an Error. A table that is written with all its fields in quotation marks
// must be the same when it is read.

#include <string>
#include <string_view>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/csv.h>

using namespace mica;

namespace {

void append_quoted(std::string& to, std::string_view field, bool ends) {
  to += '"';
  for (const char c : field) {
    to += c;
    if (c == '"') {
      to += c;
    }
  }
  to += ends ? "\"\n" : "\"|";
}

std::string written(const io::CsvTable& table) {
  std::string text;
  for (std::int64_t column = 0; column < table.columns(); ++column) {
    append_quoted(text, table.names()[static_cast<std::size_t>(column)], column + 1 == table.columns());
  }
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    for (std::int64_t column = 0; column < table.columns(); ++column) {
      append_quoted(text, table.text(row, column), column + 1 == table.columns());
    }
  }
  return text;
}

void check_columns(const io::CsvTable& table) {
  for (const std::string& name : table.names()) {
    const io::CsvTable::Type type = table.type(name);
    try {
      const io::CsvTable::Categories categories = table.categories(name);
      fuzz::expect(categories.labels.numel() == table.rows());
    } catch (const Error&) {
    }
    for (const DType dtype : {float64, float32, int64, int32}) {
      bool is_number = true;
      try {
        fuzz::expect(table.numbers(name, dtype).numel() == table.rows());
      } catch (const Error&) {
        is_number = false;
      }
      fuzz::expect(dtype != float64 || is_number == (type != io::CsvTable::Type::text));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const bool header : {true, false}) {
    try {
      const io::CsvTable table = io::CsvTable::parse(text, {.header = header});
      check_columns(table);
      const io::CsvTable again = io::CsvTable::parse(written(table), {.separator = '|'});
      fuzz::expect(again.names() == table.names() && again.rows() == table.rows());
      fuzz::expect(written(again) == written(table));
    } catch (const Error&) {
    }
  }
  return 0;
}
