#pragma once

// The table of model families. A family is a class of models that io reads and writes in the formats of other programs.
// What io has to know of one is a value (families/detail/family.h), in a file of its own beside this one.

#include <type_traits>
#include <variant>

#include <mica/nn/models/bert.h>
#include <mica/nn/models/gemma.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/models/llama.h>
#include <mica/nn/models/modern_bert.h>
#include <mica/nn/models/starcoder.h>

namespace mica::io {

/// Any of the supported models.
using PretrainedModel = std::variant<nn::GPT, nn::Llama, nn::Gemma, nn::Starcoder, nn::Bert, nn::ModernBert>;

namespace detail {

template <class Model>
struct ModelFamily;

template <class Model>
const ModelFamily<Model>& family();
template <>
const ModelFamily<nn::GPT>& family();
template <>
const ModelFamily<nn::Llama>& family();
template <>
const ModelFamily<nn::Gemma>& family();
template <>
const ModelFamily<nn::Starcoder>& family();
template <>
const ModelFamily<nn::Bert>& family();
template <>
const ModelFamily<nn::ModernBert>& family();

// To add a family, add its class to the list and to the declarations above.

template <class Models>
struct ModelTable;
template <class... Models>
struct ModelTable<std::variant<Models...>> {
  using Configs = std::variant<decltype(Models::config)...>;
  using Pointers = std::variant<Models*...>;
  using ConstPointers = std::variant<const Models*...>;
  template <class Model>
  static constexpr bool has = (std::is_same_v<Model, Models> || ...);
};
using Models = ModelTable<PretrainedModel>;

}  // namespace detail

/// The configuration of any of them.
using PretrainedConfig = detail::Models::Configs;

/// A model of any family, or the one in a PretrainedModel, as an argument of a function. Models convert to it.
class ModelReference {
 public:
  template <class Model>
  requires(detail::Models::has<Model>) ModelReference(Model& model) : pointer_(&model) {}
  ModelReference(PretrainedModel& any)
      : pointer_(std::visit([](auto& model) { return detail::Models::Pointers(&model); }, any)) {}

  template <class F>
  decltype(auto) visit(const F& f) const {
    return std::visit([&](auto* model) -> decltype(auto) { return f(*model); }, pointer_);
  }

 private:
  detail::Models::Pointers pointer_;
};

/// The same for a model that is not changed.
class ConstModelReference {
 public:
  template <class Model>
  requires(detail::Models::has<Model>) ConstModelReference(const Model& model) : pointer_(&model) {}
  ConstModelReference(const PretrainedModel& any)
      : pointer_(std::visit([](const auto& model) { return detail::Models::ConstPointers(&model); }, any)) {}

  template <class F>
  decltype(auto) visit(const F& f) const {
    return std::visit([&](const auto* model) -> decltype(auto) { return f(*model); }, pointer_);
  }

 private:
  detail::Models::ConstPointers pointer_;
};

}  // namespace mica::io
