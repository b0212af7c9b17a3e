#include <algorithm>
#include <array>
#include <utility>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/detail/matmul_steps.h>
#include <mica/ops/recurrent/detail/recurrent_kernels.h>
#include <mica/ops/recurrent/recurrent.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using detail::multiply;
using detail::product_as_gradient;
using detail::rows_of;

// Element i of the first axis, without history.
Tensor row_at(const Tensor& x, std::int64_t i) {
  return as_strided(x, x.shape().slice(1, x.dim()), x.strides().slice(1, x.dim()),
                    x.handle()->offset + i * x.strides()[0]);
}

// `count` elements of the first axis, from `first` on, without history.
Tensor rows_from(const Tensor& x, std::int64_t first, std::int64_t count) {
  Shape shape = x.shape();
  shape[0] = count;
  return as_strided(x, shape, x.strides(), x.handle()->offset + first * x.strides()[0]);
}

// out = a · b + bias for each step, with the same b and bias.
class HiddenProduct {
 public:
  HiddenProduct(const Tensor& b, const Tensor& bias, std::int64_t steps)
      : b_(kernels::readable(b)), bias_(bias.defined() ? contiguous_data(bias) : bias) {
    if (steps > 1) {  // packing pays from the second product on
      packed_ = on_device(b_.device(), [&](auto device) { return kernels::pack_for_products(device, b_); });
    }
  }
  void operator()(const Tensor& a, const Tensor& out) const {
    if (packed_.defined() && out.numel() > 0) {
      on_device(a.device(), [&](auto device) { kernels::multiply_packed(device, a, packed_, bias_, out); });
    } else {
      multiply({.a = a, .b = b_, .bias = bias_, .out = out});
    }
  }

 private:
  Tensor b_, bias_, packed_;
};

// The steps in the order of time. State k is the one before step k, or after it in reverse, so that T + 1 states hold
// the initial one, too, and those before all steps are adjacent.
struct StepOrder {
  std::int64_t steps;
  bool reverse;

  std::int64_t step(std::int64_t i) const { return reverse ? steps - 1 - i : i; }  // the i-th in time
  std::int64_t before(std::int64_t step) const { return step + (reverse ? 1 : 0); }
  std::int64_t after(std::int64_t step) const { return step + (reverse ? 0 : 1); }
  std::int64_t initial() const { return reverse ? steps : 0; }
  std::int64_t last() const { return reverse ? 0 : steps; }
  Tensor all_before(const Tensor& states) const { return rows_from(states, reverse ? 1 : 0, steps); }
  Tensor all_after(const Tensor& states) const { return rows_from(states, reverse ? 0 : 1, steps); }
};

void set_state(const Tensor& to, const Tensor& value) {
  if (value.defined()) {
    copy_into(to, value);
  } else {
    fill_data(to, 0);
  }
}

// Inputs: x (T, B, I), the weights, the biases, h0 and c0. Outputs: the states (T, B, H), the last one and, for lstm,
// the last c.
struct Recurrent {
  static constexpr bool composed = true;
  static constexpr std::size_t kInputs = 7;
  Recurrence kind;
  bool reverse;
  Tensor lengths;  // (B), int64, or undefined

  Tensors forward(autograd::Context& ctx, const Tensors& inputs) const {
    ctx.set_materialize_grads(false);
    const Tensor &x = inputs[0], &input = inputs[1], &hidden = inputs[2], &input_bias = inputs[3],
                 &hidden_bias = inputs[4];
    const StepOrder order{x.size(0), reverse};
    const std::int64_t batch = x.size(1), width = hidden.size(1), gates = gates_of(kind) * width;
    const DType dtype = x.dtype();
    const auto new_tensor = [&](const Shape& shape, DType of) { return empty(shape, of, x.device()); };
    // gru multiplies the new gate's hidden part by r after its bias was added. The others only need the biases' sum.
    const bool is_gru = kind == Recurrence::gru, is_lstm = kind == Recurrence::lstm;
    const Tensor joined = is_gru || !input_bias.defined() ? input_bias : input_bias + hidden_bias;

    const Tensor from_inputs = new_tensor({order.steps, batch, gates}, dtype);
    const std::int64_t rows = order.steps * batch;
    multiply({.a = rows_of(x, rows), .b = transpose(input, 0, 1), .bias = joined, .out = rows_of(from_inputs, rows)});
    const Tensor states = new_tensor({order.steps + 1, batch, width}, dtype);
    const Tensor cells = is_lstm ? new_tensor({order.steps + 1, batch, width}, accumulate_dtype(dtype)) : Tensor{};
    set_state(row_at(states, order.initial()), inputs[5]);
    if (is_lstm) {
      set_state(row_at(cells, order.initial()), inputs[6]);
    }
    Tensor saved = is_lstm ? from_inputs : Tensor{};
    if (is_gru) {  // without a gradient, all steps use the same memory
      saved = new_tensor({ctx.needs_any_grad() ? order.steps : 1, batch, 4 * width}, dtype);
    }
    run(order, from_inputs, hidden, is_gru ? hidden_bias : Tensor{}, states, cells, saved);

    Tensors kept = inputs;
    kept.insert(kept.end(), {saved, states, cells});
    ctx.save_for_backward(kept);
    Tensors outputs{order.all_after(states), row_at(states, order.last())};
    if (is_lstm) {
      outputs.push_back(row_at(cells, order.last()).to(dtype));
    }
    return outputs;
  }

