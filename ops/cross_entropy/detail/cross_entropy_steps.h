#pragma once

// Steps shared by cross_entropy and linear_cross_entropy.

#include <mica/core/tensor.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>

namespace mica::detail {

/// Throws, naming `op`, unless targets and options are valid for logits of this shape, dtype and device.
void check_cross_entropy(const char* op, const Shape& logits, DType dtype, Device device, const Tensor& targets,
                         const CrossEntropyOptions& options);

/// The classes' weights in the form that kernels require; undefined if there are none.
Tensor class_weights(const CrossEntropyOptions& options, DType logits_dtype);

/// x's elements in row-major order, reshaped, without history.
Tensor packed(const Tensor& x, const Shape& shape);

/// The targets of `rows` rows in row-major order. On the CPU, throws an Error that names `op` if a label is neither a
/// class nor ignore_index.
Tensor packed_targets(const char* op, const Tensor& targets, std::int64_t rows, std::int64_t classes,
                      std::int64_t ignore_index);

/// The arguments of the kernels for a matrix of logits. They refer to this function's arguments, which must outlive
/// them.
kernels::CrossEntropyTerms terms_of(const CrossEntropyOptions& options, const Tensor& logits, const Tensor& targets,
                                    const Tensor& weight);

/// The divisor of a mean, (1); undefined for other reductions. `targets` is from packed_targets().
Tensor mean_denominator(const CrossEntropyOptions& options, const Tensor& targets, const Tensor& weight,
                        DType logits_dtype);

/// The loss that an op returns: its rows' losses, reduced, in their dtype.
Tensor reduced(const CrossEntropyOptions& options, const Tensor& losses, const Tensor& denominator, const Shape& rows);

/// Multiplies gradient (…, n), row-major, in place by `factor`, which is one number, or one per row. Not recorded.
/// Where the factor is 1, the gradient is neither read nor written.
void scale_gradient(const Tensor& gradient, const Tensor& factor);

}  // namespace mica::detail
