#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/hooks.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/finite.h>
#include <mica/distributed/data_parallel.h>
#include <mica/distributed/detail/agreement.h>

namespace mica::distributed {

namespace {

constexpr const char* kWho = "DataParallel";

struct Trained {
  std::string name;
  Tensor tensor;
  std::int64_t offset = 0;  // of its gradient in the bucket's buffer
  bool arrived = false;     // its gradient is complete: set outside accumulate(), reset by wait()
  bool present = false;     // this rank had a gradient when the bucket was filled
};

// The buffer of a bucket holds the gradients, each aligned to 16 bytes, and then one flag per gradient: 1 if this rank
// had it, else 0. Flags are reduced with the gradients, so a positive one means that some rank had the gradient.
struct Bucket {
  DType dtype;
  Device device;
  std::vector<std::size_t> members{};  // in State::trained
  std::int64_t size = 0;               // of the gradients
  std::size_t missing = 0;             // members whose gradients have not arrived
  Tensor all_present{};                // flags, all 1
  Tensor buffer{};                     // defined from the start of the reduction to wait()
  Work work{};
};

Tensor part_of(const Tensor& buffer, const Shape& shape, std::int64_t offset) {
  return as_strided(buffer, shape, contiguous_strides(shape), offset);
}

std::int64_t aligned(std::int64_t elements, DType dtype) {
  const auto pack = static_cast<std::int64_t>(16 / size_of(dtype));
  return (elements + pack - 1) / pack * pack;
}

// Sorted by the last member, in reverse, since a bucket can start when its last gradient has arrived.
std::vector<Bucket> make_buckets(std::vector<Trained>& trained, std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  for (std::size_t i = trained.size(); i-- > 0;) {
    const Tensor& x = trained[i].tensor;
    const auto like_x = [&](const Bucket& bucket) { return bucket.dtype == x.dtype() && bucket.device == x.device(); };
    const auto newest = std::find_if(buckets.rbegin(), buckets.rend(), like_x);
    const auto bytes_with = [&](std::int64_t size) {
      return (size + x.numel()) * static_cast<std::int64_t>(size_of(x.dtype()));
    };
    Bucket& bucket = newest != buckets.rend() && bytes_with(newest->size) <= bucket_bytes
                         ? *newest
                         : buckets.emplace_back(Bucket{.dtype = x.dtype(), .device = x.device()});
    trained[i].offset = bucket.size;
    bucket.size += aligned(x.numel(), x.dtype());
    bucket.members.push_back(i);
    ++bucket.missing;
  }
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const Bucket& a, const Bucket& b) { return a.members.back() > b.members.back(); });
  return buckets;
}

void check_options(const DataParallelOptions& options) {
  check(options.bucket_bytes > 0, "{}: expected bucket_bytes > 0, got {}", kWho, options.bucket_bytes);
  check(options.check_every >= 0, "{}: expected check_every >= 0, got {}", kWho, options.check_every);
  check(options.reduce_dtype.value_or(float32) == float32, "{}: expected a reduce_dtype of float32, got {}", kWho,
        options.reduce_dtype.value_or(float32));
}

}  // namespace

struct DataParallel::State {
  Group group;
  DataParallelOptions options;
  nn::NamedTensors parameters;  // all
  nn::NamedTensors frozen;      // those that do not require a gradient
  Device device;                // of checks
  std::vector<Trained> trained;
  std::vector<Bucket> buckets;
  std::vector<std::size_t> bucket_of;  // by index in `trained`
  std::size_t started = 0;             // buckets before this one are being reduced
  int accumulating = 0;
  std::int64_t step = 0;
  std::string fault;  // a gradient of this rank that was not finite since the last wait(); empty: none
  std::vector<autograd::HookHandle> hooks;
  std::optional<autograd::EarlyAccumulation> early;

  State(const nn::Module& module, const Group& ranks, const DataParallelOptions& given);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void arrived(std::size_t i);
  void start(Bucket& bucket);
  void finish(Bucket& bucket);
  void forget(Bucket& bucket);
  void count_step();
};

