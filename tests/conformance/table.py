"""The OpInfos of PyTorch that each call of mica is compared with."""

import dataclasses
import functools
from typing import Callable

import torch
from torch.testing._internal.opinfo.core import SampleInput

import adapters as to
import image_adapters

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
SIGNED = FLOATS + (torch.int64, torch.int32)
NUMERIC = FLOATS + INTEGERS
ALL = NUMERIC + (torch.bool,)
SOLVED = (torch.float64, torch.float32)
SUMMED = FLOATS + (torch.int64, torch.int32)


@dataclasses.dataclass
class Spec:
    call: str  # the name in the test's table, and the fixture's
    opinfo: str
    adapt: Callable
    dtypes: tuple = FLOATS  # those that mica supports, the main one first; in PyTorch's others, mica throws
    variant: str = ""
    in_place: str = ""  # the name of PyTorch's method, if the call writes into its first tensor
    limit: int = 250  # the most elements of a sample's inputs
    most: int = None  # the most samples of the main dtype
    one_of: int = 1  # only each one_of-th sample, for ops with hundreds: one for each combination of options
    few: int = 2  # the number of samples for each dtype except the main one
    function: Callable = None  # called with the samples instead of the OpInfo's own function
    more: Callable = None  # returns additional samples for a dtype


def clamp(x, min_val=-1.0, max_val=1.0):
    """clamp for samples of hardtanh, whose bounds are numbers; hardtanh itself has another gradient of NaN."""
    return torch.clamp(x, min_val, max_val)


def rounded_once(function):
    """Computes in float32 for 16-bit floats, as mica does; PyTorch would round each step to 16 bits."""
    def wide(x):
        return x.float() if torch.is_tensor(x) and x.is_floating_point() and x.dtype.itemsize == 2 else x

    def rounded(x, *args, **options):
        return function(wide(x), *map(wide, args), **{name: wide(value) for name, value in options.items()}).to(x.dtype)

    return rounded


def as_tensor(function):
    return lambda *args, **options: torch.tensor(function(*args, **options))


def normalized(log_probs, *args, **options):
    """ctc_loss of log-probabilities that are normalized here: PyTorch's gradient is only right if they are."""
    return torch.nn.functional.ctc_loss(log_probs.log_softmax(-1), *args, **options)


def short_alignments(dtype):
    """Small samples for ctc_loss: PyTorch's have 50 times."""
    def sample(times, classes, targets, input_lengths, target_lengths, **options):
        shape = (times, classes) if targets.dim() == 1 and len(target_lengths) == 1 else (times, len(target_lengths), classes)
        return SampleInput(torch.randn(shape).to(dtype).requires_grad_(),
                           args=(targets, torch.tensor(input_lengths), torch.tensor(target_lengths)), kwargs=options)

    padded = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0]])
    return [sample(6, 4, padded, [6, 5, 3], [3, 2, 1], reduction=reduction) for reduction in ("none", "mean", "sum")] + [
        sample(5, 4, torch.tensor([1, 1, 2, 3]), [5, 4], [2, 2], reduction="none"),
        sample(3, 4, torch.tensor([[1, 1, 1], [3, 2, 1]]), [3, 3], [3, 3], reduction="none", zero_infinity=True),
        sample(4, 3, torch.tensor([[0, 2], [2, 2], [0, 0]]), [4, 2, 4], [2, 1, 0], blank=1, reduction="none"),
    ]


def distinct_elements(dtype):
    """Samples for median without equal elements, of which PyTorch may choose any."""
    def sample(*shape, **options):
        n = torch.Size(shape).numel()
        return SampleInput(torch.randperm(n).reshape(shape).to(dtype).requires_grad_(dtype.is_floating_point), kwargs=options)

    return [sample(3, 4, 5, dim=1), sample(4, 5), sample(3, 7, dim=-1, keepdim=True), sample(1)]


