#pragma once

// Rows of scores on the CPU, as Eigen packets. Included by *_cpu.cpp only.

#include <Eigen/Core>

#include <algorithm>
#include <cstdint>

namespace mica::kernels {

/// A row in the accumulator's type. Aligned and a whole number of packets long, so that an element's result does not
/// depend on the row's address.
template <class S>
using Row = Eigen::Array<S, Eigen::Dynamic, 1>;
/// Its first packets.
template <class S>
using Head = Eigen::Map<Row<S>, Eigen::AlignedMax>;

/// n, rounded up to a whole number of packets.
template <class S>
std::int64_t padded(std::int64_t n) {
  constexpr std::int64_t kPacket = Eigen::internal::packet_traits<S>::size;
  return (n + kPacket - 1) / kPacket * kPacket;
}

/// The first n elements, times scale, then `rest`.
template <class S, class T>
Head<S> load(const T* from, std::int64_t n, S scale, S rest, Row<S>& row) {
  std::transform(from, from + n, row.data(), [scale](T value) { return static_cast<S>(value) * scale; });
  std::fill(row.data() + n, row.data() + padded<S>(n), rest);
  return {row.data(), padded<S>(n)};
}

}  // namespace mica::kernels
