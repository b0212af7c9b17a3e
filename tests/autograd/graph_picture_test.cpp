#include <algorithm>
#include <array>
#include <sstream>
#include <vector>

#include "tests/depth.h"
#include "tests/support.h"
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/graph_picture.h>
#include <mica/nn/checkpoint.h>
#include <mica/nn/transformer.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Context;
using autograd::to_dot;

namespace graph_picture_test {

// An element of the picture.
struct Drawn {
  std::string frames;  // enclosing frames, outermost first: "block > block.mlp"
  std::string id;      // "n3", or "n3 -> n4"
  std::string label;   // as written in the file
};

std::string label_in(const std::string& line) {
  const std::size_t from = line.find("label=\"");
  if (from == std::string::npos) {
    return "";
  }
  std::size_t to = from + 7;
  while (line.at(to) != '"') {
    to += line.at(to) == '\\' ? 2 : 1;
  }
  return line.substr(from + 7, to - from - 7);
}

// Returns the labels of the frames, and all boxes and arrows. Checks that frames open and close correctly.
std::vector<Drawn> parse(const std::string& dot) {
  std::vector<Drawn> drawn;
  std::vector<std::string> frames;
  std::istringstream lines(dot);
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line, "digraph autograd {");
  const auto path = [&] {
    std::string text;
    for (const std::string& frame : frames) {
      text += (text.empty() ? "" : " > ") + frame.substr(0, frame.find_first_of(" \\"));
    }
    return text;
  };
  while (std::getline(lines, line)) {
    line.erase(0, line.find_first_not_of(' '));
    if (line.starts_with("subgraph cluster_")) {
      std::string label;
      std::getline(lines, label);
      drawn.push_back({path(), "frame", label_in(label)});
      frames.push_back(label_in(label));
    } else if (line == "}") {
      if (frames.empty()) {
        EXPECT_FALSE(std::getline(lines, line));
        return drawn;
      }
      frames.pop_back();
    } else if (line.starts_with("n") && !line.starts_with("node [")) {
      const std::size_t end = std::min(line.find(" ["), line.find(';'));
      drawn.push_back({path(), line.substr(0, end), label_in(line)});
    } else if (line.starts_with("more")) {
      drawn.push_back({path(), line.substr(0, std::min(line.find(" ["), line.find(';'))), label_in(line)});
    }
  }
  ADD_FAILURE() << "the picture does not end";
  return drawn;
}

std::size_t count(const std::vector<Drawn>& drawn, const std::string& frames, const std::string& label) {
  return std::count_if(drawn.begin(), drawn.end(),
                       [&](const Drawn& d) { return d.frames == frames && d.label == label; });
}

std::string id_of(const std::vector<Drawn>& drawn, const std::string& frames, const std::string& label) {
  const auto at =
      std::find_if(drawn.begin(), drawn.end(), [&](const Drawn& d) { return d.frames == frames && d.label == label; });
  EXPECT_NE(at, drawn.end()) << frames << ": " << label;
  return at == drawn.end() ? "" : at->id;
}

