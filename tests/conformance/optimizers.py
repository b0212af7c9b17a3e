"""Steps of PyTorch's optimizers, with the options its own tests use; clipping and a schedule."""

import warnings

import torch
from torch.testing._internal.common_optimizers import optim_db

from fixture import MICA_NAMES, Fixture, described, seed

STEPS = 4
SHAPES = [(4, 3), (5,), ()]
OPTIONS = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
}


def why_not(name, options):
    """The reason why mica does not support these options, if any."""
    for option, value in options.items():
        if option not in OPTIONS[name]:
            return f"no option {option}"
        if any(torch.is_tensor(v) for v in (value if isinstance(value, tuple) else (value,))):
            return f"{option} is a number, not a tensor"
    return ""


def add_steps(fixture, make, sample, options, dtype):
    """Inputs are the parameters; dy and output are their gradients and values for each step."""
    parameters = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
    start = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, foreach=False, **options)
    grads, results = [], []
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            # One parameter has no gradient in the second step.
            p.grad = None if (step, i) == (1, 0) else torch.randn(p.shape, dtype=dtype)
            grads.append(p.grad)
        optimizer.step()
        results += [p.detach().clone() for p in parameters]
    fixture.add({"sample": sample, "attributes": options}, input=start, dy=grads, output=results)


def groups_of(params):
    """The parameter groups of a sample, as a list of lists, if it has any."""
    if params is None:
        return [[torch.zeros(2, dtype=torch.float64, requires_grad=True)]]
    if not isinstance(params, list):
        return None
    if all(torch.is_tensor(p) for p in params):
        return [params]
    if not all(isinstance(p, dict) for p in params):
        return None
    groups = [[g["params"]] if torch.is_tensor(g["params"]) else g["params"] for g in params]
    return groups if all(torch.is_tensor(p) for g in groups for p in g) else None


def add_optimizer(fixture, info):
    name = info.optim_cls.__name__
    for dtype in (torch.float64, torch.float32):
        for i, sample in enumerate(info.optim_inputs_func("cpu")):
            label = f"{name}, {MICA_NAMES[dtype]}, input {i} ({sample.desc})"
            reason = why_not(name, sample.kwargs)
            if reason:
                fixture.skip(label, reason)
                continue
            seed(label)
            add_steps(fixture, info.optim_cls, label, sample.kwargs, dtype)
    seed(name, "errors")
    for i, error in enumerate(info.optim_error_inputs_func("cpu", torch.float64)):
        sample = error.optimizer_error_input
        label = f"{name}, error {i} ({error.error_regex})"
        groups = groups_of(sample.params)
        reason = why_not(name, sample.kwargs) or ("" if groups else "parameters of a type that C++ does not let pass")
        if reason:
            fixture.skip(label, reason)
            continue
        distinct = list({id(p): p for g in groups for p in g}.values())
        case = {"sample": label, "attributes": sample.kwargs,
                "groups": [[next(i for i, d in enumerate(distinct) if d is p) for p in g] for g in groups]}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                info.optim_cls([{"params": g} for g in groups], **sample.kwargs)
        except Exception as raised:
            fixture.add(case | {"raises": described(raised)}, input=distinct)
        else:
            fixture.add(case | {"refused": "a parameter is given once; PyTorch warns"}, input=distinct)


def add_clipping(fixture):
    """Inputs are gradients; outputs are the clipped gradients and, last, the norm."""
    for dtype in (torch.float64, torch.float32):
        for max_norm, scale, special in [(1.0, 3.0, None), (100.0, 0.1, None), (0.0, 1.0, None), (1.0, 0.0, None),
                                         (1.0, 1.0, float("inf")), (1.0, 1.0, float("nan"))]:
            label = f"{MICA_NAMES[dtype]}, max_norm {max_norm}, gradients of {special or scale}"
            seed("clip_grad_norm_", label)
            parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
            for p in parameters[:2]:  # the last has no gradient
                p.grad = torch.randn(p.shape, dtype=dtype) * scale
            if special is not None:
                parameters[0].grad[0, 0] = special
            grads = [p.grad.clone() for p in parameters[:2]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)
            fixture.add({"sample": label, "attributes": {"max_norm": max_norm}}, input=grads,
                        output=[p.grad for p in parameters[:2]] + [norm.double()])
            if special is not None:
                fixture.add({"sample": f"{label}, error_if_nonfinite", "raises": "RuntimeError: the norm is not finite",
                             "attributes": {"max_norm": max_norm, "error_if_nonfinite": True}}, input=grads)


def add_rates(fixture, label, attributes, lr, steps, make):
    """The learning rates of the steps 0 to steps − 1 under make(optimizer)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = make(optimizer)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    fixture.add({"sample": label, "attributes": attributes}, input=[],
                output=[torch.tensor(rates, dtype=torch.float64)])


def add_schedules(fixtures):
    schedules = torch.optim.lr_scheduler
    for peak, floor, total in [(1.0, 0.0, 10), (3e-4, 3e-5, 7), (0.5, 0.5, 1)]:
        attributes = {"peak": peak, "floor": floor, "total": total}
        add_rates(fixtures.setdefault("optim_CosineSchedule", Fixture()),
                  f"CosineAnnealingLR from {peak} to {floor} in {total}", attributes, peak, total + 1,
                  lambda o: schedules.CosineAnnealingLR(o, T_max=total, eta_min=floor))
        add_rates(fixtures.setdefault("optim_LinearSchedule", Fixture()),
                  f"LinearLR from {peak} to {floor} in {total}", attributes, peak, total + 3,
                  lambda o: schedules.LinearLR(o, start_factor=1, end_factor=floor / peak, total_iters=total))
    for total, rise, start, end, linear in [(10, 0.3, 25, 1e4, False), (17, 0.25, 10, 100, True), (8, 0.0, 4, 2, False),
                                            (5, 1.0, 4, 2, True)]:
        add_rates(fixtures.setdefault("optim_OneCycleSchedule", Fixture()),
                  f"OneCycleLR of {total} steps, {rise} up, {'linear' if linear else 'cos'}",
                  {"peak": 0.1, "total": total, "rise": rise, "start_factor": start, "end_factor": end,
                   "linear": linear}, 0.1, total,
                  lambda o: schedules.OneCycleLR(o, 0.1, total_steps=total, pct_start=rise, div_factor=start,
                                                 final_div_factor=end, anneal_strategy="linear" if linear else "cos",
                                                 cycle_momentum=False))


def add_all(fixtures):
    for info in optim_db:
        if info.optim_cls.__name__ in OPTIONS:
            add_optimizer(fixtures.setdefault(f"optim_{info.optim_cls.__name__}", Fixture()), info)
    add_clipping(fixtures.setdefault("optim_clip_grad_norm_", Fixture()))
    add_schedules(fixtures)
