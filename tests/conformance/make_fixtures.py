#!/usr/bin/env python3
"""Runs PyTorch's own test samples and writes fixtures/. See README.md.

    python3 tests/conformance/make_fixtures.py
    python3 tests/conformance/make_fixtures.py add mul   # some of them, and keeps the others
"""

import pathlib
import sys

import torch
from torch.testing._internal.common_methods_invocations import op_db

import adapters as to
import optimizers
from adapters import Skip
from fixture import MICA_NAMES, Fixture, described, seed
from table import SPECS

FOLDER = pathlib.Path(__file__).parent / "fixtures"
SMALL = 64  # elements of a sample beside the float64 ones
MOST_AXES = 8  # of a tensor of mica's


def tensors_in(x):
    if torch.is_tensor(x):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for y in x for t in tensors_in(y)] if isinstance(x, (list, tuple)) else []


def tensors_of(sample):
    return tensors_in([sample.input, sample.args, sample.kwargs])


def elements(sample):
    return sum(t.numel() for t in tensors_of(sample))


def is_compared(spec, sample, dtype):
    try:
        return dtype not in spec.dtypes or not spec.adapt(sample.input, sample.args, sample.kwargs).refused
    except Skip:
        return False


def samples_of(op, spec, dtype, fixture):
    """(name, sample) of the selected samples; the others are recorded as skipped."""
    label = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}, {MICA_NAMES[dtype]}"
    wants_grad = dtype.is_floating_point and op.supports_autograd and not spec.in_place
    seed(spec.call, label)
    samples = op.sample_inputs("cpu", dtype, requires_grad=wants_grad)
    named = [(f"{label}, sample {i}", sample) for i, sample in enumerate(samples)]
    # There is always a sample of several elements, even if the smallest is large.
    ordered = sorted(named, key=lambda n: elements(n[1]))
    compared = [n for n in ordered if elements(n[1]) > 1 and is_compared(spec, n[1], dtype)]
    if dtype == spec.dtypes[0]:
        if spec.most and len(named) > spec.most:
            fixture.skip(f"{label}, {len(named) - spec.most} of {len(named)} samples", to.ENOUGH)
            taken = [i * len(named) // spec.most for i in range(spec.most)]
            named = [named[i] for i in taken]
        for name, sample in named:
            if elements(sample) <= spec.limit or (compared and name == compared[0][0]):
                yield name, sample
            else:
                fixture.skip(name, f"more than {spec.limit} elements")
        if op.reference_inputs_func is not None:
            references = list(op.reference_inputs("cpu", dtype, requires_grad=False))[len(named):]
            kept = [(f"{label}, reference {i}", s) for i, s in enumerate(references)
                    if elements(s) <= SMALL and all(t.is_contiguous() for t in tensors_of(s))]
            if len(kept) < len(references):
                fixture.skip(f"{label}, {len(references) - len(kept)} of {len(references)} references",
                             f"more than {SMALL} elements or not contiguous")
            for name, sample in kept:
                for t in tensors_of(sample):
                    t.requires_grad_(wants_grad and t.is_floating_point())
                yield name, sample
        return
    few = spec.few if dtype in spec.dtypes else 1
    small = [n for n in compared if elements(n[1]) <= SMALL]
    kept = small[-few:] or compared[:1] or ordered[-1:]
    if len(kept) < len(named):
        fixture.skip(f"{label}, {len(named) - len(kept)} of {len(named)} samples",
                     f"beside {MICA_NAMES[spec.dtypes[0]]}, a few small samples of a dtype are enough")
    yield from kept


def check_axes(call):
    if any(t.dim() > MOST_AXES for t in call.tensors):
        raise Skip(f"more than {MOST_AXES} axes")


def result_of(op, spec, sample):
    if spec.in_place:
        x = sample.input.detach().clone() if torch.is_tensor(sample.input) else sample.input
        with torch.no_grad():
            return getattr(x, spec.in_place)(*sample.args, **sample.kwargs)
    return (spec.function or op)(sample.input, *sample.args, **sample.kwargs)


def add_case(fixture, name, op, spec, sample):
    try:
        call = spec.adapt(sample.input, sample.args, sample.kwargs)
        check_axes(call)
    except Skip as reason:
        fixture.skip(name, str(reason))
        return
    case = {"sample": name, "attributes": call.attributes}
    requires = [i for i, t in enumerate(call.tensors) if t.requires_grad]
    dtype = call.tensors[0].dtype if call.tensors else torch.float64
    if dtype not in spec.dtypes:
        call.refused = call.refused or f"not for {MICA_NAMES[dtype]}"
    if call.refused:
        fixture.add(case | {"refused": call.refused}, input=call.tensors)
        return
    try:
        outputs = tensors_in(result_of(op, spec, sample))
    except RuntimeError as error:  # samples of an op need not suit its in-place form
        fixture.add(case | {"raises": str(error).splitlines()[0]}, input=call.tensors)
        return
    if not outputs:
        fixture.skip(name, "not a call that PyTorch answers")
        return
    limit = max(spec.limit, elements(sample))
    if sum(y.numel() for y in outputs) > limit:
        fixture.skip(name, f"more than {limit} elements in the result")
        return
    differentiable = [y for y in outputs if y.requires_grad]
    dys, grads = [None] * len(outputs), []
    if requires and differentiable:
        # Rounded to few bits, so that they take little space and every dtype can represent them.
        dys = [torch.randn(y.shape).to(torch.bfloat16) if y.requires_grad else None for y in outputs]
        try:
            grads = torch.autograd.grad(differentiable, [call.tensors[i] for i in requires],
                                        [dy.to(y.dtype) for dy, y in zip(dys, outputs) if dy is not None],
                                        allow_unused=True)
        except RuntimeError:
            fixture.skip(name, "PyTorch's own gradient fails")
            return
    gradients = [None] * len(call.tensors)
    for i, grad in zip(requires, grads):
        gradients[i] = grad
    if requires:
        case["needs_grad"] = requires
    fixture.add(case, input=call.tensors, output=outputs, dy=dys, grad=gradients)


def add_error(fixture, name, op, spec, error):
    sample = error.sample_input
    try:
        if not isinstance(sample.input, (torch.Tensor, list, tuple)) and spec.adapt not in (to.arange, to.created):
            raise Skip("a number where Python expects a tensor")
        call = spec.adapt(sample.input, sample.args, sample.kwargs)
        if any(t.dtype not in MICA_NAMES for t in call.tensors):
            raise Skip("a dtype that mica has not")
        check_axes(call)
        if sum(t.numel() for t in call.tensors) > 4 * spec.limit:
            raise Skip(f"more than {4 * spec.limit} elements")
    except Skip as reason:
        fixture.skip(name, str(reason))
        return
    try:
        op(sample.input, *sample.args, **sample.kwargs)
    except Exception as raised:
        fixture.add({"sample": name, "attributes": call.attributes, "raises": described(raised)}, input=call.tensors)
    else:
        fixture.skip(name, "PyTorch does not raise it on the CPU")


def add_op(fixture, spec):
    op, = (op for op in op_db if op.name == spec.opinfo and op.variant_test_name == spec.variant)
    for dtype in MICA_NAMES:
        if dtype not in op.dtypes:
            continue
        for name, sample in samples_of(op, spec, dtype, fixture):
            add_case(fixture, name, op, spec, sample)
        seed(spec.call, MICA_NAMES[dtype], "more")
        for i, sample in enumerate(spec.more(dtype) if spec.more else []):
            add_case(fixture, f"{op.name}, {MICA_NAMES[dtype]}, own sample {i}", op, spec, sample)
    if op.error_inputs_func is not None and not spec.in_place:
        seed(spec.call, op.name, "errors")
        for i, error in enumerate(op.error_inputs("cpu")):
            add_error(fixture, f"{op.name}, error {i}", op, spec, error)


def main(names):
    torch.set_num_threads(1)  # sums in one order
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.safetensors"):
        if not names or old.stem in names:
            old.unlink()
    fixtures = {}
    for spec in SPECS:
        if not names or spec.call in names:
            add_op(fixtures.setdefault(spec.call, Fixture()), spec)
    if not names or any(name.startswith("optim_") for name in names):
        optimizers.add_all(fixtures)
    for name, fixture in fixtures.items():
        if not names or name in names:
            fixture.write(FOLDER / f"{name}.safetensors")
    print(f"{len(fixtures)} fixtures, {sum(len(f.cases) for f in fixtures.values())} cases, "
          f"{sum(len(f.skipped) for f in fixtures.values())} skipped, "
          f"{sum(p.stat().st_size for p in FOLDER.iterdir()) / 1e6:.2f} MB, by torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
