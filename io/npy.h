#pragma once

// Arrays as files of NumPy.

#include <cstdint>
#include <filesystem>
#include <span>

#include <mica/io/file.h>

namespace mica::io {

/// Writes a matrix of float32 to a .npy file row by row, so that only the rows at hand are in memory: numpy.load reads
/// the file, or maps it. The file replaces `path` on commit(); without it, nothing is left. Errors start with "save: "
/// and name `path`.
class NpyWriter {
 public:
  NpyWriter(const std::filesystem::path& path, std::int64_t columns);  ///< throws unless columns ≥ 1

  /// Appends rows. Throws unless their length is a multiple of the number of columns.
  void append(std::span<const float> rows);
  void commit();

  std::int64_t rows() const { return rows_; }

 private:
  AtomicFile file_;
  std::int64_t columns_;
  std::int64_t rows_ = 0;
};

}  // namespace mica::io
