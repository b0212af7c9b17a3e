#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/finite.h>
#include <mica/distributed/detail/agreement.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/detail/writers.h>

namespace mica::distributed {

namespace {

constexpr const char* kName = "ShardedAdamW";

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Parameters begin at a multiple of this many elements: 256 bytes, as new tensors do, for the fast kernels.
std::int64_t alignment(DType dtype) { return 256 / static_cast<std::int64_t>(size_of(dtype)); }

// FNV-1a, to compare the arguments of the ranks.
class Hash {
 public:
  Hash& add(std::string_view text) {
    for (const char c : text) {
      value_ = (value_ ^ static_cast<std::uint8_t>(c)) * 0x100000001B3u;
    }
    return *this;
  }
  Hash& add(std::int64_t number) { return add({reinterpret_cast<const char*>(&number), sizeof(number)}); }
  Hash& add(double number) { return add(std::bit_cast<std::int64_t>(number)); }

  std::int64_t value() const { return std::bit_cast<std::int64_t>(value_); }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325u;
};

// Throws on all ranks if one of them has an error: that rank throws its own error, the others one that names the rank.
void check_no_rank_failed(const std::vector<std::uint8_t>& failed, const std::exception_ptr& error, const char* what) {
  if (error) {
    std::rethrow_exception(error);
  }
  for (std::size_t rank = 0; rank < failed.size(); ++rank) {
    check(failed[rank] == 0, "{}: {}: rank {} has an error, which it reports; nothing has changed", kName, what, rank);
  }
}

template <class T>
std::vector<std::uint8_t> first_of(const std::vector<std::vector<T>>& rows) {
  std::vector<std::uint8_t> result;
  result.reserve(rows.size());
  for (const std::vector<T>& row : rows) {
    result.push_back(row.front() != 0 ? 1 : 0);
  }
  return result;
}

// `count` elements of contiguous x, from element `first` on, as a tensor with one axis.
Tensor range_of(const Tensor& x, std::int64_t first, std::int64_t count) {
  return as_strided(x, {count}, {1}, x.handle()->offset + (count > 0 ? first : 0));
}

Tensor view_at(const Tensor& flat, std::int64_t offset, const Shape& shape) {
  return as_strided(flat, shape, contiguous_strides(shape), numel_of(shape) > 0 ? offset : 0);
}

// The memory of x in a separate storage, which has its own version and does not wait for transfers into x.
Tensor alias_of(const Tensor& x) {
  struct Alias {
    explicit Alias(const std::shared_ptr<Storage>& of) : owner(of), storage(of->data(), of->bytes(), of->device()) {}

    std::shared_ptr<Storage> owner;
    Storage storage;
  };
  const auto alias = std::make_shared<Alias>(x.handle()->storage);
  const Tensor result = from_blob(x.raw_data(), x.shape(), x.dtype(), x.device());
  result.handle()->storage = std::shared_ptr<Storage>(alias, &alias->storage);
  return result;
}

std::string state_name(std::size_t parameter, std::string_view what) {
  return fmt::format("state.{}.{}", parameter, what);
}

constexpr const char* state_tensors[] = {"exp_avg", "exp_avg_sq", "master"};

bool is_16_bit(DType dtype) { return size_of(dtype) == 2; }

}  // namespace

/// The AdamW of this rank's elements. Clips by the norm of all ranks' gradients.
class ShardedAdamW::Shard : public optim::AdamW {
 public:
  Shard(const std::vector<optim::AdamW::Group>& groups, const distributed::Group& group)
      : AdamW(kName, groups), group_(group) {}

 private:
  Tensor sums_of_all_squares(const Tensor& sums) override {
    if (group_.size() == 1) {
      return sums;
    }
    const autograd::NoGrad guard;
    const Tensor total = sum(sums);
    group_.all_reduce(total);
    return total;
  }

