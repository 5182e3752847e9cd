"""Making a plan for one kind of call, from the layouts of its operands alone.

It is made once and cached; it communicates nothing, and illegal calls are found here, on
every rank alike, before anything is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.absent import absent, written
from dtensor.calls import (
    Call,
    Operand,
    Path,
    Rule,
    described,
    first_spec,
    meta_of,
    meta_shapes,
    operands_of,
    tensors_in,
)
from dtensor.errors import ShardingError
from dtensor.notation import Layout, Notation, solve
from dtensor.placement import Placements, show
from dtensor.redistribute import Transition, local_elements, plain, transition
from dtensor.spec import Spec
from dtensor.tensor import DTensor


@dataclass(slots=True)
class Op:
    """One entry of the rule table.

    Attributes:
        name: Name in messages.
        rule: Gives the notation of a call.
        numbers: Whether the rule reads integers (sizes, dims); where it does not,
            they stay out of the cache key.
        inplace: Whether the first operand is written.
        dtypes: Whether the rule reads the operands' dtypes; they are in the key then.
        floats: Whether the rule or the result's shape depends on floats; they are in
            the key then.
    """

    name: str
    rule: Rule
    numbers: bool
    inplace: bool
    dtypes: bool = False
    floats: bool = False


@dataclass(slots=True)
class Plan:
    """What to do for one kind of call.

    Attributes:
        moves: Operands to redistribute first: (path, transition).
        out: Spec of the result, or one per result tensor.
        run: Runs in place of the function, or None.
        rewrite: Makes the local arguments, or None.
        communicates: Whether any move, or ``run`` itself, sends anything.
        text, mend, nbytes: For the policy: operands, explicit calls, bytes per rank.
        moved_view: Whether the result is a view of a moved operand.
        inplace: Whether the first operand is written and returned.
        reads: As in ``Notation``, of a moved view.
        bare: Whether the function runs on the operands' shards as they are, and
            nothing else is done.
    """

    moves: tuple[tuple[Path, Transition], ...]
    out: Any
    run: Callable[..., Any] | None
    rewrite: Callable[..., Any] | None
    communicates: bool
    moved_view: bool
    inplace: bool
    text: str
    mend: str = ""
    nbytes: float = 0.0
    reads: Callable[..., Any] | None = None
    bare: bool = False


def make_plan(op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Plan one kind of call from the layouts of its operands; communicates nothing."""
    operands = operands_of(op.name, args, kwargs, op.inplace)
    by_path = {o.path: o for o in operands}
    call = Call(
        op.name,
        func,
        tuple(described(a, by_path, (i,)) for i, a in enumerate(args)),
        {k: described(v, by_path, (k,)) for k, v in kwargs.items()},
        operands,
        op.inplace,
    )
    spec = first_spec(args, kwargs)
    mesh = spec.mesh
    text = ", ".join(f"{tuple(o.shape)}{show(o.placements)}" for o in operands)
    n = op.rule(call)
    if isinstance(n, Notation):
        shapes = n.shapes if n.shapes is not None else meta_shapes(func, args, kwargs)
        n = settled(n, operands, shapes, 0 if op.inplace else None)
    if n is None:
        instead = (
            "torch.where" if op.name == "setitem" else f"the out-of-place {op.name}"
        )
        raise ShardingError(
            f"{op.name}_: in place, the result would need other placements than the "
            f"target has, got operands {text} on {mesh!r}. Use {instead}, or "
            "redistribute the target first: x = x.redistribute(...)."
        )
    if op.inplace and not n.many and tuple(n.shapes[0]) != tuple(operands[0].shape):
        raise ShardingError(
            f"{op.name}_: a DTensor keeps its shape, got {tuple(operands[0].shape)}, "
            f"which would become {tuple(n.shapes[0])}. Use the out-of-place {op.name}."
        )
    moves, nbytes, calls = [], 0.0, []
    for i, (o, places) in enumerate(zip(operands, n.ins, strict=True)):
        if places != o.placements:
            move = transition(o.spec, o.spec.replace(places))
            moves.append((o.path, move))
            if move.communicates:
                calls.append((i, places))
            nbytes += move.elements * o.dtype.itemsize
    outs = [spec.replace(p, tuple(s)) for p, s in zip(n.outs, n.shapes, strict=True)]
    ins = [o.spec.replace(w) for o, w in zip(operands, n.ins, strict=True)]
    run, rewrite, sent = n.run, n.rewrite, 0.0
    if n.sends is not None and spec.coordinate is not None:
        sent = n.sends(ins, outs)
        nbytes += sent * operands[0].dtype.itemsize
        if sent and not calls:
            calls.append((0, operands[0].spec.replicated().placements))
    if spec.coordinate is None:
        run, rewrite, moves = outsider(outs, op.inplace), None, []
    else:
        run = run(ins, outs) if run is not None else None
        rewrite = rewrite(ins, outs) if rewrite is not None else None
        if run is None and "::" in op.name and not op.inplace:
            run = on_plain
        if not op.inplace and (n.view or op.name in SHARING):
            run = sticky(run)
    communicates = sent > 0 or any(t.communicates for _, t in moves)
    steps = (run, rewrite)
    return Plan(
        moves=tuple(moves),
        out=outs if n.many or len(outs) != 1 else outs[0],
        run=run,
        rewrite=rewrite,
        communicates=communicates,
        moved_view=n.view
        and (sent > 0 or any(p == operands[0].path for p, _ in moves)),
        inplace=op.inplace,
        text=text,
        mend=mend(calls),
        nbytes=nbytes,
        reads=n.reads,
        bare=steps == (None, None)
        and not (moves or communicates or op.inplace or n.view),
    )


