#include <cufft.h>

#include <list>
#include <memory>
#include <tuple>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/fft/detail/fft_kernels.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/view/view.h>

namespace mica::kernels {

namespace {

void check_cufft(cufftResult status, const char* what, std::source_location where = std::source_location::current()) {
  if (status != CUFFT_SUCCESS) [[unlikely]] {
    (void)cudaGetLastError();
    throw cuda::CudaError(fmt::format("cuda: {} failed: error {} of cuFFT at {}:{}", what, static_cast<int>(status),
                                      where.file_name(), where.line()));
  }
}

cufftType type_of(FftKind kind, DType dtype) {
  const bool is_single = dtype == float32;
  switch (kind) {
    case FftKind::complex: return is_single ? CUFFT_C2C : CUFFT_Z2Z;
    case FftKind::real_to_complex: return is_single ? CUFFT_R2C : CUFFT_D2Z;
    default: return is_single ? CUFFT_C2R : CUFFT_Z2D;
  }
}

// Adjacent transforms of one length, on one device.
struct PlanKey {
  int device;
  cufftType type;
  std::int64_t n;
  std::int64_t count;

  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

class Plan {
 public:
  explicit Plan(const PlanKey& key) : key_(key) {
    check_cufft(cufftCreate(&plan_), "cufftCreate");
    try {
      long long n = key.n;
      check_cufft(cufftSetAutoAllocation(plan_, 0), "cufftSetAutoAllocation");
      check_cufft(
          cufftMakePlanMany64(plan_, 1, &n, nullptr, 1, 0, nullptr, 1, 0, key.type, key.count, &workspace_bytes_),
          "cufftMakePlanMany64");
    } catch (...) {
      (void)cufftDestroy(plan_);
      throw;
    }
  }
  // At program exit, the driver may already be unloaded, and frees everything.
  ~Plan() {
    int previous = 0;
    if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(key_.device) == cudaSuccess) {
      (void)cudaDeviceSynchronize();
      (void)cufftDestroy(plan_);
      (void)cudaSetDevice(previous);
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const PlanKey& key() const { return key_; }

  template <class T>
  void run(const Tensor& x, const Tensor& y, bool inverse) const {
    using C = std::conditional_t<std::is_same_v<T, float>, cufftComplex, cufftDoubleComplex>;
    const Tensor workspace = empty({static_cast<std::int64_t>(workspace_bytes_)}, uint8, y.device());
    check_cufft(cufftSetStream(plan_, cuda::current_stream()), "cufftSetStream");
    check_cufft(cufftSetWorkArea(plan_, workspace.raw_data()), "cufftSetWorkArea");
    auto* const from = reinterpret_cast<C*>(x.raw_data());
    auto* const to = reinterpret_cast<C*>(y.raw_data());
    auto* const real_from = x.data<T>();
    auto* const real_to = y.data<T>();
    const int direction = inverse ? CUFFT_INVERSE : CUFFT_FORWARD;
    switch (key_.type) {
      case CUFFT_C2C: check_cufft(exec(cufftExecC2C, from, to, direction), "cufftExecC2C"); break;
      case CUFFT_Z2Z: check_cufft(exec(cufftExecZ2Z, from, to, direction), "cufftExecZ2Z"); break;
      case CUFFT_R2C: check_cufft(exec(cufftExecR2C, real_from, to), "cufftExecR2C"); break;
      case CUFFT_D2Z: check_cufft(exec(cufftExecD2Z, real_from, to), "cufftExecD2Z"); break;
      case CUFFT_C2R: check_cufft(exec(cufftExecC2R, from, real_to), "cufftExecC2R"); break;
      default: check_cufft(exec(cufftExecZ2D, from, real_to), "cufftExecZ2D");
    }
  }

 private:
  // Calls a function of cuFFT if it is the one for these types.
  template <class F, class... Args>
  cufftResult exec(F f, Args... args) const {
    if constexpr (std::is_invocable_v<F, cufftHandle, Args...>) {
      return f(plan_, args...);
    } else {
      return CUFFT_INVALID_TYPE;
    }
  }

  PlanKey key_;
  cufftHandle plan_ = 0;
  std::size_t workspace_bytes_ = 0;
};

// This thread's plan; it keeps the last ones that it used. A graph that is captured keeps those that it uses, since
// they own tables on the device.
std::shared_ptr<const Plan> plan_for(const PlanKey& key) {
  constexpr std::size_t kMostPlans = 64;
  static thread_local std::list<std::shared_ptr<const Plan>> plans;  // the last used first
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const auto& plan) { return plan->key() == key; });
  if (found != plans.end()) {
    plans.splice(plans.begin(), plans, found);
  } else {
    plans.push_front(std::make_shared<const Plan>(key));
    if (plans.size() > kMostPlans) {
      plans.pop_back();
    }
  }
  if (is_capturing()) {
    on_each_replay([plan = plans.front()] {});
  }
  return plans.front();
}

// (outer, length, inner, …) with the lines along the middle axis as rows: (outer, inner, length, …).
Tensor as_rows(const Tensor& x) { return transpose(x, 1, 2); }

bool is_aligned(const Tensor& x) {
  return reinterpret_cast<std::uintptr_t>(x.raw_data()) % (2 * size_of(x.dtype())) == 0;
}

// The signal in rows, where cuFFT can read it.
Tensor prepared(const Fft& args) {
  const Tensor rows = as_rows(args.x);
  if (args.kind == FftKind::complex_to_real) {
    // cuFFT may overwrite its input, and expects imaginary parts of 0 where they must be.
    const Tensor copy = empty(rows.shape(), rows.dtype(), rows.device());
    copy_into(copy, rows);
    const Tensor imaginary = select(copy, 3, 1);
    fill_data(select(imaginary, 2, 0), 0);
    if (args.n % 2 == 0) {
      fill_data(select(imaginary, 2, args.n / 2), 0);
    }
    return copy;
  }
  const Tensor result = contiguous_data(rows);
  return is_aligned(result) ? result : clone(result);
}

}  // namespace

void fft(Cuda, const Fft& args) {
  const Tensor x = prepared(args);
  const Tensor y_rows = as_rows(args.y);
  const Tensor y = y_rows.is_contiguous() ? y_rows : empty(y_rows.shape(), y_rows.dtype(), y_rows.device());
  const PlanKey key{
      .device = x.device().index, .type = type_of(args.kind, x.dtype()), .n = args.n, .count = x.size(0) * x.size(1)};
  const std::shared_ptr<const Plan> plan = plan_for(key);
  on_dtype(Types<float, double>{}, x.dtype(), "fft", [&]<class T>() { plan->run<T>(x, y, args.inverse); });
  if (args.scale != 1) {
    mul_(y, args.scale);
  }
  if (!y.is_same(y_rows)) {
    copy_into(y_rows, y);
  }
}

}  // namespace mica::kernels
