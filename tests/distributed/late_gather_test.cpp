#include <tests/support.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/distributed/detail/group_state.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

// ShardingOptions::overlap_gather, with threads as ranks. Transfers run only when they are waited for, so elements that
// are read too early are wrong in every run.

namespace mica::distributed {
namespace {

using testing_support::expect_error;

/// One collective. Each rank's data is copied when the rank calls it.
struct Exchange {
  std::vector<Tensor> sent;
  int missing = 0;
};

/// Where the threads meet.
class Hub {
 public:
  explicit Hub(int size) : size_(size) {}

  int size() const { return size_; }

  std::shared_ptr<Exchange> join(std::size_t number, int rank, const Tensor& sent) {
    const autograd::NoGrad guard;
    const Tensor copy = empty(sent.shape(), sent.dtype());
    copy_into(copy, sent);
    const std::lock_guard lock(mutex_);
    if (exchanges_.size() <= number) {
      exchanges_.push_back(std::make_shared<Exchange>(Exchange{std::vector<Tensor>(size_), size_}));
    }
    const std::shared_ptr<Exchange> exchange = exchanges_.at(number);
    exchange->sent[rank] = copy;
    --exchange->missing;
    changed_.notify_all();
    return exchange;
  }

  void wait(const Exchange& exchange) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || exchange.missing == 0; });
    check(!failed_, "a rank has failed");
  }

  void fail(bool on = true) {
    const std::lock_guard lock(mutex_);
    failed_ = on;
    changed_.notify_all();
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Exchange>> exchanges_;
  bool failed_ = false;
};

/// A transfer that runs only when it is waited for.
class Late final : public detail::Transfer {
 public:
  Late(Hub& hub, std::shared_ptr<Exchange> exchange, std::function<void(const std::vector<Tensor>&)> receive)
      : hub_(hub), exchange_(std::move(exchange)), receive_(std::move(receive)) {}

  void wait() override {
    if (exchange_ != nullptr) {
      hub_.wait(*exchange_);
      const autograd::NoGrad guard;
      receive_(exchange_->sent);
      exchange_ = nullptr;
    }
  }

 private:
  Hub& hub_;
  std::shared_ptr<Exchange> exchange_;
  std::function<void(const std::vector<Tensor>&)> receive_;
};

class Threads final : public detail::Collectives {
 public:
  Threads(Hub& hub, int rank) : hub_(hub), rank_(rank) {}

  std::shared_ptr<detail::Transfer> all_reduce(const Tensor& x, Reduction reduction) override {
    return start(x, [=](const Tensors& sent) { copy_into(x, combined(sent, reduction)); });
  }
  std::shared_ptr<detail::Transfer> reduce_scatter(const Tensor& from, const Tensor& into,
                                                   Reduction reduction) override {
    return start(from, [=, rank = rank_](const Tensors& sent) {
      copy_into(into, as_strided(combined(sent, reduction), into.shape(), into.strides(), rank * into.numel()));
    });
  }
  std::shared_ptr<detail::Transfer> all_gather(const Tensor& from, const Tensor& into) override {
    return start(from, [=](const Tensors& sent) {
      std::int64_t offset = into.handle()->offset;
      for (const Tensor& part : sent) {
        copy_into(as_strided(into, part.shape(), part.strides(), offset), part);
        offset += part.numel();
      }
    });
  }
  std::shared_ptr<detail::Transfer> broadcast(const Tensor& x, int root) override {
    return start(x, [=](const Tensors& sent) { copy_into(x, sent[root]); });
  }

 private:
  std::shared_ptr<detail::Transfer> start(const Tensor& sent, std::function<void(const Tensors&)> receive) {
    return std::make_shared<Late>(hub_, hub_.join(next_++, rank_, sent), std::move(receive));
  }

