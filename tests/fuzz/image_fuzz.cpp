// Reads any bytes as a PNG or JPEG file: it must be decoded or there must be an Error. A region must have the pixels
// that it has in the whole image, and pixels that were written as PNG must be the same when they are read.

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/image.h>

using namespace mica;

namespace {

bool same(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.raw_data(), b.raw_data(), a.bytes()) == 0;
}

/// The parts of an image in which a decoder may take shortcuts: its rim, its middle, its corners.
void check_regions(const io::Image& image) {
  const Tensor whole = image.pixels();
  fuzz::expect(whole.shape() == Shape({image.channels(), image.height(), image.width()}));
  const io::Image decoded(whole);
  const std::int64_t h = image.height(), w = image.width();
  for (const io::Region& region : {io::Region{h / 3, w / 3, h - h / 3, w - w / 3},
                                   {0, 0, (h + 1) / 2, (w + 1) / 2},
                                   {h - 1, 0, 1, w},
                                   {h / 2, w / 2, 1, 1}}) {
    fuzz::expect(same(image.crop(region), decoded.crop(region)));
    fuzz::expect(image.resize(region, 3, 2).shape() == Shape({image.channels(), 3, 2}));
  }
  fuzz::expect(image.resize(2, 40).shape() == Shape({image.channels(), 2, 40}));
  fuzz::expect(same(io::decode_image(io::encode_png(whole), {.channels = 0}), whole));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  for (const int channels : {0, 1, 3}) {
    try {
      check_regions(io::Image({bytes, bytes + size}, "input", {.channels = channels, .max_pixels = 1 << 16}));
    } catch (const Error&) {
    }
  }
  return 0;
}