  Tensors backward(autograd::Context& ctx, const Tensors& came) const {
    const Tensors kept = ctx.saved_all();
    const Tensors inputs(kept.begin(), kept.begin() + kInputs);
    if (autograd::grad_enabled()) {
      return gradients_by_recorded_ops(ctx, inputs, came);
    }
    const Tensor &x = inputs[0], &input = inputs[1], &hidden = inputs[2];
    const Tensor &saved = kept[kInputs], &states = kept[kInputs + 1], &cells = kept[kInputs + 2];
    const StepOrder order{x.size(0), reverse};
    const std::int64_t batch = x.size(1), width = hidden.size(1), rows = order.steps * batch;
    const Shape shape{order.steps, batch, gates_of(kind) * width};
    const Tensor dx = empty(shape, x.dtype(), x.device());
    const Tensor dp = kind == Recurrence::gru ? empty(shape, x.dtype(), x.device()) : dx;
    const auto [dh, dc] = run_backward(order, hidden, states, cells, saved, came, dx, dp);

    const Tensor dx_rows = rows_of(dx, rows), dp_rows = rows_of(dp, rows);
    Tensors gradients(kInputs);
    if (ctx.needs_grad(0)) {
      gradients[0] = reshape(matmul(dx_rows, input), x.shape());
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = product_as_gradient(1, transpose(dx_rows, 0, 1), rows_of(x, rows));
    }
    if (ctx.needs_grad(2)) {
      gradients[2] = product_as_gradient(2, transpose(dp_rows, 0, 1), rows_of(order.all_before(states), rows));
    }
    if (ctx.needs_grad(3)) {
      gradients[3] = sum(dx_rows, {0});
    }
    if (ctx.needs_grad(4)) {
      gradients[4] = ctx.needs_grad(3) && kind != Recurrence::gru ? clone(gradients[3]) : sum(dp_rows, {0});
    }
    gradients[5] = ctx.needs_grad(5) ? dh : Tensor{};
    gradients[6] = ctx.needs_grad(6) ? dc : Tensor{};
    return gradients;
  }

 private:
  void run(const StepOrder& order, const Tensor& from_inputs, const Tensor& hidden, const Tensor& bias,
           const Tensor& states, const Tensor& cells, const Tensor& saved) const {
    if (states.numel() == 0) {
      return;
    }
    const HiddenProduct times_hidden(transpose(hidden, 0, 1), bias, order.steps);
    const Tensor product = empty(row_at(from_inputs, 0).shape(), states.dtype(), states.device());
    for (std::int64_t i = 0; i < order.steps; ++i) {
      const std::int64_t step = order.step(i), before = order.before(step), after = order.after(step);
      times_hidden(row_at(states, before), product);
      const kernels::CellForward args{
          .kind = kind,
          .x = row_at(from_inputs, step),
          .product = product,
          .h_before = row_at(states, before),
          .c_before = cells.defined() ? row_at(cells, before) : Tensor{},
          .saved = saved.defined() ? row_at(saved, saved.size(0) == 1 ? 0 : step) : Tensor{},
          .h = row_at(states, after),
          .c = cells.defined() ? row_at(cells, after) : Tensor{},
          .lengths = lengths,
          .step = step};
      on_device(states.device(), [&](auto device) { kernels::cell_forward(device, args); });
    }
  }

