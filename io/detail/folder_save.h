#pragma once

// Saving weights together with the file that describes them, such as config.json, so that a process that is killed at
// any moment leaves the old ones or the new ones, never a mixture.
//
// Only one file at a time can be replaced. Replacing the weights is what counts: their metadata have the checksum of
// their description. A description that differs from the one in the folder is first written beside it, with the suffix
// ".next", and takes its place after the weights. Until then a reader uses it if the weights have its checksum.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace mica::io::detail {

/// The key of the description's checksum in the metadata of weights.
inline constexpr const char* kDescriptionKey = "description_checksum";

std::string description_checksum(const std::string& description);

/// Returns the checksum in the metadata of a folder's weights; empty if there is none. May throw an Error.
using ChecksumOfWeights = std::function<std::string(const std::filesystem::path& folder)>;

/// The file that describes the weights which the folder has: `name`, or a complete ".next" file left by a killed save.
std::filesystem::path description_file(const std::filesystem::path& folder, const std::string& name,
                                       const ChecksumOfWeights& checksum);

/// A save to a folder:
///
///     FolderSave save("save_pretrained", folder, "config.json", checksum, text);
///     … replace the weights …
///     save.finish();
class FolderSave {
 public:
  /// Creates the folder if needed, completes or undoes a killed save, and prepares the new description. Throws an Error
  /// that begins with `what`, before anything is written, if another thread or process is saving to the folder.
  FolderSave(const char* what, std::filesystem::path folder, std::string name, ChecksumOfWeights checksum,
             std::string description);
  /// Without finish(), keeps the description that belongs to the weights.
  ~FolderSave();
  FolderSave(const FolderSave&) = delete;
  FolderSave& operator=(const FolderSave&) = delete;

  /// Files that earlier, killed saves have noted.
  const std::vector<std::string>& noted() const { return noted_; }
  /// Notes names of files in the folder for the next save, should this one be killed.
  void note(const std::vector<std::string>& names) const;

  void finish();

 private:
  void lock(const char* what);
  void settle() const;

  std::filesystem::path folder_;
  std::string name_;
  ChecksumOfWeights checksum_;
  std::string description_;
  std::filesystem::path lock_path_;
  int lock_ = -1;
  std::vector<std::string> noted_;
};

}  // namespace mica::io::detail