bool has(const std::vector<Drawn>& drawn, const std::string& id) {
  return std::any_of(drawn.begin(), drawn.end(), [&](const Drawn& d) { return d.id == id; });
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Model : nn::Module {
  nn::TransformerBlock block = child("block", nn::TransformerBlock{64, {.heads = 4}});
};

TEST(GraphPicture, ATransformerBlock) {
  const Model model;
  const Tensor x = randn({2, 16, 64}).requires_grad_();
  const std::string dot = to_dot(model.block(x));
  const auto drawn = parse(dot);
  // The whole picture; leaves do not count. ln_1 saves mean and rstd of 32 rows (384 B). c_attn saves its input,
  // 2·16·64·4 B = 8 KiB. Attention saves the 24 KiB that c_attn computed, its result of 8 KiB, which c_proj also saves,
  // and the logsumexp of its rows, 2·4·16·4 B = 512 B. ln_2 saves the sum of residual and branch, and as much as ln_1.
  // The MLP saves its input, 8 KiB, and the inputs and outputs of gelu, 32 KiB each.
  EXPECT_TRUE(contains(dot, "label=\"7 ops, saving 121.2 KiB for backward; 13 leaves of 203.2 KiB\"")) << dot;
  const std::string block = "block", attn = "block > block.attn", mlp = "block > block.mlp";
  for (const auto& [frames, label] : std::vector<std::pair<std::string, std::string>>{
           {"", R"(block (TransformerBlock)\lsaves 121.2 KiB\l)"},
           {block, R"(block.ln_1 (LayerNorm)\lsaves 384 B\l)"},
           {block, R"(block.attn (MultiheadAttention)\lsaves 40.5 KiB\l)"},
           {attn, R"(block.attn.c_attn (Linear)\lsaves 8 KiB\l)"},
           {attn, R"(block.attn.c_proj (Linear)\l)"},
           {block, R"(block.ln_2 (LayerNorm)\lsaves 8.4 KiB\l)"},
           {block, R"(block.mlp (Mlp)\lsaves 72 KiB\l)"},
           {mlp, R"(block.mlp.c_fc (Linear)\l)"},
           {mlp, R"(block.mlp.c_proj (Linear)\l)"},
           {"", R"(input\n[2, 16, 64] float32)"},
           {block + " > block.ln_1", R"(LayerNorm\n[2, 16, 64] float32\nsaves 384 B)"},
           {block + " > block.ln_1", R"(weight\n[64] float32)"},
           {attn + " > block.attn.c_attn", R"(weight\n[192, 64] float32)"},
           {attn + " > block.attn.c_attn", R"(bias\n[192] float32)"},
           {attn + " > block.attn.c_attn", R"(Linear\n[2, 16, 192] float32\nsaves 8 KiB)"},
           {attn, R"(FusedSelfAttention\n[2, 16, 64] float32\nsaves 32.5 KiB)"},
           {attn + " > block.attn.c_proj", R"(Linear\n[2, 16, 64] float32)"},
           {block + " > block.ln_2", R"(AddLayerNorm\n[2, 16, 64] float32\n[2, 16, 64] float32\nsaves 8.4 KiB)"},
           {mlp + " > block.mlp.c_fc", R"(weight\n[256, 64] float32)"},
           {mlp, R"(Mlp\n[2, 16, 64] float32\n[2, 16, 256] float32\n[2, 16, 256] float32\nsaves 72 KiB)"},
           {block, R"(Add\n[2, 16, 64] float32)"}}) {
    EXPECT_EQ(count(drawn, frames, label), 1u) << frames << ": " << label << "\n" << dot;
  }
  const std::string input = id_of(drawn, "", R"(input\n[2, 16, 64] float32)");
  const std::string norm = id_of(drawn, block + " > block.ln_1", R"(LayerNorm\n[2, 16, 64] float32\nsaves 384 B)");
  const std::string sum =
      id_of(drawn, block + " > block.ln_2", R"(AddLayerNorm\n[2, 16, 64] float32\n[2, 16, 64] float32\nsaves 8.4 KiB)");
  EXPECT_TRUE(has(drawn, input + " -> " + norm));
  EXPECT_TRUE(has(drawn, input + " -> " + sum));
  EXPECT_FALSE(has(drawn, norm + " -> " + input));
}

TEST(GraphPicture, IsTheSameForTheSameGraph) {
  const Model model;
  const Tensor x = randn({2, 4, 64}).requires_grad_();
  const std::string first = to_dot(model.block(x));
  const Tensor other = x * 2;  // numbers its node
  EXPECT_EQ(to_dot(model.block(x)), first);
}

TEST(GraphPicture, CountsAStorageOnceAndParametersNever) {
  struct Layer : nn::Module {
    Tensor weight = param("weight", randn({16, 16}));
    Tensor frozen = param("frozen", randn({16, 16}));
    Tensor operator()(const Tensor& x) const {
      const nn::Scope scope(*this);
      return matmul(matmul(x, transpose(weight, 0, 1)), frozen);
    }
  };
  const Layer layer;
  layer.frozen.requires_grad_(false);
  const Tensor x = randn({4, 16});  // without a gradient: only the graph refers to it
  const Tensor y = layer(x);
  const Tensor z = y * y + exp(y);
  const auto drawn = parse(to_dot(z));
  // Saves the left operand for weight's gradient. The frozen tensor has none, and views of weight are not counted.
  EXPECT_EQ(count(drawn, "Layer", R"(Matmul\n[4, 16] float32\nsaves 256 B)"), 1u);
  EXPECT_EQ(count(drawn, "Layer", R"(Matmul\n[4, 16] float32)"), 1u);
  EXPECT_EQ(count(drawn, "Layer", R"(weight\n[16, 16] float32)"), 1u);
  EXPECT_EQ(count(drawn, "", R"(Mul\n[4, 16] float32\nsaves 256 B)"), 1u);  // y, twice
  EXPECT_EQ(count(drawn, "", R"(Exp\n[4, 16] float32\nsaves 256 B)"), 1u);  // its own result
  EXPECT_EQ(count(drawn, "", R"(Layer\lsaves 256 B\l)"), 1u);
  sum(z).backward();
  EXPECT_TRUE(contains(to_dot(z), "6 ops, saving 0 B for backward; 1 leaf of 1 KiB"));
}

// Two outputs, and one that has no gradient.
struct Halves {
  std::array<Tensor, 3> forward(Context&, const Tensor& x) const { return {x * 0.5, x * 0.5, zeros({2}, int64)}; }
  Tensors backward(Context&, const Tensors& dy) const { return {(dy[0] + dy[1]) * 0.5}; }
};

TEST(GraphPicture, SeveralOutputs) {
  const Tensor x = randn({3}, float64).requires_grad_();
  const auto halves = autograd::apply(Halves{}, x);
  const auto drawn = parse(to_dot(halves[0] * 2 + halves[1]));
  const std::string op = id_of(drawn, "", R"(Halves\n[3] float64\n[3] float64\n[2] int64)");
  EXPECT_EQ(std::count_if(drawn.begin(), drawn.end(),
                          [&](const Drawn& d) { return d.id.starts_with(op + " ->") && d.label == "output 1"; }),
            1);
  const auto one = parse(to_dot(max(x, 0).values * 2));
  EXPECT_EQ(count(one, "", "output 0"), 0u);
}

TEST(GraphPicture, WritesInPlaceAndCheckpoints) {
  struct Block : nn::Module {
    nn::Linear fc = child("fc", nn::Linear{8, 8});
    Tensor operator()(const Tensor& x) const {
      const nn::Scope scope(*this);
      const Tensor buffer = zeros({2, 8});
      copy_(slice(buffer, 0, 0, 1), slice(fc(x), 0, 0, 1));
      return nn::checkpoint(fc, buffer);
    }
  };
  const auto drawn = parse(to_dot(Block{}(randn({2, 8}))));
  EXPECT_EQ(count(drawn, "Block", R"(WriteView\n[2, 8] float32)"), 1u);
  EXPECT_EQ(count(drawn, "Block > fc", R"(Checkpoint\n[2, 8] float32\nsaves 64 B)"), 1u);
  EXPECT_EQ(count(drawn, "Block > fc", R"(Linear\n[2, 8] float32\nsaves 64 B)"), 1u);
}

TEST(GraphPicture, NamesAreEscaped) {
  struct Odd : nn::Module {
    Tensor weight = param("a \"b\" \\n\nc", ones({1}));
  };
  const Odd odd;
  const std::string dot = to_dot(odd.weight * 2);
  EXPECT_TRUE(contains(dot, R"([label="a \"b\" \\n\nc\n[1] float32")")) << dot;
}

TEST(GraphPicture, DrawsTheNearestOpsAndCountsTheOthers) {
  const Tensor x = randn({3}).requires_grad_(), b = randn({3}).requires_grad_();
  Tensor y = x;
  for (int i = 0; i < 10; ++i) {
    y = y + b;
  }
  const auto drawn = parse(to_dot(y, {.max_nodes = 4}));  // three ops and b
  EXPECT_EQ(std::count_if(drawn.begin(), drawn.end(), [](const Drawn& d) { return d.label.starts_with("Add"); }), 3);
  EXPECT_TRUE(has(drawn, "more"));
  EXPECT_EQ(count(drawn, "", "and 8 more"), 1u);
  EXPECT_EQ(std::count_if(drawn.begin(), drawn.end(), [](const Drawn& d) { return d.id.starts_with("more ->"); }), 1);
  EXPECT_FALSE(has(parse(to_dot(y, {.max_nodes = 12})), "more"));
  EXPECT_EQ(count(parse(to_dot(y, {.max_nodes = 0})), "", "and 12 more"), 1u);
}

TEST(GraphPicture, FramesCountWhatIsNotDrawnToo) {
  const Model model;
  const auto drawn = parse(to_dot(model.block(randn({2, 16, 64}).requires_grad_()), {.max_nodes = 10}));
  EXPECT_EQ(count(drawn, "", R"(block (TransformerBlock)\lsaves 121.2 KiB\l)"), 1u);
  EXPECT_EQ(count(drawn, "block", R"(block.mlp (Mlp)\lsaves 72 KiB\l)"), 1u);
  EXPECT_EQ(count(drawn, "", "and 10 more"), 1u);
}

TEST(GraphPicture, LongChain) {
  Tensor y = randn({1}).requires_grad_();
  for (int i = 0; i < kLongChain; ++i) {
    y = y + y;
  }
  const std::string dot = to_dot(y);
  EXPECT_TRUE(contains(dot, fmt::format("label=\"{} ops, saving 0 B", kLongChain))) << dot.substr(0, 200);
  EXPECT_TRUE(contains(dot, fmt::format("and {} more", kLongChain - 1999)));
}

TEST(GraphPicture, ManyInputs) {
  Tensors parts;
  for (int i = 0; i < 20'000; ++i) {
    parts.push_back(ones({1}).requires_grad_());
  }
  const auto drawn = parse(to_dot(cat(parts, 0), {.max_nodes = 100'000}));
  EXPECT_EQ(count(drawn, "", R"(input\n[1] float32)"), 20'000u);
  EXPECT_TRUE(has(drawn, "n0 -> n20000"));
  EXPECT_TRUE(has(drawn, "n19999 -> n20000"));
}

TEST(GraphPicture, Errors) {
  expect_error([] { to_dot(Tensor{}); }, "to_dot: expected a defined tensor");
  const std::string none = "to_dot: there is no graph to draw: no recorded op made the tensor of shape [2]";
  const Tensor x = ones({2}).requires_grad_();
  expect_error([&] { to_dot(x); }, none);
  expect_error([&] { to_dot(x.detach() * 2); }, none);
  expect_error([&] { to_dot(no_grad([&] { return x * 2; })); }, none);
}

}  // namespace graph_picture_test
