#include <algorithm>
#include <new>

#include <mica/core/check.h>
#include <mica/io/detail/zlib.h>

#if MICA_WITH_ZLIB
#include <zlib.h>
#endif

namespace mica::io::detail {

bool is_gzip(std::span<const std::byte> file) {
  return file.size() >= 2 && file[0] == std::byte{0x1F} && file[1] == std::byte{0x8B};
}

#if MICA_WITH_ZLIB

struct Gunzip::State {
  const std::string& name;
  std::span<const std::byte> left;
  z_stream stream{};
  bool ended = false;
};

namespace {

constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // zlib counts in 32 bits
constexpr int kGzip = 16 + MAX_WBITS;

}  // namespace

Gunzip::Gunzip(std::span<const std::byte> file, const std::string& name) : state_(new State{name, file}) {
  if (inflateInit2(&state_->stream, kGzip) != Z_OK) {
    throw std::bad_alloc();
  }
}

Gunzip::~Gunzip() { inflateEnd(&state_->stream); }

std::size_t Gunzip::read(std::span<std::byte> to) {
  z_stream& stream = state_->stream;
  std::size_t done = 0;
  while (done < to.size() && !state_->ended) {
    const std::size_t in = std::min(state_->left.size(), kMostAtOnce), out = std::min(to.size() - done, kMostAtOnce);
    stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(state_->left.data()));
    stream.avail_in = static_cast<uInt>(in);
    stream.next_out = reinterpret_cast<Bytef*>(to.data() + done);
    stream.avail_out = static_cast<uInt>(out);
    const int status = inflate(&stream, Z_NO_FLUSH);
    state_->left = state_->left.subspan(in - stream.avail_in);
    done += out - stream.avail_out;
    if (status == Z_STREAM_END) {
      state_->ended = state_->left.empty();
      check(state_->ended || (is_gzip(state_->left) && inflateReset2(&stream, kGzip) == Z_OK),
            "{}: there is something behind the compressed data", state_->name);
    } else {
      check(status == Z_OK, "{}: the compressed data are {}", state_->name,
            status == Z_BUF_ERROR   ? "truncated"
            : stream.msg != nullptr ? stream.msg
                                    : "damaged");
    }
  }
  return done;
}

#else

struct Gunzip::State {};

Gunzip::Gunzip(std::span<const std::byte>, const std::string& name) {
  fail("{}: mica was built without zlib, which reads compressed files (Debian: zlib1g-dev; MICA_ZLIB=ON)", name);
}

Gunzip::~Gunzip() = default;

std::size_t Gunzip::read(std::span<std::byte>) { return 0; }

#endif

}  // namespace mica::io::detail
