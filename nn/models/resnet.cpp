#include <array>
#include <cmath>

#include <mica/nn/init.h>
#include <mica/nn/models/resnet.h>
#include <mica/ops/pool/pool.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

constexpr std::int64_t kExpansion = 4;  // of a bottleneck's last convolution

struct Depth {
  std::int64_t layers;
  bool bottleneck;
  std::array<std::int64_t, 4> blocks;
};

constexpr std::array<Depth, 5> kDepths{{{18, false, {2, 2, 2, 2}},
                                        {34, false, {3, 4, 6, 3}},
                                        {50, true, {3, 4, 6, 3}},
                                        {101, true, {3, 4, 23, 3}},
                                        {152, true, {3, 8, 36, 3}}}};

const Depth& depth_of(const ResNetConfig& c) {
  for (const Depth& depth : kDepths) {
    if (depth.layers == c.depth) {
      return depth;
    }
  }
  fail("ResNet: expected a depth of 18, 34, 50, 101 or 152, got {}", c.depth);
}

const ResNetConfig& checked(const ResNetConfig& c) {
  check(c.classes >= 1 && c.channels >= 1, "ResNet: expected classes and channels of at least 1, got {} and {}",
        c.classes, c.channels);
  return c;
}

// Convolutions without bias, since a norm follows each.
Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return Conv2d{in, out, kernel, {.stride = stride, .padding = kernel / 2, .bias = false}};
}

ModuleList<ResNetBlock> layer(const Depth& depth, int index) {
  const std::int64_t width = std::int64_t{64} << index, out = depth.bottleneck ? kExpansion * width : width;
  std::int64_t in = index == 0 ? 64 : out / 2, stride = index == 0 ? 1 : 2;
  ModuleList<ResNetBlock> blocks;
  for (std::int64_t i = 0; i < depth.blocks[static_cast<std::size_t>(index)]; ++i) {
    blocks.push_back(ResNetBlock{in, width, stride, depth.bottleneck});
    in = out;
    stride = 1;
  }
  return blocks;
}

}  // namespace

ResNetBlock::Downsample::Downsample(std::int64_t in, std::int64_t out, std::int64_t stride)
    : conv(child("0", nn::conv(in, out, 1, stride))), bn(child("1", BatchNorm2d{out})) {}

Tensor ResNetBlock::Downsample::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return bn(conv(x)); });
}

ResNetBlock::ResNetBlock(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck)
    : conv1(child("conv1", bottleneck ? conv(in, width, 1, 1) : conv(in, width, 3, stride))),
      bn1(child("bn1", BatchNorm2d{width})),
      conv2(child("conv2", conv(width, width, 3, bottleneck ? stride : 1))),
      bn2(child("bn2", BatchNorm2d{width})) {
  const std::int64_t out = bottleneck ? kExpansion * width : width;
  if (bottleneck) {
    conv3.emplace(child("conv3", conv(width, out, 1, 1)));
    bn3.emplace(child("bn3", BatchNorm2d{out}));
  }
  if (in != out || stride != 1) {
    downsample.emplace(child("downsample", Downsample{in, out, stride}));
  }
}

Tensor ResNetBlock::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    const Tensor shortcut = downsample ? (*downsample)(x) : x;
    const Tensor y = conv2(bn1.with_relu(conv1(x)));
    return conv3 ? bn3->with_relu((*conv3)(bn2.with_relu(y)), shortcut) : bn2.with_relu(y, shortcut);
  });
}

ResNet::ResNet(const ResNetConfig& c)
    : config(checked(c)),
      conv1(child("conv1", c.small_images ? conv(c.channels, 64, 3, 1) : conv(c.channels, 64, 7, 2))),
      bn1(child("bn1", BatchNorm2d{64})),
      layer1(child("layer1", layer(depth_of(c), 0))),
      layer2(child("layer2", layer(depth_of(c), 1))),
      layer3(child("layer3", layer(depth_of(c), 2))),
      layer4(child("layer4", layer(depth_of(c), 3))),
      fc(child("fc", Linear{depth_of(c).bottleneck ? 512 * kExpansion : 512, c.classes})) {
  for (const auto& [name, weight] : named_parameters()) {
    if (weight.dim() == 4) {
      const double fan_out = static_cast<double>(weight.size(0) * weight.size(2) * weight.size(3));
      init::normal_(weight, 0, std::sqrt(2 / fan_out));
    }
  }
}

Tensor ResNet::features(const Tensor& images) const {
  const Scope scope(*this);
  check(images.dim() == 4 && images.size(1) == config.channels,
        "ResNet: expected images of shape (N, {}, H, W), got {}", config.channels, images.shape());
  Tensor x = bn1.with_relu(conv1(images));
  if (!config.small_images) {
    x = max_pool2d(x, 3, {.stride = 2, .padding = 1});
  }
  for (const ModuleList<ResNetBlock>* const blocks : {&layer1, &layer2, &layer3, &layer4}) {
    for (const ResNetBlock& block : *blocks) {
      x = block(x);
    }
  }
  return x;
}

Tensor ResNet::operator()(const Tensor& images) const {
  return call(*this, images,
              [&](const Tensor& images) { return fc(flatten(adaptive_avg_pool2d(features(images), 1), 1)); });
}

}  // namespace mica::nn
