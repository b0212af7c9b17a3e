#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/profiler/detail/device_trace.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define MICA_WITH_NVTX 1
#else
#define MICA_WITH_NVTX 0
#endif

#if __has_include(<cupti.h>)
#include <cupti.h>
#define MICA_WITH_CUPTI 1
#else
#define MICA_WITH_CUPTI 0
#endif

namespace mica::cuda {

namespace {

std::atomic<bool> tracing{false};

/// One trace at a time.
class ExclusiveTrace {
 public:
  ExclusiveTrace() { mica::check(!tracing.exchange(true), "profiler: another profiler is active"); }
  ~ExclusiveTrace() { tracing = false; }
  ExclusiveTrace(const ExclusiveTrace&) = delete;
  ExclusiveTrace& operator=(const ExclusiveTrace&) = delete;
};

void sort_by_start(std::vector<DeviceWork>& work) {
  std::stable_sort(work.begin(), work.end(),
                   [](const DeviceWork& a, const DeviceWork& b) { return a.start_ns < b.start_ns; });
}

/// Measures the outermost ranges on the device with events. The last kernels of a range may still run when the next
/// range starts, so short ranges appear longer than they are.
class EventTrace final : public DeviceTrace {
 public:
  EventTrace() {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    start_ns_ = trace_clock_ns();
    start_ = record();
  }

  const char* source() const override { return "CUDA events"; }

  void push(std::uint64_t range) override {
    if (depth_++ == 0) {
      ranges_.push_back({range, record(), nullptr});
    }
  }

  void pop() override {
    if (--depth_ == 0) {
      ranges_.back().end = record();
    }
  }

  std::vector<DeviceWork> stop() override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<DeviceWork> work;
    const auto since_start = [this](cudaEvent_t event) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, start_, event), "cudaEventElapsedTime");
      return start_ns_ + static_cast<std::int64_t>(1e6 * static_cast<double>(milliseconds));
    };
    for (const Range& range : ranges_) {
      if (range.end != nullptr) {
        work.push_back(
            {.name = "", .start_ns = since_start(range.start), .end_ns = since_start(range.end), .range = range.range});
        (void)cudaEventDestroy(range.end);
      }
      (void)cudaEventDestroy(range.start);
    }
    (void)cudaEventDestroy(start_);
    return work;
  }

 private:
  struct Range {
    std::uint64_t range;
    cudaEvent_t start;
    cudaEvent_t end;
  };

  static cudaEvent_t record() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    check(cudaEventRecord(event, current_stream()), "cudaEventRecord");
    return event;
  }

  ExclusiveTrace exclusive_;
  std::int64_t start_ns_ = 0;
  cudaEvent_t start_ = nullptr;
  std::vector<Range> ranges_;
  int depth_ = 0;
};

#if MICA_WITH_CUPTI

#if CUPTI_API_VERSION >= 130000
using KernelRecord = CUpti_ActivityKernel10;
using CopyRecord = CUpti_ActivityMemcpy6;
#else
using KernelRecord = CUpti_ActivityKernel9;
using CopyRecord = CUpti_ActivityMemcpy5;
#endif

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

/// CUPTI's functions, loaded at run time, so that programs start without the library.
class Cupti {
 public:
  /// Null if there is no library.
  static const Cupti* find() {
    static const Cupti library;
    return library.complete_ ? &library : nullptr;
  }

  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityRegisterTimestampCallback) register_clock = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next_record = nullptr;
  decltype(&cuptiActivityPushExternalCorrelationId) push = nullptr;
  decltype(&cuptiActivityPopExternalCorrelationId) pop = nullptr;
  decltype(&cuptiGetResultString) result_string = nullptr;

  void check(CUptiResult status, const char* what) const {
    if (status != CUPTI_SUCCESS) {
      const char* text = nullptr;
      (void)result_string(status, &text);
      throw CudaError(fmt::format("cuda: {} failed: {}", what, text == nullptr ? "unknown" : text));
    }
  }

 private:
  Cupti() {
    const std::string versioned = fmt::format("libcupti.so.{}", CUDART_VERSION / 1000);
    void* library = nullptr;
    for (const std::string& name : {versioned, "/usr/local/cuda/extras/CUPTI/lib64/" + versioned,
                                    "/usr/local/cuda/lib64/" + versioned, std::string("libcupti.so")}) {
      library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) {
        break;
      }
    }
    complete_ = library != nullptr && load(library, register_callbacks, "cuptiActivityRegisterCallbacks") &&
                load(library, register_clock, "cuptiActivityRegisterTimestampCallback") &&
                load(library, enable, "cuptiActivityEnable") && load(library, disable, "cuptiActivityDisable") &&
                load(library, flush, "cuptiActivityFlushAll") &&
                load(library, next_record, "cuptiActivityGetNextRecord") &&
                load(library, push, "cuptiActivityPushExternalCorrelationId") &&
                load(library, pop, "cuptiActivityPopExternalCorrelationId") &&
                load(library, result_string, "cuptiGetResultString");
  }

  template <class F>
  static bool load(void* library, F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
  }

  bool complete_ = false;
};

constexpr CUpti_ActivityKind kKinds[] = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_RUNTIME,           CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};
constexpr auto kRangeKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;

