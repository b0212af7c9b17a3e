#pragma once

#include <mica/core/check.h>
#include <mica/core/tensor.h>

namespace mica::nn {

/// Describes several documents packed into each row of a batch: see io::TokenWindows. Both tensors are (B, T), int64 or
/// int32, or undefined if each row is one document.
struct PackedDocuments {
  Tensor positions;  ///< of each token in its document
  Tensor documents;  ///< the number of each token's document; tokens attend only to their own document

  /// Throws unless each is undefined or has the shape of `tokens`. The message starts with `model`.
  void check_shapes(const char* model, const Tensor& tokens) const {
    for (const Tensor& x : {positions, documents}) {
      check(!x.defined() || x.shape() == tokens.shape(), "{}: expected positions and documents of shape {}, got {}",
            model, tokens.shape(), x.defined() ? x.shape() : Shape{});
    }
  }
};

}  // namespace mica::nn
