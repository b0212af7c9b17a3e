#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/support.h"
#include <mica/io/csv.h>

using namespace mica;
using namespace mica::testing_support;

namespace csv_test {
namespace {

using io::CsvTable;
using Type = CsvTable::Type;

std::vector<std::string> texts(const CsvTable& table) {
  std::vector<std::string> all;
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    for (std::int64_t column = 0; column < table.columns(); ++column) {
      all.emplace_back(table.text(row, column));
    }
  }
  return all;
}

using Texts = std::vector<std::string>;

TEST(Csv, HasColumnsOfNumbersAndTexts) {
  const CsvTable table = CsvTable::parse("height,count,kind\n1.5,3,cat\n-2e1, 4 ,dog\n+0.25,-5,cat\n");
  EXPECT_EQ(table.rows(), 3);
  EXPECT_EQ(table.names(), (Texts{"height", "count", "kind"}));
  EXPECT_EQ(table.type("height"), Type::real);
  EXPECT_EQ(table.type("count"), Type::integer);
  EXPECT_EQ(table.type("kind"), Type::text);
  const Tensor height = table.numbers("height"), count = table.numbers("count", int64);
  EXPECT_EQ(height.dtype(), float32);
  EXPECT_EQ(height.shape(), (Shape{3}));
  expect_close(height, {1.5, -20, 0.25}, 0, 0);
  EXPECT_EQ(count.dtype(), int64);
  expect_close(count, {3, 4, -5}, 0, 0);
  const Tensor both = table.matrix({"count", "height"}, float64);
  EXPECT_EQ(both.shape(), (Shape{3, 2}));
  expect_close(both, {3, 1.5, 4, -20, -5, 0.25}, 0, 0);
  const CsvTable::Categories kinds = table.categories("kind");
  EXPECT_EQ(kinds.names, (Texts{"cat", "dog"}));
  expect_close(kinds.labels, {0, 1, 0}, 0, 0);
  EXPECT_EQ(table.column("kind"), 2);
}

TEST(Csv, FollowsTheRulesOfQuotation) {
  struct Case {
    const char* text;
    Texts fields;
  };
  const std::vector<Case> cases{
      {"a,b", {"a", "b"}},
      {"a,b\r\nc,d\r\n", {"a", "b", "c", "d"}},
      {"\xEF\xBB\xBF"
       "a,b\n",
       {"a", "b"}},
      {"\"a,b\",c\n", {"a,b", "c"}},
      {"\"a\nb\",\"c\"\"d\"\n", {"a\nb", "c\"d"}},
      {"\"\",\n,\"\"\"\"", {"", "", "", "\""}},
      {"a,", {"a", ""}},
      {",\n", {"", ""}},
      {"\n\na\n\n\r\nb\n\n", {"a", "b"}},
      {" a , b\tc ", {" a ", " b\tc "}},
      {"a\rb,c\r", {"a\rb", "c\r"}},
      {"a\"b,c", {"a\"b", "c"}},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(texts(CsvTable::parse(c.text, {.header = false})), c.fields) << c.text;
  }
  EXPECT_EQ(texts(CsvTable::parse("a;\"b;c\"", {.separator = ';', .header = false})), (Texts{"a", "b;c"}));
  EXPECT_EQ(CsvTable::parse("a,b", {.header = false}).names(), (Texts{"1", "2"}));
  EXPECT_EQ(CsvTable::parse("a,b").rows(), 0);
  EXPECT_EQ(CsvTable::parse("a,b").matrix({"a", "b"}).shape(), (Shape{0, 2}));
}

TEST(Csv, KnowsWhatIsMissing) {
  const CsvTable table = CsvTable::parse("x,y\n1,a\n,\"\"\nNA,NA\n 4 , \n");
  const std::vector<double> nan{1, NAN, NAN, 4};
  expect_close(table.numbers("x"), nan, 0, 0);
  EXPECT_EQ(table.type("x"), Type::integer);
  EXPECT_FALSE(table.is_missing(1, 1));  // an empty text in quotes
  EXPECT_TRUE(table.is_missing(2, 1));
  EXPECT_TRUE(table.is_missing(3, 1));
  expect_error([&] { (void)table.numbers("x", int64); },
               "the CSV file, line 3, column 1 \"x\": the value is missing, which an integer cannot be");
  expect_error([&] { (void)table.categories("y"); }, "line 4, column 2 \"y\": the value is missing");
  EXPECT_EQ(CsvTable::parse("x\n?\n", {.missing = {"?"}}).type("x"), Type::integer);
}

TEST(Csv, SaysWhereItIsWrong) {
  const auto refuses = [](const std::string& text, const std::string& message) {
    expect_error([&] { (void)CsvTable::parse(text); }, message);
  };
  refuses("", "at least one line, got an empty one");
  refuses("\n\n", "at least one line");
  refuses("a,b\n1,2\n\n3\n", "the CSV file, line 4: expected 2 fields, got 1");
  refuses("a,b\n\"x\ny\",2\n3,4,5", "line 4: expected 2 fields, got 3");
  refuses("a,b\n1,\"2\n3,4\n", "line 2, column 2: the quotation mark is not closed");
  refuses("a,b\n1,\"2\"x\n", "line 2, column 2: there is text behind the quotation mark");
  refuses("a,b,a\n", "there are two columns named \"a\"");
  const CsvTable table = CsvTable::parse("a,b\n\n1,2\n1e999,x\n3000000000,1e40\n");
  expect_error([&] { (void)table.column("c"); }, "there is no column \"c\", but \"a\", \"b\"");
  expect_error([&] { (void)table.numbers("b"); },
               "line 4, column 2 \"b\": expected a number that float32 holds, got \"x\"");
  expect_error([&] { (void)table.numbers("a"); }, "line 4, column 1 \"a\": expected a number that float32 holds");
  const CsvTable large = CsvTable::parse("a,b\n3000000000,1e40\n");
  expect_close(large.numbers("a", int64), {3e9}, 0, 0);
  expect_error([&] { (void)large.numbers("a", int32); }, "expected an integer that int32 holds, got \"3000000000\"");
  expect_error([&] { (void)large.numbers("b", float32); }, "expected a number that float32 holds, got \"1e40\"");
  expect_close(large.numbers("b", float64), {1e40}, 0, 0);
  expect_error([&] { (void)large.numbers("b", uint8); }, "expected float64, float32, int64 or int32, got uint8");
  for (const char* const text : {"1 2", "0x10", "--1", "+-1", "1,", "e", ".", "1e"}) {
    const std::string line = '"' + std::string(text) + "\"\n";
    expect_error([&] { (void)CsvTable::parse("a\n" + line).numbers("a"); }, "expected a number");
  }
  expect_error([&] { (void)table.text(3, 0); }, "a row in [0, 3) and a column in [0, 2), got 3 and 0");
  expect_error([&] { (void)table.text(0, 2); }, "got 0 and 2");
  expect_error([&] { (void)CsvTable::parse("a", {.separator = '"'}); }, "a separator other than");
}

TEST(Csv, IsReadFromFiles) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "x.csv";
  std::ofstream(path) << "a\n1\nx\n";
  const CsvTable table = CsvTable::read(path);
  expect_error([&] { (void)table.numbers("a"); }, path.string() + ", line 3");
  expect_error([&] { (void)CsvTable::read(path, {.max_bytes = 5}); }, "a CSV file of at most 5 bytes, got 6");
  expect_error([&] { (void)CsvTable::read(folder.path() / "y.csv"); }, "y.csv");
}

}  // namespace
}  // namespace csv_test