  // Writes the gradients of the gates and returns those of h0 and c0.
  std::pair<Tensor, Tensor> run_backward(const StepOrder& order, const Tensor& hidden, const Tensor& states,
                                         const Tensor& cells, const Tensor& saved, const Tensors& came,
                                         const Tensor& dx, const Tensor& dp) const {
    const Shape shape = row_at(states, 0).shape();
    const DType dtype = states.dtype(), exact = accumulate_dtype(dtype);
    const Device device = states.device();
    const auto gradient = [&](const Tensor& of) {
      const Tensor result = empty(shape, exact, device);
      set_state(result, of);
      return result;
    };
    const Tensor dh = gradient(came[1]);
    const Tensor dc = cells.defined() ? gradient(came[2]) : Tensor{};
    const Tensor dy = came[0].defined() ? contiguous_data(came[0]) : Tensor{};
    const Tensor none = zeros(shape, dtype, device), dh_product = zeros(shape, dtype, device);
    if (states.numel() > 0) {
      const HiddenProduct times_hidden(hidden, {}, order.steps);
      for (std::int64_t i = order.steps - 1; i >= 0; --i) {
        const std::int64_t step = order.step(i), before = order.before(step), after = order.after(step);
        const kernels::CellBackward args{.kind = kind,
                                         .saved = saved.defined() ? row_at(saved, step) : Tensor{},
                                         .h_before = row_at(states, before),
                                         .h = row_at(states, after),
                                         .c_before = cells.defined() ? row_at(cells, before) : Tensor{},
                                         .c = cells.defined() ? row_at(cells, after) : Tensor{},
                                         .dy = dy.defined() ? row_at(dy, step) : none,
                                         .dh_product = dh_product,
                                         .dh = dh,
                                         .dc = dc,
                                         .dx = row_at(dx, step),
                                         .dp = row_at(dp, step),
                                         .lengths = lengths,
                                         .step = step};
        on_device(device, [&](auto on) { kernels::cell_backward(on, args); });
        times_hidden(row_at(dp, step), dh_product);
      }
    }
    return {(dh + dh_product.to(exact)).to(dtype), dc.defined() ? dc.to(dtype) : dc};
  }

  // The same by ordinary ops, one small op after another.
  Tensors in_steps(const Tensors& inputs) const {
    const Tensor &x = inputs[0], &hidden = inputs[2];
    const StepOrder order{x.size(0), reverse};
    const std::int64_t width = hidden.size(1);
    const Tensor from_inputs = linear(x, inputs[1], inputs[3]);
    const Tensor none = zeros({x.size(1), width}, x.dtype(), x.device());
    Tensor h = inputs[5].defined() ? inputs[5] : none, c = inputs[6].defined() ? inputs[6] : none;
    Tensors states(static_cast<std::size_t>(order.steps));
    for (std::int64_t i = 0; i < order.steps; ++i) {
      const std::int64_t step = order.step(i);
      const Tensor from_input = select(from_inputs, 0, step), from_hidden = linear(h, hidden, inputs[4]);
      const auto part = [width](const Tensor& gates, std::int64_t k) {
        return slice(gates, 1, k * width, (k + 1) * width);
      };
      Tensor next_h, next_c = c;
      if (kind == Recurrence::gru) {
        const auto both = [&](std::int64_t k) { return sigmoid(part(from_input, k) + part(from_hidden, k)); };
        const Tensor r = both(0), z = both(1), n = tanh(part(from_input, 2) + r * part(from_hidden, 2));
        next_h = n + z * (h - n);
      } else {
        const Tensor sums = from_input + from_hidden;
        if (kind == Recurrence::lstm) {
          next_c = sigmoid(part(sums, 1)) * c + sigmoid(part(sums, 0)) * tanh(part(sums, 2));
          next_h = sigmoid(part(sums, 3)) * tanh(next_c);
        } else {
          next_h = kind == Recurrence::rnn_relu ? relu(sums) : tanh(sums);
        }
      }
      if (lengths.defined()) {
        const Tensor is_part = unsqueeze(lengths > static_cast<double>(step), 1);
        next_h = where(is_part, next_h, h);
        next_c = where(is_part, next_c, c);
      }
      h = next_h;
      c = next_c;
      states[static_cast<std::size_t>(step)] = h;
    }
    return {stack(states), h, c};
  }

  Tensors gradients_by_recorded_ops(autograd::Context& ctx, const Tensors& inputs, const Tensors& came) const {
    Tensors own, wanted;  // views, as a tensor may be several of the inputs
    for (std::size_t i = 0; i < kInputs; ++i) {
      own.push_back(ctx.needs_grad(i) ? view(inputs[i], inputs[i].shape()) : inputs[i]);
      if (ctx.needs_grad(i)) {
        wanted.push_back(own.back());
      }
    }
    const Tensors results = in_steps(own);
    Tensors outputs, incoming;
    for (std::size_t i = 0; i < came.size(); ++i) {
      if (came[i].defined()) {
        outputs.push_back(results[i]);
        incoming.push_back(came[i]);
      }
    }
    Tensors gradients(kInputs);
    if (outputs.empty()) {
      return gradients;
    }
    const Tensors known = autograd::grad(outputs, wanted, incoming, {.create_graph = true, .allow_unused = true});
    for (std::size_t i = 0, k = 0; i < kInputs; ++i) {
      gradients[i] = ctx.needs_grad(i) ? known[k++] : Tensor{};
    }
    return gradients;
  }
};

