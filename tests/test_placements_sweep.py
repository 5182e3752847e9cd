"""Every pair of placements: values, inputs, gradients, adjoints, second derivatives.

The truth is put together by plain torch from what all ranks hold. A slice runs here;
``make sweep-placements`` runs all pairs, and prints how many.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    init_device_mesh,
    simulate,
)
from dtensor.boundary import check_dtype
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.placement import Placements, is_linear, show
from dtensor.spec import local_shape_at
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()
SWEEP = bool(os.environ.get("DTENSOR_SWEEP"))
OPS = ("sum", "avg", "max", "min", "product")  # those that floats have
BITS = ("band", "bor", "bxor")
Shape = tuple[int, ...]
Pairs = list[tuple[Placements, Placements]]
Note = Callable[[str, object], None]  # pytest's record_property


def kinds(dims: int, ops: tuple[str, ...] = OPS) -> list[Placement]:
    """All placements of one axis for a tensor of so many dims."""
    return [R, *(Shard(d) for d in range(dims)), *(Partial(op) for op in ops)]


def pairs_of(
    axes: int, dims: int, stride: int, ops: tuple[str, ...] = OPS, swept: int = 1
) -> list[tuple[Placements, Placements]]:
    """All pairs of layouts in the usual nesting order, or a slice of them."""
    states = list(itertools.product(kinds(dims, ops), repeat=axes))
    return list(itertools.product(states, states))[:: swept if SWEEP else stride]


def held(
    mesh_shape: Shape, shape: Shape, places: Placements, dtype: torch.dtype = F64
) -> dict[Shape, torch.Tensor]:
    """What each coordinate holds: small numbers with ties and zeros, copies alike.

    No ties on several axes: the shares that the ranks get depend on whether one
    reduction runs over all axes or one after the other.
    """
    found: dict[Shape, torch.Tensor] = {}
    for at in itertools.product(*(range(n) for n in mesh_shape)):
        own = own_of(at, places)
        if own not in found:
            g = torch.Generator().manual_seed(sum(c * 7**i for i, c in enumerate(own)))
            size = local_shape_at(shape, places, mesh_shape, own)
            whole = not (dtype.is_floating_point or dtype.is_complex)
            found[own] = torch.randint(0 if whole else -2, 3, size, generator=g)
            if dtype is F64 and len(mesh_shape) > 1:
                found[own] = found[own] + torch.randn(size, generator=g, dtype=F64)
            found[own] = found[own].to(dtype)
    return found


def own_of(at: Shape, places: Placements) -> Shape:
    """The first of the coordinates that hold the same as ``at``."""
    return tuple(0 if p.is_replicate() else c for c, p in zip(at, places, strict=True))


def fold(pieces: list[torch.Tensor], op: str) -> torch.Tensor:
    """The value of addends, by plain torch."""
    if pieces[0].dtype.is_floating_point and op in ("max", "min", "product"):
        stacked = torch.stack(pieces)  # ties and zeros have torch's gradients
        if op == "product":
            return stacked.prod(0)
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    found = functools.reduce(REDUCTIONS[op].function, pieces)
    return found / len(pieces) if op == "avg" else found


def value(
    mesh_shape: Shape,
    places: Placements,
    parts: dict[Shape, torch.Tensor],
    at: Shape = (),
) -> torch.Tensor:
    """The global value, axis by axis, the last one first."""
    axis = len(at)
    if axis == len(mesh_shape):
        return parts[at]
    p = places[axis]
    if isinstance(p, Replicate):
        return value(mesh_shape, places, parts, (*at, 0))
    pieces = [
        value(mesh_shape, places, parts, (*at, i)) for i in range(mesh_shape[axis])
    ]
    if isinstance(p, Shard):
        return torch.cat(pieces, p.dim)
    assert isinstance(p, Partial)
    return fold(pieces, p.reduce_op)


# ---- values, gradients, second derivatives, adjoints -----------------------------------
@dataclass
class Truth:
    """What plain torch makes of what all ranks hold in one layout."""

    parts: dict[Shape, torch.Tensor]
    value: torch.Tensor
    first: dict[Shape, torch.Tensor]
    second: dict[Shape, torch.Tensor]


def weight_of(shape: Shape) -> torch.Tensor:
    """Unlike weights for all elements."""
    return torch.arange(1.0, 1 + math.prod(shape), dtype=F64).view(shape).sqrt()


def second_of(
    first: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Gradients of the sum of squares; torch records nothing of empty products."""
    if not any(g.requires_grad for g in first):
        return [torch.zeros_like(t) for t in leaves]
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)


