#include <cuda_runtime_api.h>

#include <mica/core/cuda/detail/tensor_map.h>
#include <mica/core/cuda/error.h>

namespace mica::cuda {

namespace {

// Loaded at run time, so that programs do not link the driver, which machines without a GPU lack.
auto encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    check(status, "cudaGetDriverEntryPoint");
    mica::check(result == cudaDriverEntryPointSuccess, "cuda: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case float16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case bfloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case float32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case int32: return CU_TENSOR_MAP_DATA_TYPE_INT32;
    default: mica::check(false, "cuda: no tensor map for {}", dtype);
  }
  return {};
}

CUtensorMap tensor_map(const TensorMapArgs& args, CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(args.length), static_cast<cuuint64_t>(args.lines)};
  const cuuint64_t stride = static_cast<cuuint64_t>(args.leading) * size_of(args.dtype);
  const cuuint32_t box[2] = {args.box_length, args.box_lines};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult status = encode_function()(&map, type_of(args.dtype), 2, const_cast<void*>(args.data), sizes, &stride,
                                            box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  mica::check(status == CUDA_SUCCESS,
              "cuda: cuTensorMapEncodeTiled failed with {}: a matrix of {} lines of {} elements, {} apart, in tiles of "
              "{} by {}",
              static_cast<int>(status), args.lines, args.length, args.leading, args.box_lines, args.box_length);
  return map;
}

}  // namespace

bool fits_tensor_map(DType dtype, const void* data, std::int64_t lines, std::int64_t length, std::int64_t leading) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;  // coordinates are ints
  const std::int64_t bytes = leading * static_cast<std::int64_t>(size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && bytes % 16 == 0 && bytes < std::int64_t{1} << 40 &&
         lines < kMax && length < kMax;
}

CUtensorMap swizzled_tensor_map(const TensorMapArgs& args) { return tensor_map(args, CU_TENSOR_MAP_SWIZZLE_128B); }
bool fits_heads_map(const HeadsMapArgs& args) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;  // coordinates are ints
  for (int axis = 0; axis < 4; ++axis) {
    if (args.sizes[axis] >= kMax) {
      return false;
    }
  }
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t bytes = args.strides[axis] * static_cast<std::int64_t>(size_of(args.dtype));
    if (args.sizes[axis] > 1 && (bytes <= 0 || bytes % 16 != 0 || bytes >= std::int64_t{1} << 40)) {
      return false;
    }
  }
  return reinterpret_cast<std::uintptr_t>(args.data) % 16 == 0;
}

CUtensorMap swizzled_heads_map(const HeadsMapArgs& args) {
  constexpr int kAxes = 4;  // from the innermost
  cuuint64_t sizes[kAxes];
  cuuint64_t strides[kAxes - 1];
  const std::uint64_t size = size_of(args.dtype);
  for (int axis = 0; axis < kAxes; ++axis) {
    sizes[kAxes - 1 - axis] = static_cast<cuuint64_t>(args.sizes[axis]);
  }
  for (int axis = 0; axis < kAxes - 1; ++axis) {
    strides[kAxes - 2 - axis] = args.sizes[axis] > 1 ? static_cast<cuuint64_t>(args.strides[axis]) * size : 16;
  }
  const cuuint32_t box[kAxes] = {static_cast<cuuint32_t>(128 / size), args.box_lines, 1, 1};
  const cuuint32_t steps[kAxes] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode_function()(&map, type_of(args.dtype), kAxes, const_cast<void*>(args.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  mica::check(status == CUDA_SUCCESS,
              "cuda: cuTensorMapEncodeTiled failed with {}: {} batches of {} heads of {} lines of {} elements, {}, {} "
              "and {} apart, in tiles of {} lines",
              static_cast<int>(status), args.sizes[0], args.sizes[1], args.sizes[2], args.sizes[3], args.strides[0],
              args.strides[1], args.strides[2], args.box_lines);
  return map;
}

CUtensorMap plain_tensor_map(const TensorMapArgs& args) { return tensor_map(args, CU_TENSOR_MAP_SWIZZLE_NONE); }

}  // namespace mica::cuda
