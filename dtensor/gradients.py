"""``backward`` and ``autograd.grad`` over DTensors; the engine itself is torch's.

Backward runs in C++ on the local shards. Here it is seeded: a replicated output gets its
cotangent on coordinate 0 and zero elsewhere (the dual of Replicate is Partial), a Partial
one gets it everywhere. What leaves received is brought home in ``leaves.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.errors import ShardingError
from dtensor.leaves import settle
from dtensor.placement import Partial, is_linear
from dtensor.redistribute import alias, plain
from dtensor.registry import handles
from dtensor.spec import Spec
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor


def _listed(x: Any) -> list[Any]:
    if x is None:
        return []
    return [x] if isinstance(x, T) or not isinstance(x, Iterable) else list(x)


def _seed(out: Any, given: T | None, what: str) -> T | None:
    """The local cotangent to start from, for one output."""
    if not isinstance(out, DTensor):
        return given
    spec = out._spec
    if spec.coordinate is None:  # nothing flows here, but it passes by: see absent.py
        return (
            plain(given) if isinstance(given, DTensor) else torch.zeros_like(plain(out))
        )
    if isinstance(given, DTensor):
        if given._spec.mesh is not spec.mesh or given._spec.shape != spec.shape:
            raise ShardingError(
                f"{what}: the gradient does not fit the tensor, got {given!r}, "
                f"expected shape {tuple(spec.shape)} on {spec.mesh!r}. Make it with "
                "torch.ones_like(x) or distribute_tensor(g, mesh, placements)."
            )
        return divided(plain(redistributed(given, spec.dual())), spec)
    if given is not None:
        if given.shape != spec.local_shape:
            raise ShardingError(
                f"{what}: a plain gradient is this rank's cotangent, got shape "
                f"{tuple(given.shape)}, expected {tuple(spec.local_shape)}. Give a "
                "DTensor: distribute_tensor(g, x.device_mesh, x.placements)."
            )
        return given
    if spec.shape.numel() != 1:
        raise RuntimeError(
            f"{what}: grad can be implicitly created only for scalar outputs, got "
            f"shape {tuple(spec.shape)}. Give the gradient, for example "
            "x.backward(torch.ones_like(x))."
        )
    with NoTF():
        local = plain(out)
        value = 1 / average(spec) if lead(spec) else 0
        return torch.full_like(local, value, requires_grad=False)


def _zeros(x: T) -> T:
    """The gradient of an unused tensor, placed as the tensor is."""
    zero = torch.zeros_like(x)
    return redistributed(zero, x._spec) if isinstance(x, DTensor) else zero  # type: ignore[arg-type]


def lead(spec: Spec) -> bool:
    """Whether this rank speaks for its copies: coordinate 0 on replicated axes."""
    found = spec.memo.get("lead")
    if found is None:
        at = spec.coordinate or (1,) * spec.mesh.ndim
        found = spec.memo["lead"] = all(
            c == 0 or not p.is_replicate()
            for c, p in zip(at, spec.placements, strict=True)
        )
    return bool(found)


def average(spec: Spec) -> int:
    """What a cotangent is divided by: the sizes of the averaging axes."""
    n = spec.memo.get("average")
    if n is None:
        n = 1
        for p, parts in zip(spec.placements, spec.mesh.shape, strict=True):
            n *= parts if p == Partial("avg") else 1
        spec.memo["average"] = n
    return int(n)


def divided(g: T, spec: Spec) -> T:
    n = average(spec)
    return g if n == 1 else g / n


def _run(outputs: list[Any], seeds: list[Any], *options: Any, **more: Any) -> Any:
    # Torch functions stay on: hooks and users' Functions run in this very thread.
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(seeds), *options, **more
    )


def _prepared(outputs: Any, seeds: Any, what: str) -> tuple[list[Any], list[Any]]:
    outs = _listed(outputs)
    given = _listed(seeds) or [None] * len(outs)
    for i, (out, seed) in enumerate(zip(outs, given, strict=False)):
        if isinstance(out, DTensor) and not is_linear(out._spec.placements):
            if seed is None or isinstance(seed, DTensor):  # of the value, not addends
                outs[i] = redistributed(out, out._spec.replicated())
    if len(given) != len(outs):
        raise RuntimeError(
            f"{what}: got {len(outs)} tensors and {len(given)} gradients, expected "
            "one gradient (or None) per tensor."
        )
    keep = [
        i
        for i, o in enumerate(outs)
        if not (isinstance(o, DTensor) and o._spec.coordinate is None)
        or plain(o).requires_grad
    ]
    made = []
    for i in keep:
        seed = _seed(outs[i], given[i], what)
        if seed is None and isinstance(outs[i], T) and outs[i].requires_grad:
            if outs[i].numel() != 1:
                raise RuntimeError(
                    f"{what}: grad can be implicitly created only for scalar outputs"
                )
            seed = torch.ones_like(outs[i])
        made.append(seed)
    return [outs[i] for i in keep], made


@handles(torch.autograd.backward)
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = (
        "tensors",
        "grad_tensors",
        "retain_graph",
        "create_graph",
        "grad_variables",
        "inputs",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    _start(
        given["tensors"],
        given.get("grad_tensors"),
        given.get("retain_graph"),
        bool(given.get("create_graph", False)),
        given.get("inputs"),
    )


@handles(T.backward)
def _tensor_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if not kwargs and len(args) == 5:  # from ``DTensor.backward``
        x, gradient, retain, create, inputs = args
        _start(x, gradient, retain, bool(create), inputs)
        return
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    _start(
        given["self"],
        given.get("gradient"),
        given.get("retain_graph"),
        bool(given.get("create_graph", False)),
        given.get("inputs"),
    )


def _start(tensors: Any, seeds: Any, retain: Any, create: bool, inputs: Any) -> None:
    """Run one backward that accumulates into the leaves."""
    if inputs is not None and len(_listed(inputs)) == 0:
        raise RuntimeError("backward: `inputs` must not be empty")
    outs, made = _prepared(tensors, seeds, "backward")
    if outs:
        _run(
            outs,
            made,
            create if retain is None else retain,
            create,
            tuple(_listed(inputs)),
            allow_unreachable=True,
            accumulate_grad=True,
        )


@handles(torch.autograd.grad)
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
        "is_grads_batched",
        "materialize_grads",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("is_grads_batched"):
        raise ShardingError(
            "grad: is_grads_batched (vmap) does not run over DTensors. Call "
            "torch.autograd.grad once per vector."
        )
    create = bool(given.get("create_graph", False))
    retain = given.get("retain_graph")
    inputs = given["inputs"]
    keys = list(inputs) if isinstance(inputs, dict) else None
    wanted = list(inputs.values()) if isinstance(inputs, dict) else _listed(inputs)
    outs, seeds = _prepared(given["outputs"], given.get("grad_outputs"), "grad")
    materialize = bool(given.get("materialize_grads", False))
    captured = [x for x in wanted if isinstance(x, DTensor)]
    for x in captured:
        x._spec.dual()  # refuses what has no gradient of its own
    for x in captured:
        x.__dict__["_capturing"] = x.__dict__.get("_capturing", 0) + 1
    try:
        found = (
            _run(
                outs,
                seeds,
                create if retain is None else retain,
                create,
                tuple(wanted),
                allow_unreachable=bool(given.get("allow_unused") or materialize),
                accumulate_grad=False,
            )
            if outs
            else (None,) * len(wanted)
        )
    finally:
        for x in captured:
            x.__dict__["_capturing"] -= 1
    results: list[Any] = list(found)
    with NoTF():
        at = [
            i
            for i, x in enumerate(wanted)
            if isinstance(x, DTensor) and results[i] is not None
        ]
        with torch.set_grad_enabled(create):
            done = settle([results[i] for i in at], [wanted[i]._spec for i in at])
        for i, g in zip(at, done, strict=True):
            results[i] = typed(alias(g) if g is results[i] else g, wanted[i]._spec)
    if materialize:
        results = [
            _zeros(x) if g is None else g for x, g in zip(wanted, results, strict=True)
        ]
    return dict(zip(keys, results, strict=True)) if keys is not None else tuple(results)