  distributed::Group group_;
};

struct ShardedAdamW::Parameter {
  Tensor tensor;
  std::int64_t offset = 0;  // in the bucket
  std::int64_t first = 0;   // index of this rank's first element in the parameter
  Tensor leaf{};            // this rank's elements, on one axis
  std::size_t bucket = 0;
  bool arrived = false;  // with overlap: backward has completed its gradient since the last step
  bool present = false;  // this rank had a gradient when the bucket was sent
};

/// Parameters of one dtype, and their memory.
struct ShardedAdamW::Bucket {
  DType dtype = float32;
  Device device;
  std::vector<std::size_t> parameters{};
  std::int64_t used = 0;  // elements before padding to equal parts
  std::int64_t part = 0;  // elements of one rank
  Tensor flat{};          // (ranks · part)
  // The same memory with a separate version: after writes to a parameter, a step compares it with the master weights,
  // and the gather of the weights must not count as such a write.
  Tensor stepped{};
  Tensor gathered{};          // the same memory again: the gather itself must not wait for the pending transfer
  std::uint32_t version = 0;  // of `flat`, after the gather
  // For the current step:
  std::size_t missing = 0;    // with overlap: parameters whose gradients have not arrived
  std::int64_t complete = 0;  // how many buckets were complete before this one
  Tensor reduced{};           // (part) mean gradients; undefined until the reduction starts
  Work work{};

