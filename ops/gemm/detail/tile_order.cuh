#pragma once

namespace mica::gemm {

/// The order of the output's tiles: within a group of a few rows of tiles, column after column. Tiles that are
/// processed at the same time then form about a square, and share rows of a and columns of b in the L2 cache: see
/// README.md.
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
