#pragma once

namespace mica::gemm {

/// The order in which the output's tiles are processed: within a group of a few rows of tiles, column after column;
/// then the next group. The tiles that are processed at the same time then form about a square, and so read few
/// different rows of a and columns of b, which stay in the L2 cache: see README.md.
struct TileOrder {
  int rows;     // of tiles
  int columns;  // of tiles
  int group;    // rows in a group

  constexpr int size() const { return rows * columns; }

  struct Position {
    int row;
    int column;
  };
  __device__ Position position(int tile) const {
    const int first = tile / (group * columns) * group;
    const int height = min(group, rows - first);
    const int in_group = tile - first * columns;
    return {first + in_group % height, in_group / height};
  }
};

}  // namespace mica::gemm
