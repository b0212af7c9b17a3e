#include <tests/support.h>

#include <mica/io/json.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(Json, ReadsEveryKindOfValue) {
  const io::JsonValue json = io::parse_json(
      R"({"a": [1, -2, 2.5, 1e3, true, null], "b": {"c": "dé\n"}, "large": 9223372036854775808, "empty": [{}, []]})",
      "test");
  const auto& list = *json.find("a")->as<io::JsonValue::Array>();
  ASSERT_EQ(list.size(), 6u);
  EXPECT_EQ(*list[0].as<std::int64_t>(), 1);
  EXPECT_EQ(*list[1].as<std::int64_t>(), -2);
  EXPECT_EQ(*list[2].as<double>(), 2.5);
  EXPECT_EQ(*list[3].as<double>(), 1000);
  EXPECT_EQ(*list[4].as<bool>(), true);
  EXPECT_TRUE(list[5].is_null());
  EXPECT_EQ(*json.find("b")->find("c")->as<std::string>(), "dé\n");
  EXPECT_EQ(*json.find("large")->as<double>(), 9223372036854775808.0);
  EXPECT_EQ(json.find("none"), nullptr);
  EXPECT_EQ(list[0].find("c"), nullptr);
  EXPECT_EQ(list[0].as<double>(), nullptr);
  // Written and read again, it is the same.
  const std::string text = io::to_json(json);
  EXPECT_EQ(io::to_json(io::parse_json(text, "test")), text);
  EXPECT_NE(text.find("\"c\": \"dé\\n\""), std::string::npos);
  EXPECT_EQ(io::to_json({io::JsonValue::Object{}}), "{}\n");
}

TEST(Json, Errors) {
  const auto expect = [](const std::string& text, const std::string& message) {
    expect_error([&] { io::parse_json(text, "the file"); }, message);
  };
  expect("", "the file: it is not valid JSON, at byte ");
  expect("{", "not valid JSON");
  expect("{} x", "not valid JSON");
  expect("{\"a\":1,}", "not valid JSON");
  expect("[nan]", "not valid JSON");
  expect("1e999", "not valid JSON");
  expect("\"\xff\"", "not valid JSON");
  expect(R"({"a":1,"b":2,"a":3})", "the file: the name \"a\" appears twice");
  EXPECT_NO_THROW(io::parse_json(std::string(32, '[') + std::string(32, ']'), "the file"));
  expect(std::string(33, '['), "nested more than 32 levels deep");
  std::string objects;
  for (int i = 0; i < 33; ++i) {
    objects += "{\"a\":";
  }
  expect(objects, "nested more than 32 levels deep");
  expect_error([] { io::to_json({NAN}); }, "JSON cannot represent nan");
  expect_error([] { io::to_json({std::string("\xff")}); }, "not valid UTF-8");
}

}  // namespace