  bool has(const std::vector<bool>& some) const {
    return std::any_of(parameters.begin(), parameters.end(), [&](std::size_t i) { return some[i]; });
  }
};

ShardedAdamW::ShardedAdamW(const Tensors& parameters, optim::AdamWOptions options, const Group& group,
                           ShardingOptions sharding)
    : ShardedAdamW(std::vector<optim::AdamW::Group>{{parameters, options}}, group, sharding) {}

ShardedAdamW::ShardedAdamW(const std::vector<optim::AdamW::Group>& groups, const Group& group, ShardingOptions sharding)
    : group_(group),
      reduce_dtype_(sharding.reduce_dtype),
      overlap_(sharding.overlap && group.size() > 1),
      check_gradients_(sharding.check_gradients),
      overlap_gather_(sharding.overlap_gather) {
  const autograd::InferenceMode ordinary(false);  // weights must not be inference tensors
  const autograd::NoGrad guard;
  std::exception_ptr error;
  try {
    check(sharding.bucket_bytes > 0, "{}: expected bucket_bytes > 0, got {}", kName, sharding.bucket_bytes);
    check(!reduce_dtype_ || *reduce_dtype_ == float32 || *reduce_dtype_ == float64,
          "{}: expected reduce_dtype to be float32 or float64, got {}", kName, reduce_dtype_.value_or(float32));
    shard_ = std::make_unique<Shard>(groups, group_);  // for one rank; otherwise only to validate
    if (group_.size() > 1) {
      const Tensors all = shard_->parameters();
      for (const Tensor& x : all) {
        check(x.device() == all.front().device(), "{}: expected all parameters on one device, got {} and {}", kName,
              all.front().device(), x.device());
      }
      if (overlap_) {
        early_ = std::make_unique<autograd::EarlyAccumulation>(all);
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (group_.size() == 1) {
    if (error) {
      std::rethrow_exception(error);
    }
    return;
  }
  check_ranks_agree(groups, sharding, error);
  make_buckets(shard_->parameters(), sharding.bucket_bytes);
  for (Bucket& bucket : buckets_) {
    fill(bucket);
  }
  std::vector<optim::AdamW::Group> shards;
  std::size_t next = 0;
  for (const optim::AdamW::Group& whole : groups) {
    optim::AdamW::Group& shard = shards.emplace_back(optim::AdamW::Group{{}, whole.options});
    for (std::size_t i = 0; i < whole.parameters.size(); ++i) {
      shard.parameters.push_back(parameters_[next++].leaf);
    }
  }
  shard_ = std::make_unique<Shard>(shards, group_);
  forget_gradients();
  for (std::size_t i = 0; overlap_ && i < parameters_.size(); ++i) {
    hooks_.push_back(
        parameters_[i].tensor.register_post_accumulate_grad_hook([this, i](const Tensor&) { arrived(i); }));
  }
}

ShardedAdamW::~ShardedAdamW() {
  for (autograd::HookHandle& hook : hooks_) {
    hook.remove();
  }
  try {
    wait();  // otherwise pending transfers would keep weights alive that are no longer used
  } catch (const Error&) {
    // A rank has failed. Any later use of a weight throws this error.
  }
}

// Throws the same error on all ranks, or the rank's own `error`.
void ShardedAdamW::check_ranks_agree(const std::vector<optim::AdamW::Group>& groups, const ShardingOptions& sharding,
                                     const std::exception_ptr& error) const {
  check_no_rank_failed(first_of(detail::gather_rows<std::uint8_t>(group_, {error ? std::uint8_t{1} : std::uint8_t{0}})),
                       error, "the constructor");
  std::vector<std::string> lines{
      fmt::format("bucket_bytes {}", sharding.bucket_bytes),
      reduce_dtype_ ? fmt::format("a reduce_dtype of {}", *reduce_dtype_) : "no reduce_dtype",
      sharding.overlap ? "overlap" : "no overlap", sharding.overlap_gather ? "overlap_gather" : "no overlap_gather",
      sharding.check_gradients ? "check_gradients" : "no check_gradients"};
  std::size_t number = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const optim::AdamWOptions& o = groups[g].options;
    lines.push_back(fmt::format("group {} of lr {}, betas {} and {}, eps {}, weight_decay {}, {} master weights", g,
                                o.lr, o.betas[0], o.betas[1], o.eps, o.weight_decay,
                                o.master_weights ? "with" : "without"));
    for (const Tensor& x : groups[g].parameters) {
      lines.push_back(fmt::format("parameter {} of {} {}", number++, x.dtype(), x.shape()));
    }
  }
  detail::check_same_lines(kName, group_, lines, Device::cpu());
}

void ShardedAdamW::make_buckets(const Tensors& parameters, std::int64_t bucket_bytes) {
  std::vector<std::pair<DType, std::size_t>> open;  // the last bucket of each dtype
  for (const Tensor& x : parameters) {
    const auto limit = bucket_bytes / static_cast<std::int64_t>(size_of(x.dtype()));
    auto at = std::find_if(open.begin(), open.end(), [&](const auto& of) { return of.first == x.dtype(); });
    if (at == open.end() || buckets_[at->second].used + x.numel() > limit) {
      if (at == open.end()) {
        at = open.insert(open.end(), {x.dtype(), 0});
      }
      at->second = buckets_.size();
      buckets_.push_back({.dtype = x.dtype(), .device = x.device()});
    }
    Bucket& bucket = buckets_[at->second];
    bucket.parameters.push_back(parameters_.size());
    parameters_.push_back({.tensor = x, .offset = bucket.used, .bucket = at->second});
    bucket.used = round_up(bucket.used + x.numel(), alignment(x.dtype()));
  }
  for (Bucket& bucket : buckets_) {
    const std::int64_t step = alignment(bucket.dtype);
    bucket.part = round_up(std::max<std::int64_t>(bucket.used, 1), group_.size() * step) / group_.size();
    order_.insert(order_.begin(), order_.size());
  }
}

// Moves the parameters into the bucket, with the values of rank 0, and creates the leaves.
void ShardedAdamW::fill(Bucket& bucket) {
  const std::int64_t own = group_.rank() * bucket.part;
  bucket.flat = zeros({group_.size() * bucket.part}, bucket.dtype, bucket.device);
  for (const std::size_t i : bucket.parameters) {
    const Tensor& x = parameters_[i].tensor;
    copy_into(view_at(bucket.flat, parameters_[i].offset, x.shape()), x.detach());
  }
  group_.broadcast(bucket.flat);
  bucket.stepped = alias_of(bucket.flat);
  bucket.gathered = alias_of(bucket.flat);
  for (const std::size_t i : bucket.parameters) {
    Parameter& parameter = parameters_[i];
    const Tensor& x = parameter.tensor;
    const Tensor grad = x.grad();
    x.set_data(view_at(bucket.flat, parameter.offset, x.shape()));
    x.set_grad(grad);
    parameter.first = std::clamp<std::int64_t>(own - parameter.offset, 0, x.numel());
    const std::int64_t end = std::clamp<std::int64_t>(own + bucket.part - parameter.offset, 0, x.numel());
    parameter.leaf = range_of(bucket.stepped, parameter.offset + parameter.first, end - parameter.first);
    parameter.leaf.requires_grad_();
  }
  bucket.version = bucket.flat.version();
}

void ShardedAdamW::look_for_fault(std::size_t i) const {
  const Tensor grad = parameters_[i].tensor.grad();
  if (check_gradients_ && fault_.empty() && grad.defined()) {
    if (const char* const what = first_fault(grad)) {
      fault_ = fmt::format("on rank {}, the gradient of parameter {} of shape {} has {}", group_.rank(), i,
                           grad.shape(), what);
    }
  }
}

// The checks that need no other rank.
void ShardedAdamW::check_step(const optim::StepOptions& options) const {
  check(!options.max_grad_norm || *options.max_grad_norm >= 0, "{}: expected max_grad_norm >= 0, got {}", kName,
        options.max_grad_norm.value_or(0));
  for (const Bucket& bucket : buckets_) {
    for (const std::size_t i : bucket.parameters) {
      const Parameter& parameter = parameters_[i];
      const Tensor& x = parameter.tensor;
      const Tensor in_bucket = view_at(bucket.flat, parameter.offset, x.shape());
      check(x.handle()->storage == bucket.flat.handle()->storage && x.raw_data() == in_bucket.raw_data() &&
                x.dtype() == bucket.dtype && x.is_contiguous(),
            "{}: parameter {} of shape {} has left the memory that it got from the optimizer: move and convert a model "
            "before the optimizer is made",
            kName, i, x.shape());
      optim::check_can_step(kName, x, options.scaler != nullptr);
      look_for_fault(i);
    }
  }
  const std::string fault = std::exchange(fault_, "");
  check(fault.empty(), "{}: {}", kName, fault);
}

// Returns whether any rank has a gradient, for each parameter.
std::vector<bool> ShardedAdamW::agree_on_step(const optim::StepOptions& options) const {
  const auto has_gradient = [&](const Parameter& parameter) {
    return overlap_ ? parameter.present : parameter.tensor.grad().defined();
  };
  if (is_capturing()) {
    check_step(options);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      check(
          has_gradient(parameters_[i]),
          "{}: parameter {} of shape {} has no gradient, so the ranks have to agree on the host whether it is updated; "
          "this cannot be captured into a CUDA graph",
          kName, i, parameters_[i].tensor.shape());
    }
    return std::vector<bool>(parameters_.size(), true);
  }
  constexpr std::size_t kHead = 1 + sizeof(std::int64_t);  // failed, hash of the options
  std::vector<std::uint8_t> row(kHead + parameters_.size());
  std::exception_ptr error;
  try {
    check_step(options);
  } catch (...) {
    error = std::current_exception();
    row[0] = 1;
  }
  Hash hash;
  hash.add(*steps_).add(std::int64_t{options.scaler != nullptr}).add(options.max_grad_norm.value_or(-1));
  for (std::size_t g = 0; g < group_count(); ++g) {
    hash.add(lr(g));
  }
  const std::int64_t value = hash.value();
  std::memcpy(&row[1], &value, sizeof(value));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    row[kHead + i] = has_gradient(parameters_[i]) ? 1 : 0;
  }
  const auto rows = detail::gather_rows(group_, row);
  check_no_rank_failed(first_of(rows), error, "step");
  std::vector<bool> result(parameters_.size());
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    check(std::equal(&rows[rank][1], &rows[rank][0] + kHead, &rows[0][1]),
          "{}: rank {} calls step() with other learning rates, max_grad_norm, scaler or number of steps than rank 0",
          kName, rank);
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = result[i] || rows[rank][kHead + i] != 0;
    }
  }
  return result;
}

