#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/recurrent/recurrent.h>

namespace mica::kernels {

// One step of a recurrent layer, B sequences at a time. All tensors are contiguous; c, dh and dc have the accumulate
// dtype, all others the op's. H is not 0, nor is B.

struct CellForward {
  Recurrence kind;
  Tensor x;         // (B, G H): the gates' part from the input
  Tensor product;   // (B, G H): … and from the hidden state
  Tensor h_before;  // (B, H)
  Tensor c_before;  // (B, H), lstm
  Tensor saved;     // output (B, K H), K = recurrent_saved(kind); may be x if the sizes agree
  Tensor h;         // output (B, H)
  Tensor c;         // output (B, H), lstm
  Tensor lengths;   // (B), int64, or undefined
  std::int64_t step;
};

struct CellBackward {
  Recurrence kind;
  Tensor saved;       // (B, K H)
  Tensor h_before;    // (B, H)
  Tensor h;           // (B, H)
  Tensor c_before;    // (B, H), lstm
  Tensor c;           // (B, H), lstm
  Tensor dy;          // (B, H)
  Tensor dh_product;  // (B, H): h's gradient through the next step's product
  Tensor dh;          // (B, H): the rest of h's gradient, replaced by that of h_before
  Tensor dc;          // (B, H), lstm: replaced by that of c_before
  Tensor dx;          // output (B, G H)
  Tensor dp;          // output (B, G H): the product's gradient. The same tensor as dx, except for gru
  Tensor lengths;     // (B), int64, or undefined
  std::int64_t step;
};

void cell_forward(Cpu, const CellForward& args);
void cell_forward(Cuda, const CellForward& args);
void cell_backward(Cpu, const CellBackward& args);
void cell_backward(Cuda, const CellBackward& args);

/// The number of values, in units of H, that a step saves for backward.
inline int recurrent_saved(Recurrence kind) { return kind == Recurrence::lstm || kind == Recurrence::gru ? 4 : 0; }

/// A matrix b (K, N), readable (matmul/detail/layout.h), packed for products on the CPU. Undefined if that does not
/// pay: other dtypes, or a K that is too long.
Tensor pack_for_products(Cpu, const Tensor& b);
inline Tensor pack_for_products(Cuda, const Tensor&) { return {}; }

/// out (M, N) = a (M, K) · b + bias, for a packed b. a and out are contiguous, and `bias` (N) may be undefined.
void multiply_packed(Cpu, const Tensor& a, const Tensor& packed, const Tensor& bias, const Tensor& out);
inline void multiply_packed(Cuda, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}

}  // namespace mica::kernels
