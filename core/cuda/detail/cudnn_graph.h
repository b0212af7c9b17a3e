#pragma once

// A thin layer over the graph API of cuDNN 9: a graph of operations on tensors is built, compiled to a plan by the
// library's heuristics, and executed on pointers. Built only with cuDNN (MICA_WITH_CUDNN).

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mica::cuda {

/// Throws CudaError unless `status` is success. The message contains cuDNN's explanation.
void check(cudnnStatus_t status, const char* what, std::source_location where = std::source_location::current());

/// This thread's cuDNN handle for the current device, set to the current stream.
cudnnHandle_t cudnn_handle();

/// Owns a backend descriptor.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);

  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    set_array(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value);
  void set_array(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                 const void* values);
  void finalize();
  cudnnBackendDescriptor_t get() const { return pointer_.get(); }

 private:
  struct Destroy {
    void operator()(void* descriptor) const { (void)cudnnBackendDestroyDescriptor(descriptor); }
  };
  std::unique_ptr<void, Destroy> pointer_;
};

/// The properties of the current device.
CudnnDescriptor cudnn_device();

/// A graph compiled for one device. Threads may run it concurrently, each with its own handle and workspace.
class CudnnPlan {
 public:
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  /// Whether the engine's results are bit-identical from run to run.
  bool deterministic() const { return deterministic_; }
  /// The number of the engine.
  std::int64_t engine() const { return engine_; }

  /// Runs on the current stream. `data` has one device pointer for each tensor() of the graph, in order.
  void run(const std::vector<void*>& data, void* workspace) const;

 private:
  friend class CudnnGraph;
  explicit CudnnPlan(CudnnDescriptor plan) : plan_(std::move(plan)) {}

  CudnnDescriptor plan_;
  std::vector<std::int64_t> ids_;
  std::vector<float> scalars_;  // every by-value tensor has 4 bytes
  std::int64_t workspace_bytes_ = 0;
  bool deterministic_ = true;
  std::int64_t engine_ = -1;
};

/// What the notes say about an engine's results.
using CudnnNotes = std::vector<cudnnBackendNumericalNote_t>;

/// The geometry of a convolution, one number for each spatial axis.
struct CudnnConvolution {
  std::span<const std::int64_t> stride, dilation, before, after;  // padding at both ends
};

class CudnnGraph {
 public:
  using Axes = std::array<std::int64_t, 4>;
  /// A tensor of the graph.
  struct Node {
    std::int64_t id;
  };

  /// Device memory: the i-th call corresponds to the i-th pointer of CudnnPlan::run. Aligned to 16 bytes.
  Node tensor(cudnnDataType_t type, const Axes& sizes, const Axes& strides);
  Node tensor(cudnnDataType_t type, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides);
  /// A constant stored in the plan.
  Node scalar(float value);
  Node scalar(std::int32_t value);
  /// An intermediate result that is not written to memory. Row-major unless strides are given.
  Node inner(cudnnDataType_t type, const Axes& sizes);
  Node inner(cudnnDataType_t type, const Axes& sizes, const Axes& strides);
  Node inner(cudnnDataType_t type, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides);

  // Operations write `to` and return it. They compute in float32 unless stated otherwise.
  Node matmul(Node a, Node b, Node to);
  Node pointwise(cudnnPointwiseMode_t mode, Node x, Node to, cudnnDataType_t compute = CUDNN_DATA_FLOAT);
  Node pointwise(cudnnPointwiseMode_t mode, Node x, Node b, Node to, cudnnDataType_t compute = CUDNN_DATA_FLOAT);
  /// x where `condition`, else b.
  Node select(Node x, Node b, Node condition, Node to);
  /// The index along an axis.
  Node index(Node like, std::int64_t axis, Node to);
  Node reduce(cudnnReduceTensorOp_t op, Node x, Node to);
  /// The same elements, with the strides of `to`.
  Node reshape(Node x, Node to);
  /// The convolution of x (N, C, …) with the filters (K, C / groups, …) to y (N, K, …), and its gradients.
  Node convolution(const CudnnConvolution& geometry, Node x, Node weight, Node y);
  Node convolution_input_gradient(const CudnnConvolution& geometry, Node y, Node weight, Node x);
  Node convolution_weight_gradient(const CudnnConvolution& geometry, Node x, Node y, Node weight);

  /// The first engine that cuDNN's heuristics recommend for a device and that builds; null if there is none for this
  /// graph, with cuDNN's message in *reason.
  std::unique_ptr<CudnnPlan> compile(const CudnnDescriptor& device, std::string* reason);
  /// The first engines, up to `most`, that the heuristics of any of the modes recommend, whose notes `accepts` accepts,
  /// that need at most `most_workspace` bytes, and that build. If there is none, *reason says why.
  std::vector<std::unique_ptr<CudnnPlan>> compile(const CudnnDescriptor& device,
                                                  std::span<const cudnnBackendHeurMode_t> modes, std::size_t most,
                                                  std::int64_t most_workspace,
                                                  const std::function<bool(const CudnnNotes&)>& accepts,
                                                  std::string* reason);

 private:
  Node add(cudnnDataType_t type, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
           bool is_virtual, bool by_value);
  CudnnDescriptor& convolution_settings(const CudnnConvolution& geometry);
  CudnnDescriptor& operation(cudnnBackendDescriptorType_t type);
  struct Operand {
    cudnnBackendAttributeName_t name;
    Node node;
  };
  Node add_pointwise(CudnnDescriptor settings, std::initializer_list<Operand> operands, Node to);
  cudnnBackendDescriptor_t tensor_of(Node node) const { return tensors_[static_cast<std::size_t>(node.id - 1)].get(); }

  std::vector<CudnnDescriptor> tensors_;  // id − 1
  std::vector<CudnnDescriptor> settings_;
  std::vector<CudnnDescriptor> operations_;
  std::vector<std::int64_t> memory_ids_;
  std::vector<std::int64_t> scalar_ids_;
  std::vector<float> scalars_;
};

}  // namespace mica::cuda
