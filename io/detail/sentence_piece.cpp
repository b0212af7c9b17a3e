#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/sentence_piece.h>

namespace mica::io::detail {

namespace {

constexpr std::string_view kSpace = "\u2581";

/// Reads the fields of a message of protocol buffers (https://protobuf.dev/programming-guides/encoding).
class Message {
 public:
  Message(std::string_view bytes, const std::string& what) : bytes_(bytes), what_(what) {}

  struct Field {
    std::uint64_t number = 0;
    std::uint64_t integer = 0;  // or the bits of a float
    std::string_view bytes{};   // of a text or message

    float real() const { return std::bit_cast<float>(static_cast<std::uint32_t>(integer)); }
    bool flag() const { return integer != 0; }
  };

  /// The next field; nullopt at the end.
  std::optional<Field> next() {
    if (bytes_.empty()) {
      return std::nullopt;
    }
    const std::uint64_t key = varint();
    Field field{.number = key >> 3};
    switch (key & 7) {
      case 0: field.integer = varint(); break;
      case 1: field.integer = fixed(8); break;
      case 2: field.bytes = take(varint()); break;
      case 5: field.integer = fixed(4); break;
      default: check(false, "{}: it is not a SentencePiece model", what_);
    }
    return field;
  }

 private:
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) {
        return value;
      }
    }
    fail("{}: it is not a SentencePiece model", what_);
  }
  std::uint64_t fixed(std::size_t size) {  // little-endian
    std::uint64_t value = 0;
    std::memcpy(&value, take(size).data(), size);
    return value;
  }
  std::string_view take(std::uint64_t size) {
    check(size <= bytes_.size(), "{}: it is not a SentencePiece model, or it is cut off", what_);
    const std::string_view part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }

  std::string_view bytes_;
  const std::string& what_;
};

SentencePieceModel::Piece piece_of(std::string_view bytes, const std::string& what) {
  SentencePieceModel::Piece piece;
  Message message(bytes, what);
  while (const auto field = message.next()) {
    switch (field->number) {
      case 1: piece.text = field->bytes; break;
      case 2: piece.score = field->real(); break;
      case 3: piece.type = static_cast<std::int32_t>(field->integer); break;
      default: break;
    }
  }
  check(valid_utf8_length(piece.text) == piece.text.size(), "{}: a token is not UTF-8", what);
  check(!std::isnan(piece.score), "{}: the score of the token {} is not a number", what, in_quotes(piece.text));
  return piece;
}

void read_training(std::string_view bytes, SentencePieceModel& out, const std::string& what) {
  const auto id = [](const Message::Field& field) {  // int32, negative if there is none
    const auto value = static_cast<std::int32_t>(static_cast<std::uint32_t>(field.integer));
    return value < 0 ? std::nullopt : std::optional<std::int64_t>(value);
  };
  Message message(bytes, what);
  while (const auto field = message.next()) {
    switch (field->number) {
      case 3:
        check(field->integer == 1 || field->integer == 2,
              "{}: the SentencePiece model is of type {}, expected 1, unigram, or 2, byte-pair encoding", what,
              field->integer);
        out.is_unigram = field->integer == 1;
        break;
      case 24:
        check(!field->flag(), "{}: SentencePiece models with spaces at the end of tokens are not supported", what);
        break;
      case 35: out.has_byte_tokens = field->flag(); break;
      case 40: out.unknown_token = id(*field); break;
      case 41: out.bos = id(*field); break;
      case 42: out.eos = id(*field); break;
      default: break;
    }
  }
}

void read_normalization(std::string_view bytes, SentencePieceModel& out, const std::string& what) {
  Message message(bytes, what);
  while (const auto field = message.next()) {
    switch (field->number) {
      case 2: out.character_map = field->bytes; break;
      case 3: out.adds_prefix = field->flag(); break;
      case 4: out.removes_spaces = field->flag(); break;
      case 5: out.escapes_spaces = field->flag(); break;
      default: break;
    }
  }
}

}  // namespace

SentencePieceModel parse_sentence_piece(std::string_view bytes, const std::string& what) {
  SentencePieceModel model{.pieces = {}, .unknown_token = 0, .bos = 1, .eos = 2};
  Message message(bytes, what);
  while (const auto field = message.next()) {
    switch (field->number) {
      case 1: model.pieces.push_back(piece_of(field->bytes, what)); break;
      case 2: read_training(field->bytes, model, what); break;
      case 3: read_normalization(field->bytes, model, what); break;
      default: break;
    }
  }
  check(!model.pieces.empty(), "{}: it is not a SentencePiece model: it has no tokens", what);
  const auto size = static_cast<std::int64_t>(model.pieces.size());
  for (std::optional<std::int64_t>* const id : {&model.unknown_token, &model.bos, &model.eos}) {
    if (*id && **id >= size) {
      *id = std::nullopt;
    }
  }
  return model;
}

