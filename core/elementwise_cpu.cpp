#include <algorithm>
#include <cstring>
#include <functional>

#include <mica/core/detail/blocks_cpu.h>
#include <mica/core/elementwise_cpu.h>

namespace mica::detail {

namespace {

// Minimum number of elements per thread; with fewer, another thread costs more than it saves.
constexpr std::int64_t kGrain = 16384;
// Elements of a gathered block. The rest of a run becomes a separate block if it has at least half of one.
constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kElementBytes = 8;  // at most

// The first kOuts of N operands are the outputs.
template <int N, int kOuts>
class Blocks {
 public:
  Blocks(const Shape& shape, const std::array<Operand, N>& operands, const std::array<DType, N>& dtypes,
         BlockFunction function, const void* f)
      : loop_(shape, tensors_of(operands), order_of(operands)), function_(function), f_(f) {
    for (int t = 0; t < N; ++t) {
      const Tensor* const tensor = operands[t].tensor;
      Elements& x = elements_[t];
      x.format = &element_format(dtypes[t]);
      x.stride = loop_.inner_stride(t);
      if (tensor != nullptr) {
        check(tensor->dtype() == dtypes[t], "elementwise: expected elements of {}, got {}", dtypes[t], tensor->dtype());
        x.data = tensor->raw_data();
      } else {
        on_dtype(AllTypes{}, dtypes[t], "elementwise", [&]<class T>() {
          const auto value = static_cast<Accumulate<T>>(operands[t].scalar);
          std::memcpy(x.scalar.data(), &value, sizeof value);
        });
      }
      std::int64_t step = 1;
      x.constant = true;
      x.adjacent = !x.format->converts();
      for (int axis = loop_.rank - 1; axis >= 0; --axis) {
        x.constant &= loop_.strides[t][axis] == 0;
        x.adjacent &= loop_.strides[t][axis] == step;
        step *= loop_.sizes[axis];
      }
      x.constant &= loop_.numel > 1 || tensor == nullptr;
    }
  }

  std::int64_t numel() const { return loop_.numel; }

  void run(std::int64_t begin, std::int64_t end) const {
    Position at = position_of(begin);
    Buffers buffers;
    while (begin < end) {
      const std::int64_t rest = std::min(end - begin, loop_.inner_size() - at.index[loop_.rank - 1]);
      begin += rest >= kBlock / 2 || rest == end - begin ? run_part(at, rest, buffers)
                                                         : run_patches(at, std::min(end - begin, kBlock), buffers);
    }
  }

 private:
  struct Elements {
    const ElementFormat* format = nullptr;
    std::byte* data = nullptr;  // null: the number `scalar`
    alignas(kElementBytes) std::array<std::byte, kElementBytes> scalar{};
    std::int64_t stride = 0;  // along the innermost axis
    bool constant = false;    // a single element for all positions
    bool adjacent = false;    // elements are adjacent in the order of the loop, and need no conversion
  };
  // The position of an element along each axis, and its offset in each tensor.
  struct Position {
    std::array<std::int64_t, kMaxRank> index{};
    std::array<std::int64_t, N> offset{};
  };
  struct Buffers {
    alignas(64) std::byte bytes[N][kBlock * kElementBytes];
    std::array<bool, N> filled{};  // with a constant
  };

  static std::array<const Tensor*, N> tensors_of(const std::array<Operand, N>& operands) {
    std::array<const Tensor*, N> tensors{};
    for (int t = 0; t < N; ++t) {
      tensors[t] = operands[t].tensor;
    }
    return tensors;
  }
  static Dims order_of(const std::array<Operand, N>& operands) {
    std::array<const Tensor*, kOuts> outs{};
    for (int t = 0; t < kOuts; ++t) {
      outs[t] = operands[t].tensor;
    }
    return memory_order(*first_output(outs));
  }

