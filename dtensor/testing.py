"""Checks for those who invent placements or write rules: do the laws hold?

``check_placement`` runs a placement on simulated ranks, over even, uneven and empty
shards, several dtypes, and every way from and to the built-in placements.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch

from dtensor.collectives.simulate import simulate
from dtensor.custom_placement import CustomPlacement
from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import get_rank, get_world_size
from dtensor.placement import Partial, Placement, Replicate, Shard, placements_of
from dtensor.rule_check import RuleBroken, check_rule
from dtensor.spec import check_custom, spec_of
from dtensor.tensor import DTensor, distribute_tensor, local_of

__all__ = ["LawBroken", "RuleBroken", "check_placement", "check_rule"]

F64 = torch.float64
SHAPES = ((8, 4), (5, 3), (1, 2), (0, 3), (3, 7, 2))
BITS = ("band", "bor", "bxor")  # for integers and bools
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class LawBroken(AssertionError):
    """A placement does not keep a law; the message names the law and the case."""

    def __init__(self, placement: Placement, law: str, case: str) -> None:
        super().__init__(
            f"check_placement: {placement!r} breaks the law {law!r}: {case}. See "
            "dtensor.custom_placement for the laws."
        )
        self.law = law

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)


def check_placement(
    placement: Placement,
    *,
    ranks: Sequence[int] = (1, 2, 3),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    timeout: float = 120,
) -> dict[str, int]:
    """Check the laws of a placement on simulated ranks.

    Shapes that the placement refuses on an axis of so many ranks are left out; at least
    one must remain.

    Args:
        placement: The placement.
        ranks: Sizes of the axis to try.
        shapes: Global shapes to try.
        timeout: Seconds for each number of ranks.

    Returns:
        How many cases were checked, for each law.

    Raises:
        LawBroken: A law does not hold; the message names it.
        ValueError: No shape fits.

    Example:
        >>> from dtensor import Shard
        >>> sorted(check_placement(Shard(0), ranks=(2,), shapes=[(5, 3)]))
        ['adjoint', 'data', 'dtypes', 'local shape', 'redistribution', 'round trip', \
'second derivative']
    """
    counts: dict[str, int] = {}
    fits = [(n, s) for n in ranks for s in shapes if _fits(placement, n, s)]
    if not fits:
        raise ValueError(
            f"check_placement: {placement!r} fits none of the shapes {tuple(shapes)} on "
            f"axes of {tuple(ranks)} ranks. Give ranks= and shapes= that it fits."
        )
    for n in sorted({n for n, _ in fits}):
        mine = [s for k, s in fits if k == n]
        for law, count in simulate(
            _program, n, args=(placement, mine), timeout=timeout
        )[0].items():
            counts[law] = counts.get(law, 0) + count
    return counts


def _fits(placement: Placement, n: int, shape: tuple[int, ...]) -> bool:
    mesh = DeviceMesh("cpu", list(range(n)))
    try:
        places = placements_of("check_placement", placement, 1, len(shape))
        check_custom("check_placement", mesh, places, shape)
    except ShardingError:
        return False
    return True


class _Case:
    """One placement on one mesh, with what has been checked so far."""

    def __init__(self, given: Placement, shape: tuple[int, ...]) -> None:
        self.mesh = init_device_mesh("cpu", (get_world_size(),))
        (self.placement,) = placements_of("check_placement", given, 1, len(shape))
        self.shape = shape
        self.counts: dict[str, int] = {}
        self.dtype = F64  # what the laws are checked with
        p = self.placement
        if isinstance(p, Partial) and p.reduce_op in BITS:
            self.dtype = torch.int64

    def values(self) -> torch.Tensor:
        """The same numbers on every rank."""
        numbers = values(self.shape)
        return numbers if self.dtype is F64 else (8 * numbers).to(self.dtype)

    def law(self, name: str, holds: Callable[[], bool], case: str) -> None:
        """Note a law, or say that it is broken."""
        self.counts[name] = self.counts.get(name, 0) + 1
        where = f"{case}, shape {self.shape} on {self.mesh.size()} ranks"
        try:
            good = holds()
        except Exception as e:
            where = f"{where}: {type(e).__name__}: {e}"
            raise LawBroken(self.placement, name, where) from e
        if not good:
            raise LawBroken(self.placement, name, where)


def values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=g, dtype=F64)


def _program(given: Placement, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for shape in shapes:
        case = _Case(given, shape)
        _data(case)
        _local(case)
        _ways(case)
        if case.dtype is F64:
            if _flows(case.placement):
                _adjoints(case)
            _second(case)
        _dtypes(case)
        for law, count in case.counts.items():
            total[law] = total.get(law, 0) + count
    return total


def _data(c: _Case) -> None:
    p = c.placement
    twin = copy.deepcopy(p)
    c.law("data", lambda: p == twin and hash(p) == hash(twin), "equal and hashed alike")
    c.law("data", lambda: bool(str(p)), "has a name")


def _local(c: _Case) -> None:
    """The two laws that a custom placement states, checked without any ranks."""
    p, n = c.placement, c.mesh.size()
    full = c.values()
    if isinstance(p, CustomPlacement):
        shards = []
        for i in range(n):
            shard = p.split(full, n, i)
            wanted = tuple(p.local_shape(c.shape, n, i))
            got = tuple(shard.shape)
            c.law(
                "local shape",
                lambda got=got, wanted=wanted: got == wanted,  # type: ignore[misc]
                f"rank {i} gets {got}, expected {wanted}",
            )
            shards.append(shard)
        held = sum(s.numel() for s in shards)
        c.law("round trip", lambda: held == full.numel(), f"the ranks hold {held}")
        c.law(
            "round trip",
            lambda: torch.equal(p.assemble(shards, c.shape), full),
            "assemble(split(x)) is not x",
        )
    x = distribute_tensor(full, c.mesh, [p])
    wanted = tuple(x._spec.local_shape)
    got = tuple(local_of(x).shape)
    c.law("local shape", lambda: got == wanted, f"got {got}, expected {wanted}")
    c.law(
        "round trip",
        lambda: torch.allclose(x.full_tensor(), full),
        "distribute_tensor, then full_tensor",
    )


def others(shape: Sequence[int], dtype: torch.dtype = F64) -> list[Placement]:
    """The built-in placements of a tensor of this shape."""
    shards: list[Placement] = [Shard(d) for d in range(len(shape))]
    ops = ("sum", "avg", "max", "product") if dtype is F64 else ("sum", "max", *BITS)
    kinds = [Partial(op) for op in ops]
    return [Replicate(), *shards, *kinds]


def _ways(c: _Case) -> None:
    full = c.values()
    for other in others(c.shape, c.dtype):
        for src, dst in ((c.placement, other), (other, c.placement)):
            what = f"{src} -> {dst}"
            x = distribute_tensor(full, c.mesh, [src])
            before = local_of(x).clone()
            y = x.redistribute([dst])
            c.law(
                "redistribution",
                lambda y=y: torch.allclose(y.full_tensor(), full),  # type: ignore[misc]
                what,
            )
            c.law(
                "redistribution",
                lambda x=x, b=before: torch.equal(local_of(x), b),  # type: ignore[misc]
                f"{what} changes its input",
            )


def _adjoints(c: _Case) -> None:
    """<A x, y> = <x, A* y>, summed over the ranks, for linear ways.

    The shards of a Replicate are alike on the ranks, and so are the cotangents of a
    Partial; everything else differs from rank to rank.
    """
    linear = [o for o in others(c.shape) if not isinstance(o, Partial) or o.linear]
    for other in linear:
        for src, dst in ((c.placement, other), (other, c.placement)):
            model = spec_of(c.mesh, (src,), c.shape)
            own = 1 if src.is_replicate() else 1 + get_rank()
            leaf = (values(model.local_shape, 11) * own).requires_grad_()
            x = DTensor.from_local(
                leaf,
                c.mesh,
                [src],
                shape=c.shape,
                grad_placements=[Partial()] if src.is_replicate() else [src],
            )
            out = local_of(x.redistribute([dst]))
            own = 1 if dst.is_partial() else 1 + get_rank()
            cotangent = values(out.shape, 13) * own

            def holds(
                leaf: torch.Tensor = leaf,
                out: torch.Tensor = out,
                cotangent: torch.Tensor = cotangent,
            ) -> bool:
                (back,) = torch.autograd.grad(out, leaf, cotangent)
                left, right = (
                    DTensor.from_local(z.sum(), c.mesh, [Partial()]).full_tensor()
                    for z in (out.detach() * cotangent, leaf.detach() * back)
                )
                return math.isclose(
                    left.item(), right.item(), rel_tol=1e-12, abs_tol=1e-12
                )

            c.law("adjoint", holds, f"{src} -> {dst}")


def _second(c: _Case) -> None:
    full = values(c.shape)
    for other in others(c.shape):
        x = distribute_tensor(full, c.mesh, [other if _flows(other) else Replicate()])
        x.requires_grad_()
        y = x.redistribute([other]).redistribute([c.placement])

        def holds(x: DTensor = x, y: DTensor = y) -> bool:
            z = y.redistribute([Replicate()])
            (g,) = torch.autograd.grad(z.pow(3).sum(), x, create_graph=True)
            first = torch.allclose(whole(g), 3 * full.pow(2))
            (gg,) = torch.autograd.grad(g.sum(), x)
            return first and torch.allclose(whole(gg), 6 * full)

        c.law("second derivative", holds, f"through {other}")


def whole(x: torch.Tensor) -> torch.Tensor:
    """The full tensor of a gradient, which is a DTensor."""
    assert isinstance(x, DTensor), "gradients of DTensors are DTensors"
    return x.full_tensor()


def _flows(p: Placement) -> bool:
    """Whether a leaf may lie so and have a gradient."""
    return not isinstance(p, Partial) or p.linear


def _dtypes(c: _Case) -> None:
    for dtype in DTYPES:
        full = (values(c.shape) > 0).to(dtype)
        try:
            x = distribute_tensor(full, c.mesh, [c.placement])
        except ShardingError:
            continue  # addends that have no meaning for the dtype
        c.law(
            "dtypes",
            lambda x=x, f=full: torch.equal(
                x.redistribute(Replicate()).full_tensor(), f
            ),  # type: ignore[misc]
            str(dtype),
        )
        c.law("dtypes", lambda x=x, d=dtype: x.dtype == d, f"{dtype} changes")  # type: ignore[misc]