TokenizerDescription describe_sentence_piece(const SentencePieceModel& model, const std::string& what) {
  using Model = SentencePieceModel;
  TokenizerDescription out;
  std::vector<Vocabulary::Entry> entries;
  std::vector<double> scores;
  entries.reserve(model.pieces.size());
  for (std::size_t i = 0; i < model.pieces.size(); ++i) {
    const Model::Piece& piece = model.pieces[i];
    const auto id = static_cast<std::int64_t>(i);
    const bool is_normal = piece.type == Model::normal;
    const std::string text = piece.text.empty() ? fmt::format("[EMPTY_{}]", i) : piece.text;
    entries.push_back({.id = id, .text = text, .is_bytes = is_normal, .bytes = text});
    scores.push_back(is_normal ? piece.score : std::numeric_limits<double>::quiet_NaN());
    if (piece.type == Model::control || piece.type == Model::user_defined) {
      const bool is_special = piece.type == Model::control;
      check(text.size() <= kLongestAddedToken, "{}: the token {} has {} bytes, expected at most {}", what,
            in_quotes(text), text.size(), kLongestAddedToken);
      const bool is_raw = is_special || model.finds_in_raw_text;
      out.added_tokens.push_back(
          {.id = id, .content = text, .normalized = !is_raw, .is_normalized = !is_raw, .special = is_special});
    }
  }
  out.vocabulary = Vocabulary(std::move(entries), what);
  if (model.is_unigram) {
    out.unigram.emplace(
        out.vocabulary, std::move(scores),
        UnigramEncoder::Options{.unknown = model.unknown_token, .has_byte_tokens = model.has_byte_tokens});
  } else {
    out.merges = merges_of_scores(out.vocabulary, scores);
  }
  out.byte_pair = {.of_characters = true,
                   .unknown = model.unknown_token,
                   .fuses_unknown = true,
                   .has_byte_tokens = model.has_byte_tokens};

  using Kind = NormalizerStep::Kind;
  const auto space = std::string(model.escapes_spaces ? kSpace : " ");
  if (!model.character_map.empty()) {
    NormalizerStep map{.kind = Kind::sentence_map,
                       .map = std::make_shared<const CharacterMap>(model.character_map, what)};
    for (const AddedToken& token : out.added_tokens) {
      if (!token.special) {
        map.kept.push_back(token.content);
      }
    }
    std::sort(map.kept.begin(), map.kept.end(),
              [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
    out.normalizer.push_back(std::move(map));
  }
  if (model.removes_spaces) {
    out.normalizer.push_back({.kind = Kind::extra_spaces});
  }
  if (model.escapes_spaces) {
    out.normalizer.push_back({.kind = Kind::replace, .searched = Searched::text(" "), .text = space});
  }
  if (model.adds_prefix && model.prefix_only_first) {
    out.pre_tokenizer.push_back({.kind = PreTokenizerStep::Kind::metaspace,
                                 .text = space,
                                 .prepend = PreTokenizerStep::Prepend::first,
                                 .splits = false});
  } else if (model.adds_prefix) {
    out.normalizer.push_back({.kind = Kind::prepend, .text = space});
  }
  using Decoding = DecoderStep::Kind;
  out.decoder = {{.kind = Decoding::replace, .searched = Searched::text(std::string(kSpace)), .text = " "},
                 {.kind = Decoding::byte_tokens},
                 {.kind = Decoding::fuse}};
  if (model.adds_prefix) {
    out.decoder.push_back({.kind = Decoding::strip, .text = " ", .start = 1});
  }
  return out;
}

TokenizerDescription describe_sentence_piece_file(std::string_view bytes, TokenizerSettings& settings,
                                                  const std::string& what) {
  for (const char* const name : {"XLMRoberta", "Camembert", "MBart", "NllbTokenizer", "Barthez", "M2M100", "XGLM"}) {
    check(!settings.tokenizer_class.starts_with(name),
          "{}: {} has other numbers for its tokens than the SentencePiece model; it needs a tokenizer.json", what,
          settings.tokenizer_class);
  }
  SentencePieceModel model = parse_sentence_piece(bytes, what);
  model.prefix_only_first = !settings.is_legacy.value_or(true);
  if (settings.adds_prefix_space) {
    model.adds_prefix = *settings.adds_prefix_space;
  }
  const auto set_name = [&](const char* key, std::optional<std::string>& name, std::optional<std::int64_t> id) {
    if (!name && id && model.pieces[static_cast<std::size_t>(*id)].type == SentencePieceModel::control) {
      name = model.pieces[static_cast<std::size_t>(*id)].text;
      settings.named_tokens.emplace_back(key, *name);
    }
  };
  set_name("bos_token", settings.bos_token, model.bos);
  set_name("eos_token", settings.eos_token, model.eos);
  TokenizerDescription out = describe_sentence_piece(model, what);
  add_tokens(settings, out, what);
  // What the classes of transformers do unless the file says otherwise.
  const bool is_t5 = settings.tokenizer_class.starts_with("T5");
  TokenizerSettings frame = settings;
  frame.adds_bos = settings.adds_bos.value_or(!is_t5);
  frame.adds_eos = settings.adds_eos.value_or(is_t5);
  apply_frame(frame, out);
  return out;
}

}  // namespace mica::io::detail
