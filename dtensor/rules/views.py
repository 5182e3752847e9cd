"""Views: where each dim of the operand goes, and whether its cut goes with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from dtensor.calls import Call
from dtensor.custom_placement import CustomPlacement
from dtensor.notation import Layout, Letters, Notation
from dtensor.placement import Placement, Replicate, Shard, normal
from dtensor.rules.pointwise import built_in, without_partial
from dtensor.rules.reductions import dims_of
from dtensor.rules.reshapes import kept
from dtensor.spec import Spec

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def reshaped(local: bool) -> Callable[[Call], Layout]:
    """Rule of view and reshape; ``local``: sizes are arguments and become local.

    A second operand, as ``view_as`` has, lends its shape alone and stays as it is.
    """

    def rule(call: Call) -> Layout:
        x = call.operands[0]
        shape = call.shapes()[0]
        wanted, there = kept(x, tuple(shape))
        name = "view" if call.name.startswith("view") else "reshape"

        def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
            sizes = outs[0].local_shape

            def reshape(func: Any, args: Any, kwargs: Any) -> Any:
                return getattr(torch.Tensor, name)(args[0], sizes)

            return reshape

        return Layout(
            [wanted, *(o.placements for o in call.operands[1:])],
            [there],
            [shape],
            run=run if local else None,
            view=True,
        )

    return rule


def view(call: Call) -> Notation | Layout:
    """``Tensor.view``: sizes, or a dtype."""
    if (
        call.args[1:]
        and isinstance(call.args[1], torch.dtype)
        or "dtype" in call.kwargs
    ):
        x = call.operands[0]
        letters: Letters = tuple(range(x.ndim))
        last: set[Hashable] = {x.ndim - 1} if x.ndim else set()
        shape = call.shapes()[0]
        same = shape == x.shape
        return Notation(
            [letters],
            [letters if same else (*letters[:-1], "bytes")],
            whole=set() if same else last,
            shapes=[shape],
            view=True,
        )
    return reshaped(True)(call)


def permuted(call: Call) -> Notation:
    """``transpose``, ``permute``, ``movedim`` ...: tried on a shape of primes."""
    x = call.operands[0]
    probe = torch.empty(PRIMES[: x.ndim], device="meta")
    result = call.func(probe, *call.args[1:], **call.kwargs)
    letters: Letters = tuple(range(x.ndim))
    out = tuple(PRIMES.index(n) for n in result.shape)
    return Notation(
        [letters],
        [out],
        linear=[{0}],
        shapes=[[x.shape[d] for d in out]],
        view=True,
    )


def squeeze(call: Call) -> Notation:
    """``squeeze``: the dims are found on the global shape and given explicitly."""
    x = call.operands[0]
    given = call.arg(1, "dim")
    if given is None:
        every: Sequence[int] = range(x.ndim)
    else:  # an empty tuple stands for no dim here
        every = dims_of(given, x.ndim) if given != () else ()
    dims = tuple(d for d in every if x.shape[d] == 1)
    letters: Letters = tuple(range(x.ndim))
    out: Letters = tuple(d for d in letters if d not in dims)

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        return lambda func, args, kwargs: func(args[0], dims)

    return Notation(
        [letters],
        [out],
        whole=set(dims),
        linear=[{0}],
        shapes=[[n for d, n in enumerate(x.shape) if d not in dims]],
        run=run,
        view=True,
    )


def unsqueeze(call: Call) -> Notation:
    """``unsqueeze``: one more dim, whole."""
    x = call.operands[0]
    shape = call.shapes()[0]
    dim = call.arg(1, "dim") % (x.ndim + 1)
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters],
        [(*letters[:dim], "new", *letters[dim:])],
        linear=[{0}],
        shapes=[shape],
        view=True,
    )


def pairs(call: Call) -> Notation:
    """``view_as_complex``, ``view_as_real``: a last dim of two, whole, goes or comes."""
    x = call.operands[0]
    shape = call.shapes()[0]
    letters: Letters = tuple(range(min(x.ndim, len(shape))))
    last: Letters = ("pair",)
    return Notation(
        [letters if x.ndim < len(shape) else letters + last],
        [letters + last if x.ndim < len(shape) else letters],
        whole={"pair"},
        linear=[{0}],
        shapes=[shape],
        view=True,
    )


def expand(call: Call) -> Layout:
    """``expand``, ``expand_as``, ``broadcast_to``: stretched dims are whole.

    A second operand lends its shape alone and stays as it is.
    """
    x = call.operands[0]
    shape = call.shapes()[0]
    lead = len(shape) - x.ndim
    wanted: list[Placement] = []
    out: list[Placement] = []
    for p in x.placements:
        dim = p.dim if isinstance(p, Shard) else None
        if isinstance(p, CustomPlacement):
            dim = p.along
        if p.is_cut() and (dim is None or shape[dim + lead] != x.shape[dim]):
            p, dim = Replicate(), None
        wanted.append(p)
        out.append(p if dim is None else p.at_dim(dim + lead))

    def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        sizes = outs[0].local_shape
        return lambda func, args, kwargs: torch.Tensor.expand(args[0], sizes)

    return Layout(
        [normal(tuple(wanted)), *(o.placements for o in call.operands[1:])],
        [normal(tuple(out))],
        [shape],
        run=run,
        view=True,
    )


def joined(new_dim: bool) -> Callable[[Call], Notation]:
    """Rule of ``cat`` (along a whole dim) and ``stack`` (along a new one)."""

    def rule(call: Call) -> Notation:
        n = max(o.ndim for o in call.operands)
        shape = call.shapes()[0]
        dim = dims_of(call.arg(1, "dim", call.kwargs.get("axis", 0)), n + new_dim)[0]
        ins: list[Letters] = []
        for i, o in enumerate(call.operands):
            if o.ndim != n:  # cat skips empty 1-d tensors
                ins.append(tuple(("skipped", i, d) for d in range(o.ndim)))
            elif new_dim:
                ins.append(tuple(range(n)))
            else:
                ins.append(tuple(("cat", i) if d == dim else d for d in range(n)))
        letters: Letters = tuple(range(n))
        out: Letters = (
            (*letters[:dim], "new", *letters[dim:])
            if new_dim
            else tuple("new" if d == dim else d for d in letters)
        )
        return Notation(
            ins,
            [out],
            whole={x for sub in ins for x in sub if isinstance(x, tuple)},
            linear=[set(range(len(ins)))],
            shapes=[shape],
        )

    return rule


def matrix_whole(call: Call) -> Notation:
    """``tril``, ``triu``, ``diagonal``-like: the last two dims whole."""
    x = call.operands[0]
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters],
        [letters],
        whole=set(letters[-2:]),
        linear=[{0}],
        shapes=[x.shape],
    )


def dims_whole(dim_at: int) -> Callable[[Call], Notation]:
    """``flip``, ``roll``: the dims that are permuted inside must be whole."""

    def rule(call: Call) -> Notation:
        x = call.operands[0]
        name = "dims"
        dims = call.arg(dim_at, name)
        letters: Letters = tuple(range(x.ndim))
        return Notation(
            [letters],
            [letters],
            whole=set(dims_of(dims, x.ndim)),
            linear=[{0}],
            shapes=[x.shape],
        )

    return rule


def diagonal(call: Call) -> Notation:
    """``diagonal``: its two dims whole, they become the last one."""
    x = call.operands[0]
    a = dims_of(call.arg(2, "dim1", 0), x.ndim)[0]
    b = dims_of(call.arg(3, "dim2", 1), x.ndim)[0]
    letters: Letters = tuple(range(x.ndim))
    return Notation(
        [letters],
        [(*(d for d in letters if d not in (a, b)), "diagonal")],
        whole={a, b},
        linear=[{0}],
        view=True,
    )


def repeated(call: Call) -> Notation:
    """``repeat``, ``tile``: the repeated dims whole."""
    x = call.operands[0]
    shape = call.shapes()[0]
    lead = len(shape) - x.ndim
    same = [shape[d + lead] == n for d, n in enumerate(x.shape)]
    out: list[Hashable] = [("new", d) for d in range(lead)]
    out += [d if s else ("new", d + lead) for d, s in enumerate(same)]
    return Notation(
        [tuple(range(x.ndim))],
        [tuple(out)],
        whole={d for d, s in enumerate(same) if not s},
        linear=[{0}],
        shapes=[shape],
    )


def created(call: Call) -> Layout:
    """``new_zeros`` and its kind: cut as the model where it has the model's shape."""
    x = call.operands[0]
    shape = call.shapes()[0]
    if tuple(shape) != tuple(x.shape):
        return Layout([x.placements], [x.spec.replicated().placements], [shape])

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        size = tuple(outs[0].local_shape)

        def create(func: Any, args: Any, kwargs: Any) -> Any:
            rest = {k: v for k, v in kwargs.items() if k != "size"}
            fill = args[2:3] if call.name == "new_full" else ()
            return getattr(torch.Tensor, call.name)(args[0], size, *fill, **rest)

        return create

    places = without_partial(x.placements)
    return Layout([x.placements], [places], [shape], run=run)


def broadcast_tensors(call: Call) -> Layout:
    """``broadcast_tensors``: each operand is expanded, by itself."""
    shape = call.shapes()[0]
    ins, outs = [], []
    for o in call.operands:
        lead = len(shape) - o.ndim
        wanted: list[Placement] = []
        for p in built_in(o.placements):
            stretched = isinstance(p, Shard) and o.shape[p.dim] != shape[p.dim + lead]
            wanted.append(Replicate() if stretched else p)
        ins.append(tuple(wanted))
        outs.append(
            tuple(
                Shard(p.dim + lead, p.depth) if isinstance(p, Shard) else p
                for p in wanted
            )
        )

    def run(specs: list[Spec], results: list[Spec]) -> Callable[..., Any]:
        def expand(func: Any, args: Any, kwargs: Any) -> Any:
            given = args[0] if isinstance(args[0], (list, tuple)) else args
            return tuple(
                torch.Tensor.expand(t, s.local_shape)
                for t, s in zip(given, results, strict=True)
            )

        return expand

    return Layout(ins, outs, [shape] * len(ins), run=run, view=True, many=True)
