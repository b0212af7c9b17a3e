#include <algorithm>
#include <bit>
#include <map>

#include <mica/core/cuda/detail/cudnn_graph.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

namespace {

constexpr std::int64_t kAlignment = 16;  // of every tensor, in bytes
constexpr CudnnGraph::Axes kOne{1, 1, 1, 1};
constexpr cudnnBackendAttributeType_t kDescriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;

class Handle {
 public:
  Handle() { check(cudnnCreate(&handle_), "cudnnCreate"); }
  // At program exit the driver may already be unloaded, so errors are ignored.
  ~Handle() { (void)cudnnDestroy(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  cudnnHandle_t get() const { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

// cuDNN's message for the last error of this thread.
std::string last_error() {
  std::array<char, 1024> text{};
  cudnnGetLastErrorString(text.data(), text.size());
  return text.data();
}

CudnnGraph::Axes row_major(const CudnnGraph::Axes& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

CudnnNotes numerical_notes(cudnnBackendDescriptor_t engine) {
  CudnnNotes notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
  std::int64_t count = 0;
  check(cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                 static_cast<std::int64_t>(notes.size()), &count, notes.data()),
        "cudnnBackendGetAttribute");
  notes.resize(static_cast<std::size_t>(count));
  return notes;
}

}  // namespace

void check(cudnnStatus_t status, const char* what, std::source_location where) {
  if (status != CUDNN_STATUS_SUCCESS) [[unlikely]] {
    (void)cudaGetLastError();
    throw CudaError(fmt::format("cuda: {} failed: {} at {}:{}: {}", what, cudnnGetErrorString(status),
                                where.file_name(), where.line(), last_error()));
  }
}

cudnnHandle_t cudnn_handle() {
  static thread_local std::map<int, Handle> handles;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const cudnnHandle_t handle = handles.try_emplace(device).first->second.get();
  check(cudnnSetStream(handle, current_stream()), "cudnnSetStream");
  return handle;
}

CudnnDescriptor cudnn_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  CudnnDescriptor properties(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  properties.set(CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, device);
  properties.finalize();
  return properties;
}

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t descriptor = nullptr;
  check(cudnnBackendCreateDescriptor(type, &descriptor), "cudnnBackendCreateDescriptor");
  pointer_.reset(descriptor);
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
  const cudnnBackendDescriptor_t raw = value.get();
  set_array(name, kDescriptor, 1, &raw);
}

void CudnnDescriptor::set_array(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                                const void* values) {
  check(cudnnBackendSetAttribute(get(), name, type, count, values), "cudnnBackendSetAttribute");
}

void CudnnDescriptor::finalize() { check(cudnnBackendFinalize(get()), "cudnnBackendFinalize"); }

CudnnGraph::Node CudnnGraph::add(cudnnDataType_t type, std::span<const std::int64_t> sizes,
                                 std::span<const std::int64_t> strides, bool is_virtual, bool by_value) {
  mica::check(sizes.size() == strides.size(), "cuda: a cuDNN tensor has {} sizes and {} strides", sizes.size(),
              strides.size());
  const auto rank = static_cast<std::int64_t>(sizes.size());
  const auto id = static_cast<std::int64_t>(tensors_.size()) + 1;
  CudnnDescriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment);
  tensor.set_array(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, rank, sizes.data());
  tensor.set_array(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, rank, strides.data());
  tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
  tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value);
  tensor.finalize();
  tensors_.push_back(std::move(tensor));
  return {id};
}

CudnnGraph::Node CudnnGraph::tensor(cudnnDataType_t type, const Axes& sizes, const Axes& strides) {
  return tensor(type, std::span<const std::int64_t>(sizes), std::span<const std::int64_t>(strides));
}

CudnnGraph::Node CudnnGraph::tensor(cudnnDataType_t type, std::span<const std::int64_t> sizes,
                                    std::span<const std::int64_t> strides) {
  const Node node = add(type, sizes, strides, false, false);
  memory_ids_.push_back(node.id);
  return node;
}

CudnnGraph::Node CudnnGraph::scalar(float value) {
  const Node node = add(CUDNN_DATA_FLOAT, kOne, kOne, false, true);
  scalar_ids_.push_back(node.id);
  scalars_.push_back(value);
  return node;
}

CudnnGraph::Node CudnnGraph::scalar(std::int32_t value) {
  const Node node = add(CUDNN_DATA_INT32, kOne, kOne, false, true);
  scalar_ids_.push_back(node.id);
  scalars_.push_back(std::bit_cast<float>(value));
  return node;
}

CudnnGraph::Node CudnnGraph::inner(cudnnDataType_t type, const Axes& sizes) {
  return add(type, sizes, row_major(sizes), true, false);
}

CudnnGraph::Node CudnnGraph::inner(cudnnDataType_t type, const Axes& sizes, const Axes& strides) {
  return add(type, sizes, strides, true, false);
}

CudnnGraph::Node CudnnGraph::inner(cudnnDataType_t type, std::span<const std::int64_t> sizes,
                                   std::span<const std::int64_t> strides) {
  return add(type, sizes, strides, true, false);
}

CudnnDescriptor& CudnnGraph::operation(cudnnBackendDescriptorType_t type) { return operations_.emplace_back(type); }

CudnnGraph::Node CudnnGraph::matmul(Node a, Node b, Node to) {
  CudnnDescriptor& settings = settings_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  settings.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  settings.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, kDescriptor, tensor_of(a));
  op.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, kDescriptor, tensor_of(b));
  op.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, kDescriptor, tensor_of(to));
  op.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, settings);
  op.finalize();
  return to;
}