def truth(mesh_shape: Shape, shape: Shape, src: Placements) -> Truth:
    """The value of a layout and two derivatives of a function of it."""
    parts = held(mesh_shape, shape, src)
    leaves = [t.requires_grad_() for t in parts.values()]
    want = value(mesh_shape, src, parts)
    loss = (want.pow(2) * weight_of(shape)).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = second_of(first, leaves)
    return Truth(
        {c: t.detach() for c, t in parts.items()},
        want.detach(),
        {c: g.detach() for c, g in zip(parts, first, strict=True)},
        dict(zip(parts, second, strict=True)),
    )


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of its memory, the last dim slowest."""
    turned = x.movedim(-1, 0) if x.ndim > 1 else x
    wide = torch.stack([turned, turned], -1)[..., 0]
    return wide.movedim(0, -1) if x.ndim > 1 else wide


def check(
    mesh_shape: Shape, shape: Shape, pairs: Pairs, truths: dict[Placements, Truth]
) -> tuple[int, int]:
    """All checks of some pairs on this rank; how many pairs, and how many linear."""
    mesh = init_device_mesh("cpu", mesh_shape)
    at = mesh.coordinate
    assert at is not None
    whole = [R] * mesh.ndim
    w = DTensor.from_local(weight_of(shape), mesh, whole, run_check=False)
    linear = 0
    for i, (src, dst) in enumerate(pairs):
        what = f"{shape}: {show(src)} -> {show(dst)} on {mesh_shape}"
        want, own = truths[src], own_of(at, src)
        part = want.parts[own]
        leaf = (strided(part) if i % 2 else part.clone()).requires_grad_()
        x = DTensor.from_local(leaf, mesh, src, shape=shape, run_check=False)
        y = x.redistribute(dst)
        assert y.placements == dst, what
        assert local_of(y).shape == y._spec.local_shape, what
        torch.testing.assert_close(y.full_tensor().detach(), want.value, msg=what)
        (g,) = torch.autograd.grad((y.pow(2) * w).sum(), leaf, create_graph=True)
        torch.testing.assert_close(g, want.first[own], msg=f"gradient, {what}")
        (gg,) = second_of([g], [leaf])
        torch.testing.assert_close(
            gg, want.second[own], msg=f"second derivative, {what}"
        )
        assert torch.equal(leaf, part), f"{what}: the input changed"
        if is_linear(src) and is_linear(dst):
            check_adjoint(mesh, leaf.detach(), shape, src, dst, what)
            linear += 1
    return len(pairs), linear


def check_adjoint(
    mesh: DeviceMesh,
    part: torch.Tensor,
    shape: Shape,
    src: Placements,
    dst: Placements,
    what: str,
) -> None:
    """<A x, y> = <x, A* y>, summed over the ranks.

    Copies in x are alike on their ranks, and so are the cotangents of addends in y;
    everything else differs from rank to rank.
    """
    at = mesh.coordinate
    assert at is not None
    leaf = part.clone().requires_grad_()
    raw = [Partial() if p.is_replicate() else p for p in src]
    x = DTensor.from_local(leaf, mesh, src, shape=shape, grad_placements=raw)
    y = local_of(x.redistribute(dst))
    own = [0 if p.is_partial() else c for c, p in zip(at, dst, strict=True)]
    g = torch.Generator().manual_seed(17 + sum(c * 7**i for i, c in enumerate(own)))
    cotangent = torch.randn(y.shape, generator=g, dtype=F64).to(y.dtype)
    (back,) = torch.autograd.grad(y, leaf, cotangent)
    addends = [Partial()] * mesh.ndim
    left, right = (
        DTensor.from_local(
            (a.detach() * b.conj()).real.sum(), mesh, addends, run_check=False
        ).full_tensor()
        for a, b in ((y, cotangent), (leaf, back))
    )
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=what)


def run(mesh_shape: Shape, shape: Shape, pairs: Pairs) -> tuple[int, int]:
    """``check`` on simulated ranks."""
    truths = {src: truth(mesh_shape, shape, src) for src in {src for src, _ in pairs}}
    given = (mesh_shape, shape, pairs, truths)
    counts = simulate(check, math.prod(mesh_shape), args=given, timeout=3000)
    assert len(set(counts)) == 1
    return counts[0]


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "stride"),
    [
        ((1,), (3, 2), 3),
        ((1,), (), 3),
        ((2,), (4, 6), 3),  # even
        ((2,), (3, 5), 5),  # uneven
        ((2,), (), 1),
        ((2,), (0, 3), 3),
        ((3,), (6, 3), 7),
        ((3,), (7, 2), 5),  # an empty shard
        ((3,), (), 5),
        ((3,), (2, 0), 7),
        ((4,), (4, 8), 9),
        ((4,), (5, 3), 7),
        ((4,), (3, 2, 2), 11),
        ((4,), (), 5),
        ((4,), (0,), 5),
        ((6,), (6, 12), 11),
        ((6,), (8, 1), 9),
        ((6,), (0, 7), 11),
        ((6,), (), 5),
        ((2, 2), (4,), 101),
        ((2, 2), (5, 4), 71),
        ((2, 2), (), 101),
        ((2, 2), (0,), 301),
        ((2, 3), (6,), 101),
        ((2, 3), (7, 1), 131),
        ((2, 3), (), 101),
        ((2, 3), (0,), 301),
    ],
)
def test_pairs(
    mesh_shape: Shape, shape: Shape, stride: int, record_property: Note
) -> None:
    swept = 5 if len(mesh_shape) > 1 and 0 in shape else 1
    pairs = pairs_of(len(mesh_shape), len(shape), stride, swept=swept)
    count, linear = run(mesh_shape, shape, pairs)
    assert count == len(pairs)
    record_property("pairs", (str(mesh_shape), count, linear))


places = st.tuples(*[st.sampled_from(kinds(2))] * 3)


def test_three_axes(record_property: Note) -> None:
    total = [0, 0]

    @settings(
        max_examples=300 if SWEEP else 8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        src=places, dst=places, shape=st.tuples(st.integers(0, 9), st.integers(1, 5))
    )
    def sample(src: Placements, dst: Placements, shape: Shape) -> None:
        count, linear = run((2, 2, 2), shape, [(src, dst)])
        total[0] += count
        total[1] += linear

    sample()
    record_property("pairs", ("(2, 2, 2)", *total))


# ---- every dtype and every reduction ----------------------------------------------------
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def check_dtypes(
    mesh_shape: Shape, shape: Shape, dtype: torch.dtype, pairs: Pairs
) -> tuple[int, int]:
    """Values of pairs; those without a meaning are refused. How many, how many linear."""
    mesh = init_device_mesh("cpu", mesh_shape)
    at = mesh.coordinate
    assert at is not None
    good: dict[Placements, bool] = {}
    for p in {p for pair in pairs for p in pair}:
        try:
            check_dtype("sweep", dtype, p)
            good[p] = True
        except ShardingError:
            good[p] = False
    linear = 0
    for i, (src, dst) in enumerate(pairs):
        what = f"{dtype} {shape}: {show(src)} -> {show(dst)} on {mesh_shape}"
        start = src if good[src] else (R,) * mesh.ndim
        parts = held(mesh_shape, shape, start, dtype)
        part = parts[own_of(at, start)]
        leaf = strided(part) if i % 2 else part.clone()

        def laid(
            leaf: torch.Tensor = leaf, places: Placements = start, move: bool = False
        ) -> DTensor:
            return DTensor.from_local(leaf, mesh, places, shape=shape, run_check=False)

        if not good[src]:
            with pytest.raises(ShardingError, match="has no meaning for"):
                laid(leaf, src)
            continue
        if not good[dst]:
            with pytest.raises(ShardingError, match="has no meaning for"):
                laid().redistribute(dst)
            continue
        y = laid().redistribute(dst)
        assert y.dtype == dtype and y.placements == dst, what
        assert local_of(y).shape == y._spec.local_shape, what
        want = value(mesh_shape, start, parts)
        if dtype.is_floating_point or dtype.is_complex:
            torch.testing.assert_close(y.full_tensor(), want, msg=what)
        else:
            assert torch.equal(y.full_tensor(), want), what
        assert torch.equal(leaf, part), f"{what}: the input changed"
        if dtype is torch.complex128 and is_linear(src) and is_linear(dst):
            check_adjoint(mesh, leaf, shape, src, dst, what)
            linear += 1
    return len(pairs), linear


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_dtypes(dtype: torch.dtype, record_property: Note) -> None:
    cases = [((2,), (4, 3), 7), ((3,), (4, 3), 7), ((2,), (), 5), ((2, 2), (3,), 487)]
    if SWEEP and dtype in (torch.int64, torch.bool):
        cases.append(((2, 3), (4, 3), 1))
    for mesh_shape, shape, stride in cases:
        ops = OPS + BITS
        if len(shape) == 2 and len(mesh_shape) == 2:
            ops = ("sum", "max", *BITS) if dtype is torch.int64 else ("min", *BITS)
        swept = 13 if shape == (3,) else 1
        pairs = pairs_of(len(mesh_shape), len(shape), stride, ops, swept)
        counts = simulate(
            check_dtypes,
            math.prod(mesh_shape),
            args=(mesh_shape, shape, dtype, pairs),
            timeout=3000,
        )
        assert len(set(counts)) == 1
        record_property("pairs", (f"{mesh_shape} of {str(dtype)[6:]}", *counts[0]))
