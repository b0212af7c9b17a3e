#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::io {

struct CsvOptions {
  char separator = ',';
  bool header = true;  ///< whether the first line has the columns' names; otherwise they are "1", "2", …
  /// What stands for a missing value, besides an empty field that is not in quotes.
  std::vector<std::string> missing{"NA", "NaN", "nan", "null"};
  std::uint64_t max_bytes = std::uint64_t{1} << 32;  ///< of the file
};

/// A table from a CSV file (RFC 4180): fields are separated by commas, and may be in quotation marks and then contain
/// separators, line breaks and, doubled, quotation marks. Lines end with LF or CRLF; empty lines are skipped. Spaces
/// around a number, but not in a text, are ignored.
///
///     const io::CsvTable iris = io::CsvTable::read("iris.csv");
///     const Tensor x = iris.matrix({"sepal length", "sepal width"});       // float32 (rows, 2)
///     const io::CsvTable::Categories species = iris.categories("species");  // labels (rows), names
///     const io::TensorDataset data({x, species.labels});
///
/// Errors name the file, the line, counted from 1, and the column.
class CsvTable {
 public:
  /// What all values of a column that are not missing are. `integer` fits into int64.
  enum class Type { integer, real, text };
  struct Categories {
    Tensor labels;                   ///< (rows), int64: the index of a row's text in `names`
    std::vector<std::string> names;  ///< the texts, sorted
  };

  /// Throws an Error if the file cannot be read, is too large, has no line, has a line with another number of fields
  /// than the first, or two columns of the same name, or if quotation marks are not closed or text follows them.
  static CsvTable read(const std::filesystem::path& path, const CsvOptions& options = {});
  /// The same from the text of a file. `name` is for errors.
  static CsvTable parse(std::string_view text, const CsvOptions& options = {},
                        const std::string& name = "the CSV file");

  std::int64_t rows() const { return static_cast<std::int64_t>(lines_.size()); }
  std::int64_t columns() const { return static_cast<std::int64_t>(names_.size()); }
  const std::vector<std::string>& names() const { return names_; }  ///< of the columns
  /// The number of a column. Throws an Error that lists the names if there is none of this name.
  std::int64_t column(std::string_view name) const;

  /// A field. Throws if there is no such row or column. Valid as long as the table.
  std::string_view text(std::int64_t row, std::int64_t column) const;
  bool is_missing(std::int64_t row, std::int64_t column) const;
  Type type(std::string_view column) const;

  /// The numbers of a column, (rows), or of several, (rows, columns). A missing value is NaN. Throws an Error for a
  /// field that is not a number, for a dtype other than float64, float32, int64 and int32, and, for the last two, for
  /// missing values and what they cannot hold.
  Tensor numbers(std::string_view column, DType dtype = float32) const;
  Tensor matrix(const std::vector<std::string>& columns, DType dtype = float32) const;
  /// A column of texts as labels. Throws an Error if one is missing.
  Categories categories(std::string_view column) const;

 private:
  struct Field {
    std::size_t begin, size;
    bool quoted;
  };
  class Parser;

  const Field& field(std::int64_t row, std::int64_t column) const;
  std::string place(std::int64_t row, std::int64_t column) const;
  template <class T>
  void read_numbers(std::span<const std::int64_t> columns, T* to) const;

  std::string name_;
  std::vector<std::string> names_, missing_;
  std::string text_;                 // of all fields, one after the other
  std::vector<Field> fields_;        // (rows, columns)
  std::vector<std::int64_t> lines_;  // on which each row begins
};

}  // namespace mica::io
