"""Ops on empty shards: every operand must stay in the autograd graph.

Some kernels drop an operand on a shard without elements (attention forgets its mask
there). Then this rank would not run the collectives in that operand's backward, and
the other ranks would wait. Exact zeros tie the operands to the results; their second
derivatives are tied as well.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch

from dtensor.redistribute import plain
from dtensor.spec import Spec

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def has_empty(specs: Sequence[Spec]) -> bool:
    """Whether this rank's shard of any of these has no elements."""
    return any(s.local_shape.numel() == 0 for s in specs)


def tied(run: Run | None) -> Run:
    """``run`` (or the function itself), its results tied to all its operands."""

    def ops(x: Any) -> Iterator[torch.Tensor]:
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                yield plain(x)
        elif isinstance(x, (list, tuple)):
            for v in x:
                yield from ops(v)

    def tie(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs) if run is None else run(func, args, kwargs)
        if not torch.is_grad_enabled():
            return out
        inside = [*ops(args), *ops(list(kwargs.values()))]
        if not inside:
            return out
        zero = sum(x.reshape(-1)[:0].sum() for x in inside)
        return _added(out, zero)

    return tie


def _added(out: Any, zero: Any) -> Any:
    """A result with a zero added to its floating tensors."""
    if isinstance(out, torch.Tensor):
        if out.is_complex() or out.is_floating_point() and not zero.is_complex():
            return out + zero.to(out.dtype)
        return out
    if isinstance(out, (list, tuple)):
        items = [_added(o, zero) for o in out]
        return items if isinstance(out, list) else tuple(items)
    return out
