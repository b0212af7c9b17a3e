#include <mica/core/dtype.h>

namespace mica {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return "float64";
    case DType::float32: return "float32";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::int64: return "int64";
    case DType::int32: return "int32";
    case DType::uint8: return "uint8";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

}  // namespace mica
