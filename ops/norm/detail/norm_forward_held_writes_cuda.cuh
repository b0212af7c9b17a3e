#pragma once

// The last step for held rows: y of a thread's elements, from the row's moments, weight and bias.

#include <mica/ops/norm/detail/norm_forward_held_parameters_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_held_rows_cuda.cuh>

namespace mica::kernels::norm_cuda {

// Writes y of a thread's single elements. Loads weight and bias of several elements at once.
template <bool kBoth, class H, class S>
__device__ void write_elements(const RowPacks<H>& row, const Place<H>& place, S mean, S rstd,
                               const Parameters<H>& parameters, typename H::T* y) {
  constexpr int kAtOnce = 8;
  const S offset = -mean * rstd;
#pragma unroll
  for (int begin = 0; begin < H::P; begin += kAtOnce) {
    S w[kAtOnce][1];
    S b[kAtOnce][1];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k < H::P && place.has(begin + k)) {
        parameters.template at<kBoth>(begin + k, 0, w[k], b[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = begin + k;
      if (i < H::P && place.has(i)) {
        S value[1];
        row.differences(i, place, value);
        value[0] = H::N::kCentered ? fma(fma(value[0], rstd, offset), w[k][0], b[k][0]) : value[0] * rstd * w[k][0];
        store(y + i * H::kStep, pack_of<typename H::T>(value));
      }
    }
  }
}

// Writes those elements of pack i that are in the row.
template <class H, class T, int V>
__device__ void store_edge(const Place<H>& place, int i, T* y, const Pack<T, V>& pack) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j >= place.first_of(i) && j < place.end_of(i)) {
      y[j] = pack.at[j];
    }
  }
}

// Writes y of a thread's packs of a row that may begin and end inside packs. kEdges: the warp has edges.
template <bool kEdges, class H, class S>
__device__ void write_packs_by_column(const RowPacks<H>& row, const Place<H>& place, S mean, S rstd,
                                      const Parameters<H>& parameters, typename H::T* y) {
  using T = typename H::T;
  constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
  const S offset = -mean * rstd;
  const typename Parameters<H>::OfRow entries = parameters.of_row(place);
  // Not all packs at once if the entries for them would take too many registers.
  constexpr int kAtOnce = H::kWarps && H::P >= 4 ? H::P / 2 : H::P;
#pragma unroll
  for (int begin = 0; begin < H::P; begin += kAtOnce) {
    Pack<T, H::V> packs[kAtOnce];
#pragma unroll
    for (int j = 0; j < H::V; j += kPair) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        S values[H::V];
        row.differences(begin + i, place, values);
        S pair[kPair];
#pragma unroll
        for (int k = 0; k < kPair; ++k) {
          S w;
          S b;
          entries.at(begin + i, j + k, w, b);
          const S value = values[j + k];
          pair[k] = H::N::kCentered ? fma(fma(value, rstd, offset), w, b) : value * rstd * w;
        }
        reinterpret_cast<Pack<T, kPair>&>(packs[i].at[j]) = pack_of<T>(pair);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool may_be_edge = kEdges && place.may_be_edge(begin + i);
      if (place.has(begin + i)) {
        if (may_be_edge && place.is_edge(begin + i)) {
          store_edge(place, begin + i, y + (begin + i) * H::kStep, packs[i]);
        } else {
          store_whole(y + (begin + i) * H::kStep, packs[i]);
        }
      }
    }
  }
}

// Writes y of a thread's packs. kBoth: weight and bias are known to be present.
template <bool kBoth, class H, class S>
__device__ void write_packs(const RowPacks<H>& row, const Place<H>& place, S mean, S rstd,
                            const Parameters<H>& parameters, typename H::T* y) {
  constexpr int kPart = Parameters<H>::kPart;
  const S offset = -mean * rstd;
#pragma unroll
  for (int i = 0; i < H::P; ++i) {
    if (place.has(i)) {
      S values[H::V];
      row.differences(i, place, values);
#pragma unroll
      for (int part = 0; part < H::V; part += kPart) {
        S w[kPart];
        S b[kPart];
        parameters.template at<kBoth>(i, part, w, b);
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          S& value = values[part + j];
          value = H::N::kCentered ? fma(fma(value, rstd, offset), w[j], b[j]) : value * rstd * w[j];
        }
      }
      const Pack<typename H::T, H::V> pack = pack_of<typename H::T>(values);
      if constexpr (sizeof(pack) == 16) {
        store_whole(y + i * H::kStep, pack);
      } else {
        store(y + i * H::kStep, pack);
      }
    }
  }
}

}  // namespace mica::kernels::norm_cuda
