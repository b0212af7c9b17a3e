#pragma once

// Text for character-level language models: files, characters as numbers, and batches of windows.

#include <cstdint>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::io {

/// The whole of a file as it is. Throws Error naming the file.
std::string read_text(const std::filesystem::path& path);

/// The characters (Unicode code points) of UTF-8 text, and the way back. from_utf8 throws Error saying at which byte
/// the text is not UTF-8.
std::u32string from_utf8(std::string_view text);
std::string to_utf8(std::u32string_view characters);

/// Characters as numbers: the position of each in an alphabet.
class CharTokenizer {
 public:
  /// Throws Error if the alphabet (UTF-8) is empty or has a character twice.
  explicit CharTokenizer(std::string_view alphabet);

  /// The tokenizer for all characters of `text`, in the order of their code points.
  static CharTokenizer of(std::string_view text);

  /// How many characters there are.
  std::int64_t size() const { return static_cast<std::int64_t>(alphabet_.size()); }
  /// All characters as UTF-8; what the constructor takes.
  std::string alphabet() const { return to_utf8(alphabet_); }

  /// Throws Error naming the first character that is not in the alphabet.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Throws Error for a number that is no character.
  std::string decode(std::span<const std::int32_t> tokens) const;

 private:
  std::u32string alphabet_;
  std::unordered_map<char32_t, std::int32_t> tokens_;
};

/// What a language model learns from: `targets` is `inputs` one character later. Both (B, T) of int64.
struct Batch {
  Tensor inputs;
  Tensor targets;
};

/// Batches of windows of a token sequence in random order, for training. The sequence is cut into windows side by side,
/// which are drawn without putting any back until all were seen; then it is cut anew, elsewhere. So a short training
/// sees as much of the text as it can, and a long one sees windows at every place. The batches follow from the seed
/// alone and are the same on every device; other users of random numbers do not change them.
class RandomWindows {
 public:
  /// Throws Error unless there are more tokens than the context is long. Keeps a view of `tokens`, not a copy.
  RandomWindows(std::span<const std::int32_t> tokens, std::int64_t context, std::uint64_t seed);

  Batch next(std::int64_t batch, Device device = Device::cpu());

 private:
  /// Cuts the sequence from a random place on and shuffles the windows.
  void start_epoch();

  std::span<const std::int32_t> tokens_;
  std::int64_t context_;
  std::vector<std::int64_t> starts_;  // of the windows still to come, the next one last
  std::mt19937_64 engine_;
};

/// Windows side by side over a token sequence, for validation: all that fit, or `most` of them at even distances.
/// In batches of at most `batch` windows; the last may be smaller.
std::vector<Batch> even_windows(std::span<const std::int32_t> tokens, std::int64_t context, std::int64_t batch,
                                std::int64_t most, Device device = Device::cpu());

}  // namespace mica::io