namespace {

CudnnDescriptor pointwise_settings(cudnnPointwiseMode_t mode, cudnnDataType_t compute) {
  CudnnDescriptor settings(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  settings.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
  settings.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
  return settings;
}

}  // namespace

CudnnGraph::Node CudnnGraph::add_pointwise(CudnnDescriptor settings, std::initializer_list<Operand> operands, Node to) {
  CudnnDescriptor& kept = settings_.emplace_back(std::move(settings));
  kept.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kept);
  for (const Operand& operand : operands) {
    op.set(operand.name, kDescriptor, tensor_of(operand.node));
  }
  op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, kDescriptor, tensor_of(to));
  op.finalize();
  return to;
}

CudnnGraph::Node CudnnGraph::pointwise(cudnnPointwiseMode_t mode, Node x, Node to, cudnnDataType_t compute) {
  return add_pointwise(pointwise_settings(mode, compute), {{CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x}}, to);
}

CudnnGraph::Node CudnnGraph::pointwise(cudnnPointwiseMode_t mode, Node x, Node b, Node to, cudnnDataType_t compute) {
  return add_pointwise(pointwise_settings(mode, compute),
                       {{CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x}, {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b}}, to);
}

CudnnGraph::Node CudnnGraph::select(Node x, Node b, Node condition, Node to) {
  return add_pointwise(pointwise_settings(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT),
                       {{CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x},
                        {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b},
                        {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, condition}},
                       to);
}

CudnnGraph::Node CudnnGraph::index(Node like, std::int64_t axis, Node to) {
  CudnnDescriptor settings = pointwise_settings(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT);
  settings.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
  return add_pointwise(std::move(settings), {{CUDNN_ATTR_OPERATION_POINTWISE_XDESC, like}}, to);
}

CudnnGraph::Node CudnnGraph::reduce(cudnnReduceTensorOp_t reduction, Node x, Node to) {
  CudnnDescriptor& settings = settings_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  settings.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  settings.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, reduction);
  settings.finalize();
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, settings);
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, kDescriptor, tensor_of(x));
  op.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, kDescriptor, tensor_of(to));
  op.finalize();
  return to;
}

CudnnGraph::Node CudnnGraph::reshape(Node x, Node to) {
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, kDescriptor, tensor_of(x));
  op.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, kDescriptor, tensor_of(to));
  op.finalize();
  return to;
}

CudnnDescriptor& CudnnGraph::convolution_settings(const CudnnConvolution& geometry) {
  CudnnDescriptor& settings = settings_.emplace_back(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const auto axes = static_cast<std::int64_t>(geometry.stride.size());
  settings.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  settings.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
  settings.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, axes);
  settings.set_array(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, axes, geometry.stride.data());
  settings.set_array(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, axes, geometry.dilation.data());
  settings.set_array(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, axes, geometry.before.data());
  settings.set_array(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, axes, geometry.after.data());
  settings.finalize();
  return settings;
}

CudnnGraph::Node CudnnGraph::convolution(const CudnnConvolution& geometry, Node x, Node weight, Node y) {
  const CudnnDescriptor& settings = convolution_settings(geometry);
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, settings);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, kDescriptor, tensor_of(x));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, kDescriptor, tensor_of(weight));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, kDescriptor, tensor_of(y));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, 1.0F);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, 0.0F);
  op.finalize();
  return y;
}

CudnnGraph::Node CudnnGraph::convolution_input_gradient(const CudnnConvolution& geometry, Node y, Node weight, Node x) {
  const CudnnDescriptor& settings = convolution_settings(geometry);
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, settings);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, kDescriptor, tensor_of(y));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, kDescriptor, tensor_of(weight));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, kDescriptor, tensor_of(x));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_TYPE_FLOAT, 1.0F);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, CUDNN_TYPE_FLOAT, 0.0F);
  op.finalize();
  return x;
}

