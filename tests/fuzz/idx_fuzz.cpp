// Reads any bytes as an IDX file, compressed or not: a tensor no larger than the limit, or an Error.

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/idx.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile file(data, size);
  try {
    const Tensor x = io::read_idx(file.path(), 1 << 22);
    fuzz::expect(x.is_contiguous() && x.bytes() <= 1 << 22);
    const bool is_compressed = data[0] == 0x1F;
    fuzz::expect(x.bytes() <= 4 * (is_compressed ? 1032 : 1) * size);
  } catch (const Error&) {
  }
  return 0;
}
