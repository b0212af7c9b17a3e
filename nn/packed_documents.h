#pragma once

#include <mica/core/check.h>
#include <mica/core/tensor.h>

namespace mica::nn {

/// Several documents packed into each row of a batch: see io::TokenWindows. Both (B, T), int64 or int32; undefined if
/// the rows are single documents.
struct PackedDocuments {
  Tensor positions;  ///< of each token in its document
  Tensor documents;  ///< the number of its document; attention stays within equal numbers

  /// Throws unless each is undefined or of the shape of `tokens`. `model` begins the message.
  void check_shapes(const char* model, const Tensor& tokens) const {
    for (const Tensor& x : {positions, documents}) {
      check(!x.defined() || x.shape() == tokens.shape(), "{}: expected positions and documents of shape {}, got {}",
            model, tokens.shape(), x.defined() ? x.shape() : Shape{});
    }
  }
};

}  // namespace mica::nn
