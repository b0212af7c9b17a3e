#!/usr/bin/env python3
"""Checks that mica and PyTorch, and mica and NumPy, share tensors in both directions without a copy.

    cmake --build build --target mica_dlpack
    python3 tests/dlpack/check_dlpack.py build/lib/libmica_dlpack.so

Needs numpy and torch. Runs on the CPU and, if both have one, on a CUDA device. With --stress N, runs N round trips and
checks that memory is released.
"""

import argparse
import ctypes
import gc
import itertools
import warnings

import numpy as np
import torch

# In the order of mica::DType.
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]

parser = argparse.ArgumentParser()
parser.add_argument("library")
parser.add_argument("--stress", type=int, default=1000)
arguments = parser.parse_args()

mica = ctypes.CDLL(arguments.library)
POINTER = ctypes.c_void_p
for name, result, types in [
    ("mica_error", ctypes.c_char_p, []),
    ("mica_count", POINTER, [ctypes.POINTER(ctypes.c_int64), ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    ("mica_transpose", POINTER, [POINTER, ctypes.c_int, ctypes.c_int]),
    ("mica_odd", POINTER, [POINTER]),
    ("mica_twice", POINTER, [POINTER]),
    ("mica_fill", ctypes.c_int, [POINTER, ctypes.c_double]),
    ("mica_sum", ctypes.c_double, [POINTER]),
    ("mica_address", ctypes.c_size_t, [POINTER]),
    ("mica_device", ctypes.c_int, [POINTER]),
    ("mica_free", None, [POINTER]),
    ("mica_to_dlpack", POINTER, [POINTER, ctypes.c_int]),
    ("mica_from_dlpack", POINTER, [POINTER, ctypes.c_int, ctypes.c_int]),
    ("mica_dlpack_wait", ctypes.c_int, [POINTER, ctypes.c_ssize_t]),
    ("mica_release", None, [POINTER, ctypes.c_int]),
]:
    getattr(mica, name).restype = result
    getattr(mica, name).argtypes = types

python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [POINTER, ctypes.c_char_p, POINTER]
# A destructor must not create new references to the capsule, so it is passed by address.
python.PyCapsule_IsValid.restype = ctypes.c_int
python.PyCapsule_IsValid.argtypes = [POINTER, ctypes.c_char_p]
python.PyCapsule_GetPointer.restype = POINTER
python.PyCapsule_GetPointer.argtypes = [POINTER, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [POINTER, ctypes.c_char_p]

NAMES = [ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"dltensor_versioned")]
USED = [ctypes.c_char_p(b"used_dltensor"), ctypes.c_char_p(b"used_dltensor_versioned")]


def release_unused(capsule):
    for versioned in (0, 1):
        if python.PyCapsule_IsValid(capsule, NAMES[versioned]):
            mica.mica_release(python.PyCapsule_GetPointer(capsule, NAMES[versioned]), versioned)


DESTRUCTOR = ctypes.CFUNCTYPE(None, POINTER)(release_unused)


def checked(pointer):
    if not pointer:
        raise BufferError(mica.mica_error().decode())
    return pointer


class MicaTensor:
    """A mica tensor with Python's DLPack protocol."""

    def __init__(self, pointer):
        self.pointer = checked(pointer)

    def __del__(self):
        if getattr(self, "pointer", None):
            mica.mica_free(self.pointer)

    @staticmethod
    def count(shape, dtype, device):
        return MicaTensor(mica.mica_count((ctypes.c_int64 * len(shape))(*shape), len(shape), DTYPES.index(dtype), device))

    @staticmethod
    def take(other, versioned, read_only=False):
        """A mica tensor that shares memory with an object that has __dlpack__."""
        stream = {"stream": 1} if other.__dlpack_device__()[0] == 2 else {}  # mica's stream here: the default one
        capsule = other.__dlpack__(**stream, **({"max_version": (1, 0)} if versioned else {}))
        # A producer that does not know versions ignores max_version.
        versioned = int(python.PyCapsule_IsValid(id(capsule), NAMES[1]))
        managed = python.PyCapsule_GetPointer(id(capsule), NAMES[versioned])
        result = MicaTensor(mica.mica_from_dlpack(managed, versioned, int(read_only)))
        python.PyCapsule_SetName(id(capsule), USED[versioned])
        result.versioned = bool(versioned)
        return result

    def __dlpack_device__(self):
        device = mica.mica_device(self.pointer)
        return (1, 0) if device < 0 else (2, device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy:
            raise BufferError("this tensor is exported without a copy only")
        versioned = int(max_version is not None and max_version[0] >= 1)
        if self.__dlpack_device__()[0] == 2 and mica.mica_dlpack_wait(self.pointer, 1 if stream is None else stream) != 0:
            raise BufferError(mica.mica_error().decode())
        managed = checked(mica.mica_to_dlpack(self.pointer, versioned))
        return python.PyCapsule_New(managed, NAMES[versioned], ctypes.cast(DESTRUCTOR, POINTER))

    address = property(lambda self: mica.mica_address(self.pointer))


class OldProtocol:
    """The same tensor for consumers that support only DLPack before version 1."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None, **ignored):
        return self.tensor.__dlpack__(stream=stream)


def check(condition, what):
    global checks
    checks += 1
    if not condition:
        raise SystemExit(f"FAILED: {what}")


def torch_device(device):
    return torch.device("cpu") if device < 0 else torch.device("cuda", device)


def expected_count(shape, dtype, device):
    n = int(np.prod(shape, dtype=np.int64))
    return torch.arange(n, device=torch_device(device)).to(getattr(torch, dtype)).reshape(shape)


def to_torch(device):
    for dtype, shape, protocol in itertools.product(DTYPES, [(), (5,), (2, 3, 4), (0, 3)], [lambda x: x, OldProtocol]):
        what = f"mica to torch: {dtype} {shape} on {torch_device(device)} by {protocol.__name__}"
        x = MicaTensor.count(shape, dtype, device)
        y = torch.from_dlpack(protocol(x))
        check(y.dtype == getattr(torch, dtype) and y.device == torch_device(device), what + ": dtype and device")
        check(torch.equal(y, expected_count(shape, dtype, device)), what + ": values")
        check(y.numel() == 0 or y.data_ptr() == x.address, what + ": a copy was made")
        if y.numel() > 0:
            y.fill_(1)
            check(mica.mica_sum(x.pointer) == y.numel(), what + ": a write in torch is not seen in mica")
            mica.mica_fill(x.pointer, 0)
            check(int((y != 0).sum()) == 0, what + ": a write in mica is not seen in torch")
        address = x.address
        del x
        check(y.numel() == 0 or y.data_ptr() == address, what)
        check(int((y != 0).sum()) == 0, what + ": the elements were freed with mica's handle")
    x = MicaTensor.count((2, 3, 8), "float32", device)
    transposed = MicaTensor(mica.mica_transpose(x.pointer, 0, 1))
    view = MicaTensor(mica.mica_odd(transposed.pointer))
    y = torch.from_dlpack(view)
    check(y.stride() == (8, 24, 2) and y.shape == (3, 2, 4), "strides of a view")
    check(torch.equal(y, expected_count((2, 3, 8), "float32", device).transpose(0, 1)[..., 1::2]), "values of a view")


def from_torch(device):
    for dtype, shape, versioned in itertools.product(DTYPES, [(), (5,), (2, 3, 4), (0, 3)], [False, True]):
        what = f"torch to mica: {dtype} {shape} on {torch_device(device)}, versioned {versioned}"
        x = expected_count(shape, dtype, device)
        y = MicaTensor.take(x, versioned)
        check(y.versioned == versioned, what + ": version")
        check(x.numel() == 0 or y.address == x.data_ptr(), what + ": a copy was made")
        check(mica.mica_sum(y.pointer) == float(x.double().sum()), what + ": values")
        again = torch.from_dlpack(y)
        check(again.dtype == x.dtype and torch.equal(again, x), what + ": there and back")
        if x.numel() > 0:
            mica.mica_fill(y.pointer, 1)
            check(int((x != 1).sum()) == 0, what + ": a write in mica is not seen in torch")
        del x
        check(mica.mica_sum(y.pointer) == again.numel(), what + ": the elements were freed with torch's tensor")
    x = expected_count((4, 6, 8), "float32", device)
    for name, view in {"transposed": x.transpose(0, 2), "sliced": x[1:, ::2, 3:], "expanded": x[:1].expand(4, 6, 8),
                       "selected": x[:, 2], "diagonal": x.diagonal(0, 0, 1)}.items():
        y = MicaTensor.take(view, True)
        check(y.address == view.data_ptr(), name + ": a copy was made")
        check(torch.equal(torch.from_dlpack(y), view), name + ": values")
        check(torch.equal(torch.from_dlpack(MicaTensor(mica.mica_twice(y.pointer))), 2 * view), name + ": computed")
    for bad, message in [(torch.ones(2, dtype=torch.complex64), "no dtype"), (torch.ones(2, dtype=torch.int16), "no dtype")]:
        try:
            MicaTensor.take(bad.to(torch_device(device)), True)
            check(False, f"{bad.dtype} was accepted")
        except BufferError as error:
            check(message in str(error), str(error))


def with_numpy():
    for dtype, shape in itertools.product([d for d in DTYPES if d != "bfloat16"], [(), (5,), (2, 3, 4), (0, 3)]):
        what = f"numpy: {dtype} {shape}"
        x = MicaTensor.count(shape, dtype, -1)
        y = np.from_dlpack(x)
        check(y.dtype == np.dtype(dtype) and y.shape == shape, what + ": dtype and shape")
        check(np.array_equal(y, np.arange(y.size).astype(dtype).reshape(shape)), what + ": values")
        check(y.size == 0 or y.ctypes.data == x.address, what + ": a copy was made")
        for versioned in (False, True):
            source = np.arange(y.size).astype(dtype).reshape(shape)
            z = MicaTensor.take(source, versioned)
            check(source.size == 0 or z.address == source.ctypes.data, what + ": a copy was made of numpy's")
            check(mica.mica_sum(z.pointer) == float(source.astype("float64").sum()), what + ": values of numpy's")
            if source.size > 0:
                mica.mica_fill(z.pointer, 1)
                check(bool((source == 1).all()), what + ": a write in mica is not seen in numpy")
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    check(np.array_equal(np.from_dlpack(MicaTensor.take(array.T[1:, ::2], True)), array.T[1:, ::2]), "a strided array")
    try:
        MicaTensor.take(array[::-1], True)
        check(False, "negative strides were accepted")
    except BufferError as error:
        check("strides" in str(error), str(error))
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    try:
        MicaTensor.take(frozen, True)
        check(False, "read-only memory was accepted")
    except BufferError as error:
        check("read-only" in str(error), str(error))
    accepted = MicaTensor.take(frozen, True, read_only=True)
    check(mica.mica_sum(accepted.pointer) == 15, "read-only memory")


def on_another_stream():
    """torch works on a separate stream, while mica's work on the default stream is still running."""
    for _ in range(20):
        x = MicaTensor.count((1 << 24,), "float32", 0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            twice = MicaTensor(mica.mica_twice(x.pointer))
            y = torch.from_dlpack(twice)  # passes the stream to __dlpack__
            last = float(y[-1])
        check(last == 2.0 * ((1 << 24) - 1), f"torch's stream did not wait for mica's: {last}")
        torch.cuda.synchronize()


def stress(device):
    """Capsules that are never consumed, and many round trips: nothing leaks, and nothing is freed twice."""

    def resident():
        if device >= 0:
            torch.cuda.synchronize()
            return torch.cuda.mem_get_info(device)[0]
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    def trip():
        x = MicaTensor.count((1 << 18,), "float32", device)
        x.__dlpack__()
        x.__dlpack__(max_version=(1, 0))
        y = torch.from_dlpack(x)
        z = MicaTensor.take(y, True)
        del x, y
        mica.mica_fill(z.pointer, 3)

    for _ in range(20):
        trip()
    gc.collect()
    before = resident()
    for _ in range(arguments.stress):
        trip()
    gc.collect()
    grown = abs(resident() - before)
    check(grown < 64 << 20, f"memory changed by {grown} bytes in {arguments.stress} round trips")


checks = 0
warnings.simplefilter("ignore")
devices = [-1] + ([0] if torch.cuda.is_available() and mica.mica_cuda_devices() > 0 else [])
for device in devices:
    to_torch(device)
    from_torch(device)
    stress(device)
with_numpy()
if len(devices) > 1:
    on_another_stream()
places = "cpu and cuda" if len(devices) > 1 else "cpu"
print(f"{checks} checks passed on {places}; torch {torch.__version__}, numpy {np.__version__}")
