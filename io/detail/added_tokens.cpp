#include <utility>

#include <mica/io/detail/added_tokens.h>

namespace mica::io::detail {

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) {
    for (int second = 0; second < 256; ++second) {
      const auto byte = static_cast<char>(second);
      if (token.content.size() == 1 || token.content[1] == byte) {
        begins_.set(two_bytes(token.content[0], byte));
      }
    }
  }
}

AddedTokenFinder::Match AddedTokenFinder::next(std::string_view text, std::size_t at) const {
  for (; at < text.size(); ++at) {
    if (at + 1 == text.size() || begins_[two_bytes(text[at], text[at + 1])]) {
      if (const AddedToken* const token = longest_at(text.substr(at))) {
        return {token, at};
      }
    }
  }
  return {};
}

// Narrows the range of tokens that begin as the text does, one byte at a time.
const AddedToken* AddedTokenFinder::longest_at(std::string_view text) const {
  const AddedToken* longest = nullptr;
  auto first = tokens_.begin(), last = tokens_.end();
  for (std::size_t i = 0; i < text.size() && first != last; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // Tokens that end before this byte come first.
    first = std::partition_point(first, last, [&](const AddedToken& token) {
      return token.content.size() <= i || static_cast<unsigned char>(token.content[i]) < byte;
    });
    last = std::partition_point(
        first, last, [&](const AddedToken& token) { return static_cast<unsigned char>(token.content[i]) == byte; });
    if (first != last && first->content.size() == i + 1) {
      longest = &*first;
    }
  }
  return longest;
}

bool AddedTokenFinder::is_allowed(std::string_view text, std::size_t begin, std::size_t end, const AddedToken& token) {
  if (!token.single_word) {
    return true;
  }
  const CharacterKinds& kinds = CharacterKinds::get();
  const auto is_word_at = [&](std::size_t at) { return kinds.is_word(character_at(text.data() + at).code); };
  return (begin == 0 || !is_word_at(character_before(text, begin))) && (end == text.size() || !is_word_at(end));
}

std::size_t AddedTokenFinder::spaces_before(std::string_view text, std::size_t at) {
  while (at > 0) {
    const std::size_t before = character_before(text, at);
    if (CharacterKinds::get().kind(character_at(text.data() + before).code) != Kind::space) {
      break;
    }
    at = before;
  }
  return at;
}

std::size_t AddedTokenFinder::spaces_after(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const Character c = character_at(text.data() + at);
    if (CharacterKinds::get().kind(c.code) != Kind::space) {
      break;
    }
    at += c.length;
  }
  return at;
}

}  // namespace mica::io::detail
