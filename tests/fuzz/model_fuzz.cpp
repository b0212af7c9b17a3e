// Reads any bytes as a model that train_transformer saved: it must load and run, or throw an Error.

#include "examples/common/character_model.h"
#include "tests/fuzz/memory_file.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/check.h>
#include <mica/core/creation.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile file(data, size);
  try {
    const CharacterModel model = load_character_model(file.path(), Device::cpu());
    const autograd::NoGrad guard;
    const Tensor logits = model.gpt.next_token_logits(zeros({1, 1}, int64));
    fuzz::expect(logits.shape() == Shape({1, model.tokenizer.size()}));
  } catch (const Error&) {
  }
  return 0;
}
