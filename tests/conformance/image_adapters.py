"""Translates PyTorch's samples of ops on images: pooling, norms of channels, resampling. See adapters.py."""

import torch

from adapters import Call, arguments, need


def numbers(value):
    return [value] if isinstance(value, int) else list(value)


def windows(x, args, kwargs, *names):
    return arguments(args, kwargs, "kernel_size", "stride", "padding", *names)


def common(values):
    stride = values.get("stride")
    return {"size": numbers(values["kernel_size"]), "padding": numbers(values.get("padding", 0)),
            "ceil_mode": values.get("ceil_mode", False)} | \
        ({} if stride is None or stride == [] or stride == () else {"stride": numbers(stride)})


def max_pool(axes):
    def adapt(x, args, kwargs):
        values = windows(x, args, kwargs, "dilation", "ceil_mode", "return_indices")
        return Call([x], common(values) | {"axes": axes, "dilation": numbers(values.get("dilation", 1)),
                                           "indices": values.get("return_indices", False)})

    return adapt


def avg_pool(axes):
    def adapt(x, args, kwargs):
        values = windows(x, args, kwargs, "ceil_mode", "count_include_pad", "divisor_override")
        divisor = values.get("divisor_override")
        return Call([x], common(values) | {"axes": axes, "count_include_pad": values.get("count_include_pad", True)}
                    | ({} if divisor is None else {"divisor": divisor}))

    return adapt


def adaptive(axes):
    def adapt(x, args, kwargs):
        values = arguments(args, kwargs, "output_size", "return_indices")
        size = numbers(values["output_size"]) if values["output_size"] is not None else [None]
        need(-1 not in size, "-1 keeps a size, as None does in PyTorch")
        return Call([x], {"axes": axes, "size": [-1 if n is None else n for n in size],
                          "indices": values.get("return_indices", False)},
                    refused="there is no empty result" if 0 in size else "")

    return adapt


def max_unpool(axes):
    def adapt(x, args, kwargs):
        values = arguments(args, kwargs, "indices", "kernel_size", "stride", "padding", "output_size")
        size, stride, padding = (numbers(values.get(name) or default) for name, default in
                                 (("kernel_size", 1), ("stride", values["kernel_size"]), ("padding", 0)))
        planes = values["indices"].flatten(-axes).flatten(0, -2) if x.numel() else values["indices"].new_zeros(0, 1)
        need(all(plane.unique().numel() == plane.numel() for plane in planes), "mica takes the mean at equal positions")
        output = values.get("output_size")
        if output is None:
            output = [(x.shape[x.dim() - axes + i] - 1) * stride[i % len(stride)] - 2 * padding[i % len(padding)] + size[i % len(size)]
                      for i in range(axes)]
        return Call([x, values["indices"]], {"axes": axes, "output_size": list(output)[-axes:]})

    return adapt


def given(*tensors):
    """The tensors that are not None, and which they are."""
    return [t for t in tensors if t is not None], [t is not None for t in tensors]


