// Reads any bytes as a safetensors file and as a training checkpoint: they must load, or throw an Error.

#include <cstring>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/safetensors.h>
#include <mica/io/training_checkpoint.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile file(data, size);
  try {
    const StateDict tensors = io::load(file.path());
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : tensors) {
      fuzz::expect(tensor.defined() && tensor.is_contiguous());
      bytes += tensor.bytes();
    }
    fuzz::expect(bytes <= size);  // tensors are not larger than the file
    (void)io::load_metadata(file.path());
    const StateDict mapped = io::load_mapped(file.path());
    fuzz::expect(mapped.size() == tensors.size());
    for (const auto& [name, tensor] : mapped) {
      const Tensor& read = tensors.at(name);
      fuzz::expect(tensor.shape() == read.shape() && tensor.dtype() == read.dtype() &&
                   (tensor.bytes() == 0 || std::memcmp(tensor.raw_data(), read.raw_data(), tensor.bytes()) == 0));
    }
  } catch (const Error&) {
  }
  try {
    const io::TrainingCheckpoint checkpoint = io::load_training_checkpoint(file.path());
    fuzz::expect(checkpoint.step >= 0 && checkpoint.data.epoch >= 0 && checkpoint.data.index >= 0);
  } catch (const Error&) {
  }
  return 0;
}