// Called when backward has accumulated the gradient of parameter i.
void ShardedAdamW::arrived(std::size_t i) {
  Parameter& parameter = parameters_[i];
  Bucket& bucket = buckets_[parameter.bucket];
  check(!parameter.arrived && !bucket.reduced.defined(),
        "{}: a backward reached parameter {} of shape {} a second time before step(): run all backward passes of a "
        "step but the last under accumulate()",
        kName, i, parameter.tensor.shape());
  if (*accumulating_ > 0) {
    return;
  }
  look_for_fault(i);
  parameter.arrived = true;
  if (--bucket.missing == 0) {
    bucket.complete = complete_++;
  }
  // In a fixed order, so that all ranks start the same reductions, in whatever order gradients arrive.
  while (started_ < order_.size() && buckets_[order_[started_]].missing == 0) {
    start_reduction(buckets_[order_[started_]]);
    ++started_;
  }
}

void ShardedAdamW::start_reduction(Bucket& bucket) {
  const autograd::NoGrad guard;
  const DType dtype = is_16_bit(bucket.dtype) ? reduce_dtype_.value_or(bucket.dtype) : bucket.dtype;
  const Tensor gradients = empty(bucket.flat.shape(), dtype, bucket.device);  // its padding is never read
  Tensors copies, grads;
  for (const std::size_t i : bucket.parameters) {
    Parameter& parameter = parameters_[i];
    const Tensor grad = parameter.tensor.grad();
    const Tensor to = view_at(gradients, parameter.offset, parameter.tensor.shape());
    parameter.present = grad.defined();
    if (parameter.present) {
      copies.push_back(to);
      grads.push_back(grad);
    } else {
      fill_data(to, 0);
    }
  }
  copy_all_into(copies, grads);
  bucket.reduced = empty({bucket.part}, dtype, bucket.device);
  bucket.work = group_.start_reduce_scatter(gradients, bucket.reduced, Reduction::mean);
  for (const std::size_t i : bucket.parameters) {
    if (overlap_) {
      parameters_[i].tensor.set_grad({});
    }
  }
}