  std::byte* element(int t, const Position& at) const {
    return elements_[t].data + at.offset[t] * elements_[t].format->bytes;
  }
  // An input's constant, as an element of a block.
  const std::byte* constant(int t, const Position& at, std::byte* buffer) const {
    const Elements& x = elements_[t];
    if (x.data == nullptr) {
      return x.scalar.data();
    }
    if (!x.format->converts()) {
      return element(t, at);
    }
    x.format->gather(element(t, at), {1, 1, 1, 0}, buffer);
    return buffer;
  }
  void fill(int t, const Position& at, std::byte* buffer) const {
    const ElementFormat& format = *elements_[t].format;
    alignas(kElementBytes) std::byte value[kElementBytes];
    const std::byte* const from = constant(t, at, value);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      std::memcpy(buffer + i * format.block_bytes, from, format.block_bytes);
    }
  }

  // A null output is computed into its buffer.
  bool is_buffered(int out, bool adjacent) const { return elements_[out].data == nullptr || !adjacent; }

  // Computes up to n elements of one run. Returns how many.
  std::int64_t run_part(Position& at, std::int64_t n, Buffers& buffers) const {
    std::array<void*, N> data{};
    std::array<std::int64_t, N> strides{};
    for (int t = 0; t < N; ++t) {
      const Elements& x = elements_[t];
      const bool converts = t < kOuts ? is_buffered(t, !x.format->converts()) : x.format->converts() && x.stride != 0;
      n = std::min(n, converts ? kBlock : n);
    }
    for (int t = 0; t < N; ++t) {
      const Elements& x = elements_[t];
      strides[t] = x.stride;
      if (t < kOuts) {
        const bool buffered = is_buffered(t, !x.format->converts());
        data[t] = buffered ? buffers.bytes[t] : element(t, at);
        strides[t] = buffered ? 1 : x.stride;
      } else if (x.stride == 0) {
        data[t] = const_cast<std::byte*>(constant(t, at, buffers.bytes[t]));
        buffers.filled[t] = false;
      } else if (x.format->converts()) {
        x.format->gather(element(t, at), {n, x.stride, 1, 0}, buffers.bytes[t]);
        data[t] = buffers.bytes[t];
        strides[t] = 1;
      } else {
        data[t] = element(t, at);
      }
    }
    function_(f_, n, data.data(), data.data() + kOuts, strides.data());
    for (int t = 0; t < kOuts; ++t) {
      const Elements& out = elements_[t];
      if (out.data != nullptr && out.format->converts()) {
        out.format->scatter(buffers.bytes[t], {n, out.stride, 1, 0}, element(t, at));
      }
    }
    advance(at, n);
    return n;
  }

  // Computes n ≤ kBlock elements of several runs.
  std::int64_t run_patches(Position& at, std::int64_t n, Buffers& buffers) const {
    const Position start = at;
    std::array<void*, N> data{};
    std::array<bool, N> gathers{};
    std::array<std::int64_t, N> strides{};
    strides.fill(1);
    for (int t = 0; t < kOuts; ++t) {
      data[t] = is_buffered(t, elements_[t].adjacent) ? buffers.bytes[t] : element(t, start);
    }
    for (int t = kOuts; t < N; ++t) {
      const Elements& x = elements_[t];
      if (x.adjacent) {
        data[t] = element(t, at);
      } else if (N == 3 && kOuts == 1 && x.constant && strides[1] != 0) {
        strides[t] = 0;
        data[t] = const_cast<std::byte*>(constant(t, at, buffers.bytes[t]));
        buffers.filled[t] = false;
      } else if (x.constant) {
        if (!buffers.filled[t]) {
          fill(t, at, buffers.bytes[t]);
          buffers.filled[t] = true;
        }
        data[t] = buffers.bytes[t];
      } else {
        gathers[t] = true;
        data[t] = buffers.bytes[t];
      }
    }
    for_each_patch(at, n, [&](const Position& from, std::int64_t done, std::int64_t count, std::int64_t rows) {
      for (int t = kOuts; t < N; ++t) {
        if (gathers[t]) {
          const ElementFormat& format = *elements_[t].format;
          format.gather(element(t, from), patch(t, count, rows), buffers.bytes[t] + done * format.block_bytes);
        }
      }
    });
    function_(f_, n, data.data(), data.data() + kOuts, strides.data());
    for (int t = 0; t < kOuts; ++t) {
      if (elements_[t].data == nullptr || elements_[t].adjacent) {
        continue;
      }
      Position to = start;
      for_each_patch(to, n, [&](const Position& place, std::int64_t done, std::int64_t count, std::int64_t rows) {
        const ElementFormat& format = *elements_[t].format;
        format.scatter(buffers.bytes[t] + done * format.block_bytes, patch(t, count, rows), element(t, place));
      });
    }
    return n;
  }

