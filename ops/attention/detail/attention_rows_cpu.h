#pragma once

// Vectorized access to rows of scores on the CPU, by Eigen's packets. Included by *_cpu.cpp only.

#include <Eigen/Core>

#include <algorithm>
#include <cstdint>

namespace mica::kernels {

/// A row of the accumulation type. It is aligned and padded to whole packets, so that results do not depend on its
/// address.
template <class S>
using Row = Eigen::Array<S, Eigen::Dynamic, 1>;
/// The first packets of a row.
template <class S>
using Head = Eigen::Map<Row<S>, Eigen::AlignedMax>;

/// n rounded up to a whole number of packets.
template <class S>
std::int64_t padded(std::int64_t n) {
  constexpr std::int64_t kPacket = Eigen::internal::packet_traits<S>::size;
  return (n + kPacket - 1) / kPacket * kPacket;
}

/// A row of n elements, multiplied by `scale`; the elements that pad it are `rest`.
template <class S, class T>
Head<S> load(const T* from, std::int64_t n, S scale, S rest, Row<S>& row) {
  std::transform(from, from + n, row.data(), [scale](T value) { return static_cast<S>(value) * scale; });
  std::fill(row.data() + n, row.data() + padded<S>(n), rest);
  return {row.data(), padded<S>(n)};
}

}  // namespace mica::kernels