// Completes a reduction that was started; does nothing if none was.
void ShardedAdamW::finish_reduction(Bucket& bucket) const {
  if (bucket.reduced.defined()) {
    bucket.work.wait();
    bucket.work = {};  // frees the gradients that were sent
    bucket.reduced = bucket.reduced.to(bucket.dtype);
  }
}

// Reduces the buckets that were not started and contain a wanted parameter, and completes all reductions. Two buckets
// are in progress at any time: one is copied while the other is communicated.
void ShardedAdamW::reduce_gradients(const std::vector<bool>& wanted) {
  for (; started_ < order_.size(); ++started_) {
    if (buckets_[order_[started_]].has(wanted)) {
      start_reduction(buckets_[order_[started_]]);
    }
    if (started_ > 0) {
      finish_reduction(buckets_[order_[started_ - 1]]);
    }
  }
  for (Bucket& bucket : buckets_) {
    finish_reduction(bucket);
  }
}

void ShardedAdamW::set_shard_gradients(const std::vector<bool>& has_gradient) {
  shard_->zero_grad();
  for (const Bucket& bucket : buckets_) {
    const std::int64_t own = group_.rank() * bucket.part;
    for (const std::size_t i : bucket.parameters) {
      const Parameter& parameter = parameters_[i];
      if (has_gradient[i]) {
        parameter.leaf.set_grad(
            range_of(bucket.reduced, parameter.offset + parameter.first - own, parameter.leaf.numel()));
      }
    }
  }
}

// Backward does not complete gradients in the order of the groups. So all ranks reduce buckets in the order in which
// rank 0's first backward completed them; buckets that it did not complete come last.
void ShardedAdamW::learn_order() {
  if (learned_order_) {
    return;
  }
  std::vector<std::int64_t> complete;
  for (const Bucket& bucket : buckets_) {
    complete.push_back(bucket.complete);
  }
  const Tensor of_rank_0 = from_data(complete, {static_cast<std::int64_t>(complete.size())});
  group_.broadcast(of_rank_0);
  complete = to_vector<std::int64_t>(of_rank_0);
  learned_order_ = std::count(complete.begin(), complete.end(), 0) > 0;
  std::stable_sort(order_.begin(), order_.end(),
                   [&](std::size_t a, std::size_t b) { return complete[a] < complete[b]; });
}

