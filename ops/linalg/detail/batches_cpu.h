#pragma once

// Eigen's views of batches of matrices. Included by *_cpu.cpp only.

#include <Eigen/Core>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
template <class T>
using MatrixMap = Eigen::Map<Matrix<T>>;

// Matrix i of a batch.
template <class T>
MatrixMap<T> matrix_of(const Tensor& x, std::int64_t i) {
  const std::int64_t columns = x.shape()[1];
  const std::int64_t rows = x.shape()[2];
  return {x.data<T>() + i * columns * rows, rows, columns};
}

template <class T>
Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> row_of(const Tensor& x, std::int64_t i) {
  const std::int64_t n = x.shape()[1];
  return {x.data<T>() + i * n, n};
}

// Calls f.operator()<T>(i) for each matrix of the batch, in parallel. An algorithm takes about rows · columns · depth
// steps.
template <class F>
void for_each_matrix(const Tensor& a, std::int64_t depth, const char* op, const F& f) {
  const std::int64_t grain = 1 + 20'000 / (a.shape()[1] * a.shape()[2] * depth);
  on_dtype(Types<float, double>{}, a.dtype(), op, [&]<class T>() {
    parallel_for(a.shape()[0], grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        f.template operator()<T>(i);
      }
    });
  });
}

}  // namespace mica::kernels
