#include <array>
#include <string>
#include <string_view>

#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/vit.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const ViTConfig& checked(const ViTConfig& c) {
  check(c.channels >= 1 && c.classes >= 1 && c.width >= 1 && c.hidden >= 1 && c.layers >= 0 &&
            c.layers <= detail::kMostLayers,
        "ViT: expected channels, classes, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {}, {} and {}",
        detail::kMostLayers, c.channels, c.classes, c.width, c.hidden, c.layers);
  check(c.patch >= 1 && c.image >= c.patch && c.image % c.patch == 0,
        "ViT: expected patch to divide image, got image {} and patch {}", c.image, c.patch);
  check(c.heads >= 1 && c.width % c.heads == 0, "ViT: expected heads to divide width, got width {} and heads {}",
        c.width, c.heads);
  return c;
}

std::int64_t tokens_of(const ViTConfig& c) { return 1 + (c.image / c.patch) * (c.image / c.patch); }

struct Renaming {
  std::string_view from, to;
};

// Parts of names: torchvision's, then timm's.
constexpr std::array<Renaming, 7> kBeginnings{{{"class_token", "cls_token"},
                                               {"conv_proj.", "patch_embed."},
                                               {"encoder.pos_embedding", "pos_embed"},
                                               {"encoder.layers.encoder_layer_", "blocks."},
                                               {"encoder.ln.", "norm."},
                                               {"heads.head.", "head."},
                                               {"patch_embed.proj.", "patch_embed."}}};
constexpr std::array<Renaming, 10> kInBlocks{{{".self_attention.in_proj_", ".attn.c_attn."},
                                              {".self_attention.out_proj.", ".attn.c_proj."},
                                              {".mlp.0.", ".mlp.c_fc."},
                                              {".mlp.3.", ".mlp.c_proj."},
                                              {".norm1.", ".ln_1."},
                                              {".norm2.", ".ln_2."},
                                              {".attn.qkv.", ".attn.c_attn."},
                                              {".attn.proj.", ".attn.c_proj."},
                                              {".mlp.fc1.", ".mlp.c_fc."},
                                              {".mlp.fc2.", ".mlp.c_proj."}}};

std::string mica_name(std::string name) {
  for (const Renaming& r : kBeginnings) {
    if (name.starts_with(r.from)) {
      name.replace(0, r.from.size(), r.to);
      break;
    }
  }
  if (name.starts_with("blocks.")) {
    for (const Renaming& r : kInBlocks) {
      if (const auto at = name.find(r.from); at != std::string::npos) {
        name.replace(at, r.from.size(), r.to);
        break;
      }
    }
  }
  return name;
}

}  // namespace

StateDict vit_state(const StateDict& state) {
  StateDict result;
  for (const auto& [name, tensor] : state) {
    const bool added = result.emplace(mica_name(name), tensor).second;
    check(added, "vit_state: two tensors are \"{}\" in mica, one of them \"{}\"", mica_name(name), name);
  }
  return result;
}

ViT::ViT(const ViTConfig& c)
    : config(checked(c)),
      cls_token(param("cls_token", zeros({1, 1, c.width}))),
      pos_embed(param("pos_embed", init::normal_(empty({1, tokens_of(c), c.width}), 0, 0.02))),
      patch_embed(child("patch_embed", Conv2d{c.channels, c.width, c.patch, {.stride = c.patch}})),
      drop(child("drop", Dropout{c.dropout})),
      blocks(child("blocks", ModuleList<TransformerBlock>{})),
      norm(child("norm", LayerNorm{c.width, {.eps = c.norm_eps}})),
      head(child("head", Linear{c.width, c.classes})) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    blocks.push_back(TransformerBlock{c.width,
                                      {.heads = c.heads,
                                       .dropout = c.dropout,
                                       .causal = false,
                                       .gelu = GeluApproximation::none,
                                       .norm_eps = c.norm_eps,
                                       .hidden = c.hidden}});
  }
  for (const auto& [name, parameter] : named_parameters()) {
    if (name.ends_with(".weight") && parameter.dim() >= 2) {
      init::normal_(parameter, 0, 0.02);
    } else if (name.ends_with(".bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor ViT::features(const Tensor& images) const {
  const Scope scope(*this);
  check(images.shape() == Shape({images.dim() > 0 ? images.size(0) : 1, config.channels, config.image, config.image}),
        "ViT: expected images of shape (B, {}, {}, {}), got {}", config.channels, config.image, config.image,
        images.shape());
  const std::int64_t batch = images.size(0), width = config.width;
  const Tensor patches = transpose(reshape(patch_embed(images), {batch, width, tokens_of(config) - 1}), 1, 2);
  const Tensor first = expand(cls_token.to(patches.dtype()), {batch, 1, width});
  ResidualAndBranch stream{drop(cat({first, patches}, 1) + pos_embed), {}};
  Tensor bias;  // of the branch
  for (const TransformerBlock& block : blocks) {
    const auto& [residual, branch] = stream;
    stream = block(residual, branch, bias);
    bias = block.mlp.c_proj.bias;
  }
  const auto& [residual, branch] = stream;
  return branch.defined() ? norm(branch, residual, drop, bias).y : norm(residual);
}

Tensor ViT::operator()(const Tensor& images) const {
  return call(*this, images, [&](const Tensor& images) { return head(select(features(images), 1, 0)); });
}

}  // namespace mica::nn
