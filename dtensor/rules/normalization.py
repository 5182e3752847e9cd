"""Layer, group, batch and instance norm, over whole dims and over cut ones.

Where a dim that is averaged over is cut, the shards' moments are put together by one
all-gather of three numbers per mean (see ``moments``); so statistics of a batch are those
of the whole batch, as in one process, and so are the running ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.calls import Call, Operand
from dtensor.errors import ShardingError
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import (
    Placement,
    Placements,
    Replicate,
    Shard,
    is_linear,
    show,
)
from dtensor.redistribute import plain, transition
from dtensor.rules.linalg import everything_whole
from dtensor.rules.moments import moments, narrow_of
from dtensor.rules.partition import Partition
from dtensor.rules.pointwise import built_in, without_partial
from dtensor.spec import Spec

T = torch.Tensor


def given(args: Sequence[Any], kwargs: dict[str, Any], at: int, name: str) -> Any:
    """A local argument by position or name."""
    return args[at] if len(args) > at else kwargs.get(name)


def cut_anywhere(call: Call, ins: Sequence[Letters], letters: set[Any]) -> bool:
    """Whether some operand is cut along one of the letters."""
    for o, sub in zip(call.operands, ins, strict=True):
        for p in o.placements:
            if isinstance(p, Shard) and sub[p.dim] in letters:
                return True
    return False


def scaled(x: T, mean: T | None, rsqrt: T, weight: Any, bias: Any, result: Any) -> T:
    """``(x - mean) * rsqrt * weight + bias``, in the dtype of the result."""
    out = x if mean is None else x - mean.to(x.dtype)
    out = out * rsqrt.to(x.dtype)
    if weight is not None:
        out = out * plain(weight)
    if bias is not None:
        out = out + plain(bias)
    return out.to(result)


def normalized(call: Call) -> Notation:
    """``layer_norm``, ``rms_norm``: any dim may be cut, the normalized ones too."""
    x = call.operands[0]
    shape = call.arg(1, "normalized_shape")
    letters: Letters = tuple(range(x.ndim))
    tail = letters[x.ndim - len(shape) :]
    ins: list[Letters] = [letters]
    ins += [tail] * (len(call.operands) - 1)
    if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        call.shapes()  # raises torch's own error
    # three numbers of each rank travel per mean: of a few elements, these are less
    few = math.prod(shape) <= 3 * x.spec.mesh.size()
    if few or not cut_anywhere(call, ins, set(tail)) or x.shape.numel() == 0:
        return Notation(ins, [letters], whole=set(tail), shapes=[x.shape])
    root_mean_square = call.name == "rms_norm"

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(specs[0], range(x.ndim - len(shape), x.ndim))

        def together(func: Any, args: Any, kwargs: Any) -> Any:
            if not part.axes:
                return func(*args, **kwargs)
            local = plain(args[0])
            exact = local.to(narrow_of(local.dtype))
            weight = given(args, kwargs, 2, "weight")
            if root_mean_square:
                eps = given(args, kwargs, 3, "eps")
                eps = torch.finfo(exact.dtype).eps if eps is None else eps
                total = part.sum((exact * exact).sum(part.dims, keepdim=True))
                rsqrt = (total / part.size + eps).rsqrt()
                return scaled(exact, None, rsqrt, weight, None, local.dtype)
            eps = given(args, kwargs, 4, "eps")
            mean, squares = moments(part, exact)
            rsqrt = (squares / part.size + (1e-5 if eps is None else eps)).rsqrt()
            bias = given(args, kwargs, 3, "bias")
            return scaled(exact, mean, rsqrt, weight, bias, local.dtype)

        return together

    return Notation(ins, [letters], shapes=[x.shape], run=run)


def group_norm(call: Call) -> Notation:
    """``group_norm``: batch and space free; channels where no group is torn."""
    x, groups = call.operands[0], call.arg(1, "num_groups")
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = [letters]
    ins += [letters[1:2]] * (len(call.operands) - 1)
    shapes = call.shapes()
    if not cut_anywhere(call, ins, set(letters[1:])) or x.shape.numel() == 0:
        return Notation(ins, [letters], whole=set(letters[1:]), shapes=shapes)
    mesh = x.spec.mesh.shape
    parts = 1
    for axis, n in enumerate(mesh):
        here = [o.placements[axis] for o in call.operands]
        if here[0].is_shard(1) or any(p.is_shard() for p in here[1:]):
            parts *= n
    whole = set() if groups % parts == 0 else {1}

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(specs[0], range(2, x.ndim))
        here = groups // specs[0].shards(1)

        def together(func: Any, args: Any, kwargs: Any) -> Any:
            if not part.axes:
                if len(args) > 1:
                    return func(args[0], here, *args[2:], **kwargs)
                return func(args[0], **{**kwargs, "num_groups": here})
            local = plain(args[0])
            exact = local.to(narrow_of(local.dtype))
            batch, channels, *space = exact.shape
            each = channels // here
            inner = exact.reshape(batch, here, each, *space)
            dims = list(range(2, inner.ndim))
            mean, squares = moments(part, inner, dims, each)
            eps = given(args, kwargs, 4, "eps")
            variance = squares / (part.size * each)
            rsqrt = (variance + (1e-5 if eps is None else eps)).rsqrt()
            out = ((inner - mean.to(exact.dtype)) * rsqrt.to(exact.dtype)).reshape(
                exact.shape
            )
            shape = (1, channels) + (1,) * len(space)
            weight = given(args, kwargs, 2, "weight")
            bias = given(args, kwargs, 3, "bias")
            if weight is not None:
                out = out * plain(weight).reshape(shape)
            if bias is not None:
                out = out + plain(bias).reshape(shape)
            return out.to(local.dtype)

        return together

    return Notation(ins, [letters], whole=whole, shapes=shapes, run=run)


NAMES = ("input", "weight", "bias", "running_mean", "running_var")


def batch_norm(call: Call) -> Notation | Layout:
    """``batch_norm``: statistics of the whole batch, however it is cut."""
    x = call.operands[0]
    if not call.arg(5, "training") or x.ndim < 2:
        return by_channel(call)
    return with_statistics(call, [d for d in range(x.ndim) if d != 1], False)


def instance_norm(call: Call) -> Notation | Layout:
    """``instance_norm``: statistics of each sample's channels, however space is cut."""
    if not call.arg(5, "use_input_stats"):
        return by_channel(call)
    return with_statistics(call, list(range(2, call.operands[0].ndim)), True)


