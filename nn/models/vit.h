#pragma once

#include <cstdint>

#include <mica/core/state_dict.h>
#include <mica/nn/containers.h>
#include <mica/nn/conv.h>
#include <mica/nn/transformer.h>

namespace mica::nn {

/// The defaults are ViT-B/16's.
struct ViTConfig {
  std::int64_t image = 224;  ///< height and width of the images
  std::int64_t patch = 16;   ///< must divide image
  std::int64_t channels = 3;
  std::int64_t classes = 1000;
  std::int64_t layers = 12;
  std::int64_t heads = 12;  ///< must divide width
  std::int64_t width = 768;
  std::int64_t hidden = 3072;  ///< inner width of the feed-forward part
  double dropout = 0;
  double norm_eps = 1e-6;
};

/// A vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929): patches of an image and a class token pass
/// through pre-norm blocks with exact GELU; a linear layer classifies by the class token.
///
/// Initialized with normal weights of standard deviation 0.02; biases and the class token are 0, the norms' weights 1.
class ViT : public Module {
 public:
  explicit ViT(const ViTConfig& config);  ///< throws unless the sizes fit together

  /// Images (B, channels, image, image) to logits (B, classes).
  Tensor operator()(const Tensor& images) const;
  /// The normalized features of the class token and of each patch, (B, 1 + (image / patch)², width).
  Tensor features(const Tensor& images) const;

  ViTConfig config;
  Tensor cls_token;  ///< (1, 1, width)
  Tensor pos_embed;  ///< (1, 1 + (image / patch)², width)
  Conv2d patch_embed;
  Dropout drop;
  ModuleList<TransformerBlock> blocks;
  LayerNorm norm;
  Linear head;
};

/// The tensors of a ViT of timm or torchvision under the names of mica's ViT. Names that belong to neither stay, so
/// that load_state_dict() reports them.
StateDict vit_state(const StateDict& state);

}  // namespace mica::nn
