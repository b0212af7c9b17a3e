#include <unordered_map>
#include <vector>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>

namespace mica::autograd {

namespace detail {

thread_local constinit AutocastState autocast_state;

/// 16-bit copies of parameters, made at their first use.
class CastCache {
 public:
  Tensor find_or_make(const Tensor& x, DType dtype) {
    const mica::detail::TensorImpl& impl = *x.handle();
    std::vector<Entry>& entries = entries_[impl.storage.get()];
    for (Entry& entry : entries) {
      if (entry.storage.lock() == impl.storage && entry.offset == impl.offset && entry.strides == impl.strides &&
          entry.cast.shape() == impl.shape && entry.cast.dtype() == dtype) {
        if (entry.version != x.version()) {
          entry.cast = converted(x, dtype);
          entry.version = x.version();
        }
        return entry.cast;
      }
    }
    std::erase_if(entries, [](const Entry& entry) { return entry.storage.expired(); });
    entries.push_back({impl.storage, x.version(), impl.offset, impl.strides, converted(x, dtype)});
    return entries.back().cast;
  }

 private:
  struct Entry {
    std::weak_ptr<Storage> storage;
    std::uint32_t version;
    std::int64_t offset;
    Strides strides;
    Tensor cast;
  };

  static Tensor converted(const Tensor& x, DType dtype) {
    const InferenceMode ordinary(false);  // graphs may save it
    const Tensor result = empty(x.shape(), dtype, x.device());
    copy_into(result, x);
    return result;
  }

  std::unordered_map<const Storage*, std::vector<Entry>> entries_;
};

}  // namespace detail

namespace {

// A cached conversion. Each use is a separate op, so that one backward does not release the node of another.
struct Cast {
  static constexpr bool composed = true;
  Tensor result;
  DType from;

  Tensor forward(Context&, const Tensor&) const {
    return as_strided(result, result.shape(), result.strides(), result.handle()->offset);
  }
  Tensor backward(Context&, const Tensor& dy) const { return dy.to(from); }
};

}  // namespace

Autocast::Autocast(std::optional<DType> dtype) : previous_(detail::autocast_state) {
  check(!dtype || *dtype == float16 || *dtype == bfloat16, "Autocast: expected float16 or bfloat16, got {}",
        dtype.value_or(float32));
  if (dtype && previous_.cache == nullptr) {
    cache_ = std::make_unique<detail::CastCache>();
    detail::autocast_state.cache = cache_.get();
  }
  detail::autocast_state.dtype = dtype.value_or(float32);
}

Autocast::~Autocast() { detail::autocast_state = previous_; }

std::optional<DType> autocast_dtype() {
  const DType dtype = detail::autocast_state.dtype;
  return dtype == float32 ? std::nullopt : std::optional(dtype);
}

Tensor narrowed(const Tensor& x) {
  if (!x.defined() || x.dtype() != float32) {
    return x;
  }
  const detail::AutocastState& state = detail::autocast_state;
  const bool is_parameter = x.is_leaf() && x.requires_grad() && !x.is_inference();
  if (!is_parameter || is_capturing()) {
    return x.to(state.dtype);
  }
  return apply(Cast{state.cache->find_or_make(x, state.dtype), float32}, x);
}

Tensor widened(const Tensor& x) { return x.defined() && size_of(x.dtype()) == 2 ? x.to(float32) : x; }

}  // namespace mica::autograd
