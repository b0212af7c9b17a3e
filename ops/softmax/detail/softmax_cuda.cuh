#pragma once

#include <cstdint>

namespace mica::kernels {

// softmax, or log_softmax with kLog, of rows (rows, n) that lie one after another, and their backward. False, with
// nothing done, where rows are too long for the registers of a block, or where they or their lengths are not aligned to
// 16 bytes. T: float, Half or BFloat16.

template <class T, bool kLog>
bool softmax_held(const T* x, T* y, std::int64_t rows, std::int64_t n);

template <class T, bool kLog>
bool softmax_backward_held(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t n);

}  // namespace mica::kernels
