#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include <mica/io/detail/byte_alphabet.h>
#include <mica/io/detail/token_decoder.h>

namespace mica::io::detail {

namespace {

using StepKind = DecoderStep::Kind;

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  if (from.empty() || text.find(from) == std::string::npos) {
    return;
  }
  std::string out;
  for (std::string_view rest = text;;) {
    const std::size_t at = rest.find(from);
    out += rest.substr(0, at);
    if (at == std::string_view::npos) {
      break;
    }
    out += to;
    rest.remove_prefix(at + from.size());
  }
  text = std::move(out);
}

std::string clean(std::string text) {
  constexpr std::array<std::pair<const char*, const char*>, 11> rules{{{" .", "."},
                                                                       {" ?", "?"},
                                                                       {" !", "!"},
                                                                       {" ,", ","},
                                                                       {" ' ", "'"},
                                                                       {" n't", "n't"},
                                                                       {" 'm", "'m"},
                                                                       {" do not", " don't"},
                                                                       {" 's", "'s"},
                                                                       {" 've", "'ve"},
                                                                       {" 're", "'re"}}};
  for (const auto& [from, to] : rules) {
    replace_all(text, from, to);
  }
  return text;
}

std::optional<char> byte_of(std::string_view token) {
  unsigned value = 0;
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) {
    return std::nullopt;
  }
  const char* const end = token.data() + 5;
  const auto [last, error] = std::from_chars(token.data() + 3, end, value, 16);
  return error == std::errc() && last == end ? std::optional(static_cast<char>(value)) : std::nullopt;
}

void strip(std::string& token, std::string_view content, std::size_t start, std::size_t stop) {
  while (start-- > 0 && token.starts_with(content)) {
    token.erase(0, content.size());
  }
  while (stop-- > 0 && token.ends_with(content)) {
    token.resize(token.size() - content.size());
  }
}

std::string bytes_in_alphabet(const std::string& token) {
  static const ByteAlphabet alphabet;
  return alphabet.bytes(token).value_or(token);
}

/// A whole token after a step that looks at each by itself. `is_first`: it is the first token.
std::string after_step(const DecoderStep& step, std::string token, bool is_first) {
  switch (step.kind) {
    case StepKind::byte_level: return bytes_in_alphabet(token);
    case StepKind::replace: {
      std::string out;
      std::size_t copied = 0;
      step.searched.for_each_match(token, [&](Span match) {
        out.append(token, copied, match.begin - copied);
        out += step.text;
        copied = match.end;
      });
      return out.append(token, copied);
    }
    case StepKind::strip: strip(token, step.text, step.start, step.stop); return token;
    case StepKind::metaspace: replace_all(token, step.text, is_first && step.drops_first ? "" : " "); return token;
    case StepKind::word_piece:
      if (!is_first) {
        token = token.starts_with(step.text) ? token.substr(step.text.size()) : " " + token;
      }
      return step.cleans_up ? clean(std::move(token)) : token;
    case StepKind::suffix: replace_all(token, step.text, " "); return token;
    case StepKind::join: return is_first ? token : " " + token;
    default: return token;
  }
}

}  // namespace

bool TokenDecoder::is_fused(std::size_t step) const {
  return std::any_of(steps_->begin(), steps_->begin() + static_cast<std::ptrdiff_t>(step), [](const DecoderStep& each) {
    return each.kind == StepKind::fuse || each.kind == StepKind::byte_level;
  });
}

void TokenDecoder::feed(std::size_t step, std::string part, bool begins, std::string& out) {
  if (step == steps_->size()) {
    out += part;
    return;
  }
  const DecoderStep& own = (*steps_)[step];
  State& state = states_[step];
  const bool is_first = state.tokens == 0;
  state.tokens += begins ? 1 : 0;
  if (own.kind == StepKind::fuse) {
    feed(step + 1, std::move(part), is_first, out);
    return;
  }
  if (is_fused(step)) {  // the parts form one token
    if (own.kind == StepKind::strip && own.stop == 0) {
      state.strip_left = is_first ? own.start : state.strip_left;
      while (state.strip_left > 0 && part.starts_with(own.text)) {
        part.erase(0, own.text.size());
        --state.strip_left;
      }
      state.strip_left = part.empty() ? state.strip_left : 0;
      feed(step + 1, std::move(part), is_first, out);
    } else {
      state.pending += part;
    }
    return;
  }
  switch (own.kind) {
    case StepKind::byte_tokens:
      if (const std::optional<char> byte = byte_of(part)) {
        state.pending += *byte;
        return;
      }
      flush(step, out);
      feed(step + 1, std::move(part), true, out);
      break;
    case StepKind::suffix:
      if (!is_first) {
        std::string last = std::exchange(state.pending, std::move(part));
        replace_all(last, own.text, " ");
        feed(step + 1, std::move(last), true, out);
      } else {
        state.pending = std::move(part);
      }
      break;
    default:
      feed(step + 1, after_step(own, std::move(part), is_first), own.kind != StepKind::byte_level || is_first, out);
  }
}

void TokenDecoder::flush(std::size_t step, std::string& out) {
  const DecoderStep& own = (*steps_)[step];
  std::string pending = std::exchange(states_[step].pending, {});
  if (pending.empty()) {
    return;
  }
  if (own.kind == StepKind::byte_tokens && !is_fused(step)) {
    if (valid_utf8_length(pending) == pending.size()) {
      feed(step + 1, std::move(pending), true, out);
    } else {
      for (std::size_t i = 0; i < pending.size(); ++i) {
        feed(step + 1, "\uFFFD", true, out);
      }
    }
  } else if (own.kind == StepKind::suffix) {
    replace_all(pending, own.text, "");
    feed(step + 1, std::move(pending), true, out);
  } else {
    feed(step + 1, after_step(own, std::move(pending), true), true, out);
  }
}

void TokenDecoder::finish(std::string& out) {
  for (std::size_t step = 0; step < steps_->size(); ++step) {
    flush(step, out);
  }
}

std::string bytes_of_token(const Decoder& steps, std::string_view token) {
  std::string bytes(token);
  for (const DecoderStep& step : steps) {
    if (step.kind == StepKind::fuse) {
      break;
    }
    if (const std::optional<char> byte = byte_of(bytes); byte && step.kind == StepKind::byte_tokens) {
      return {*byte};
    }
    bytes = after_step(step, std::move(bytes), false);
  }
  return bytes;
}

}  // namespace mica::io::detail
