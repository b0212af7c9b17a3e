#include <tests/support.h>

#include <mica/nn/containers.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/quantized_linear.h>
#include <mica/nn/summary.h>

using namespace mica;

namespace {

TEST(Summary, OfAGpt) {
  nn::GPT gpt({.vocab = 1000, .context = 6, .layers = 1, .heads = 1, .width = 4, .bias = false});
  // The head's weight is the embedding's.
  EXPECT_EQ(nn::summary(gpt),
            "module           class      tensors                   elements    bytes\n"
            "wte              Embedding  weight [1000, 4] float32     4,000  16.0 kB\n"
            "wpe              Embedding  weight [6, 4] float32           24     96 B\n"
            "h.0.ln_1         LayerNorm  weight [4] float32               4     16 B\n"
            "h.0.attn.c_attn  Linear     weight [12, 4] float32          48    192 B\n"
            "h.0.attn.c_proj  Linear     weight [4, 4] float32           16     64 B\n"
            "h.0.ln_2         LayerNorm  weight [4] float32               4     16 B\n"
            "h.0.mlp.c_fc     Linear     weight [16, 4] float32          64    256 B\n"
            "h.0.mlp.c_proj   Linear     weight [4, 16] float32          64    256 B\n"
            "ln_f             LayerNorm  weight [4] float32               4     16 B\n"
            "4,228 parameters, 4,228 of them trained; 16.9 kB on cpu\n");
}

TEST(Summary, OfAdaptersAndBuffers) {
  nn::Sequential model{nn::Linear{32, 16}, nn::QuantizedLinear{16, 32, {.bias = false, .quantize = {.bits = 8}}}};
  nn::add_lora(model, {"0"}, {.rank = 2});
  model.to(bfloat16);
  const std::string text = nn::summary(model);
  EXPECT_NE(text.find("\n0       Linear           weight [16, 32] bfloat16"), std::string::npos) << text;
  EXPECT_NE(text.find("\n                         bias [16] bfloat16"), std::string::npos) << text;
  EXPECT_NE(text.find("\n                         lora_a [2, 32] bfloat16"), std::string::npos) << text;
  EXPECT_NE(text.find("\n1       QuantizedLinear  packed "), std::string::npos) << text;
  EXPECT_NE(text.find("\n624 parameters, 96 of them trained; "), std::string::npos) << text;
  EXPECT_NE(text.find(" elements in buffers; "), std::string::npos) << text;
}

TEST(Summary, OfNothing) {
  nn::Sequential model;
  EXPECT_EQ(nn::summary(model), "module  class  tensors  elements  bytes\n0 parameters, 0 of them trained; 0 B\n");
}

}  // namespace