const char* name_of(Recurrence kind) {
  switch (kind) {
    case Recurrence::rnn_tanh: return "rnn_tanh";
    case Recurrence::rnn_relu: return "rnn_relu";
    case Recurrence::lstm: return "lstm";
    case Recurrence::gru: return "gru";
  }
  fail("recurrent: unknown kind {}", static_cast<int>(kind));
}

void check_operand_of(const char* op, const char* name, const Tensor& x, const Tensor& t, const Shape& shape) {
  if (t.defined()) {
    check(t.shape() == shape, "{}: expected {} of shape {}, got {}", op, name, shape, t.shape());
    check(t.dtype() == x.dtype() && t.device() == x.device(), "{}: expected {} of {} on {}, got {} on {}", op, name,
          x.dtype(), x.device(), t.dtype(), t.device());
  }
}

// The lengths as the kernels need them.
Tensor usable_lengths(const char* op, const Tensor& lengths, const Tensor& x) {
  if (!lengths.defined()) {
    return {};
  }
  check(lengths.shape() == Shape{x.size(1)}, "{}: expected lengths of shape [{}], got {}", op, x.size(1),
        lengths.shape());
  check(lengths.dtype() == int64 || lengths.dtype() == int32, "{}: expected lengths of int64 or int32, got {}", op,
        lengths.dtype());
  if (lengths.device().is_cpu()) {
    for (const std::int64_t length : to_vector<std::int64_t>(lengths)) {
      check(length >= 0 && length <= x.size(0), "{}: expected lengths from 0 to {}, got {}", op, x.size(0), length);
    }
  }
  return contiguous_data(lengths.detach().to(x.device(), int64));
}

}  // namespace

int gates_of(Recurrence kind) { return kind == Recurrence::lstm ? 4 : kind == Recurrence::gru ? 3 : 1; }

RecurrentResult recurrent(Recurrence kind, const Tensor& x, const RecurrentWeights& weights, const Tensor& h0,
                          const Tensor& c0, const RecurrentOptions& options) {
  const auto& [input, hidden, input_bias, hidden_bias] = weights;
  if (autograd::autocast_narrows(x, input, hidden, input_bias, hidden_bias, h0, c0)) {
    const auto narrow = [](const Tensor& t) { return t.defined() ? autograd::narrowed(t) : t; };
    return recurrent(kind, narrow(x), {narrow(input), narrow(hidden), narrow(input_bias), narrow(hidden_bias)},
                     narrow(h0), narrow(c0), options);
  }
  const char* const op = name_of(kind);
  check(x.dim() == 3 && x.size(0) >= 1, "{}: expected x of shape (T, B, I) with T >= 1, got {}", op, x.shape());
  check(is_floating(x.dtype()), "{}: expected x of a floating dtype, got {}", op, x.dtype());
  check(hidden.dim() == 2 && hidden.size(0) == gates_of(kind) * hidden.size(1),
        "{}: expected hidden weights of shape ({} H, H), got {}", op, gates_of(kind), hidden.shape());
  const std::int64_t width = hidden.size(1), gates = hidden.size(0);
  check(input.defined(), "{}: expected input weights, got an undefined tensor", op);
  check(input_bias.defined() == hidden_bias.defined(), "{}: expected both biases or none", op);
  check(!c0.defined() || kind == Recurrence::lstm, "{}: only lstm has a c0", op);
  check_operand_of(op, "input weights", x, input, {gates, x.size(2)});
  check_operand_of(op, "hidden weights", x, hidden, {gates, width});
  check_operand_of(op, "input_bias", x, input_bias, {gates});
  check_operand_of(op, "hidden_bias", x, hidden_bias, {gates});
  check_operand_of(op, "h0", x, h0, {x.size(1), width});
  check_operand_of(op, "c0", x, c0, {x.size(1), width});
  const Tensor lengths = usable_lengths(op, options.lengths, x);

  Tensor is_part;  // (T, B, 1)
  if (lengths.defined()) {
    const Tensor steps = arange(0, static_cast<double>(x.size(0)), 1, int64, x.device());
    is_part = unsqueeze(unsqueeze(steps, 1) < lengths, 2);
  }
  const Tensor read = is_part.defined() ? where(is_part, x, 0.0) : x;  // 0 · NaN in the padding would be NaN
  const Tensors outputs = autograd::apply(Recurrent{kind, options.reverse, lengths},
                                          Tensors{read, input, hidden, input_bias, hidden_bias, h0, c0});
  return {.y = is_part.defined() ? where(is_part, outputs[0], 0.0) : outputs[0],
          .h = outputs[1],
          .c = outputs.size() > 2 ? outputs[2] : Tensor{}};
}

}  // namespace mica
