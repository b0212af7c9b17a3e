#pragma once

// How an epilogue moves a tile between registers and global memory: through buffers in shared memory, in whole lines.
//
//     accumulators ── stmatrix ──▶ buffer, 64 rows and 64 columns, swizzled ── TMA ──▶ the output
//     registers    ◀── ldmatrix ── buffer                                   ◀── TMA ── a residual, slopes
//
// A lane of a warpgroup has, of each 16 columns, columns 2 t and 2 t + 1 of both halves (t = lane % 4), in two rows
// that are 8 apart. In one lane's four pairs, pair j is of row j % 2 and of the 8 columns j / 2.

#include <mica/ops/gemm/detail/mainloop_sm90.cuh>

namespace mica::gemm {

/// Two elements in one register as floats.
template <class T>
__device__ float2 floats_of(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Float16>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

/// A warpgroup's buffers. Copies between them and global memory are started by its first thread.
template <int kCount>
struct TileBuffers {
  unsigned char (&memory)[kCount][kChunkBytes];
  int consumer;  // the warpgroup's index among the consumers
  int next = 0;  // the buffer to use next

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return thread() / 32; }
  __device__ void sync() const { cuda::barrier_sync(1 + consumer, kWarpgroup); }

  /// The first of this lane's columns of pair j of the i-th 16 columns of a chunk.
  __device__ int column(int i, int j) const { return i * 16 + j / 2 * 8 + lane() % 4 * 2; }

  /// Takes the next kTaken buffers and waits until the copy engine has read their previous contents.
  template <int kTaken = 1>
  __device__ int take() {
    const int taken = next;
    next = (next + kTaken) % kCount;
    if (thread() == 0) {
      cuda::wait_stores_read<kCount / kTaken - 1>();
    }
    sync();
    return taken;
  }

  /// Starts to load a tile of a matrix into all buffers: chunk after chunk, kHalves times 64 rows of each.
  template <int kHalves, class Tile>
  __device__ void load(const CUtensorMap* map, const Tile& tile) const {
    if (thread() == 0) {
      cuda::wait_stores_read<0>();  // until the previous tile's output has been read from the buffers
      cuda::arrive_expecting(tile.loaded, kCount * kChunkBytes);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        cuda::load_tile(memory[i], map, tile.column + i / kHalves * kChunk, tile.row + i % kHalves * kHalfRows,
                        tile.loaded);
      }
    }
  }

  /// Reads the lane's pairs of the i-th 16 columns.
  __device__ void get(int buffer, int i, std::uint32_t (&pairs)[4]) const {
    cuda::load_matrices(pairs, address(buffer, i));
  }
  __device__ void put(int buffer, int i, const std::uint32_t (&pairs)[4]) const {
    cuda::store_matrices(address(buffer, i), pairs);
  }

  /// Calls start(), which starts copies of buffers that all threads have filled, in one thread.
  template <class F>
  __device__ void store(const F& start) const {
    cuda::fence_async_proxy();
    sync();
    if (thread() == 0) {
      start();
      cuda::commit_stores();
    }
  }

  /// Stores 64 rows and kChunks * 64 columns to y, which has `columns` columns, from `row` and `column` on; elements
  /// outside of y are skipped. value_of(first)(s, c) computes the elements of columns c and c + 1 from their sums s[0]
  /// and s[1]; `first` is the first column of their chunk.
  template <class T, int kChunks, class F>
  __device__ void write(const CUtensorMap* y, int row, int column, int columns, const float* sums, const F& value_of) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int first = column + chunk * kChunk;
      if (first >= columns) {
        return;
      }
      const auto value = value_of(first);
      const int buffer = take();
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = value(sums + chunk * (kChunk / 2) + i * 8 + 2 * j, first + this->column(i, j));
          pairs[j] = cuda::pair_of<T>(two.x, two.y);
        }
        put(buffer, i, pairs);
      }
      store([&] { cuda::store_tile(y, first, row, memory[buffer]); });
    }
  }

 private:
  /// The address that this lane passes to ldmatrix or stmatrix: the 16 bytes (2 i + lane / 16) of line
  /// 16 warp + lane % 16, at the position where the swizzle of the tensor maps puts them.
  __device__ unsigned char* address(int buffer, int i) const {
    const int line = warp() * 16 + lane() % 16;
    return memory[buffer] + line * kLineBytes + ((2 * i + lane() / 16) ^ (line % 8)) * 16;
  }
};

}  // namespace mica::gemm