def by_channel(call: Call) -> Notation:
    """With running statistics the norm is pointwise."""
    x = call.operands[0]
    if x.ndim < 2:  # of nothing at all
        return everything_whole(call)
    letters: Letters = tuple(range(x.ndim))
    ins: list[Letters] = [letters]
    ins += [letters[1:2]] * (len(call.operands) - 1)
    call.shapes()  # raises torch's own error

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        if specs[0].local_shape.numel():
            return lambda func, args, kwargs: func(*args, **kwargs)
        return of_nothing

    return Notation(ins, [letters], shapes=[x.shape], run=run)


def of_nothing(func: Any, args: Any, kwargs: Any) -> T:
    """The norm of an empty shard, with the operands that have gradients tied to it."""
    x = plain(args[0])
    out = x * 1
    for at in (1, 2):
        other = given(args, kwargs, at, NAMES[at])
        if other is not None:
            out = out + plain(other).sum().to(out.dtype) * 0
    return out


def with_statistics(call: Call, dims: list[int], each_sample: bool) -> Layout:
    """The norm with the statistics of its operand, over ``dims``."""
    x = call.operands[0]
    call.shapes()  # raises torch's own error
    places = built_in(without_partial(x.placements))
    channel: list[Placement] = [
        Shard(0, p.depth) if isinstance(p, Shard) and p.dim == 1 else Replicate()
        for p in places
    ]
    running = [call.arg(at, NAMES[at]) for at in (3, 4)]
    ins: list[Placements] = []
    for o in call.operands:
        if o is x:
            ins.append(places)
        elif any(o is r for r in running):
            check_running(call.name, o)
            ins.append(o.placements)
        else:
            ins.append(tuple(channel))

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        part = Partition(specs[0], dims)
        statistics = specs[0].replace(tuple(channel), (x.shape[1],))
        kept = [r.spec is statistics for r in running if isinstance(r, Operand)]
        samples = Partition(specs[0], [0])
        simple = not part.axes and specs[0].local_shape.numel() > 0
        if simple and all(kept) and not (each_sample and kept and samples.axes):
            return lambda func, args, kwargs: func(*args, **kwargs)
        shape = [1] * x.ndim
        shape[1] = specs[0].local_shape[1]

        def together(func: Any, args: Any, kwargs: Any) -> Any:
            local = plain(args[0])
            exact = local.to(narrow_of(local.dtype))
            momentum = given(args, kwargs, 6, "momentum")
            eps = given(args, kwargs, 7, "eps")
            mean, squares = moments(part, exact)
            rsqrt = (squares / part.size + eps).rsqrt()
            weight, bias = (
                None if w is None else plain(w).reshape(shape)
                for w in (given(args, kwargs, at, NAMES[at]) for at in (1, 2))
            )
            out = scaled(exact, mean, rsqrt, weight, bias, local.dtype)
            unbiased = squares.detach() / (part.size - 1)
            for at, new in ((3, mean.detach()), (4, unbiased)):
                old = given(args, kwargs, at, NAMES[at])
                if old is None:
                    continue
                if each_sample:
                    new = samples.fold(new.sum(0, keepdim=True), "sum") / x.shape[0]
                operand = running[at - 3]
                with torch.no_grad():
                    move = transition(statistics, operand.spec)
                    moved = move(new.reshape(-1).to(old.dtype))
                    plain(old).mul_(1 - momentum).add_(moved, alpha=momentum)
            return out

        return together

    return Layout(ins, [places], [x.shape], run=run)


def check_running(name: str, o: Operand) -> None:
    """Running statistics are written where they lie."""
    if built_in(o.placements) != o.placements or not is_linear(o.placements):
        raise ShardingError(
            f"{name}: running statistics are written in place, got placements "
            f"{show(o.placements)}, expected Replicate, Shard(0) or addends of a sum. "
            "Redistribute them first: x.redistribute([Replicate()])."
        )
