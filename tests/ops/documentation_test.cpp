#include <gtest/gtest.h>
#include <tests/files.h>
#include <tests/paths.h>

#include <filesystem>
#include <regex>
#include <set>
#include <string>

using mica::testing_support::contents;
namespace fs = std::filesystem;

// docs/ops.md lists every function that a public header of ops/ declares, and no others.
TEST(Documentation, ListsAllOps) {
  const fs::path source = MICA_SOURCE;
  if (!fs::exists(source / "docs/ops.md")) {
    GTEST_SKIP() << "no source tree";
  }
  const auto matches = [](const std::string& text, const char* pattern) {
    std::set<std::string> names;
    const std::regex expression(pattern);
    for (std::sregex_iterator at(text.begin(), text.end(), expression), end; at != end; ++at) {
      names.insert((*at)[1]);
    }
    return names;
  };
  std::set<std::string> declared;
  for (const auto& folder : fs::directory_iterator(source / "ops")) {
    if (!folder.is_directory() || folder.path().filename() == "detail") {
      continue;
    }
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".h") {
        declared.merge(
            matches(contents(entry.path()),
                    "\\n(?:const )?(?:Tensors?|bool(?! has_)|[A-Z]\\w+Result|QuantizedWeight|std::array<Tensor, "
                    "\\d>)&? (\\w+)\\("));
      }
    }
  }
  EXPECT_GT(declared.size(), 90u);
  std::string table = contents(source / "docs/ops.md");
  table = table.substr(table.find("|---|"));
  table.resize(table.find("\n\n"));
  const std::set<std::string> documented = matches(table, "`(\\w+)`");
  for (const std::string& name : declared) {
    EXPECT_TRUE(documented.contains(name)) << name << " is not in docs/ops.md";
  }
  for (const std::string& name : documented) {
    EXPECT_TRUE(declared.contains(name)) << "ops/ does not declare " << name;
  }
}
