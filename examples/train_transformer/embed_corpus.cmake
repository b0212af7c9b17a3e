# cmake -D ROOT=... -D FILES=... -D OUTPUT=... -P embed_corpus.cmake
# Writes a C++ source with the text of the files, given as paths below ROOT, one per line.

file(STRINGS "${FILES}" files)
# Concatenated, so that this file can be embedded as well.
set(open "R\"corpus(")
set(close ")" "corpus\"sv")  # a literal with a known length: counting a megabyte is too slow for the compiler
list(JOIN close "" close)

string(CONCAT code "#include \"examples/train_transformer/corpus.h\"\n\nnamespace {\n\n"
              "using namespace std::literals;\n\nconstexpr std::string_view files[] = {\n")
foreach(path IN LISTS files)
  file(READ "${ROOT}/${path}" text)
  string(APPEND code "${open}// ${path}\n\n${text}\n${close},\n")
endforeach()
string(APPEND code "};\n\n}  // namespace\n\nstd::string built_in_corpus() {\n  std::string text;\n"
                   "  for (std::string_view file : files) {\n    text += file;\n  }\n  return text;\n}\n")
file(WRITE "${OUTPUT}" "${code}")