/// Measures every kernel. CUPTI delivers records in buffers, on its own thread.
class CuptiTrace final : public DeviceTrace {
 public:
  explicit CuptiTrace(const Cupti& cupti) : cupti_(cupti) {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    // Use the host's clock for device times, too.
    (void)cupti_.register_clock([]() -> std::uint64_t { return static_cast<std::uint64_t>(trace_clock_ns()); });
    cupti_.check(cupti_.register_callbacks(&CuptiTrace::buffer_requested, &CuptiTrace::buffer_completed),
                 "cuptiActivityRegisterCallbacks");
    current = this;
    for (const CUpti_ActivityKind kind : kKinds) {
      if (const CUptiResult status = cupti_.enable(kind); status != CUPTI_SUCCESS) {
        end();
        current = nullptr;
        cupti_.check(status, "cuptiActivityEnable");
      }
    }
  }

  ~CuptiTrace() override {
    if (!stopped_) {
      end();
    }
    current = nullptr;
  }

  const char* source() const override { return "CUPTI"; }

  void push(std::uint64_t range) override { (void)cupti_.push(kRangeKind, range); }

  void pop() override {
    std::uint64_t range = 0;
    (void)cupti_.pop(kRangeKind, &range);
  }

  std::vector<DeviceWork> stop() override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    end();
    const std::lock_guard lock(mutex_);
    std::vector<DeviceWork> work;
    work.reserve(work_.size());
    for (auto& [correlation, entry] : work_) {
      const auto range = ranges_.find(correlation);
      entry.range = range == ranges_.end() ? 0 : range->second;
      work.push_back(std::move(entry));
    }
    sort_by_start(work);
    return work;
  }

 private:
  void end() {
    stopped_ = true;
    (void)cupti_.flush(0);
    for (const CUpti_ActivityKind kind : kKinds) {
      (void)cupti_.disable(kind);
    }
  }

  static void CUPTIAPI buffer_requested(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBytes));
    *size = *buffer == nullptr ? 0 : kBytes;
    *most_records = 0;
  }

  static void CUPTIAPI buffer_completed(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                                        std::size_t valid) {
    if (CuptiTrace* const trace = current; trace != nullptr && buffer != nullptr) {
      trace->read(buffer, valid);
    }
    std::free(buffer);
  }

  void read(std::uint8_t* buffer, std::size_t valid) {
    const std::lock_guard lock(mutex_);
    CUpti_Activity* record = nullptr;
    while (cupti_.next_record(buffer, valid, &record) == CUPTI_SUCCESS) {
      switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
          const auto& kernel = *reinterpret_cast<const KernelRecord*>(record);
          add(kernel.correlationId, name_of(kernel.name), kernel.start, kernel.end, kernel.streamId, 0);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
          const auto& copy = *reinterpret_cast<const CopyRecord*>(record);
          add(copy.correlationId, "memcpy", copy.start, copy.end, copy.streamId, copy.bytes);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
          const auto& fill = *reinterpret_cast<const CUpti_ActivityMemset4*>(record);
          add(fill.correlationId, "memset", fill.start, fill.end, fill.streamId, fill.bytes);
          break;
        }
        case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
          const auto& link = *reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
          if (link.externalKind == kRangeKind) {
            ranges_[link.correlationId] = link.externalId;
          }
          break;
        }
        default: break;  // API calls, which only link the other records
      }
    }
  }

  void add(std::uint32_t correlation, const std::string& name, std::uint64_t start, std::uint64_t end,
           std::uint32_t stream, std::size_t bytes) {
    work_.emplace_back(correlation, DeviceWork{.name = name,
                                               .start_ns = static_cast<std::int64_t>(start),
                                               .end_ns = static_cast<std::int64_t>(end),
                                               .range = 0,
                                               .stream = stream,
                                               .bytes = bytes});
  }

  const std::string& name_of(const char* mangled) {
    const auto [at, is_new] = names_.try_emplace(mangled == nullptr ? "kernel" : mangled);
    if (is_new) {
      at->second = demangled(at->first.c_str());
    }
    return at->second;
  }

  static inline std::atomic<CuptiTrace*> current{nullptr};

  ExclusiveTrace exclusive_;
  const Cupti& cupti_;
  bool stopped_ = false;
  std::mutex mutex_;
  std::vector<std::pair<std::uint32_t, DeviceWork>> work_;   // by the API call that launched it
  std::unordered_map<std::uint32_t, std::uint64_t> ranges_;  // of those calls
  std::unordered_map<std::string, std::string> names_;       // demangled
};

#endif

}  // namespace

std::unique_ptr<DeviceTrace> start_device_trace() {
  if (device_count() == 0) {
    return nullptr;
  }
#if MICA_WITH_CUPTI
  if (const Cupti* const cupti = Cupti::find(); cupti != nullptr) {
    try {
      return std::make_unique<CuptiTrace>(*cupti);
    } catch (const CudaError&) {
      // Another tool uses CUPTI, or the program lacks permission.
    }
  }
#endif
  return std::make_unique<EventTrace>();
}

#if MICA_WITH_NVTX
void nvtx_push(const std::string& name) { (void)nvtxRangePushA(name.c_str()); }
void nvtx_pop() { (void)nvtxRangePop(); }
#else
void nvtx_push(const std::string&) {}
void nvtx_pop() {}
#endif

}  // namespace mica::cuda
