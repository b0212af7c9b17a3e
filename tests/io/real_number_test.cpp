#include <gtest/gtest.h>

#include <bit>
#include <clocale>
#include <string>

#include <mica/io/detail/real_number.h>

namespace mica::io {
namespace {

#if defined(__cpp_lib_to_chars)
TEST(RealNumber, StrtodReadsWhatFromCharsReads) {
  for (const std::string text : {"0",
                                 "-0",
                                 "1",
                                 "-1.5",
                                 ".5",
                                 "-.5e-3",
                                 "5.",
                                 "1e5",
                                 "1E+5",
                                 "1e",
                                 "1e+",
                                 "1.25abc",
                                 "0.1",
                                 "1,5",
                                 "123456789012345678901",
                                 "2.2250738585072014e-308",
                                 "4.9e-324",
                                 "1e-400",
                                 "-1e-400",
                                 "1e400",
                                 "-1e400",
                                 "inf",
                                 "-inf",
                                 "infinity",
                                 "nan",
                                 "",
                                 "-",
                                 ".",
                                 "+1",
                                 " 1",
                                 "\t1",
                                 "--1",
                                 "-+1",
                                 "- 1",
                                 "0x10",
                                 "-0X1p3",
                                 "e5",
                                 "abc",
                                 "-abc"}) {
    const char* const first = text.data();
    const char* const last = first + text.size();
    double expected = 7;
    double value = 7;
    const auto [end, error] = std::from_chars(first, last, expected);
    const auto [value_end, value_error] = detail::real_by_strtod(first, last, value);
    EXPECT_EQ(value_error, error) << text;
    EXPECT_EQ(value_end - first, end - first) << text;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(value), std::bit_cast<std::uint64_t>(expected)) << text;
  }
}
#endif

}  // namespace
}  // namespace mica::io