DataParallel::State::State(const nn::Module& module, const Group& ranks, const DataParallelOptions& given)
    : group(ranks), options(given), parameters(module.named_parameters()) {
  if (group.size() == 1) {
    check_options(options);
    return;
  }
  const nn::NamedTensors buffers = module.named_buffers();
  if (!parameters.empty()) {
    device = parameters[0].second.device();
  }
  std::vector<std::string> lines{
      fmt::format("bucket_bytes {}", options.bucket_bytes), fmt::format("check_every {}", options.check_every),
      fmt::format("reduce_dtype {}", options.reduce_dtype ? fmt::format("{}", *options.reduce_dtype) : "none"),
      fmt::format("check_gradients {}", options.check_gradients)};
  for (const std::vector<std::string>& more :
       {detail::described("parameter", parameters), detail::described("buffer", buffers)}) {
    lines.insert(lines.end(), more.begin(), more.end());
  }
  detail::check_same_lines(kWho, group, lines, device);
  check_options(options);  // before any collective, so that no rank waits for one that has thrown

  const auto others = autograd::EarlyAccumulation::leaves();
  Tensors all, leaves;
  for (const auto& [name, tensor] : parameters) {
    all.push_back(tensor);
    if (tensor.requires_grad()) {
      mica::check(others == nullptr || !others->contains(tensor.handle()->slot.get()),
                  "{}: parameter \"{}\" is already in another DataParallel or EarlyAccumulation", kWho, name);
      leaves.push_back(tensor);
      trained.push_back({.name = name, .tensor = tensor});
    } else {
      frozen.emplace_back(name, tensor);
    }
  }
  for (const auto& [name, tensor] : buffers) {
    all.push_back(tensor);
  }
  early.emplace(leaves);
  detail::broadcast_all(group, all);
  buckets = make_buckets(trained, options.bucket_bytes);
  bucket_of.resize(trained.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (const std::size_t i : buckets[b].members) {
      bucket_of[i] = b;
    }
  }
  hooks.reserve(trained.size());
  for (std::size_t i = 0; i < trained.size(); ++i) {
    hooks.push_back(trained[i].tensor.register_post_accumulate_grad_hook([this, i](const Tensor&) { arrived(i); }));
  }
}

DataParallel::State::~State() {
  for (autograd::HookHandle& hook : hooks) {
    hook.remove();
  }
}

void DataParallel::State::arrived(std::size_t i) {
  Trained& parameter = trained[i];
  mica::check(!parameter.arrived && bucket_of[i] >= started,
              "{}: a backward reached parameter \"{}\" a second time before wait(): run all backward passes but the "
              "last under accumulate(), and call wait() and drop the gradients after one that threw",
              kWho, parameter.name);
  if (accumulating > 0) {
    return;
  }
  parameter.arrived = true;
  --buckets[bucket_of[i]].missing;
  // In a fixed order, so that all ranks start the same reductions, in whatever order gradients arrive.
  while (started < buckets.size() && buckets[started].missing == 0) {
    start(buckets[started]);
    ++started;
  }
}

// Copies the gradients into a new buffer and removes them. Copying costs a pass over the gradients, but backward can
// allocate each gradient anywhere, and both copies are never kept at once.
void DataParallel::State::start(Bucket& bucket) {
  const DType dtype = size_of(bucket.dtype) == 2 ? options.reduce_dtype.value_or(bucket.dtype) : bucket.dtype;
  const auto count = static_cast<std::int64_t>(bucket.members.size());
  for (const std::size_t i : bucket.members) {
    const Tensor& x = trained[i].tensor;
    mica::check(x.dtype() == bucket.dtype && x.device() == bucket.device,
                "{}: parameter \"{}\" is {} on {} now, and was {} on {} when the DataParallel was constructed", kWho,
                trained[i].name, x.dtype(), x.device(), bucket.dtype, bucket.device);
  }
  const Tensor buffer = empty({bucket.size + count}, dtype, bucket.device);
  std::vector<float> flags;
  Tensors to, from;
  for (const std::size_t i : bucket.members) {
    Trained& parameter = trained[i];
    const Tensor gradient = parameter.tensor.grad();
    const Shape& shape = parameter.tensor.shape();
    parameter.present = gradient.defined();
    flags.push_back(parameter.present ? 1.0F : 0.0F);
    if (parameter.present && options.check_gradients && fault.empty()) {
      if (const char* const what = first_fault(gradient)) {
        fault = fmt::format("the gradient of parameter \"{}\" has {}", parameter.name, what);
      }
    }
    if (parameter.present) {
      to.push_back(part_of(buffer, shape, parameter.offset));
      from.push_back(gradient);
    } else {
      mica::check(!is_capturing(),
                  "{}: parameter \"{}\" has no gradient, so the host has to read whether another rank has one; this "
                  "cannot be captured into a CUDA graph",
                  kWho, parameter.name);
      fill_data(part_of(buffer, shape, parameter.offset), 0);
    }
  }
  const Tensor flags_in_buffer = part_of(buffer, {count}, bucket.size);
  if (std::find(flags.begin(), flags.end(), 0.0F) != flags.end()) {
    copy_into(flags_in_buffer, from_data(flags, {count}));
  } else {
    const Tensor ones =
        bucket.all_present.defined() ? bucket.all_present : full({count}, 1, bucket.dtype, bucket.device);
    if (!is_capturing()) {  // otherwise only replays fill it
      bucket.all_present = ones;
    }
    to.push_back(flags_in_buffer);
    from.push_back(ones);
  }
  copy_all_into(to, from);
  bucket.work = group.start_all_reduce(buffer, Reduction::mean);
  bucket.buffer = buffer;
  for (const std::size_t i : bucket.members) {
    trained[i].tensor.set_grad({});
  }
}

