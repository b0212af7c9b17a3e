#include <cstdio>

#include <mica/mica.h>

using namespace mica;

int main() {
  const Tensor weight = ones({2, 3});
  const Tensor x = from_data({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {2, 3});
  std::printf("mica %s, CUDA kernels %d, x = %s\n", "installed", MICA_WITH_CUDA, to_string(x).c_str());
  return weight.numel() == 6 ? 0 : 1;
}