def mend(moves: Sequence[tuple[int, Placements]]) -> str:
    """The explicit calls in place of an implicit redistribution.

    Args:
        moves: Number of each operand that moves, and the placements it needs.
    """
    calls = [f"operand {i}: x.redistribute({list(p)})" for i, p in moves]
    return f"To move explicitly, first call, on {', on '.join(calls)}."


def settled(
    n: Notation,
    operands: Sequence[Operand],
    shapes: Sequence[Sequence[int]],
    keep: int | None,
) -> Layout | None:
    """The layout that ``solve`` chooses for a notation, or None (see ``solve``)."""
    mesh = operands[0].spec.mesh
    nbytes = [
        local_elements(mesh, o.placements, tuple(o.shape)) * o.dtype.itemsize
        for o in operands
    ]
    found = solve(n, mesh, [o.placements for o in operands], nbytes, keep)
    if found is None:
        return None
    ins, outs = found
    return Layout(ins, outs, shapes, n.run, n.rewrite, n.view, n.many, n.sends, n.reads)


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a user's op on plain aliases: its backward mixes what it saved with plain
    gradients, in Python and with torch functions on."""
    return func(*plain_arguments(args), **plain_arguments(kwargs))


def plain_arguments(x: Any) -> Any:
    """Arguments with every DTensor as a plain alias of its shard."""
    if isinstance(x, DTensor):
        return plain(x)
    if isinstance(x, dict):
        return {k: plain_arguments(v) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(plain_arguments(v) for v in x)
    return x


def outsider(outs: list[Spec], inplace: bool) -> Callable[..., Any]:
    """What a rank outside of the mesh runs: nothing; its results hold no data.

    Args:
        outs: Specs of the results.
        inplace: Whether the first operand is written and returned.
    """

    def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        sources = [t for _, t in tensors_in(args, kwargs)]
        if inplace:
            if isinstance(args[0], torch.Tensor):
                written(args[0], sources[1:])
            return args[0]
        with torch.no_grad():
            result = func(
                *[meta_of(a) for a in args],
                **{k: meta_of(v) for k, v in kwargs.items()},
            )
        if isinstance(result, torch.Tensor):
            return absent([(tuple(outs[0].local_shape), result.dtype)], sources)[0]
        metas = [m for m in result if isinstance(m, torch.Tensor)]
        made = absent(
            [(tuple(s.local_shape), m.dtype) for s, m in zip(outs, metas, strict=True)],
            sources,
        )
        named = isinstance(result, tuple) and hasattr(result, "n_fields")
        return type(result)(made) if named else made

    return run


SHARING = frozenset(
    """
    alias conj contiguous cpu cuda detach double flatten float half imag positive ravel
    real reshape resolve_conj resolve_neg to type type_as view_as
    """.split()
)


def sticky(run: Callable[..., Any] | None) -> Callable[..., Any]:
    """Run, and mark views of a moved view as moved, too."""

    def marked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs) if run is None else run(func, args, kwargs)
        if args and getattr(args[0], "_moved_view", False):
            memory = args[0].untyped_storage().data_ptr()
            for o in out if isinstance(out, (tuple, list)) else (out,):
                if o.untyped_storage().data_ptr() == memory:
                    o._moved_view = True
        return out

    return marked