// After the reduction: sets the gradients of the parameters to views of the buffer.
void DataParallel::State::finish(Bucket& bucket) {
  const auto count = static_cast<std::int64_t>(bucket.members.size());
  std::vector<float> flags(bucket.members.size(), 1.0F);
  // On a GPU, reading the flags waits for the reduction. A rank that had all gradients need not read them.
  if (std::any_of(bucket.members.begin(), bucket.members.end(), [&](std::size_t i) { return !trained[i].present; })) {
    flags = to_vector<float>(part_of(bucket.buffer, {count}, bucket.size));
  }
  for (std::size_t k = 0; k < bucket.members.size(); ++k) {
    Trained& parameter = trained[bucket.members[k]];
    parameter.tensor.set_grad(flags[k] > 0 ? part_of(bucket.buffer, parameter.tensor.shape(), parameter.offset)
                                           : Tensor{});
  }
  forget(bucket);
}

void DataParallel::State::forget(Bucket& bucket) {
  for (const std::size_t i : bucket.members) {
    trained[i].arrived = false;
  }
  bucket.missing = bucket.members.size();
  bucket.buffer = {};
  bucket.work = {};
}

void DataParallel::State::count_step() {
  ++step;
  if (group.size() > 1 && options.check_every > 0 && step % options.check_every == 0) {
    detail::check_same_values(kWho, group, step, parameters, device);
  }
}

DataParallel::DataParallel(const nn::Module& module, const Group& group, DataParallelOptions options)
    : state_("DataParallel", std::make_shared<State>(module, group, options)) {}
DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;

void DataParallel::wait() const {
  State& state = *state_;
  const autograd::InferenceMode ordinary(false);  // gradients outlive an inference mode around this
  const autograd::NoGrad guard;
  for (const auto& [name, tensor] : state.frozen) {
    mica::check(!tensor.grad().defined(),
                "{}: parameter \"{}\" has a gradient, but did not require one when the DataParallel was constructed",
                kWho, name);
  }
  while (state.started < state.buckets.size()) {
    state.start(state.buckets[state.started]);
    ++state.started;
  }
  for (Bucket& bucket : state.buckets) {
    bucket.work.wait();
    bucket.buffer = bucket.buffer.to(bucket.dtype);
  }
  for (Bucket& bucket : state.buckets) {
    state.finish(bucket);
  }
  state.started = 0;
  if (state.options.check_gradients && state.group.size() > 1) {
    detail::check_no_fault(kWho, state.group, state.step + 1, std::exchange(state.fault, ""), state.device);
  }
  on_each_replay([kept = state_.pointer()] { kept->count_step(); });
}

void DataParallel::discard() const {
  for (Bucket& bucket : state_->buckets) {
    state_->forget(bucket);
  }
  state_->started = 0;
  state_->fault.clear();
}

DataParallel::Accumulating DataParallel::accumulate(bool on) const {
  return Accumulating(on ? state_.pointer() : nullptr);
}

void DataParallel::check(std::int64_t step) const {
  if (state_->group.size() > 1) {
    detail::check_same_values(kWho, state_->group, step, state_->parameters, state_->device);
  }
}

int DataParallel::buckets() const { return static_cast<int>(state_->buckets.size()); }
int DataParallel::started() const { return static_cast<int>(state_->started); }

DataParallel::Accumulating::Accumulating(std::shared_ptr<State> state) : state_(std::move(state)) {
  if (state_ != nullptr) {
    ++state_->accumulating;
  }
}

DataParallel::Accumulating::~Accumulating() {
  if (state_ != nullptr) {
    --state_->accumulating;
  }
}

}  // namespace mica::distributed
