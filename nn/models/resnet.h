#pragma once

#include <cstdint>
#include <optional>

#include <mica/nn/batch_norm.h>
#include <mica/nn/containers.h>
#include <mica/nn/conv.h>
#include <mica/nn/linear.h>

namespace mica::nn {

struct ResNetConfig {
  std::int64_t depth = 18;  ///< 18 or 34, of blocks with two convolutions; 50, 101 or 152, of bottlenecks with three
  std::int64_t classes = 1000;
  std::int64_t channels = 3;  ///< of the images
  /// For images of about 32×32, as in the paper's CIFAR experiments: the first convolution is 3×3 with stride 1, and no
  /// pooling follows it.
  bool small_images = false;
};

/// A residual block, x (N, in, H, W) to (N, out, H / stride, W / stride): relu(branch(x) + shortcut(x)). The branch has
/// two convolutions of 3×3 or, in a bottleneck, of 1×1, 3×3 and 1×1 to four times as many channels. The stride is that
/// of the (first) 3×3. The shortcut is x or, where the shapes differ, a convolution of 1×1 with a norm.
class ResNetBlock : public Module {
 public:
  /// `width`: channels between the convolutions.
  ResNetBlock(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck);

  Tensor operator()(const Tensor& x) const;

  struct Downsample : Module {
    Downsample(std::int64_t in, std::int64_t out, std::int64_t stride);
    Tensor operator()(const Tensor& x) const;

    Conv2d conv;     // "0"
    BatchNorm2d bn;  // "1"
  };

  Conv2d conv1;
  BatchNorm2d bn1;
  Conv2d conv2;
  BatchNorm2d bn2;
  std::optional<Conv2d> conv3;  // in a bottleneck
  std::optional<BatchNorm2d> bn3;
  std::optional<Downsample> downsample;
};

/// A residual network (He et al., 2015, arXiv:1512.03385). In bottlenecks, the 3×3 convolution has the stride, as in
/// torchvision and timm, whose names the parameters have: conv1.weight, bn1.weight, layer1.0.conv1.weight,
/// layer1.0.downsample.0.weight, …, fc.weight.
///
/// Convolutions are initialized with normal weights of variance 2 / (out · kernel area) (He et al., 2015,
/// arXiv:1502.01852, "fan out"), norms with weight 1 and bias 0, the last layer as nn::Linear.
class ResNet : public Module {
 public:
  explicit ResNet(const ResNetConfig& config);  ///< throws for other depths, and unless classes and channels ≥ 1

  /// Images (N, channels, H, W) to logits (N, classes).
  Tensor operator()(const Tensor& images) const;
  /// The last feature maps, (N, C, H / 32, W / 32), rounded up; with small_images (N, C, H / 8, W / 8). C is 512, or
  /// 2048 with bottlenecks.
  Tensor features(const Tensor& images) const;

  ResNetConfig config;
  Conv2d conv1;
  BatchNorm2d bn1;
  ModuleList<ResNetBlock> layer1, layer2, layer3, layer4;
  Linear fc;
};

}  // namespace mica::nn
