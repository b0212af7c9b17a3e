#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/detail/callable.h>
#include <mica/nn/module.h>

namespace mica::nn {

/// Modules of one type, named "0", "1", …
template <std::derived_from<Module> M>
class ModuleList : public Module {
 public:
  ModuleList() = default;

  void push_back(M&& module) {
    static_assert(std::is_nothrow_move_constructible_v<M>, "ModuleList: a growing list moves its modules");
    modules_.push_back(child(std::to_string(modules_.size()), std::move(module)));
  }

  std::size_t size() const { return modules_.size(); }
  /// Throws unless i < size().
  M& operator[](std::size_t i) { return modules_[checked(i)]; }
  const M& operator[](std::size_t i) const { return modules_[checked(i)]; }
  auto begin() { return modules_.begin(); }
  auto end() { return modules_.end(); }
  auto begin() const { return modules_.begin(); }
  auto end() const { return modules_.end(); }

 private:
  std::size_t checked(std::size_t i) const {
    check(i < size(), "ModuleList: index {} is out of range for {} modules", i, size());
    return i;
  }

  std::vector<M> modules_;
};

/// Layers applied in order, named "0", "1", …: modules, or any functions from a Tensor to a Tensor.
///
///     nn::Sequential mlp{nn::Linear{784, 256}, nn::ReLU{}, nn::Linear{256, 10}};
class Sequential : public Module {
 public:
  Sequential() = default;
  template <class... Layers>
  requires(std::is_invocable_r_v<Tensor, const Layers&, const Tensor&>&&...) explicit Sequential(Layers... layers) {
    (push_back(std::move(layers)), ...);
  }
  Sequential(Sequential&&) noexcept = default;
  Sequential(const Sequential& other) : Module(other) {  // for nn::clone()
    for (const auto& layer : other.layers_) {
      layers_.push_back(layer->copy());
    }
  }

  template <class L>
  requires std::is_invocable_r_v<Tensor, const L&, const Tensor&>
  void push_back(L layer) {
    check_callable(layer, "Sequential");
    if constexpr (std::derived_from<L, Module>) {
      layers_.push_back(std::make_unique<Holder<L>>(child(std::to_string(layers_.size()), std::move(layer))));
    } else {
      layers_.push_back(std::make_unique<Holder<L>>(std::move(layer)));
    }
  }

  std::size_t size() const { return layers_.size(); }

  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [this](const Tensor& input) {
      Tensor y = input;
      for (const auto& layer : layers_) {
        y = layer->call(y);
      }
      return y;
    });
  }

 private:
  struct Layer {
    virtual ~Layer() = default;
    virtual Tensor call(const Tensor& x) const = 0;
    virtual std::unique_ptr<Layer> copy() const = 0;
  };

  template <class L>
  struct Holder final : Layer {
    explicit Holder(L held) : layer(std::move(held)) {}
    Tensor call(const Tensor& x) const override { return layer(x); }
    std::unique_ptr<Layer> copy() const override {
      if constexpr (std::is_copy_constructible_v<L>) {
        return std::make_unique<Holder<L>>(*this);
      } else {
        fail("clone: a layer of a Sequential cannot be copied");
      }
    }
    L layer;
  };

  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace mica::nn
