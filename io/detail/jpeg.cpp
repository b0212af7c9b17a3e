#include <algorithm>
#include <csetjmp>
#include <cstdio>

#include <mica/io/detail/image_codec.h>

#if MICA_WITH_JPEG
// clang-format off: jpeglib.h needs <cstdio>, and jerror.h needs jpeglib.h
#include <jerror.h>
#include <jpeglib.h>
// clang-format on
#endif

namespace mica::io::detail {

bool is_jpeg(Bytes file) {
  return file.size() >= 3 && file[0] == std::byte{0xFF} && file[1] == std::byte{0xD8} && file[2] == std::byte{0xFF};
}

#if MICA_WITH_JPEG

namespace {

// A progressive file may have any number of scans, each of which costs time, at a few bytes per scan.
constexpr int kMaxScans = 100;
// Chroma is interpolated between neighbors, so pixels next to a cut need one more. Two are on the safe side.
constexpr std::int64_t kMargin = 2;

struct JpegErrors {
  jpeg_error_mgr manager;  // first, since libjpeg passes its address
  std::jmp_buf jump;
  char text[JMSG_LENGTH_MAX];
};

[[noreturn]] void on_jpeg_error(j_common_ptr state) {
  auto* const errors = reinterpret_cast<JpegErrors*>(state->err);
  state->err->format_message(state, errors->text);
  std::longjmp(errors->jump, 1);
}

// libjpeg would only warn that data are missing or damaged, and make up the rest of the image.
void on_jpeg_message(j_common_ptr state, int level) {
  const int code = state->err->msg_code;
  const bool is_harmless = code == JWRN_EXTRANEOUS_DATA || code == JWRN_JFIF_MAJOR || code == JWRN_ADOBE_XFORM;
  if (level < 0 && !is_harmless) {
    on_jpeg_error(state);
  }
}

void on_jpeg_progress(j_common_ptr state) {
  auto* const errors = reinterpret_cast<JpegErrors*>(state->err);
  if (reinterpret_cast<j_decompress_ptr>(state)->input_scan_number > kMaxScans) {
    std::snprintf(errors->text, sizeof errors->text, "it has more than %d scans", kMaxScans);
    std::longjmp(errors->jump, 1);
  }
}

/// libjpeg's state. Errors jump to run(), over frames that have nothing to destroy.
class JpegReader {
 public:
  JpegReader(Bytes file, const std::string& name) : name_(name) {
    state_.err = jpeg_std_error(&errors_.manager);
    errors_.manager.error_exit = on_jpeg_error;
    errors_.manager.emit_message = on_jpeg_message;
    progress_.progress_monitor = on_jpeg_progress;
    run([&] { jpeg_create_decompress(&state_); });
    state_.progress = &progress_;
    file_ = file;
  }
  ~JpegReader() { jpeg_destroy_decompress(&state_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  jpeg_decompress_struct& state() { return state_; }

  ImageHeader read_header(const ImageOptions& options) {
    run([&] {
      jpeg_mem_src(&state_, reinterpret_cast<const unsigned char*>(file_.data()), file_.size());
      jpeg_read_header(&state_, TRUE);
    });
    check_image_size(state_.image_height, state_.image_width, name_, options);
    const int components = state_.num_components;
    check(components == 1 || components == 3 || components == 4,
          "{}: expected a JPEG file of 1, 3 or 4 components, got {}", name_, components);
    // A Huffman code has a bit at least for each block of 8 × 8 samples.
    std::uint64_t blocks = 0;
    for (int i = 0; i < components; ++i) {
      blocks += std::uint64_t{state_.comp_info[i].width_in_blocks} * state_.comp_info[i].height_in_blocks;
    }
    check(state_.arith_code != 0 || blocks / 8 <= file_.size(),
          "{}: the JPEG file is damaged: {} bytes are too few for {} × {} pixels", name_, file_.size(),
          state_.image_height, state_.image_width);
    return {state_.image_height, state_.image_width,
            options.channels != 0 ? options.channels
            : components == 1     ? 1
                                  : 3};
  }

  /// Calls f, whose objects need no destructor. Throws if libjpeg has an error.
  template <class F>
  void run(F f) {
    if (setjmp(errors_.jump) != 0) {  // NOLINT(cert-err52-cpp): the only way out of libjpeg
      fail("{}: the JPEG file is damaged: {}", name_, static_cast<const char*>(errors_.text));
    }
    f();
  }

 private:
  const std::string& name_;
  Bytes file_;
  jpeg_decompress_struct state_{};
  jpeg_progress_mgr progress_{};
  JpegErrors errors_{};
};

// Printers' colors to RGB. Adobe's programs store them inverted.
void cmyk_to_rgb(const std::uint8_t* from, std::uint8_t* to, std::int64_t pixels, bool inverted) {
  for (std::int64_t i = 0; i < pixels; ++i) {
    const int black = inverted ? from[4 * i + 3] : 255 - from[4 * i + 3];
    for (int c = 0; c < 3; ++c) {
      const int ink = inverted ? from[4 * i + c] : 255 - from[4 * i + c];
      to[3 * i + c] = static_cast<std::uint8_t>((ink * black + 127) / 255);
    }
  }
}

}  // namespace

ImageHeader jpeg_header(Bytes file, const std::string& name, const ImageOptions& options) {
  return JpegReader(file, name).read_header(options);
}

DecodedRegion decode_jpeg(Bytes file, const std::string& name, const ImageOptions& options, const Region& region,
                          std::int64_t height, std::int64_t width) {
  JpegReader reader(file, name);
  const ImageHeader header = reader.read_header(options);
  jpeg_decompress_struct& state = reader.state();
  const bool is_cmyk = state.num_components == 4;
  state.out_color_space = is_cmyk ? JCS_CMYK : header.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  std::int64_t reduction = 1;
  while (height > 0 && width > 0 && reduction < 8 && region.height >= 2 * reduction * height &&
         region.width >= 2 * reduction * width) {
    reduction *= 2;
  }
  state.do_block_smoothing = FALSE;  // which depends on neighbors that may be cut off
  state.scale_num = 1;
  state.scale_denom = static_cast<unsigned>(reduction);
  reader.run([&] { jpeg_start_decompress(&state); });

  // What to decode, in pixels of the lower resolution.
  const std::int64_t rows = state.output_height, columns = state.output_width;
  const std::int64_t top = std::max<std::int64_t>(region.top / reduction - kMargin, 0);
  const std::int64_t bottom = std::min((region.top + region.height + reduction - 1) / reduction + kMargin, rows);
  const std::int64_t left = std::max<std::int64_t>(region.left / reduction - kMargin, 0);
  const std::int64_t right = std::min((region.left + region.width + reduction - 1) / reduction + kMargin, columns);
  auto begin = static_cast<JDIMENSION>(left), count = static_cast<JDIMENSION>(right - left);
  reader.run([&] {
    if (count < columns) {
      jpeg_crop_scanline(&state, &begin, &count);  // begins at a multiple of a block
    }
    if (top > 0) {
      jpeg_skip_scanlines(&state, static_cast<JDIMENSION>(top));
    }
  });
  const Tensor decoded = empty({bottom - top, count, state.output_components}, uint8);
  std::uint8_t* const data = decoded.data<std::uint8_t>();
  const std::int64_t stride = static_cast<std::int64_t>(count) * state.output_components;
  reader.run([&] {
    while (state.output_scanline < bottom) {
      JSAMPROW row = data + (static_cast<std::int64_t>(state.output_scanline) - top) * stride;
      jpeg_read_scanlines(&state, &row, 1);
    }
    if (bottom == rows) {
      jpeg_finish_decompress(&state);  // reports a file that ends too early
    }
  });

  DecodedRegion part{decoded, 0, 0, 0, 0};
  if (is_cmyk) {
    part.pixels = empty({bottom - top, count, 3}, uint8);
    cmyk_to_rgb(data, part.pixels.data<std::uint8_t>(), (bottom - top) * count, state.saw_Adobe_marker != 0);
  }
  const auto scale = static_cast<double>(reduction);
  part.top = static_cast<double>(region.top) / scale - static_cast<double>(top);
  part.left = static_cast<double>(region.left) / scale - static_cast<double>(begin);
  part.height = static_cast<double>(region.height) / scale;
  part.width = static_cast<double>(region.width) / scale;
  return part;
}

#else

namespace {

[[noreturn]] void fail_without_jpeg(const std::string& name) {
  fail("{}: mica was built without libjpeg-turbo, which reads JPEG files (Debian: libjpeg-dev; MICA_JPEG=ON)", name);
}

}  // namespace

ImageHeader jpeg_header(Bytes, const std::string& name, const ImageOptions&) { fail_without_jpeg(name); }

DecodedRegion decode_jpeg(Bytes, const std::string& name, const ImageOptions&, const Region&, std::int64_t,
                          std::int64_t) {
  fail_without_jpeg(name);
}

#endif

}  // namespace mica::io::detail