  Patch patch(int t, std::int64_t count, std::int64_t rows) const {
    return {count, elements_[t].stride, rows, loop_.rank > 1 ? loop_.strides[t][loop_.rank - 2] : 0};
  }

  // Advances `at` by n elements, in patches: parts of a run, or several whole runs along the second innermost axis.
  // Calls f(at, elements done so far, elements of a run, runs) for each.
  template <class F>
  void for_each_patch(Position& at, std::int64_t n, const F& f) const {
    const int last = loop_.rank - 1;
    const std::int64_t run = loop_.inner_size();
    for (std::int64_t done = 0; done < n;) {
      std::int64_t count = std::min(n - done, run - at.index[last]);
      std::int64_t rows = 1;
      if (count == run && last > 0) {
        rows = std::min((n - done) / run, loop_.sizes[last - 1] - at.index[last - 1]);
      }
      f(at, done, count, rows);
      done += count * rows;
      if (rows == 1) {
        advance(at, count);
        continue;
      }
      at.index[last - 1] += rows - 1;
      for (int t = 0; t < N; ++t) {
        at.offset[t] += loop_.strides[t][last - 1] * (rows - 1);
      }
      advance(at, run);
    }
  }

  Position position_of(std::int64_t element) const {
    Position at;
    for (int axis = loop_.rank - 1; axis >= 0 && element > 0; --axis) {
      at.index[axis] = element % loop_.sizes[axis];
      element /= loop_.sizes[axis];
      for (int t = 0; t < N; ++t) {
        at.offset[t] += at.index[axis] * loop_.strides[t][axis];
      }
    }
    return at;
  }

  // Advances by n elements, at most to the end of the run; from there to the start of the next.
  void advance(Position& at, std::int64_t n) const {
    std::int64_t step = n;
    for (int axis = loop_.rank - 1; axis >= 0; --axis, step = 1) {
      at.index[axis] += step;
      const bool wraps = at.index[axis] == loop_.sizes[axis];
      for (int t = 0; t < N; ++t) {
        at.offset[t] += loop_.strides[t][axis] * (wraps ? step - loop_.sizes[axis] : step);
      }
      if (!wraps) {
        break;
      }
      at.index[axis] = 0;
    }
  }

  StridedLoop<N> loop_;
  BlockFunction function_;
  const void* f_;
  std::array<Elements, N> elements_{};
};

}  // namespace

template <int N, int kOuts>
void for_each_block(const Shape& shape, const std::array<Operand, N>& operands, const std::array<DType, N>& dtypes,
                    BlockFunction function, const void* f) {
  const Blocks<N, kOuts> blocks(shape, operands, dtypes, function, f);
  if (blocks.numel() <= kGrain) {
    blocks.run(0, blocks.numel());
  } else {
    parallel_for(blocks.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) { blocks.run(begin, end); });
  }
}

#define MICA_INSTANTIATE(N, kOuts)                                                                                 \
  template void for_each_block<N, kOuts>(const Shape&, const std::array<Operand, N>&, const std::array<DType, N>&, \
                                         BlockFunction, const void*)
MICA_INSTANTIATE(1, 1);
MICA_INSTANTIATE(2, 1);
MICA_INSTANTIATE(3, 1);
MICA_INSTANTIATE(4, 1);
MICA_INSTANTIATE(5, 1);
MICA_INSTANTIATE(5, 2);
#undef MICA_INSTANTIATE

}  // namespace mica::detail
