"""Translates PyTorch's samples to mica's arguments: one function per convention.

Each takes (input, args, kwargs) and returns a Call; Skip means that mica cannot express the sample.
"""

import dataclasses

import torch


class Skip(Exception):
    """Raised, with the reason, if a sample cannot be a case."""


@dataclasses.dataclass
class Call:
    tensors: list
    attributes: dict = dataclasses.field(default_factory=dict)
    refused: str = ""  # why mica throws where PyTorch has a result


def arguments(args, kwargs, *names):
    """The arguments by name, bound as Python would bind them."""
    if len(args) > len(names):
        raise Skip("more arguments than mica's function has")
    values = dict(zip(names, args)) | kwargs
    for name in values:
        if name not in names:
            raise Skip(f"no argument {name}")
    return values


def is_number(x):
    return isinstance(x, (bool, int, float))


def refused_unless_same_dtype(a, b):
    return "" if a.dtype == b.dtype else "dtypes are not promoted"


def is_integer(x):
    return isinstance(x, int) and not isinstance(x, bool)


def need(ok, reason):
    if not ok:
        raise Skip(reason)


NOT_HELD = "a number must be one that the dtype holds"
SCALAR_AXES = "a tensor without axes has no axis 0 nor -1"


def on_axes(call, *axes):
    """PyTorch accepts a 0-dimensional tensor as 1-dimensional; mica does not."""
    if call.tensors[0].dim() == 0 and any(axis in (0, -1) for axis in axes):
        call.refused = SCALAR_AXES
    return call


def unary(x, args, kwargs):
    arguments(args, kwargs)
    return Call([x])


def binary(a, args, kwargs):
    values = arguments(args, kwargs, "other")
    b = values["other"]
    if torch.is_tensor(a) and torch.is_tensor(b):
        return Call([a, b], refused=refused_unless_same_dtype(a, b))
    if torch.is_tensor(a) and is_number(b):
        return Call([a], {"right": b})
    if torch.is_tensor(b) and is_number(a):
        return Call([b], {"left": a})
    raise Skip("two numbers, no tensor")


def swapped(a, args, kwargs):
    """PyTorch's reflected operators: __rsub__(a, b) is b - a."""
    b = arguments(args, kwargs, "other")["other"]
    return binary(b, (a,), {})


def compared(a, args, kwargs):
    need(torch.is_tensor(a), "no overload with the number on the left")
    return binary(a, args, kwargs)


def two_tensors(a, args, kwargs):
    b = arguments(args, kwargs, "other")["other"]
    need(torch.is_tensor(a) and torch.is_tensor(b), "with a number, PyTorch has no such overload or mica has none")
    return Call([a, b], refused=refused_unless_same_dtype(a, b))


def added_in_place(x, args, kwargs):
    values = arguments(args, kwargs, "other", "alpha")
    need(torch.is_tensor(x), "the target is a number")
    need(torch.is_tensor(values["other"]), "no overload with a number")
    alpha = values.get("alpha", 1)
    held = x.dtype != torch.uint8 or alpha >= 0
    return Call([x, values["other"]], {"alpha": alpha}, refused="" if held else NOT_HELD)


def multiplied_in_place(x, args, kwargs):
    need(torch.is_tensor(x), "the target is a number")
    return binary(x, args, kwargs)


def filled(x, args, kwargs):
    value = arguments(args, kwargs, "value")["value"]
    need(is_number(value), "the value is a number, not a tensor")
    return Call([x], {"value": float(value)})


def clamped(x, args, kwargs):
    values = arguments(args, kwargs, "min", "max")
    low, high = values.get("min"), values.get("max")
    need(not torch.is_tensor(low) and not torch.is_tensor(high), "the bounds are numbers, not tensors")
    return Call([x], {"low": float("-inf") if low is None else low, "high": float("inf") if high is None else high})


def hardtanh(x, args, kwargs):
    values = arguments(args, kwargs, "min_val", "max_val")
    return clamped(x, (values.get("min_val", -1.0), values.get("max_val", 1.0)), {})


def gelu(x, args, kwargs):
    how = arguments(args, kwargs, "approximate").get("approximate", "none")
    need(how in ("none", "tanh"), "the approximation is an enum: no other can be named")
    return Call([x], {"approximate": how})


def leaky_relu(x, args, kwargs):
    slope = arguments(args, kwargs, "negative_slope").get("negative_slope", 0.01)
    return Call([x], {"slope": slope})


def elu(x, args, kwargs):
    return Call([x], {"alpha": arguments(args, kwargs, "alpha").get("alpha", 1.0)})


