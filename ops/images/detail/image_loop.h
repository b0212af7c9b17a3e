#pragma once

// Loops over the elements of images that each compute one element, or a pack of neighboring ones, from others. A body
// is a struct that both devices call:
//
//     using Element = T;                                   // of the tensors that it reads and writes in packs
//     template <int V> MICA_HOST_DEVICE void compute(const images::Place& p) const;
//
// It computes V inner elements of the grid, from place p on. image_loop_cpu.h and image_loop.cuh have the loops:
//
//     for_images(device, name, grid, body, work, aligned)
//
// calls it for all elements of the grid. `name` is the kernel's, for profilers; `work` is about the number of elements
// that each reads; `aligned`: all data that is accessed in packs is aligned to 16 bytes.

#include <type_traits>

#include <mica/core/dtype.h>
#include <mica/ops/images/detail/image_grid.h>

#if defined(__CUDACC__)
#include <mica/core/cuda/pack.cuh>
#endif

namespace mica::images {

/// V elements as numbers of the type of sums.
template <int V, class T, class S>
MICA_HOST_DEVICE inline void read(const T* from, S (&values)[V]) {
#if defined(__CUDA_ARCH__)
  cuda::unpack(cuda::load<V>(from), values);
#else
  for (int i = 0; i < V; ++i) {
    values[i] = static_cast<S>(from[i]);
  }
#endif
}

template <int V, class T, class S>
MICA_HOST_DEVICE inline void write(T* to, const S (&values)[V]) {
#if defined(__CUDA_ARCH__)
  cuda::store(to, cuda::pack_of<T>(values));
#else
  for (int i = 0; i < V; ++i) {
    to[i] = static_cast<T>(values[i]);
  }
#endif
}

/// Whether the data of all defined tensors is aligned to 16 bytes.
template <class... Tensors>
bool are_aligned(const Tensors&... tensors) {
  return ((!tensors.defined() || reinterpret_cast<std::uintptr_t>(tensors.raw_data()) % 16 == 0) && ...);
}

}  // namespace mica::images