def batch_norm(x, args, kwargs):
    values = arguments(args, kwargs, "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    training = values.get("training", False)
    statistics = [values.get(name) for name in ("running_mean", "running_var")]
    tensors, has = given(values.get("weight"), values.get("bias"), *statistics)
    # PyTorch changes the running statistics; what mica makes of them is compared in tests/ops.
    return Call([x] + [t.detach().clone() if any(t is s for s in statistics) else t for t in tensors],
                {"has": has, "training": training, "momentum": values.get("momentum", 0.1),
                 "eps": values.get("eps", 1e-5)}, refused="" if x.dim() > 1 else "x has an axis of channels")


def group_norm(x, args, kwargs):
    values = arguments(args, kwargs, "num_groups", "weight", "bias", "eps")
    tensors, has = given(values.get("weight"), values.get("bias"))
    eps = values.get("eps", 1e-5)
    return Call([x] + tensors, {"has": has, "groups": values["num_groups"], "eps": eps},
                refused="" if eps >= 0 else "eps is at least 0")


def instance_norm(x, args, kwargs):
    values = arguments(args, kwargs, "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum",
                       "eps")
    need(values.get("running_mean") is None, "running statistics belong to the module")
    tensors, has = given(values.get("weight"), values.get("bias"))
    return Call([x] + tensors, {"has": has, "eps": values.get("eps", 1e-5)})


def interpolated(x, args, kwargs):
    values = arguments(args, kwargs, "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor",
                       "antialias")
    need(not values.get("antialias"), "there is no antialias")
    size, factor = values.get("size"), values.get("scale_factor")
    mode = values.get("mode", "nearest")
    attributes = {"mode": mode, "align_corners": bool(values.get("align_corners")),
                  "recompute": bool(values.get("recompute_scale_factor"))}
    if size is not None:
        attributes["size"] = numbers(size)
    if factor is not None:
        attributes["scale_factor"] = [factor] if isinstance(factor, (int, float)) else list(factor)
    return Call([x], attributes)


def columns(x, args, kwargs):
    values = arguments(args, kwargs, "kernel_size", "dilation", "padding", "stride")
    return Call([x], {"size": numbers(values["kernel_size"]), "dilation": numbers(values.get("dilation", 1)),
                      "padding": numbers(values.get("padding", 0)), "stride": numbers(values.get("stride", 1))})


def shuffled(x, args, kwargs):
    values = arguments(args, kwargs, "upscale_factor", "downscale_factor")
    return Call([x], {"factor": list(values.values())[0]})


def sampled(x, args, kwargs):
    values = arguments(args, kwargs, "grid", "mode", "padding_mode", "align_corners")
    nearest = values.get("mode") == "nearest"  # then PyTorch has a gradient of zeros for the grid, and mica none
    return Call([x, values["grid"].detach() if nearest else values["grid"]], {"mode": values.get("mode", "bilinear"),
                                      "padding": values.get("padding_mode", "zeros"),
                                      "align_corners": bool(values.get("align_corners"))})


def specs(Spec, rounded_once, ALL):
    nn = "nn.functional."
    modes = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic", "area")
    return [
        *(Spec("max_pool", f"{nn}max_pool{n}d", max_pool(n), limit=200, few=1, one_of=67) for n in (1, 2, 3)),
        *(Spec("avg_pool", f"{nn}avg_pool{n}d", avg_pool(n), limit=200, few=1) for n in (1, 2, 3)),
        *(Spec("adaptive_avg_pool", f"{nn}adaptive_avg_pool{n}d", adaptive(n), limit=130, few=1) for n in (1, 2, 3)),
        *(Spec("adaptive_max_pool", f"{nn}adaptive_max_pool{n}d", adaptive(n), limit=130, few=1, one_of=2)
          for n in (1, 2, 3)),
        *(Spec("max_unpool", f"{nn}max_unpool{n}d", max_unpool(n), limit=130, few=1, one_of=23) for n in (1, 2, 3)),
        Spec("batch_norm", f"{nn}batch_norm", batch_norm),
        Spec("group_norm", f"{nn}group_norm", group_norm),
        Spec("instance_norm", f"{nn}instance_norm", instance_norm),
        *(Spec("interpolate", f"{nn}interpolate", interpolated, limit=130, few=1, one_of=5, variant=mode)
          for mode in modes),
        Spec("unfold", f"{nn}unfold", columns, one_of=7),
        Spec("pixel_shuffle", f"{nn}pixel_shuffle", shuffled, ALL, few=1),
        Spec("pixel_unshuffle", f"{nn}pixel_unshuffle", shuffled, ALL, few=1),
        Spec("grid_sample", f"{nn}grid_sample", sampled, few=1, one_of=4,
             function=rounded_once(torch.nn.functional.grid_sample)),
    ]
