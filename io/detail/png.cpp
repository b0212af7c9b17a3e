#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <exception>
#include <iterator>

#include <mica/io/detail/image_codec.h>

#if MICA_WITH_PNG
#include <png.h>
#endif

namespace mica::io::detail {

bool is_png(Bytes file) {
  constexpr unsigned char signature[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
  return file.size() >= sizeof signature &&
         std::equal(std::begin(signature), std::end(signature), reinterpret_cast<const unsigned char*>(file.data()));
}

#if MICA_WITH_PNG

namespace {

// Of chunks other than pixels, such as texts and color profiles.
constexpr std::size_t kMaxChunk = 8 << 20;
// The most that deflate can compress.
constexpr std::uint64_t kMaxDeflate = 1032;

struct PngState {
  Bytes left;                       // of a file that is read
  std::vector<std::byte>* written;  // of a file that is written
  char text[128];                   // of the error
  std::jmp_buf jump;
};

PngState& png_state_of(png_structp png) { return *static_cast<PngState*>(png_get_error_ptr(png)); }

[[noreturn]] void on_png_error(png_structp png, const char* text) {
  PngState& state = png_state_of(png);
  std::strncpy(state.text, text, sizeof state.text - 1);
  std::longjmp(state.jump, 1);
}

// About chunks other than pixels.
void on_png_warning(png_structp, const char*) {}

void read_png_bytes(png_structp png, png_bytep to, std::size_t count) {
  PngState& state = png_state_of(png);
  if (count > state.left.size()) {
    png_error(png, "it ends too early");
  }
  std::memcpy(to, state.left.data(), count);
  state.left = state.left.subspan(count);
}

void write_png_bytes(png_structp png, png_bytep from, std::size_t count) {
  bool fits = true;
  try {
    const auto* const bytes = reinterpret_cast<const std::byte*>(from);
    png_state_of(png).written->insert(png_state_of(png).written->end(), bytes, bytes + count);
  } catch (const std::exception&) {
    fits = false;
  }
  if (!fits) {
    png_error(png, "out of memory");
  }
}

void flush_png(png_structp) {}

/// libpng's state. Errors jump to run(), over frames that have nothing to destroy.
class PngReader {
 public:
  PngReader(Bytes file, const std::string& name) : name_(name), file_(file) {
    state_.left = file;
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, &state_, on_png_error, on_png_warning);
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
    if (info_ == nullptr) {
      png_destroy_read_struct(&png_, nullptr, nullptr);
      throw OutOfMemory(name + ": libpng is out of memory");
    }
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  /// Calls f, whose objects need no destructor. Throws if libpng has an error.
  template <class F>
  void run(F f) {
    if (setjmp(state_.jump) != 0) {  // NOLINT(cert-err52-cpp): the only way out of libpng
      fail("{}: the PNG file is damaged: {}", name_, static_cast<const char*>(state_.text));
    }
    f();
  }

  /// Reads the header, and says how to convert pixels to 8 bits per channel.
  ImageHeader read_header(const ImageOptions& options) {
    run([&] {
      png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
      png_set_chunk_malloc_max(png_, kMaxChunk);
      png_set_chunk_cache_max(png_, 128);
      png_set_read_fn(png_, &state_, read_png_bytes);
      png_read_info(png_, info_);
    });
    const std::int64_t height = png_get_image_height(png_, info_), width = png_get_image_width(png_, info_);
    check_image_size(height, width, name_, options);
    check(static_cast<std::uint64_t>(height) * png_get_rowbytes(png_, info_) / kMaxDeflate <= file_.size(),
          "{}: the PNG file is damaged: {} bytes are too few for {} × {} pixels", name_, file_.size(), height, width);
    run([&] {
      png_set_expand(png_);  // palettes, fewer bits than 8, a transparent color
      png_set_scale_16(png_);
      if (options.channels != 0) {
        png_set_strip_alpha(png_);
      }
      if (options.channels == 3) {
        png_set_gray_to_rgb(png_);
      }
      (void)png_set_interlace_handling(png_);
      png_read_update_info(png_, info_);
    });
    return {height, width, png_get_channels(png_, info_)};
  }

  /// Reads the pixels, and the rest of the file.
  void read(std::uint8_t* to, png_bytep* rows, const ImageHeader& header) {
    for (std::int64_t y = 0; y < header.height; ++y) {
      rows[y] = to + y * header.width * header.channels;
    }
    run([&] {
      png_read_image(png_, rows);
      png_read_end(png_, nullptr);
    });
  }

 private:
  const std::string& name_;
  Bytes file_;
  PngState state_{};
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

int png_color_type(int channels) {
  constexpr int types[] = {PNG_COLOR_TYPE_GRAY, PNG_COLOR_TYPE_GRAY_ALPHA, PNG_COLOR_TYPE_RGB,
                           PNG_COLOR_TYPE_RGB_ALPHA};
  return types[channels - 1];
}

}  // namespace

ImageHeader png_header(Bytes file, const std::string& name, const ImageOptions& options) {
  return PngReader(file, name).read_header(options);
}

Tensor decode_png(Bytes file, const std::string& name, const ImageOptions& options) {
  PngReader reader(file, name);
  const ImageHeader header = reader.read_header(options);
  Tensor pixels = empty({header.height, header.width, header.channels}, uint8);
  std::vector<png_bytep> rows(static_cast<std::size_t>(header.height));
  reader.read(pixels.data<std::uint8_t>(), rows.data(), header);
  return pixels;
}

std::vector<std::byte> encode_png(const std::uint8_t* pixels, const ImageHeader& size) {
  std::vector<std::byte> file;
  PngState state{};
  state.written = &file;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &state, on_png_error, on_png_warning);
  png_infop info = png == nullptr ? nullptr : png_create_info_struct(png);
  if (info == nullptr || setjmp(state.jump) != 0) {  // NOLINT(cert-err52-cpp): the only way out of libpng
    png_destroy_write_struct(&png, &info);
    fail("encode_png: {}", info == nullptr ? "out of memory" : static_cast<const char*>(state.text));
  }
  png_set_write_fn(png, &state, write_png_bytes, flush_png);
  png_set_IHDR(png, info, static_cast<png_uint_32>(size.width), static_cast<png_uint_32>(size.height), 8,
               png_color_type(size.channels), PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
               PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  for (std::int64_t y = 0; y < size.height; ++y) {
    png_write_row(png, pixels + y * size.width * size.channels);
  }
  png_write_end(png, nullptr);
  png_destroy_write_struct(&png, &info);
  return file;
}

#else

namespace {

[[noreturn]] void fail_without_png(const std::string& name) {
  fail("{}: mica was built without libpng, which reads and writes PNG files (Debian: libpng-dev; MICA_PNG=ON)", name);
}

}  // namespace

ImageHeader png_header(Bytes, const std::string& name, const ImageOptions&) { fail_without_png(name); }
Tensor decode_png(Bytes, const std::string& name, const ImageOptions&) { fail_without_png(name); }
std::vector<std::byte> encode_png(const std::uint8_t*, const ImageHeader&) { fail_without_png("encode_png"); }

#endif

}  // namespace mica::io::detail