def softplus(x, args, kwargs):
    values = arguments(args, kwargs, "beta", "threshold")
    return Call([x], {"beta": values.get("beta", 1.0), "threshold": values.get("threshold", 20.0)})


def chosen(a, args, kwargs):
    values = arguments(args, kwargs, "condition", "other")
    condition, b = values["condition"], values["other"]
    need(torch.is_tensor(a) and torch.is_tensor(b), "no overload with this number")
    return Call([condition, a, b], refused=refused_unless_same_dtype(a, b))


def masked(x, args, kwargs):
    values = arguments(args, kwargs, "mask", "value")
    need(is_number(values["value"]), "the value is a number, not a tensor")
    grows = torch.broadcast_shapes(x.shape, values["mask"].shape) != x.shape
    call = Call([x, values["mask"]], {"value": values["value"]})
    if grows:
        call.refused = "the mask must broadcast to x's shape, x is not stretched"
    elif x.dtype == torch.bool and values["value"] not in (0, 1):
        call.refused = NOT_HELD
    return call


def reduced(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "keepdim")
    dim = values.get("dim")
    axes = [] if dim is None else [dim] if is_integer(dim) else list(dim)
    return on_axes(Call([x], {"axes": axes, "keepdim": values.get("keepdim", False)}), *axes)


def variance(x, args, kwargs):
    if args and isinstance(args[0], bool):
        args, kwargs = args[1:], kwargs | {"unbiased": args[0]}
    values = arguments(args, kwargs, "dim", "unbiased", "keepdim", "correction")
    correction = values.get("correction", int(values.get("unbiased", True)))
    call = reduced(x, (), {"dim": values.get("dim"), "keepdim": values.get("keepdim", False)})
    call.attributes["correction"] = 1 if correction is None else correction
    return call


def norm(x, args, kwargs):
    values = arguments(args, kwargs, "ord", "dim", "keepdim", "dtype")
    need(values.get("dtype") is None, "no argument dtype: cast x")
    call = reduced(x, (), {"dim": values.get("dim"), "keepdim": values.get("keepdim", False)})
    call.attributes["p"] = values.get("ord", 2)
    need(call.attributes["p"] != 0, "PyTorch's count of elements has a gradient for some axes only")
    return call


def position(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "keepdim")
    if values.get("dim") is None:
        need(not values.get("keepdim"), "without an axis there is no keepdim")
        return Call([x])
    return along_axis(x, args, kwargs)


def along_axis(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "keepdim")
    need(is_integer(values.get("dim")), "needs an axis")
    return on_axes(Call([x], {"axis": values["dim"], "keepdim": values.get("keepdim", False)}), values["dim"])


def softmax(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "dtype")
    need(values.get("dtype") is None, "no argument dtype: cast x")
    return on_axes(Call([x], {"axis": values["dim"]}), values["dim"])


def multiplied(a, args, kwargs):
    return Call([a, arguments(args, kwargs, "other")["other"]])


def linear(x, args, kwargs):
    values = arguments(args, kwargs, "weight", "bias")
    call = Call([x, values["weight"]] + ([values["bias"]] if values.get("bias") is not None else []))
    if values["weight"].dim() != 2:
        call.refused = "weight has two axes"
    return call


def per_axis(value):
    return [value] if isinstance(value, int) else list(value)


def convolution(x, args, kwargs):
    values = arguments(args, kwargs, "weight", "bias", "stride", "padding", "dilation", "groups")
    bias = values.get("bias")
    padding = values.get("padding", 0)
    return Call([x, values["weight"]] + ([] if bias is None else [bias]),
                {"stride": per_axis(values.get("stride", 1)),
                 "padding": padding if isinstance(padding, str) else per_axis(padding),
                 "dilation": per_axis(values.get("dilation", 1)), "groups": values.get("groups", 1)})


def transposed_convolution(x, args, kwargs):
    values = arguments(args, kwargs, "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    bias = values.get("bias")
    return Call([x, values["weight"]] + ([] if bias is None else [bias]),
                {name: per_axis(values.get(name, default)) for name, default in
                 (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))}
                | {"groups": values.get("groups", 1)})


def layer_norm(x, args, kwargs):
    values = arguments(args, kwargs, "normalized_shape", "weight", "bias", "eps")
    parameters = [p for p in (values.get("weight"), values.get("bias")) if p is not None]
    eps = values.get("eps", 1e-5)
    return Call([x] + parameters, {"normalized_shape": values["normalized_shape"], "eps": eps},
                refused="" if eps >= 0 else "eps is at least 0")