  static Tensor combined(const Tensors& sent, Reduction reduction) {
    Tensor sum = sent[0];
    for (std::size_t rank = 1; rank < sent.size(); ++rank) {
      sum = sum + sent[rank];
    }
    return reduction == Reduction::mean ? sum / static_cast<double>(sent.size()) : sum;
  }

  Hub& hub_;
  const int rank_;
  std::size_t next_ = 0;
};

/// Calls f for each rank, on a thread of its own.
void run_ranks(Hub& hub, const std::function<void(const Group&)>& f) {
  std::vector<std::exception_ptr> errors(hub.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < hub.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto state = std::make_shared<detail::GroupState>();
        state->rank = rank;
        state->size = hub.size();
        state->cpu = std::make_shared<Threads>(hub, rank);
        f(Group(state));
      } catch (...) {
        errors[rank] = std::current_exception();
        hub.fail();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

struct Net : nn::Module {
  nn::Linear first = child("first", nn::Linear{3, 9});
  nn::Linear second = child("second", nn::Linear{9, 8});
  nn::Linear third = child("third", nn::Linear{8, 2});

  Tensor operator()(const Tensor& x) const {
    const nn::Scope scope(*this);
    return third(tanh(second(tanh(first(x)))));
  }
};

std::unique_ptr<Net> make_net(DType dtype = float32) {
  manual_seed(3);
  auto net = std::make_unique<Net>();
  net->to(dtype);
  return net;
}

Tensor loss_of(const Net& net, const Group& group, int step) {
  const DType dtype = net.parameters()[0].dtype();
  std::vector<float> rows;
  for (int k = 0; k < 12; ++k) {
    rows.push_back(static_cast<float>((k * 5 + group.rank() * 7 + step * 3) % 11) / 8 - 0.5F);
  }
  const Tensor out = net(from_data(rows, {4, 3}).to(dtype));
  return sum(out * out).to(float32);
}

bool on_its_way(const Tensor& x) { return x.handle()->storage->is_on_its_way(); }

int count_on_their_way(const nn::Module& module) {
  int count = 0;
  for (const Tensor& x : module.parameters()) {
    count += on_its_way(x) ? 1 : 0;
  }
  return count;
}

using Values = std::vector<std::vector<double>>;

Values values_of(const nn::Module& module) {
  Values result;
  for (const Tensor& x : module.parameters()) {
    result.push_back(to_vector<double>(x));
  }
  return result;
}

constexpr optim::AdamWOptions kOptions{.lr = 0.05};

TEST(LateGather, WeightsTravelWhileTheLayersBeforeThemCompute) {
  for (const bool overlap : {false, true}) {
    Hub hub(2);
    const std::vector<std::unique_ptr<Net>> nets = [] {
      std::vector<std::unique_ptr<Net>> made;
      made.push_back(make_net());
      made.push_back(make_net());
      return made;
    }();
    run_ranks(hub, [&](const Group& group) {
      const Net& net = *nets[group.rank()];
      const Tensor weight = net.third.parameters()[0];
      ShardedAdamW optimizer(net.parameters(), kOptions, group,
                             {.bucket_bytes = 1, .overlap = overlap, .overlap_gather = true});
      const float* const pointer = weight.data<float>();
      for (int step = 0; step < 4; ++step) {
        const std::vector<float> before = to_vector<float>(weight);
        loss_of(net, group, step).backward();
        optimizer.step({.max_grad_norm = 0.5});
        optimizer.zero_grad();
        EXPECT_EQ(count_on_their_way(net), 6) << "step() has returned";
        // The part of the other rank has not been written: 16 elements of a bucket of 128, of which each has 64, so
        // that rank 0 owns them all.
        EXPECT_EQ(std::vector<float>(pointer, pointer + 16) == before, group.rank() == 1);
        const Tensor x = tanh(net.first(ones({1, 3})));
        EXPECT_EQ(count_on_their_way(net.first), 0);
        EXPECT_EQ(count_on_their_way(net), 4);
        const Tensor y = tanh(net.second(x));
        EXPECT_EQ(count_on_their_way(net.second), 0);
        EXPECT_EQ(count_on_their_way(net.third), 2);
        (void)net.third(y);
        EXPECT_EQ(count_on_their_way(net), 0);
        EXPECT_NE(std::vector<float>(pointer, pointer + 16), before);
      }
    });
    EXPECT_EQ(values_of(*nets[0]), values_of(*nets[1]));
  }
}

// Several steps with accumulation, with different numbers of ranks: the same bits as when step() waits for the gathers.
TEST(LateGather, HasTheSameBits) {
  for (const int ranks : {2, 3}) {
    for (const DType dtype : {float32, bfloat16}) {
      std::vector<Values> results;
      for (const bool late : {false, true}) {
        Hub hub(ranks);
        std::vector<std::unique_ptr<Net>> nets;
        for (int rank = 0; rank < ranks; ++rank) {
          nets.push_back(make_net(dtype));
        }
        StateDict state;
        run_ranks(hub, [&](const Group& group) {
          const Net& net = *nets[group.rank()];
          const auto train = [&](ShardedAdamW& optimizer, int from, int to) {
            for (int step = from; step < to; ++step) {
              for (int pass = 0; pass < 2; ++pass) {
                const auto guard = optimizer.accumulate(pass == 0);
                (loss_of(net, group, 2 * step + pass) / 2).backward();
              }
              optimizer.step({.max_grad_norm = 0.5});
              optimizer.zero_grad();
            }
          };
          const ShardingOptions sharding{.bucket_bytes = 400, .overlap = true, .overlap_gather = late};
          auto optimizer = std::make_unique<ShardedAdamW>(net.parameters(), kOptions, group, sharding);
          train(*optimizer, 0, 3);
          const StateDict states = optimizer->state_dict();
          EXPECT_EQ(count_on_their_way(net), late ? 6 : 0) << "the states are no weights";
          optimizer = nullptr;
          EXPECT_EQ(count_on_their_way(net), 0);
          optimizer = std::make_unique<ShardedAdamW>(net.parameters(), kOptions, group, sharding);
          optimizer->load_state_dict(states);
          train(*optimizer, 3, 6);
          const StateDict last = optimizer->state_dict(0);
          if (group.rank() == 0) {
            state = last;
          }
        });
        Values& result = results.emplace_back(values_of(*nets[0]));
        EXPECT_EQ(values_of(*nets.back()), result);
        for (const auto& [name, tensor] : state) {
          result.push_back(to_vector<double>(tensor));
        }
      }
      EXPECT_EQ(results[0], results[1]);
      EXPECT_NE(results[0][0], values_of(*make_net(dtype))[0]);
    }
  }
}

TEST(LateGather, NothingReadsAWeightTooEarly) {
  struct Case {
    Net& net;
    ShardedAdamW& optimizer;
    Group group;
    StateDict handles;  // from before the step
    Tensor view;        // of third.weight
  };
  using Read = std::function<std::vector<double>(const Case&)>;
  const auto weight = [](const Case& c) { return c.net.third.parameters()[0]; };
  const std::vector<std::pair<std::string, Read>> reads{
      {"to_vector", [&](const Case& c) { return to_vector<double>(weight(c)); }},
      {"view", [&](const Case& c) { return to_vector<double>(c.view); }},
      {"handle", [&](const Case& c) { return to_vector<double>(c.handles.at("third.weight")); }},
      {"state_dict", [&](const Case& c) { return to_vector<double>(c.net.state_dict().at("third.weight")); }},
      {"copy", [&](const Case& c) { return to_vector<double>(weight(c).to(float64)); }},
      {"item", [&](const Case& c) { return std::vector<double>{slice(slice(weight(c), 0, 1, 2), 1, 3, 4).item()}; }},
      {"an op", [&](const Case& c) { return to_vector<double>(weight(c) * 2); }},
      {"print",
       [&](const Case& c) {
         const std::string text = to_string(weight(c));
         return std::vector<double>(text.begin(), text.end());
       }},
      {"a write to a part",
       [&](const Case& c) {
         fill_data(slice(weight(c).detach(), 0, 0, 1), 7);
         return to_vector<double>(weight(c));
       }},
      {"load_state_dict",
       [&](const Case& c) {
         c.net.load_state_dict(c.handles);
         return to_vector<double>(weight(c));
       }},
      {"to",
       [&](const Case& c) {
         c.net.to(float64);
         return to_vector<double>(weight(c));
       }},
      {"a second step",
       [&](const Case& c) {
         for (const Tensor& x : c.net.parameters()) {
           x.set_grad(ones(x.shape()));
         }
         c.optimizer.step({.max_grad_norm = 1});
         return to_vector<double>(weight(c));
       }},
      {"forward", [&](const Case& c) { return to_vector<double>(loss_of(c.net, c.group, 9).detach()); }},
      {"backward",
       [&](const Case& c) {
         loss_of(c.net, c.group, 9).backward();
         return to_vector<double>(c.net.first.parameters()[0].grad());
       }},
      {"wait",
       [&](const Case& c) {
         c.optimizer.wait();
         EXPECT_EQ(count_on_their_way(c.net), 0);
         return to_vector<double>(weight(c));
       }},
  };
  for (const auto& [what, read] : reads) {
    std::vector<Values> results;
    for (const bool late : {false, true}) {
      Hub hub(2);
      std::vector<std::unique_ptr<Net>> nets;
      nets.push_back(make_net());
      nets.push_back(make_net());
      Values& got = results.emplace_back(2);
      run_ranks(hub, [&, &read = read, &what = what](const Group& group) {
        Net& net = *nets[group.rank()];
        ShardedAdamW optimizer(net.parameters(), kOptions, group, {.overlap_gather = late});
        const Case c{net, optimizer, group, net.state_dict(), slice(net.third.parameters()[0].detach(), 1, 2, 5)};
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          loss_of(net, group, step).backward();
          optimizer.step();
        }
        optimizer.zero_grad();
        EXPECT_EQ(count_on_their_way(net), late ? 6 : 0) << what;
        got[group.rank()] = read(c);
      });
    }
    EXPECT_EQ(results[0], results[1]) << what;
    EXPECT_FALSE(results[0][0].empty()) << what;
  }
}

TEST(LateGather, AnyUseOfAWeightThrowsIfItDoesNotArrive) {
  Hub hub(2);
  const Tensors weights{ones({100}).requires_grad_(), ones({100}).requires_grad_()};
  std::vector<std::unique_ptr<ShardedAdamW>> optimizers(2);
  run_ranks(hub, [&](const Group& group) {
    const Tensor& x = weights[group.rank()];
    auto& optimizer = optimizers[group.rank()];
    optimizer = std::make_unique<ShardedAdamW>(Tensors{x}, kOptions, group, ShardingOptions{.overlap_gather = true});
    x.set_grad(ones({100}));
    optimizer->step();
  });
  hub.fail();
  for (int rank = 0; rank < 2; ++rank) {
    const Tensor& x = weights[rank];
    for (int i = 0; i < 2; ++i) {
      expect_error([&] { to_vector<float>(x); }, "a rank has failed");
      expect_error([&] { (void)(x + x); }, "a rank has failed");
      expect_error([&] { optimizers[rank]->wait(); }, "a rank has failed");
      expect_error([&] { optimizers[rank]->step(); }, "a rank has failed");
    }
    optimizers[rank] = nullptr;
    expect_error([&] { to_vector<float>(x); }, "a rank has failed");
  }
  hub.fail(false);
  EXPECT_EQ(to_vector<float>(weights[0]), to_vector<float>(weights[1]));
  EXPECT_LT(to_vector<float>(weights[1])[99], 1.0F);
}

}  // namespace
}  // namespace mica::distributed
