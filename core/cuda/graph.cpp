#include <cuda_runtime_api.h>

#include <map>
#include <vector>

#include <mica/core/cuda/detail/arena.h>
#include <mica/core/cuda/detail/cublas.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/detail/callable.h>
#include <mica/core/dispatch.h>
#include <mica/core/storage.h>

namespace mica::cuda {

namespace {

// This thread's stream for captures on the current device, since the default stream cannot be captured. It is not
// ordered with the default stream and never executes work.
cudaStream_t capture_stream(int device) {
  static thread_local std::map<int, cudaStream_t> streams;  // never destroyed before the driver is unloaded
  cudaStream_t& stream = streams[device];
  if (stream == nullptr) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  return stream;
}

// Records what f launches on `stream`, the current one.
cudaGraph_t record(cudaStream_t stream, const std::function<void()>& f) {
  // Relaxed, since f may allocate, load kernels and create handles.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    f();
  } catch (...) {
    (void)cudaStreamEndCapture(stream, &graph);
    (void)cudaGetLastError();
    if (graph != nullptr) {
      (void)cudaGraphDestroy(graph);
    }
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  return graph;
}

}  // namespace

struct Graph::State {
  explicit State(Device device)
      : capture{.device = device, .calls = {}, .random = nullptr}, arena(new Arena(device.index)) {}

  ~State() {
    // At program exit the driver may already be unloaded: ignore errors.
    int previous = 0;
    if (exec != nullptr && cudaGetDevice(&previous) == cudaSuccess &&
        cudaSetDevice(capture.device.index) == cudaSuccess) {
      (void)cudaDeviceSynchronize();
      (void)cudaGraphExecDestroy(exec);
      (void)cudaSetDevice(previous);
    }
    capture.calls.clear();
    capture.after.clear();
    capture.random.reset();
    arena->abandon();
  }

  State(const State&) = delete;
  State& operator=(const State&) = delete;

  mica::detail::Capture capture;
  Arena* arena;
  cudaGraphExec_t exec = nullptr;
  std::size_t nodes = 0;
};

Graph capture(const std::function<void()>& f, Device device) {
  check_callable(f, "capture");
  mica::check(device.is_cuda(), "capture: expected a CUDA device, got {}", device);
  mica::check(!is_capturing(), "capture: this thread already captures a CUDA graph");
  const DeviceGuard on(device);
  Storage::arrive_all();  // now, since captured kernels cannot wait for transfers started before
  const cudaStream_t stream = capture_stream(device.index);
  // The graph has its own memory and cannot reuse what earlier steps have freed.
  release_cached_memory();

  Graph graph;
  graph.state_ = std::make_shared<Graph::State>(device);
  Graph::State& state = *graph.state_;
  const StreamGuard on_stream(stream);
  (void)cublas_handle();  // created here, not while the stream is captured
  const ArenaGuard memory(*state.arena, stream);
  const mica::detail::Capturing capturing(state.capture);
  const cudaGraph_t recorded = record(stream, f);
  // Collectives keep the priority of their stream.
  const cudaError_t status = cudaGraphInstantiate(&state.exec, recorded, cudaGraphInstantiateFlagUseNodePriority);
  (void)cudaGraphGetNodes(recorded, nullptr, &state.nodes);
  (void)cudaGraphDestroy(recorded);
  check(status, "cudaGraphInstantiate");
  return graph;
}

void Graph::replay() const {
  mica::check(state_ != nullptr, "replay: the graph is empty; cuda::capture makes one");
  check_not_capturing("Graph::replay");
  const DeviceGuard on(state_->capture.device);
  Storage::arrive_all();
  for (const std::function<void()>& call : state_->capture.calls) {
    call();
  }
  check(cudaGraphLaunch(state_->exec, current_stream()), "cudaGraphLaunch");
  check_launch("cuda_graph");
  for (const std::function<void()>& call : state_->capture.after) {
    call();
  }
}

std::size_t Graph::node_count() const { return state_ == nullptr ? 0 : state_->nodes; }

std::size_t Graph::reserved_bytes() const { return state_ == nullptr ? 0 : state_->arena->reserved(); }

}  // namespace mica::cuda