def rms_norm(x, args, kwargs):
    values = arguments(args, kwargs, "normalized_shape", "weight", "eps")
    weight = values.get("weight")
    eps = values.get("eps")
    if eps is None:  # PyTorch's own, of the type that it computes in
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return Call([x] if weight is None else [x, weight], {"normalized_shape": values["normalized_shape"], "eps": eps},
                refused="" if eps >= 0 else "eps is at least 0")


def cross_entropy(x, args, kwargs):
    values = arguments(args, kwargs, "target", "weight", "ignore_index", "reduction", "label_smoothing")
    weight = values.get("weight")
    attributes = {name: values[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in values}
    # PyTorch's classes lie along axis 1 (0 without a batch), mica's along the last: the test permutes.
    tensors = [x, values["target"]] + ([] if weight is None else [weight])
    return Call(tensors, attributes | {"class_axis": min(1, x.dim() - 1)})


def loss(x, args, kwargs):
    values = arguments(args, kwargs, "target", "reduction", "delta", "log_target", "weight")
    need(values.get("reduction") != "batchmean", "a mean over rows is a sum divided by their number")
    need(values.get("reduction", "mean") in ("none", "mean", "sum"), "the reduction is an enum: no other can be named")
    need(values.get("weight") is None, "no weights")
    target = values["target"]
    call = Call([x, target], {name: values[name] for name in ("reduction", "delta", "log_target") if name in values})
    if target.shape != x.shape:
        call.refused = "there is no broadcasting"
    return call


def binary_cross_entropy(x, args, kwargs):
    values = arguments(args, kwargs, "target", "weight", "pos_weight", "reduction")
    given = [name for name in ("weight", "pos_weight") if values.get(name) is not None]
    return Call([x, values["target"]] + [values[name] for name in given],
                {"reduction": values.get("reduction", "mean"), "given": given})


def negative_log_likelihood(x, args, kwargs):
    values = arguments(args, kwargs, "target", "weight", "ignore_index", "reduction")
    weight = values.get("weight")
    attributes = {name: values[name] for name in ("ignore_index", "reduction") if name in values}
    # As for cross_entropy.
    tensors = [x, values["target"]] + ([] if weight is None else [weight])
    return Call(tensors, attributes | {"class_axis": min(1, x.dim() - 1)})


def product(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "keepdim", "dtype")
    need(values.get("dtype") is None, "no argument dtype: cast x")
    return reduced(x, (), {name: values[name] for name in ("dim", "keepdim") if name in values})


def summed_along(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "dtype")
    need(values.get("dtype") is None, "no argument dtype: cast x")
    return on_axes(Call([x], {"axis": values["dim"]}), values["dim"])


def flipped(x, args, kwargs):
    axes = arguments(args, kwargs, "dims")["dims"]
    axes = [axes] if is_integer(axes) else list(axes)
    need(axes or x.dim() == 0, "without axes all are meant")
    return on_axes(Call([x], {"axes": axes}), *axes)


def gathered(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "sparse_grad")
    index = values["index"]
    call = on_axes(Call([x, index], {"axis": values["dim"]}), values["dim"])
    if index.dim() != x.dim():
        call.refused = "the index has as many axes as x"
    elif index.dtype not in (torch.int64, torch.int32):
        call.refused = "an index is int64 or int32"
    return call


def scattered(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "src")
    call = on_axes(Call([x, values["index"], values["src"]], {"axis": values["dim"]}), values["dim"])
    if not x.dim() == values["index"].dim() == values["src"].dim():
        call.refused = "the index and src have as many axes as x"
    return call


def index_selected(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index")
    call = on_axes(Call([x, values["index"]], {"axis": values["dim"]}), values["dim"])
    if values["index"].dim() != 1:
        call.refused = "the index has one axis"
    return call


def index_added(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "source", "alpha")
    call = index_selected(x, (values["dim"], values["index"]), {})
    call.tensors.append(values["source"])
    call.attributes["alpha"] = values.get("alpha", 1)
    if x.dim() != values["source"].dim():
        call.refused = "src has as many axes as x"
    return call


def masked_selected(x, args, kwargs):
    return Call([x, arguments(args, kwargs, "mask")["mask"]])


LARGE_ORDERS = "large samples along one axis are enough"


def sorted_along(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "descending", "stable")
    axis = values.get("dim", -1)
    need(x.numel() < 64 or axis == 1 and values.get("descending"), LARGE_ORDERS)
    need(values.get("stable") or x.unique().numel() == x.numel(), "PyTorch's order of equal elements is not defined")
    return on_axes(Call([x], {"axis": axis, "descending": values.get("descending", False)}), axis)


def argsorted(x, args, kwargs):
    return sorted_along(x, args, kwargs)


def top(x, args, kwargs):
    values = arguments(args, kwargs, "k", "dim", "largest", "sorted")
    need(values.get("sorted", True), "the result is sorted")
    need(x.numel() < 200 or values.get("dim") in (0, -2), LARGE_ORDERS)
    need(x.unique().numel() == x.numel(), "PyTorch's order of equal elements is not defined")
    axis = values.get("dim", -1)
    return on_axes(Call([x], {"k": values["k"], "axis": axis, "largest": values.get("largest", True)}), axis)


def rolled(x, args, kwargs):
    values = arguments(args, kwargs, "shifts", "dims")
    need(is_integer(values["shifts"]) and is_integer(values.get("dims")), "one axis at a time")
    return on_axes(Call([x], {"shift": values["shifts"], "axis": values["dims"]}), values["dims"])


def repeated(x, args, kwargs):
    counts = arguments(args, kwargs, "repeats")["repeats"]
    return Call([x], {"counts": list(counts)})


def one_hot(indices, args, kwargs):
    classes = arguments(args, kwargs, "num_classes").get("num_classes", -1)
    need(classes != -1, "mica takes the number of classes, and does not look for the largest index")
    return Call([indices], {"classes": classes})


def padded(x, args, kwargs):
    values = arguments(args, kwargs, "pad", "mode", "value")
    sizes = list(values["pad"])
    need(len(sizes) == 2, "one axis at a time")
    value = values.get("value") or 0
    held = x.dtype != torch.bool or value in (0, 1)
    return Call([x], {"before": sizes[0], "after": sizes[1], "value": value},
                refused="a negative number of elements is a slice" if min(sizes) < 0 else "" if held else NOT_HELD)


def embedding(weight, args, kwargs):
    values = arguments(args, kwargs, "indices")
    return Call([weight, values["indices"]])


def dropout(x, args, kwargs):
    values = arguments(args, kwargs, "p", "training")
    p, training = values.get("p", 0.5), values.get("training", True)
    need(not training or p in (0, 1), "what is dropped is up to each library's random numbers")
    return Call([x], {"p": p, "training": training}, refused="p is less than 1" if p == 1 else "")


def attention(q, args, kwargs):
    values = arguments(args, kwargs, "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    need(not values.get("dropout_p"), "what is dropped is up to each library's random numbers")
    k, v, mask = values["key"], values["value"], values.get("attn_mask")
    need(not values.get("enable_gqa") or k.shape[-3] < q.shape[-3], "groups of one head are no other case")
    attributes = {"causal": values.get("is_causal", False)}
    if values.get("scale") is not None:
        attributes["scale"] = values["scale"]
    before = -3 if values.get("enable_gqa") else -2  # keys and values then have fewer heads
    same = q.shape[:before] == k.shape[:before] == v.shape[:before] and k.shape[:-2] == v.shape[:-2]
    return Call([q, k, v] + ([] if mask is None else [mask]), attributes,
                refused="" if same else "leading axes are equal, they do not broadcast")


def shaped(x, args, kwargs):
    """For functions of a shape, given as one list or as numbers."""
    need(not kwargs, "a keyword argument")
    shape = args[0] if len(args) == 1 and not is_integer(args[0]) else args
    if torch.is_tensor(shape):
        shape = shape.shape
    return Call([x], {"shape": list(shape)})


def flattened(x, args, kwargs):
    values = arguments(args, kwargs, "start_dim", "end_dim")
    return Call([x], {"from": values.get("start_dim", 0), "to": values.get("end_dim", -1)})


def transposed(x, args, kwargs):
    values = arguments(args, kwargs, "dim0", "dim1")
    return on_axes(Call([x], {"a": values["dim0"], "b": values["dim1"]}), values["dim0"], values["dim1"])


def permuted(x, args, kwargs):
    return Call([x], {"axes": arguments(args, kwargs, "dims")["dims"]})


def sliced(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "start", "end", "step")
    start, end = values.get("start"), values.get("end")
    return Call([x], {"axis": values.get("dim", 0), "start": 0 if start is None else start,
                      "end": 2**62 if end is None else end, "step": values.get("step", 1)})


def indexed(x, args, kwargs):
    need(len(args) == 1 and isinstance(args[0], slice), "no indexing by lists, masks or several axes at once")
    return sliced(x, (0, args[0].start, args[0].stop, args[0].step or 1), {})


def narrowed(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "start", "length")
    axis, start, length = values["dim"], values["start"], values["length"]
    need(is_integer(start), "positions are numbers, not tensors")
    if x.dim() > 0 and -x.dim() <= axis < x.dim():
        size = x.shape[axis]
        need(-size <= start <= size and 0 <= length and (start + size if start < 0 else start) + length <= size,
             "no narrow: slice takes start and end, and clamps them as Python does")
        start = start + size if start < 0 else start
    return Call([x], {"axis": axis, "start": start, "end": start + length, "step": 1})


def selected(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index")
    return Call([x], {"axis": values["dim"], "index": values["index"]})


def squeezed(x, args, kwargs):
    axis = arguments(args, kwargs, "dim").get("dim")
    if isinstance(axis, (list, tuple)):
        need(len(axis) == 1, "squeezes one axis or all")
        axis = axis[0]
    call = Call([x], {} if axis is None else {"axis": axis})
    return call if axis is None else on_axes(call, axis)


def one_axis(x, args, kwargs):
    return Call([x], {"axis": arguments(args, kwargs, "dim")["dim"]})


def split(x, args, kwargs):
    values = arguments(args, kwargs, "size", "dim")
    return Call([x], {"size": values["size"], "axis": values.get("dim", 0)})


def joined(tensors, args, kwargs):
    values = arguments(args, kwargs, "dim")
    need(isinstance(tensors, (list, tuple)), "a tensor instead of a list")
    need(all(torch.is_tensor(t) for t in tensors), "something that is no tensor")
    return Call(list(tensors), {"axis": values.get("dim", 0)})


def concatenated(tensors, args, kwargs):
    call = joined(tensors, args, kwargs)
    if len({t.dim() for t in call.tensors}) > 1 and any(t.shape == (0,) for t in call.tensors):
        call.refused = "an empty tensor of one axis does not pass for one of every shape"
    return call


def triangle(x, args, kwargs):
    return Call([x], {"diagonal": arguments(args, kwargs, "diagonal").get("diagonal", 0)})


def cast_to(dtype):
    def cast(x, args, kwargs):
        memory = arguments(args, kwargs, "memory_format").get("memory_format", torch.contiguous_format)
        need(memory in (torch.contiguous_format, torch.preserve_format), "no memory formats")
        if x.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool and x.numel() > 0:
            limits, whole = torch.iinfo(dtype), x.detach().double().trunc()
            need(limits.min <= whole.min() and whole.max() <= limits.max,
                 "what a float outside of an integer's range becomes is up to the processor")
        return Call([x])
    return cast


def refused_unless_held(dtype, value):
    held = {torch.bool: value in (0, 1), torch.uint8: 0 <= value <= 255}.get(dtype, True)
    return "" if held else NOT_HELD


def like(x, args, kwargs):
    values = arguments(args, kwargs, "value", "dtype", "device")
    need(values.get("dtype", x.dtype) == x.dtype, "no argument dtype")
    return Call([x], {"value": values["value"]} if "value" in values else {},
                refused=refused_unless_held(x.dtype, values.get("value", 0)))


ENOUGH = "enough of these"


def spaced(first, args, kwargs):
    """linspace and logspace."""
    values = arguments(args, kwargs, "end", "steps", "base", "dtype", "device")
    need("dtype" in values, "the default dtype")
    need(not torch.is_tensor(first) and not torch.is_tensor(values["end"]), "bounds are numbers")
    dtype, base = values["dtype"], values.get("base", 10.0)
    need(dtype.is_floating_point or "base" not in values, "PyTorch rounds the exponents to integers first")
    if not dtype.is_floating_point:
        whole = (values["end"] - first) % max(values["steps"] - 1, 1) == 0
        need(whole, "PyTorch rounds the step to float32 before it rounds the numbers")
    return Call([], {"start": float(first), "end": float(values["end"]), "count": values["steps"], "base": base,
                     "dtype": dtype},
                refused=NOT_HELD if dtype == torch.uint8 and min(first, values["end"]) < 0 and values["steps"] else "")


def identity(rows, args, kwargs):
    values = arguments(args, kwargs, "columns", "dtype", "device", "requires_grad")
    need("dtype" in values, "the default dtype")
    return Call([], {"rows": rows, "columns": values.get("columns", rows), "dtype": values["dtype"]})


def grid(tensors, args, kwargs):
    values = arguments((), kwargs, "indexing")
    need(values.get("indexing", "ij") == "ij", "matrix indexing only: permute the result")
    return Call(list(tensors) if isinstance(tensors, (list, tuple)) else [tensors, *args])


def on_diagonal(x, args, kwargs):
    values = arguments(args, kwargs, "offset", "dim1", "dim2")
    return Call([x], {"offset": values.get("offset", 0), "a": values.get("dim1", 0), "b": values.get("dim2", 1)})


def embedded(x, args, kwargs):
    call = on_diagonal(x, args, {"dim1": -2, "dim2": -1} | kwargs)
    need((call.attributes["a"], call.attributes["b"]) in ((-2, -1), (x.dim() - 1, x.dim())), "the axes are the last two")
    return call


def matrix_diagonal(x, args, kwargs):
    return Call([x], {"offset": arguments(args, kwargs, "diagonal").get("diagonal", 0)})


def positions(x, args, kwargs):
    need(not arguments(args, kwargs, "as_tuple").get("as_tuple"), "one tensor of positions")
    return Call([x])


def distinct(x, args, kwargs):
    values = arguments(args, kwargs, "sorted", "return_inverse", "return_counts", "dim")
    need(values.get("dim") is None, "distinct elements only, not slices")
    need(values.get("sorted") and values.get("return_inverse") and values.get("return_counts"),
         "mica returns all three, sorted")
    return Call([x])


def searched(x, args, kwargs):
    values = arguments(args, kwargs, "other", "out_int32", "right", "side", "sorter")
    need(values.get("sorter") is None and not values.get("out_int32"), "no sorter, and int64 positions")
    right = values.get("right", False) or values.get("side") == "right"
    need(torch.is_tensor(values["other"]), "a number is a tensor without axes")
    return Call([x, values["other"]], {"right": right}, refused=refused_unless_same_dtype(x, values["other"]))


def counted(x, args, kwargs):
    values = arguments(args, kwargs, "weights", "minlength")
    weights = values.get("weights")
    need(weights is None or weights.dtype in (torch.float64, torch.float32), "weights are floats and keep their dtype")
    return Call([x] + ([] if weights is None else [weights]), {"minlength": values.get("minlength", 0)})


def histogram(x, args, kwargs):
    values = arguments(args, kwargs, "bins", "range", "weight", "density")
    weight, bins = values.get("weight"), values["bins"]
    need(is_integer(bins), "the same for given edges")
    call = Call([x] + ([] if weight is None else [weight]), {"bins": bins, "density": values.get("density", False)})
    if values.get("range") is not None:
        call.attributes["range"] = list(values["range"])
    return call


def without_nan(tensors):
    need(not any(t.is_floating_point() and t.isnan().any() for t in tensors),
         "which argument gets the gradient where one is NaN is arbitrary")


def scanned_in_logarithms(x, args, kwargs):
    need(x.dtype == torch.float64 or x.numel() == 0 or x.abs().max() < 1000,
         "PyTorch's gradient of large numbers is exact in float64 only")
    return softmax(x, args, kwargs)


def arithmetic_of_three(a, args, kwargs):
    """lerp and clamp: each further argument is a tensor or a number, or absent."""
    values = arguments(args, kwargs, "second", "third", "min", "max")
    second, third = values.get("second", values.get("min")), values.get("third", values.get("max"))
    need(torch.is_tensor(second) or torch.is_tensor(third), "the bounds are tensors here")
    call = Call([a])
    for name, value in (("second", second), ("third", third)):
        if torch.is_tensor(value):
            call.attributes[name] = "tensor"
            call.tensors.append(value)
        elif value is not None:
            need(is_number(value), "a complex number")
            call.attributes[name] = value
    without_nan(call.tensors)
    if any(t.dtype != a.dtype for t in call.tensors):
        call.refused = "dtypes are not promoted"
    return call


def replaced(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "src", "value", "reduce")
    need(values.get("reduce") is None, "scatter_reduce reduces")
    src = values.get("src", values.get("value"))
    need(torch.is_tensor(src), "a number stands for a tensor that is full of it")
    return scattered(x, (values["dim"], values["index"], src), {})


def scatter_reduced(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "src", "reduce", "include_self")
    call = scattered(x, (values["dim"], values["index"], values["src"]), {})
    call.attributes |= {"reduction": values["reduce"], "include_self": values.get("include_self", True)}
    if x.dtype == torch.uint8 and values["reduce"] in ("sum", "mean"):
        call.refused = "no sums in uint8"
    return call


def index_reduced(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "index", "source", "reduce", "include_self")
    call = index_added(x, (values["dim"], values["index"], values["source"]), {})
    call.attributes |= {"reduction": values["reduce"], "include_self": values.get("include_self", True)}
    if x.dtype == torch.uint8 and values["reduce"] == "mean":
        call.refused = "no sums in uint8"
    return call


def middle(x, args, kwargs):
    values = arguments(args, kwargs, "dim", "keepdim")
    need(x.unique().numel() == x.numel(), "PyTorch's choice of equal elements is not defined")
    return along_axis(x, args, kwargs) if values.get("dim") is not None else Call([x])


def quantiles(x, args, kwargs):
    values = arguments(args, kwargs, "q", "dim", "keepdim", "interpolation")
    q, axis = values["q"], values.get("dim")
    need(not torch.is_tensor(q) or q.dim() <= 1, "quantiles are a number or a list")
    call = Call([x], {"q": q.tolist() if torch.is_tensor(q) else q, "keepdim": values.get("keepdim", False),
                      "interpolation": values.get("interpolation", "linear")})
    if axis is None:
        return call
    call.attributes["axis"] = axis
    return on_axes(call, axis)


def compared_closely(a, args, kwargs):
    values = arguments(args, kwargs, "other", "rtol", "atol", "equal_nan")
    b = values["other"]
    need(torch.is_tensor(a) and torch.is_tensor(b), "something that is no tensor")
    return Call([a, b], {"rtol": values.get("rtol", 1e-5), "atol": values.get("atol", 1e-8),
                         "equal_nan": values.get("equal_nan", False)}, refused=refused_unless_same_dtype(a, b))


def distances(x, args, kwargs):
    values = arguments(args, kwargs, "x2", "p", "compute_mode")
    need(values.get("compute_mode") != "donot_use_mm_for_euclid_dist", "the mode is not chosen by the caller")
    return Call([x, values["x2"]], {"p": values.get("p", 2.0)})


def vectors(x, args, kwargs):
    """normalize, cosine_similarity and pairwise_distance."""
    values = arguments(args, kwargs, "other", "dim", "p", "eps", "keepdim")
    call = Call([x] + ([values["other"]] if "other" in values else []),
                {name: values[name] for name in ("p", "eps", "keepdim") if name in values})
    call.attributes["axis"] = values.get("dim", 1)
    return on_axes(call, call.attributes["axis"]) if "p" not in values else call


def vectors_p_first(x, args, kwargs):
    values = arguments(args, kwargs, "other", "p", "eps", "keepdim")
    return vectors(x, (), values)


def embedding_loss(x, args, kwargs):
    """Losses of two or three tensors, and of numbers."""
    values = arguments(args, kwargs, "second", "third", "reduction", "margin", "p", "eps", "swap", "full", "log_input",
                       "beta", "weight", "target")
    tensors = [x] + [values[name] for name in ("second", "third", "target", "weight") if values.get(name) is not None]
    need(values.get("reduction", "mean") in ("none", "mean", "sum"), "the reduction is an enum: no other can be named")
    return Call(tensors, {name: values[name] for name in ("reduction", "margin", "p", "eps", "swap", "full", "log_input",
                                                          "beta") if name in values})


def equal_shapes(x, args, kwargs):
    call = embedding_loss(x, args, kwargs)
    without_nan(call.tensors)
    if any(t.shape != x.shape for t in call.tensors):
        call.refused = "there is no broadcasting"
    return call


def same_rows(x, args, kwargs):
    call = embedding_loss(x, args, kwargs)
    if call.tensors[0].shape != call.tensors[1].shape or call.tensors[2].shape != x.shape[:-1]:
        call.refused = "there is no broadcasting"
    elif call.tensors[2].dtype not in (x.dtype, torch.int64, torch.int32):
        call.refused = "a target has x's dtype or is an integer"
    return call


def variances(x, args, kwargs):
    call = embedding_loss(x, args, kwargs)
    shapes = (x.shape, x.shape[:-1], (*x.shape[:-1], 1))
    if call.tensors[1].shape != x.shape or call.tensors[2].shape not in shapes:
        call.refused = "there is no broadcasting"
    return call


def alignment(x, args, kwargs):
    values = arguments(args, kwargs, "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    need(x.numel() <= 1000, "own samples are small")
    lengths = [torch.as_tensor(values[name], dtype=torch.int64) for name in ("input_lengths", "target_lengths")]
    return Call([x, values["targets"], *lengths], {name: values[name] for name in ("blank", "reduction", "zero_infinity")
                                                   if name in values})


def created(shape, args, kwargs):
    values = arguments(args, kwargs, "value", "dtype", "device")
    need("dtype" in values, "the default dtype")
    return Call([], {"shape": list(shape), "dtype": values["dtype"]} |
                ({"value": values["value"]} if "value" in values else {}),
                refused=refused_unless_held(values["dtype"], values.get("value", 0)))


def arange(first, args, kwargs):
    args = list(args)
    start, end = (0, kwargs["end"]) if "end" in kwargs and not args else (first, args.pop(0)) if args else (0, first)
    if "end" in kwargs:
        start = first
    step, dtype = args[0] if args else 1, kwargs.get("dtype", torch.int64)
    need(dtype.is_floating_point or step == int(step), "not the step is rounded to integers but each number")
    need(step == 0 or (end - start) * step >= 0, "a step away from the end gives nothing, as Python's range does")
    return Call([], {"start": float(start), "end": float(end), "step": float(step), "dtype": dtype})


def einsum(operands, args, kwargs):
    equation = arguments(args, kwargs, "equation")["equation"]
    call = Call(list(operands), {"equation": equation})
    if any(x.dtype != operands[0].dtype for x in operands):
        call.refused = "dtypes are not promoted"
    return call


def tensordot(a, args, kwargs):
    values = arguments(args, kwargs, "other", "dims")
    dims = values.get("dims", 2)
    attributes = {"count": dims} if is_integer(dims) else {"a_axes": list(dims[0]), "b_axes": list(dims[1])}
    return Call([a, values["other"]], attributes)


def solved(a, args, kwargs):
    values = arguments(args, kwargs, "B", "left")
    need(values.get("left", True), "a is on the left")
    return Call([a, values["B"]])


def solved_triangular(a, args, kwargs):
    values = arguments(args, kwargs, "B", "upper", "left", "unitriangular")
    need(a.shape[-1] == 3 and a.numel() > 0 and values["B"].numel() > 0, "one size is enough")
    return Call([a, values["B"]],
                {name: values.get(name, name == "left") for name in ("upper", "left", "unitriangular")})


def cholesky(a, args, kwargs):
    return Call([a], {"upper": arguments(args, kwargs, "upper").get("upper", False)})


def cholesky_solved(b, args, kwargs):
    values = arguments(args, kwargs, "L", "upper")
    return Call([b, values["L"]], {"upper": values.get("upper", False)})


def qr(a, args, kwargs):
    mode = arguments(args, kwargs, "mode").get("mode", "reduced")
    need(mode in ("reduced", "complete"), "the mode is an enum, and r alone is no mode")
    return Call([a], {"mode": mode})


def svd(a, args, kwargs):
    full = arguments(args, kwargs, "full_matrices").get("full_matrices", True)
    need(not full or a.shape[-1] == a.shape[-2], "completing vectors are not unique")
    return Call([a], {"full": full})


def eigh(a, args, kwargs):
    return Call([a], {"upper": arguments(args, kwargs, "UPLO").get("UPLO", "L") == "U"})


def pinv(a, args, kwargs):
    values = arguments(args, kwargs, "rtol", "atol", "hermitian")
    need(not values.get("hermitian"), "no argument hermitian")
    need(not any(torch.is_tensor(values.get(name)) for name in ("rtol", "atol")), "tolerances are numbers, not tensors")
    return Call([a], {name: values[name] for name in ("rtol", "atol") if values.get(name) is not None})


def lstsq(a, args, kwargs):
    values = arguments(args, kwargs, "B", "rcond", "driver")
    need(values.get("driver", "gels") == "gels", "there is one algorithm, for matrices of full rank")
    need(values["B"].dim() == a.dim(), "b is a matrix")
    return Call([a, values["B"]])


def matrix_power(a, args, kwargs):
    power = arguments(args, kwargs, "n")["n"]
    need(power != 0, "the identity has no gradient")
    return Call([a], {"power": power})


def determinant(a, args, kwargs):
    arguments(args, kwargs)
    need(a.numel() > 0, "PyTorch gives no gradient for matrices without elements")
    return Call([a])


def matrix_norm(a, args, kwargs):
    values = arguments(args, kwargs, "ord", "dim", "keepdim")
    need([axis - a.dim() if axis >= 0 else axis for axis in values.get("dim", (-2, -1))] == [-2, -1],
         "matrices are in the last two axes")
    return Call([a], {"ord": values.get("ord", "fro"), "keepdim": values.get("keepdim", False)})


def transformed(x, args, kwargs):
    values = arguments(args, kwargs, "s" if "s" in kwargs else "n", "dim", "norm")
    attributes = {"norm": values.get("norm") or "backward"}
    for name, ours in (("n", "n"), ("s", "lengths"), ("dim", "axes")):
        if values.get(name) is not None:
            attributes[ours] = list(values[name]) if isinstance(values[name], (list, tuple)) else values[name]
    return Call([x], attributes)


def complex_transformed(x, args, kwargs):
    need("pairs" in kwargs, "a complex tensor has a last axis of two real numbers")
    return transformed(x, args, {name: value for name, value in kwargs.items() if name != "pairs"})


def centered(x, args, kwargs):
    axes = arguments(args, kwargs, "dim").get("dim")
    return Call([x], {"axes": [] if axes is None else [axes] if is_integer(axes) else list(axes)})