// Frees the reduced gradients, and resets the counts of arrived gradients for the next step.
void ShardedAdamW::forget_gradients() {
  fault_.clear();
  shard_->zero_grad();
  for (Bucket& bucket : buckets_) {
    bucket.reduced = {};
    bucket.work = {};
    bucket.missing = bucket.parameters.size();
    bucket.complete = std::numeric_limits<std::int64_t>::max();
  }
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
  }
  started_ = 0;
  complete_ = 0;
}

// Starts with the bucket that was reduced last: roughly the order in which the next forward uses the weights.
void ShardedAdamW::gather_weights(const std::vector<bool>& has_gradient) {
  std::vector<Work> works;
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    Bucket& bucket = buckets_[*at];
    if (!bucket.has(has_gradient)) {
      continue;
    }
    const Tensor own = range_of(bucket.gathered, group_.rank() * bucket.part, bucket.part);
    const Work work = group_.start_all_gather(own, bucket.gathered);
    bucket.flat.bump_version("all_gather");
    bucket.version = bucket.flat.version();
    if (overlap_gather_ && !is_capturing()) {  // a graph ends after all that it has started
      Storage::arrive_later(bucket.flat.handle()->storage, [work] { work.wait(); });
    } else {
      works.push_back(work);
    }
  }
  for (const Work& work : works) {
    work.wait();
  }
}

void ShardedAdamW::wait() const {
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    if (const Bucket& bucket = buckets_[*at]; bucket.flat.defined()) {
      bucket.flat.handle()->storage->arrive();
    }
  }
}

Tensor ShardedAdamW::step(const optim::StepOptions& options) {
  if (group_.size() == 1) {
    return shard_->step(options);
  }
  const autograd::NoGrad guard;
  wait();  // for transfers of weights that were not used since the last step
  std::vector<bool> has_gradient;
  if (overlap_) {
    // Backward has started some reductions, and each rank must start those that others have started.
    reduce_gradients(std::vector<bool>(parameters_.size(), true));
    has_gradient = agree_on_step(options);
    learn_order();
  } else {
    has_gradient = agree_on_step(options);
    reduce_gradients(has_gradient);
  }
  set_shard_gradients(has_gradient);
  for (const Bucket& bucket : buckets_) {
    if (bucket.flat.version() != bucket.version) {
      bucket.stepped.bump_version("a write to a parameter");
    }
  }
  const Tensor norm = shard_->step(options);
  forget_gradients();
  gather_weights(has_gradient);
  on_each_replay([steps = steps_] { ++*steps; });
  return norm;
}

void ShardedAdamW::zero_grad() {
  const bool arrived =
      std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return p.arrived; });
  if (arrived || started_ > 0) {
    reduce_gradients(std::vector<bool>(parameters_.size(), true));  // other ranks may have started more
    forget_gradients();
  }
  for (const Tensor& x : parameters()) {
    x.set_grad({});
  }
}

void ShardedAdamW::discard() {
  if (group_.size() > 1) {
    forget_gradients();
  }
}

ShardedAdamW::Accumulating ShardedAdamW::accumulate(bool on) const {
  return Accumulating(on ? accumulating_ : nullptr);
}

ShardedAdamW::Accumulating::Accumulating(std::shared_ptr<int> count) : count_(std::move(count)) {
  if (count_ != nullptr) {
    ++*count_;
  }
}

ShardedAdamW::Accumulating::~Accumulating() {
  if (count_ != nullptr) {
    --*count_;
  }
}

void ShardedAdamW::set_lr(double lr) { shard_->set_lr(lr); }
void ShardedAdamW::set_lr(std::size_t group, double lr) { shard_->set_lr(group, lr); }
double ShardedAdamW::lr(std::size_t group) const { return shard_->lr(group); }
std::size_t ShardedAdamW::group_count() const { return shard_->group_count(); }

Tensors ShardedAdamW::parameters() const {
  if (group_.size() == 1) {
    return shard_->parameters();
  }
  Tensors result;
  for (const Parameter& parameter : parameters_) {
    result.push_back(parameter.tensor);
  }
  return result;
}

