// The first line of the input is config.json or adapter_config.json, the rest a safetensors file. There must be a model
// that runs, an adapter of a small model, or an Error.

#include <string_view>
#include <variant>

#include "tests/fuzz/memory_file.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/io/adapter.h>
#include <mica/io/pretrained.h>

using namespace mica;

namespace {

// A hostile configuration may request a huge model. Refusing the memory is up to the operating system; models with more
// elements than this are not run, since that takes too long.
constexpr std::int64_t kLargest = 1 << 16;

template <class Model>
void run(const Model& model) {
  const Tensor result = model(zeros({1, 1}, int64));
  if constexpr (requires { model.config.head; }) {
    if (model.config.head != nn::EncoderHead::none) {
      (void)model.logits(result);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Folder folder("folder_fuzz");
  const autograd::NoGrad no_grad;
  std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view config = fuzz::take_line(input);
  folder.write("config.json", config);
  folder.write("model.safetensors", input);
  for (const bool strict : {true, false}) {
    try {
      const io::PretrainedModel model = io::load_pretrained(folder.path(), {.strict = strict});
      std::visit(
          [](const auto& m) {
            if (io::parameter_count(m.config) <= kLargest) {
              run(m);
            }
          },
          model);
    } catch (const Error&) {
    }
  }
  folder.write("adapter_config.json", config);
  folder.write("adapter_model.safetensors", input);
  try {
    nn::Llama llama({.vocab = 3, .layers = 1, .heads = 1, .key_heads = 1, .width = 2, .hidden = 2});
    io::load_adapter(llama, folder.path());
    run(llama);
  } catch (const Error&) {
  }
  return 0;
}