CudnnGraph::Node CudnnGraph::convolution_weight_gradient(const CudnnConvolution& geometry, Node x, Node y,
                                                         Node weight) {
  const CudnnDescriptor& settings = convolution_settings(geometry);
  CudnnDescriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, settings);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, kDescriptor, tensor_of(x));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, kDescriptor, tensor_of(y));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, kDescriptor, tensor_of(weight));
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_TYPE_FLOAT, 1.0F);
  op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, CUDNN_TYPE_FLOAT, 0.0F);
  op.finalize();
  return weight;
}

namespace {

// The engine configurations that the heuristics of a mode recommend for a graph, best first.
std::vector<CudnnDescriptor> recommended(const CudnnDescriptor& graph, const CudnnDescriptor& device,
                                         cudnnBackendHeurMode_t mode, std::string* reason) {
  CudnnDescriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
  if (cudnnBackendFinalize(heuristics.get()) != CUDNN_STATUS_SUCCESS) {
    *reason = last_error();
    return {};
  }
  std::int64_t count = 0;
  check(cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, kDescriptor, 0, &count, nullptr),
        "cudnnBackendGetAttribute");
  std::vector<CudnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i) {
    raw.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).get());
  }
  check(
      cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, kDescriptor, count, &count, raw.data()),
      "cudnnBackendGetAttribute");
  configs.erase(configs.begin() + count, configs.end());
  return configs;
}

}  // namespace

std::unique_ptr<CudnnPlan> CudnnGraph::compile(const CudnnDescriptor& device, std::string* reason) {
  constexpr std::array modes{CUDNN_HEUR_MODE_A};
  const auto any = [](const CudnnNotes&) { return true; };
  auto plans = compile(device, modes, 1, INT64_MAX, any, reason);
  return plans.empty() ? nullptr : std::move(plans.front());
}

std::vector<std::unique_ptr<CudnnPlan>> CudnnGraph::compile(const CudnnDescriptor& device,
                                                            std::span<const cudnnBackendHeurMode_t> modes,
                                                            std::size_t most, std::int64_t most_workspace,
                                                            const std::function<bool(const CudnnNotes&)>& accepts,
                                                            std::string* reason) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const CudnnDescriptor& op : operations_) {
    raw.push_back(op.get());
  }
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set_array(CUDNN_ATTR_OPERATIONGRAPH_OPS, kDescriptor, static_cast<std::int64_t>(raw.size()), raw.data());
  if (cudnnBackendFinalize(graph.get()) != CUDNN_STATUS_SUCCESS) {
    *reason = last_error();
    return {};
  }

  std::vector<std::unique_ptr<CudnnPlan>> plans;
  for (const cudnnBackendHeurMode_t mode : modes) {
    for (const CudnnDescriptor& config : recommended(graph, device, mode, reason)) {
      if (plans.size() == most) {
        return plans;
      }
      std::int64_t got = 0;
      CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
      cudnnBackendDescriptor_t raw_engine = engine.get();
      check(cudnnBackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, kDescriptor, 1, &got, &raw_engine),
            "cudnnBackendGetAttribute");
      const CudnnNotes notes = numerical_notes(raw_engine);
      if (!accepts(notes)) {
        *reason = "the notes of every engine rule it out";
        continue;
      }
      CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
      if (cudnnBackendFinalize(plan.get()) != CUDNN_STATUS_SUCCESS) {
        *reason = last_error();
        continue;
      }
      std::unique_ptr<CudnnPlan> result(new CudnnPlan(std::move(plan)));
      check(cudnnBackendGetAttribute(result->plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                     &got, &result->workspace_bytes_),
            "cudnnBackendGetAttribute");
      if (result->workspace_bytes_ > most_workspace) {
        *reason = fmt::format("an engine needs a workspace of {} bytes", result->workspace_bytes_);
        continue;
      }
      check(cudnnBackendGetAttribute(raw_engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &got,
                                     &result->engine_),
            "cudnnBackendGetAttribute");
      result->deterministic_ =
          std::find(notes.begin(), notes.end(), CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == notes.end();
      result->ids_ = memory_ids_;
      result->ids_.insert(result->ids_.end(), scalar_ids_.begin(), scalar_ids_.end());
      result->scalars_ = scalars_;
      plans.push_back(std::move(result));
    }
  }
  return plans;
}

void CudnnPlan::run(const std::vector<void*>& data, void* workspace) const {
  std::vector<void*> pointers = data;
  for (const float& scalar : scalars_) {
    pointers.push_back(const_cast<float*>(&scalar));
  }
  mica::check(pointers.size() == ids_.size(), "cuda: a cuDNN plan expected {} tensors, got {}", ids_.size(),
              pointers.size());
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  const auto count = static_cast<std::int64_t>(ids_.size());
  pack.set_array(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids_.data());
  pack.set_array(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  pack.finalize();
  check(cudnnBackendExecute(cudnn_handle(), plan_.get(), pack.get()), "cudnnBackendExecute");
}

}  // namespace mica::cuda
