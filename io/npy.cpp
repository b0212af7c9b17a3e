#include <fmt/format.h>

#include <bit>
#include <string>

#include <mica/core/check.h>
#include <mica/io/npy.h>

namespace mica::io {

namespace {

// As numpy's: a multiple of 64, so that the elements of a mapped file are aligned.
constexpr std::size_t kHeader = 128;

// Format version 1.0: a magic string, the version, the length of what follows, and a Python dictionary.
std::string npy_header(std::int64_t rows, std::int64_t columns) {
  static_assert(std::endian::native == std::endian::little);
  std::string header("\x93NUMPY\x01\x00", 8);
  const std::size_t rest = kHeader - header.size() - 2;
  header += static_cast<char>(rest % 256);
  header += static_cast<char>(rest / 256);
  header += fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
  header.resize(kHeader - 1, ' ');  // at most 101 characters before it
  return header + '\n';
}

}  // namespace

NpyWriter::NpyWriter(const std::filesystem::path& path, std::int64_t columns) : file_(path), columns_(columns) {
  check(columns >= 1, "NpyWriter: expected at least 1 column, got {}", columns);
  const std::string header = npy_header(0, columns);
  file_.write(header.data(), header.size());
}

void NpyWriter::append(std::span<const float> rows) {
  const auto count = static_cast<std::int64_t>(rows.size());
  check(count % columns_ == 0, "NpyWriter: expected rows of {} elements, got {} elements", columns_, count);
  file_.write(rows.data(), rows.size_bytes());
  rows_ += count / columns_;
}

void NpyWriter::commit() {
  const std::string header = npy_header(rows_, columns_);
  file_.rewrite_start(header.data(), header.size());
  file_.commit();
}

}  // namespace mica::io
