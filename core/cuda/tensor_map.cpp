#include <cuda_runtime_api.h>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/tensor_map.h>

namespace mica::cuda {

namespace {

// Asked for at run time, so that programs do not link the driver, which machines without a GPU lack.
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
  constexpr std::int64_t kMost = std::int64_t{1} << 31;  // coordinates are ints
  const std::int64_t bytes = leading * static_cast<std::int64_t>(size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && bytes % 16 == 0 && bytes < std::int64_t{1} << 40 &&
         lines < kMost && length < kMost;
}

CUtensorMap swizzled_tensor_map(const TensorMapArgs& args) { return tensor_map(args, CU_TENSOR_MAP_SWIZZLE_128B); }
CUtensorMap plain_tensor_map(const TensorMapArgs& args) { return tensor_map(args, CU_TENSOR_MAP_SWIZZLE_NONE); }

}  // namespace mica::cuda
