#pragma once

// Tensors shared with other libraries of the same process without a copy, by DLPack
// (https://dmlc.github.io/dlpack/latest): PyTorch, NumPy, JAX, TVM and others read and write its structs.
//
// The structs are those of <dlpack/dlpack.h>, which mica does not need: include it if you fill or read one yourself.

#include <cstdint>

#include <mica/core/tensor.h>

struct DLManagedTensor;
struct DLManagedTensorVersioned;

namespace mica {

/// A struct of DLPack 1 that shares the elements of `x`, with its shape, strides, dtype and device. The receiver owns
/// the struct: it calls the struct's deleter once, on any thread, which releases the elements.
///
/// On a GPU, the elements are complete in the order of this thread's stream: see dlpack_wait(). Memory is reused in the
/// order of the stream that it was allocated on, so a receiver that works on another stream must finish before it calls
/// the deleter.
///
/// Throws an Error if `x` is undefined or requires a gradient, which DLPack cannot express: export x.detach().
DLManagedTensorVersioned* to_dlpack(const Tensor& x);
/// Like to_dlpack(), but with the struct from before DLPack 1, for receivers that do not know the new one.
DLManagedTensor* to_dlpack_unversioned(const Tensor& x);

struct FromDlpackOptions {
  /// Accept memory that its owner has marked as read-only. mica has no read-only tensors: do not write to the result.
  bool read_only = false;
};

/// A tensor that shares the elements of `managed`. Takes over the struct: its deleter is called when the last tensor
/// that refers to the elements is gone. Autograd does not see writes by the other library: call Tensor::bump_version()
/// after one, if the tensor may have been saved for a backward.
///
/// Accepts memory of the CPU, pinned or not, and of CUDA devices. On a GPU, the elements must be complete in the order
/// of this thread's stream, and the deleter may be called before the work on that stream is done.
///
/// Throws an Error, and leaves the struct to the caller, for any version but 1, a dtype or device that mica does not
/// support, negative sizes or strides, elements that are not aligned for their dtype, bools other than 0 and 1,
/// read-only memory, or sizes that do not fit in memory. To check bools on a GPU, it waits for this thread's stream.
Tensor from_dlpack(DLManagedTensorVersioned* managed, FromDlpackOptions options = {});
Tensor from_dlpack(DLManagedTensor* managed);

/// Makes a receiver's CUDA stream wait for the work that this thread has queued on its own stream. Implements the
/// argument of Python's __dlpack__(stream=…). `stream` is a cudaStream_t as a number, 1 the default stream, 2 the
/// per-thread one, or −1 for no synchronization. Does nothing on the CPU.
void dlpack_wait(Device device, std::intptr_t stream);

}  // namespace mica