def grouped_and_masked(dtype):
    """Samples of attention with grouped queries and with masks, since PyTorch's have one mask only, and no groups."""
    visible = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    padding = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool).reshape(2, 1, 1, 5)

    def random(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    def sample(key_heads, **options):
        grouped = {"enable_gqa": True} if key_heads < 4 else {}
        return SampleInput(random(2, 4, 3, 4), args=(random(2, key_heads, 5, 4), random(2, key_heads, 5, 3)),
                           kwargs=grouped | options)

    return [sample(2), sample(1, is_causal=True, scale=0.3), sample(4, attn_mask=visible),
            sample(2, attn_mask=padding), sample(4, attn_mask=random(4, 3, 5)), sample(2, attn_mask=random(2, 1, 3, 5))]


def distinct(dtype):
    """Samples for topk without equal elements, whose order PyTorch does not define; its own 16-bit samples have some."""
    def sample(*args):
        return SampleInput(torch.randperm(60).reshape(3, 4, 5).to(dtype).requires_grad_(), args=args)

    return [sample(2), sample(3, 1, False)] if dtype.is_floating_point else []


def indices_of_some_axes(dtype):
    """Small samples for one_hot; PyTorch's samples with several axes are large."""
    def sample(classes, *shape):
        return SampleInput(torch.randint(classes, shape, dtype=dtype), args=(classes,))

    return [sample(5, 2, 3), sample(1, 3), sample(7, 2, 1, 4), sample(3, 0, 2)]


def as_pairs(function):
    """Takes and returns complex tensors as mica has them, with a last axis of two real numbers."""
    def of_pairs(x, *args, pairs=False, **options):
        y = function(torch.view_as_complex(x) if pairs else x, *args, **options)
        return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y

    return of_pairs


def complex_samples(*calls):
    """Own samples of a transform, (shape, arguments), since PyTorch's complex ones have 210 elements."""
    def samples(dtype):
        complex_dtype = {torch.float64: torch.complex128, torch.float32: torch.complex64}.get(dtype)
        if complex_dtype is None:
            return []
        return [SampleInput(torch.view_as_real(torch.randn(shape, dtype=complex_dtype)).clone().requires_grad_(),
                            kwargs=options | {"pairs": True}) for shape, options in calls]

    return samples


one_axis = complex_samples(((7,), {}), ((2, 8), {}), ((3, 4, 2), {"n": 6, "dim": 1, "norm": "ortho"}),
                           ((5, 3), {"n": 4, "dim": 0, "norm": "forward"}), ((3, 5), {"norm": "backward"}))
two_axes = complex_samples(((2, 3, 4), {}), ((3, 4, 2), {"s": (2, 5), "dim": (0, 1), "norm": "ortho"}),
                           ((5, 3), {"norm": "forward"}), ((2, 3, 3), {"dim": (2, 0)}))


def svd_without_signs(a, full_matrices=True):
    u, s, vh = torch.linalg.svd(a, full_matrices)
    return u.abs(), s, vh.abs()


def eigh_without_signs(a, UPLO="L"):
    values, vectors = torch.linalg.eigh(a + a.mT, UPLO)
    return values, vectors.abs()


def eigvalsh_of_sum(a, UPLO="L"):
    return torch.linalg.eigvalsh(a + a.mT, UPLO)


def cholesky_solve_of_triangle(b, factor, upper=False):
    """PyTorch's gradient has elements in the triangle that it does not read."""
    return torch.cholesky_solve(b, factor.triu() if upper else factor.tril(), upper)


def least_squares(a, b, driver=None):
    return torch.linalg.lstsq(a, b, driver=driver).solution


def reflected(call, opinfo, dtypes):
    return Spec(call, opinfo, to.swapped, dtypes, limit=64)


# Ops that only move elements support all dtypes, and need few samples of each.
Moved = functools.partial(Spec, dtypes=ALL, few=1, limit=130)

SPECS = [
    Spec("add", "add", to.binary, NUMERIC),
    reflected("add", "__radd__", NUMERIC),
    Spec("sub", "sub", to.binary, NUMERIC),
    reflected("sub", "__rsub__", NUMERIC),
    Spec("mul", "mul", to.binary, NUMERIC),
    reflected("mul", "__rmul__", NUMERIC),
    Spec("div", "div", to.binary, variant="no_rounding_mode"),
    reflected("div", "__rdiv__", FLOATS),
    Spec("fmod", "fmod", to.binary, NUMERIC),
    Spec("floor_divide", "floor_divide", to.binary, NUMERIC),
    Spec("pow", "pow", to.binary),
    reflected("pow", "__rpow__", FLOATS),
    *(Spec(name, name, to.two_tensors, NUMERIC) for name in ("maximum", "minimum")),
    *(Spec(name, name, to.compared, ALL) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(Spec(name, name, to.two_tensors, (torch.bool,)) for name in ("logical_and", "logical_or")),
    Spec("logical_not", "logical_not", to.unary, (torch.bool,)),
    Spec("where", "where", to.chosen, ALL),
    Spec("masked_fill", "masked_fill", to.masked, ALL),

    Spec("neg", "neg", to.unary, SIGNED),
    *(Spec(name, name, to.unary) for name in ("exp", "log", "log1p", "expm1", "sin", "cos", "sqrt", "rsqrt", "sigmoid",
                                              "abs", "floor", "ceil")),
    Spec("round", "round", to.unary),
    *(Spec(name, name, to.unary, ALL) for name in ("isnan", "isfinite")),
    Spec("elu", "nn.functional.elu", to.elu),
    Spec("softplus", "nn.functional.softplus", to.softplus),
    *(Spec(name, name, to.unary, limit=400) for name in ("tanh", "erf")),  # have no smaller sample of many values
    Spec("relu", "nn.functional.relu", to.unary),
    Spec("leaky_relu", "nn.functional.leaky_relu", to.leaky_relu),
    Spec("silu", "nn.functional.silu", to.unary),
    Spec("gelu", "nn.functional.gelu", to.gelu),
    Spec("clamp", "clamp", to.clamped),
    Spec("clamp", "nn.functional.hardtanh", to.hardtanh, function=clamp),

    Spec("sum", "sum", to.reduced, ALL),
    Spec("prod", "prod", to.product, ALL, limit=64),
    Spec("cumsum", "cumsum", to.summed_along, NUMERIC, limit=130),
    Spec("mean", "mean", to.reduced),
    Spec("var", "var", to.variance),
    Spec("var", "var", to.variance, variant="unbiased"),
    Spec("stddev", "std", to.variance),
    Spec("stddev", "std", to.variance, variant="unbiased"),
    Spec("vector_norm", "linalg.vector_norm", to.norm),
    Spec("logsumexp", "logsumexp", to.reduced),
    *(Spec(name, name, to.unary, NUMERIC, variant="reduction_no_dim") for name in ("max", "min")),
    *(Spec(f"{name}_along", name, to.along_axis, NUMERIC, variant="reduction_with_dim") for name in ("max", "min")),
    *(Spec(name, name, to.reduced, NUMERIC) for name in ("amax", "amin")),
    *(Spec(name, name, to.position, NUMERIC) for name in ("argmax", "argmin")),
    Spec("sum_to", "sum_to_size", to.shaped, ALL),

    *(Spec(name, name, to.softmax, variant=v) for name in ("softmax", "log_softmax") for v in ("", "with_dtype")),
    Spec("cross_entropy", "nn.functional.cross_entropy", to.cross_entropy),
    *(Spec(name, f"nn.functional.{name}", to.loss, limit=130) for name in ("mse_loss", "l1_loss", "huber_loss", "kl_div")),
    Spec("nll_loss", "nn.functional.nll_loss", to.negative_log_likelihood, limit=64),
    Spec("bce_with_logits", "nn.functional.binary_cross_entropy_with_logits", to.binary_cross_entropy, limit=130,
         function=rounded_once(torch.nn.functional.binary_cross_entropy_with_logits)),
    Spec("layer_norm", "nn.functional.layer_norm", to.layer_norm),
    Spec("rms_norm", "nn.functional.rms_norm", to.rms_norm),
    *image_adapters.specs(Spec, rounded_once, ALL),
    Spec("embedding", "nn.functional.embedding", to.embedding),
    Spec("dropout", "nn.functional.dropout", to.dropout),
    Spec("scaled_dot_product_attention", "nn.functional.scaled_dot_product_attention", to.attention, limit=2000,
         function=rounded_once(torch.nn.functional.scaled_dot_product_attention), more=grouped_and_masked),

    Spec("matmul", "matmul", to.multiplied, NUMERIC, limit=600),
    Spec("matmul", "mm", to.multiplied, NUMERIC),
    Spec("matmul", "bmm", to.multiplied, NUMERIC, limit=600),
    Spec("matmul", "mv", to.multiplied, NUMERIC),
    Spec("matmul", "dot", to.multiplied, NUMERIC),
    Spec("linear", "nn.functional.linear", to.linear),

    *(Spec(f"conv{n}d", f"nn.functional.conv{n}d", to.convolution, limit=300) for n in (1, 2, 3)),
    *(Spec(f"conv_transpose{n}d", f"nn.functional.conv_transpose{n}d", to.transposed_convolution,
           limit=600 if n == 3 else 300)
      for n in (1, 2, 3)),
    Spec("einsum", "einsum", to.einsum),
    Spec("tensordot", "tensordot", to.tensordot),
    Spec("outer", "outer", to.multiplied, NUMERIC),
    Spec("inner", "inner", to.multiplied),

    *(Spec(name, f"linalg.{name}", to.unary, SOLVED, limit=130) for name in ("inv", "svdvals")),
    *(Spec(name, f"linalg.{name}", to.determinant, SOLVED, limit=130) for name in ("det", "slogdet")),
    Spec("solve", "linalg.solve", to.solved, SOLVED, limit=130),
    Spec("solve_triangular", "linalg.solve_triangular", to.solved_triangular, SOLVED, limit=20),
    Spec("cholesky", "linalg.cholesky", to.cholesky, SOLVED, limit=130),
    Spec("cholesky_solve", "cholesky_solve", to.cholesky_solved, SOLVED, limit=130,
         function=cholesky_solve_of_triangle),
    Spec("qr", "linalg.qr", to.qr, SOLVED, limit=60),
    Spec("svd", "linalg.svd", to.svd, SOLVED, limit=20, function=svd_without_signs),
    Spec("eigh", "linalg.eigh", to.eigh, SOLVED, limit=130, function=eigh_without_signs),
    Spec("eigvalsh", "linalg.eigvalsh", to.eigh, SOLVED, limit=130, function=eigvalsh_of_sum),
    Spec("pinv", "linalg.pinv", to.pinv, SOLVED, limit=60),
    Spec("lstsq", "linalg.lstsq", to.lstsq, SOLVED, variant="grad_oriented", limit=60,
         function=least_squares),
    Spec("matrix_power", "linalg.matrix_power", to.matrix_power, SOLVED, limit=60),
    Spec("matrix_norm", "linalg.matrix_norm", to.matrix_norm, SOLVED),

    *(Spec(name, f"fft.{name}", to.complex_transformed, SOLVED, function=as_pairs(getattr(torch.fft, name)),
           more=one_axis) for name in ("fft", "ifft", "irfft")),
    Spec("rfft", "fft.rfft", to.transformed, SOLVED, function=as_pairs(torch.fft.rfft)),
    *(Spec(name, f"fft.{name}", to.complex_transformed, SOLVED, function=as_pairs(getattr(torch.fft, name)),
           more=two_axes) for name in ("fft2", "ifft2", "irfft2")),
    Spec("rfft2", "fft.rfft2", to.transformed, SOLVED, function=as_pairs(torch.fft.rfft2), limit=500),
    *(Moved(name, f"fft.{name}", to.centered) for name in ("fftshift", "ifftshift")),

    Moved("contiguous", "contiguous", to.unary),
    Moved("reshape", "reshape", to.shaped),
    Moved("view", "view", to.shaped),
    Moved("view", "view_as", to.shaped),
    Moved("flatten", "flatten", to.flattened),
    Moved("transpose", "transpose", to.transposed),
    Moved("permute", "permute", to.permuted),
    Moved("slice", "slice", to.sliced),
    Moved("slice", "narrow", to.narrowed),
    Moved("slice", "__getitem__", to.indexed),
    Moved("select", "select", to.selected),
    Moved("expand", "expand", to.shaped),
    Moved("expand", "expand_as", to.shaped),
    Moved("expand", "broadcast_to", to.shaped),
    Moved("squeeze", "squeeze", to.squeezed),
    Moved("squeeze", "squeeze", to.squeezed, variant="multiple"),
    Moved("unsqueeze", "unsqueeze", to.one_axis),
    Moved("split", "split", to.split),
    Moved("split", "split", to.split, variant="list_args"),
    Moved("cat", "cat", to.concatenated),
    Moved("roll", "roll", to.rolled),
    Moved("repeat", "repeat", to.repeated),
    Moved("flip", "flip", to.flipped, limit=250),
    Spec("one_hot", "nn.functional.one_hot", to.one_hot, (torch.int64,), more=indices_of_some_axes),
    Moved("gather", "gather", to.gathered),
    Moved("index_select", "index_select", to.index_selected),
    Moved("masked_select", "masked_select", to.masked_selected),
    Spec("scatter_add", "scatter_add", to.scattered, SUMMED, limit=130),
    Spec("index_add", "index_add", to.index_added, SUMMED, limit=130),
    Moved("sort", "sort", to.sorted_along, limit=520),
    Moved("argsort", "argsort", to.argsorted, limit=520),
    Moved("topk", "topk", to.top, limit=520, more=distinct),
    Moved("pad", "nn.functional.pad", to.padded, variant="constant"),
    Moved("stack", "stack", to.joined),
    *(Moved(name, name, to.triangle) for name in ("tril", "triu")),

    Moved("to_float64", "double", to.cast_to(torch.float64)),
    Moved("to_float32", "float", to.cast_to(torch.float32)),
    Moved("to_float16", "half", to.cast_to(torch.float16)),
    Moved("to_bfloat16", "bfloat16", to.cast_to(torch.bfloat16)),
    Moved("to_int64", "long", to.cast_to(torch.int64)),
    Moved("to_int32", "int", to.cast_to(torch.int32)),
    Moved("to_uint8", "byte", to.cast_to(torch.uint8)),
    Moved("to_boolean", "bool", to.cast_to(torch.bool)),

    Spec("add_", "add", to.added_in_place, NUMERIC, in_place="add_"),
    Spec("mul_", "mul", to.multiplied_in_place, NUMERIC, in_place="mul_"),
    Spec("fill_", "fill", to.filled, ALL, in_place="fill_"),
    Spec("zero_", "zero_", to.unary, ALL, in_place="zero_"),

    *(Spec(name, name, to.unary, limit=64, function=rounded_once(getattr(torch, name)))
      for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "trunc", "frac")),
    Spec("sign", "sign", to.unary, NUMERIC, limit=64),
    Spec("atan2", "atan2", to.two_tensors, limit=130, function=rounded_once(torch.atan2)),
    Spec("lerp", "lerp", to.arithmetic_of_three, limit=100, function=rounded_once(torch.lerp)),
    Spec("clamp_tensors", "clamp", to.arithmetic_of_three, NUMERIC, limit=800, few=1),
    *(Spec(name, name, to.compared, INTEGERS + (torch.bool,), limit=130)
      for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    *(Spec(name, name, to.compared, INTEGERS, limit=130) for name in ("bitwise_left_shift", "bitwise_right_shift")),
    Spec("bitwise_not", "bitwise_not", to.unary, INTEGERS + (torch.bool,)),
    Spec("isclose", "isclose", to.compared_closely, ALL),
    Spec("allclose", "allclose", to.compared_closely, limit=64, function=as_tensor(torch.allclose)),
    Spec("equal", "equal", to.two_tensors, ALL, limit=64, function=as_tensor(torch.equal)),

    Spec("cumprod", "cumprod", to.summed_along, NUMERIC, limit=130),
    Spec("logcumsumexp", "logcumsumexp", to.scanned_in_logarithms, limit=130, function=rounded_once(torch.logcumsumexp)),
    *(Spec(name, name, to.summed_along, ALL, limit=260) for name in ("cummax", "cummin")),
    Spec("median", "median", to.middle, NUMERIC, limit=130, more=distinct_elements),
    Spec("quantile", "quantile", to.quantiles, limit=64, most=24),
    *(Spec(f"{name}_mean", f"{name}_mean", to.variance, limit=130, variant=v)
      for name in ("var", "std") for v in ("", "unbiased")),
    Spec("bincount", "bincount", to.counted, INTEGERS),
    Spec("histogram", "histogram", to.histogram, limit=64, most=24),

    Spec("linspace", "linspace", to.spaced, NUMERIC, limit=60, most=20),
    Spec("logspace", "logspace", to.spaced, limit=60, most=12),
    Spec("eye", "eye", to.identity, ALL, limit=60, most=12),
    Moved("meshgrid", "meshgrid", to.grid, variant="list_of_tensors"),
    Moved("diagonal", "diagonal", to.on_diagonal),
    Moved("diag_embed", "diag_embed", to.embedded),
    Moved("diag", "diag", to.matrix_diagonal),
    Spec("trace", "trace", to.unary, NUMERIC),
    Moved("tile", "tile", to.repeated, most=12, limit=64),
    Moved("nonzero", "nonzero", to.positions, most=12),
    Moved("unique", "unique", to.distinct, most=8, limit=64),
    Spec("searchsorted", "searchsorted", to.searched, NUMERIC, most=16, limit=64),
    Spec("bucketize", "bucketize", to.searched, NUMERIC, most=12, limit=64),

    Moved("scatter", "scatter", to.replaced),
    *(Spec("scatter_reduce", "scatter_reduce", to.scatter_reduced, NUMERIC, variant=v, limit=130, most=5, few=1)
      for v in ("sum", "prod", "mean", "amin", "amax")),
    *(Spec("index_reduce", "index_reduce", to.index_reduced, NUMERIC, variant=v, limit=130, most=8)
      for v in ("prod", "mean", "amin", "amax")),

    Spec("cdist", "cdist", to.distances, limit=130, most=24),
    Spec("normalize", "nn.functional.normalize", to.vectors_p_first, limit=130,
         function=rounded_once(torch.nn.functional.normalize)),
    Spec("cosine_similarity", "nn.functional.cosine_similarity", to.vectors, limit=130,
         function=rounded_once(torch.nn.functional.cosine_similarity)),
    Spec("pairwise_distance", "nn.functional.pairwise_distance", to.vectors_p_first,
         function=rounded_once(torch.nn.functional.pairwise_distance)),
    Spec("smooth_l1_loss", "nn.functional.smooth_l1_loss", to.equal_shapes, limit=130),
    *(Spec(name, f"nn.functional.{name}", adapt, limit=130, most=24,
           function=rounded_once(getattr(torch.nn.functional, name)))
      for name, adapt in (("triplet_margin_loss", to.equal_shapes), ("cosine_embedding_loss", to.same_rows),
                          ("gaussian_nll_loss", to.variances), ("poisson_nll_loss", to.equal_shapes),
                          ("margin_ranking_loss", to.equal_shapes), ("hinge_embedding_loss", to.equal_shapes),
                          ("soft_margin_loss", to.equal_shapes), ("multilabel_soft_margin_loss", to.embedding_loss))),
    Spec("ctc_loss", "nn.functional.ctc_loss", to.alignment, function=normalized, limit=200, more=short_alignments),

    *(Spec(name, name, to.created, ALL) for name in ("zeros", "ones", "full")),
    *(Spec(name, name, to.like, ALL) for name in ("zeros_like", "ones_like", "full_like")),
    Spec("arange", "arange", to.arange, ALL),
]
