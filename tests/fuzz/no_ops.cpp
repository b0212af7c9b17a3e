// Stubs of the functions of autograd and ops that core and io use, for programs that are linked without these.

#include <mica/core/detail/finite.h>
#include <mica/core/tensor.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

const char* first_fault(const Tensor&) { return nullptr; }
Tensor Tensor::to(Device) const { fail("to: this program has no ops"); }
Tensor Tensor::to(DType) const { fail("to: this program has no ops"); }
Tensor add(const Tensor&, double) { fail("add: this program has no ops"); }
Tensor sub(const Tensor&, double) { fail("sub: this program has no ops"); }
Tensor cat(const Tensors&, std::int64_t) { fail("cat: this program has no ops"); }
Tensor reshape(const Tensor&, const Shape&) { fail("reshape: this program has no ops"); }
Tensor transpose(const Tensor&, std::int64_t, std::int64_t) { fail("transpose: this program has no ops"); }
bool Tensor::requires_grad() const { return false; }
Tensor Tensor::detach() const { return *this; }

}  // namespace mica
