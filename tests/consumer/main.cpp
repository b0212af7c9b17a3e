#include <iostream>

#include <mica/mica.h>

using namespace mica;

// A program's own type, whose name would be ambiguous here if mica had it, too.
struct Half {
  double of(double x) const { return x / 2; }
};

struct Mlp : nn::Module {
  nn::Linear fc1 = child("fc1", nn::Linear{2, 32});
  nn::LayerNorm norm = child("norm", nn::LayerNorm{32});
  nn::Linear fc2 = child("fc2", nn::Linear{32, 2});
  Tensor operator()(const Tensor& x) const { return fc2(gelu(norm(fc1(x)))); }
};

int main() {
  manual_seed(1);
  Mlp model;
  optim::AdamW optimizer{model.parameters(), {.lr = 1e-2}};
  double last = 0;
  for (int step = 1; step <= 200; ++step) {
    const Tensor x = randn({64, 2});
    const Tensor target = (sum(x * x, {1}) > 1.4).to(int64);  // outside of a circle?
    const Tensor loss = cross_entropy(model(x), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item();
    if (step % 50 == 0) {
      std::cout << "step " << step << ": loss " << last << "\n";
    }
  }
  io::save("mlp.safetensors", model.state_dict());
  return Half{}.of(last) < 0.1 ? 0 : 1;
}