StateDict ShardedAdamW::state_dict(std::optional<int> only_rank) const {
  const int rank = only_rank.value_or(0);
  check(rank >= 0 && rank < group_.size(), "{}: state_dict: expected a rank in [0, {}), got {}", kName, group_.size(),
        rank);
  const StateDict own = shard_->state_dict();
  if (group_.size() == 1) {
    return own;
  }
  const autograd::NoGrad guard;
  const bool wanted = !only_rank || *only_rank == group_.rank();
  StateDict result;
  for (const Bucket& bucket : buckets_) {
    const std::int64_t begin = group_.rank() * bucket.part;
    for (const char* const what : state_tensors) {
      std::vector<std::size_t> with_state;  // the same on all ranks, since each has all parameters
      for (const std::size_t i : bucket.parameters) {
        if (own.contains(state_name(i, what))) {
          with_state.push_back(i);
        }
      }
      if (with_state.empty()) {
        continue;
      }
      const DType dtype = accumulate_dtype(bucket.dtype);
      const Tensor part = empty({bucket.part}, dtype, bucket.device);
      const Tensor whole = empty({group_.size() * bucket.part}, dtype, bucket.device);
      for (const std::size_t i : with_state) {
        const Parameter& parameter = parameters_[i];
        copy_into(range_of(part, parameter.offset + parameter.first - begin, parameter.leaf.numel()),
                  own.at(state_name(i, what)));
      }
      group_.all_gather(part, whole);
      for (const std::size_t i : wanted ? with_state : std::vector<std::size_t>{}) {
        const Shape& shape = parameters_[i].tensor.shape();
        const Tensor copy = empty(shape, dtype);
        copy_into(copy, view_at(whole, parameters_[i].offset, shape));
        result.emplace(state_name(i, what), copy);
      }
    }
    for (const std::size_t i : bucket.parameters) {
      if (const auto at = own.find(state_name(i, "step")); wanted && at != own.end()) {
        result.insert(*at);
      }
    }
  }
  return result;
}

// The states of this rank's elements. AdamW reports any other error in `state`.
StateDict ShardedAdamW::shard_of(const StateDict& state) const {
  StateDict result = state;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    for (const char* const what : state_tensors) {
      const auto at = result.find(state_name(i, what));
      if (at == result.end()) {
        continue;
      }
      const Shape& expected = parameter.tensor.shape();
      check(at->second.defined() && at->second.shape() == expected,
            "{}: load_state_dict: expected \"{}\" of shape {}, got {}", kName, at->first, expected,
            at->second.defined() ? to_string(at->second.shape()) : "an undefined tensor");
      at->second = range_of(contiguous_data(at->second.detach()), parameter.first, parameter.leaf.numel());
    }
  }
  return result;
}

void ShardedAdamW::load_state_dict(const StateDict& state) {
  if (group_.size() == 1) {
    shard_->load_state_dict(state);
    return;
  }
  const autograd::NoGrad guard;
  wait();  // this rank's shard of the weights is read, and the gather may still be writing that memory
  const StateDict before = shard_->state_dict();
  std::exception_ptr error;
  Hash steps;
  try {
    shard_->load_state_dict(shard_of(state));
    for (const auto& [name, tensor] : shard_->state_dict()) {
      steps.add(name);
      if (name.ends_with(".step")) {
        steps.add(to_vector<std::int64_t>(tensor)[0]);
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  const auto rows = detail::gather_rows<std::int64_t>(group_, {error ? 1 : 0, steps.value()});
  try {
    check_no_rank_failed(first_of(rows), error, "load_state_dict");
    for (std::size_t rank = 1; rank < rows.size(); ++rank) {
      check(rows[rank][1] == rows[0][1], "{}: load_state_dict: rank {} was given states of other steps than rank 0",
            kName, rank);
    }
  } catch (...) {
    shard_->load_state_dict(before);
    throw;
  }
}

std::size_t ShardedAdamW::state_bytes() const {
  std::size_t result = 0;
  for (const auto& [name, tensor] : shard_->state_dict()) {
    result += name.ends_with(".step") ? 0 : tensor.bytes();
  }
  return result;
}

}  // namespace mica::distributed
