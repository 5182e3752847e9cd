"""Placements: how the shards along one mesh axis make up the global value.

One placement per mesh axis. ``Shard(d)``: the shards are concatenated along dim
``d``. ``Replicate()``: every shard is the value. ``Partial(op)``: the value is the
reduction of the shards. Placements are data; they never communicate.

Several axes may cut one dim, one inside the other: the first axis outermost, unless
the shards say otherwise by their ``depth``. Several axes may hold addends of unlike
reductions; then the last axis is reduced first: ``(P(max), P)`` is the maximum over
the first axis of the sums over the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dtensor.collectives.reductions import REDUCTIONS
from dtensor.errors import ShardingError

if TYPE_CHECKING:
    from dtensor.mesh.device_mesh import DeviceMesh


class Placement:
    """Base of the placements; the queries are those of PyTorch."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a ``Shard`` (of ``dim``, if given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether this is ``Replicate``."""
        return isinstance(self, Replicate)

    def is_cut(self) -> bool:
        """Whether each rank of the axis holds a part of its own: no copy, no addend."""
        return not isinstance(self, (Replicate, Partial))

    def at_dim(self, dim: int) -> Placement:
        """The same way of cutting, of another dim."""
        return self

    def on(self, dims: int) -> Placement:
        """The placement for a tensor of so many dims."""
        return self

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a ``Partial`` (of ``reduce_op``, if given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """Each rank of the axis holds a piece of dim ``dim``, cut as ``torch.chunk`` does.

    Where several axes cut one dim, a later axis cuts what the earlier ones left.
    ``[Shard(0, depth=1), Shard(0, depth=0)]`` is the other way round: the second axis
    cuts first. In the usual order, and where one axis alone cuts the dim, a depth says
    nothing and is dropped where the layout of a tensor is built.

    Args:
        dim: The tensor dim. A negative one counts from the end and is made
            positive where the layout of a tensor is built.
        depth: Place among the axes that cut the dim, 0 for the outermost.
    """

    dim: int
    depth: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(
                f"Shard: the dim must be an int, got {self.dim!r}. "
                "Write Shard(0) to cut the first dim."
            )
        depth = self.depth
        if depth is not None and (isinstance(depth, bool) or type(depth) is not int):
            raise TypeError(
                f"Shard: the depth must be an int, got {depth!r}. "
                "Write Shard(0, depth=0) for the outermost axis."
            )

    def at_dim(self, dim: int) -> Shard:
        """The same depth, of another dim."""
        return Shard(dim, self.depth)

    def __str__(self) -> str:
        return f"S({self.dim})" + ("" if self.depth is None else f"[{self.depth}]")

    def __repr__(self) -> str:
        depth = "" if self.depth is None else f", depth={self.depth}"
        return f"Shard(dim={self.dim}{depth})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Each rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank of the axis holds an addend; the value is their reduction.

    Args:
        reduce_op: A name in ``REDUCTIONS``: ``"sum"``, ``"avg"``, ``"max"``,
            ``"min"``, ``"product"``; for integers and bools ``"band"``, ``"bor"``,
            ``"bxor"``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCTIONS:
            raise ShardingError(
                f"Partial: unknown reduction, got {self.reduce_op!r}, expected one "
                f"of {', '.join(REDUCTIONS)}. Write Partial('sum')."
            )

    @property
    def linear(self) -> bool:
        """Whether linear maps of the addends are linear maps of the value."""
        return REDUCTIONS[self.reduce_op].linear

    def commutes(self, other: Placement) -> bool:
        """Whether it does not matter which of two axes is reduced first."""
        if not isinstance(other, Partial):
            return True
        return self == other or self.linear and other.linear

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


Placements = tuple[Placement, ...]
PlacementsLike = Placement | Sequence[Placement]


def placements_of(
    what: str, value: PlacementsLike, axes: int, dims: int | None
) -> Placements:
    """Check placements given by a user and bring them to their normal form.

    Args:
        what: The caller's name, for the message.
        value: One placement (for a mesh of one axis) or a sequence of them.
        axes: Number of mesh axes.
        dims: Number of tensor dims, or None where it is not known yet.

    Returns:
        One placement per mesh axis; shard dims are not negative.

    Raises:
        ShardingError: Wrong number of placements, or a dim that is not there.
    """
    given = (value,) if isinstance(value, Placement) else tuple(value)
    for p in given:
        if not isinstance(p, Placement):
            raise TypeError(
                f"{what}: a placement must be Shard, Replicate or Partial, got "
                f"{p!r}. Write for example [Shard(0)]."
            )
    if len(given) != axes:
        raise ShardingError(
            f"{what}: one placement per mesh axis is needed, got {len(given)} "
            f"placements {show(given)} for a mesh of {axes} axes. Give {axes}; "
            "Replicate() stands for an axis that does not cut the tensor."
        )
    if dims is None:
        return given
    out: list[Placement] = []
    for p in given:
        if isinstance(p, Shard):
            dim = p.dim + dims if p.dim < 0 else p.dim
            if not 0 <= dim < dims:
                raise ShardingError(
                    f"{what}: placement {p} shards a dim that is not there, got dim "
                    f"{p.dim} of a tensor of {dims} dims. Use a dim from "
                    f"{-dims} to {dims - 1}, or Replicate()."
                    if dims
                    else f"{what}: placement {p} shards a tensor of 0 dims, which "
                    "has nothing to cut. Use Replicate() or Partial()."
                )
            p = Shard(dim, p.depth)
        out.append(p.on(dims))
    return normal(tuple(out))


def axes_of(placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The mesh axes that cut ``dim``, the outermost first.

    Example:
        >>> axes_of((Shard(0, depth=1), Replicate(), Shard(0, depth=0)), 0)
        (2, 0)
    """
    found = []
    for axis, p in enumerate(placements):
        if isinstance(p, Shard) and p.dim == dim:
            found.append((axis if p.depth is None else p.depth, axis))
    return tuple(axis for _, axis in sorted(found))


@lru_cache(maxsize=65536)
def normal(placements: Placements) -> Placements:
    """The one spelling of placements: depths only where the order is not the usual.

    Example:
        >>> show(normal((Shard(0, depth=7), Shard(1), Shard(0, depth=3))))
        '(S(0)[1], S(1), S(0)[0])'
        >>> show(normal((Shard(0, depth=0), Shard(0, depth=1))))
        '(S(0), S(0))'
    """
    out = list(placements)
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        axes = axes_of(placements, dim)
        usual = axes == tuple(sorted(axes))
        for depth, axis in enumerate(axes):
            out[axis] = Shard(dim, None if usual else depth)
    return tuple(out)


def placed(placements: Placements, axes: Sequence[int], p: Placement) -> Placements:
    """Placements after some axes have gone to ``p``; as shards they cut innermost."""
    out = list(placements)
    for axis in axes:
        out[axis] = Replicate()
    if isinstance(p, Shard):
        before = axes_of(out, p.dim)
        for depth, axis in enumerate((*before, *axes)):
            out[axis] = Shard(p.dim, depth)
    else:
        for axis in axes:
            out[axis] = p
    return normal(tuple(out))


def in_order(
    what: str,
    placements: PlacementsLike,
    shard_order: Mapping[int, Sequence[int | str]] | None,
    mesh: DeviceMesh,
) -> PlacementsLike:
    """Placements whose shards have the nesting order that a user gives by axes.

    Args:
        what: The caller's name, for the message.
        placements: The placements; their own depths give way.
        shard_order: For a dim, the axes that cut it, the outermost first.
        mesh: The mesh, for names of axes.

    Raises:
        ShardingError: The axes are not those that cut the dim.
    """
    if not shard_order:
        return placements
    out = [placements] if isinstance(placements, Placement) else list(placements)
    for dim, names in shard_order.items():
        axes = [mesh.axis(name) for name in names]
        cut = [a for a, p in enumerate(out) if isinstance(p, Shard) and p.dim == dim]
        if sorted(axes) != cut:
            raise ShardingError(
                f"{what}: shard_order does not fit the placements, got axes "
                f"{tuple(names)} for dim {dim}, expected each of "
                f"{tuple(mesh.axis_name(a) for a in cut)} once. Name every axis that "
                "shards the dim, the outermost first."
            )
        for depth, axis in enumerate(axes):
            out[axis] = Shard(dim, depth)
    return tuple(out)


def dual(placement: Placement) -> Placement:
    """The placement of the cotangent of a value placed so.

    Local autograd differentiates the sum over ranks of (local output x local
    cotangent); under that pairing Shard is its own dual, Replicate and
    Partial(sum) are each other's.

    Example:
        >>> dual(Replicate())
        Partial(reduce_op='sum')
    """
    if isinstance(placement, Replicate):
        return Partial()
    if isinstance(placement, Partial):
        if not placement.linear:
            raise ShardingError(
                f"gradient: addends of a {placement.reduce_op} have no cotangent of a "
                f"placement of its own, got {placement}. Call "
                "x.redistribute(Replicate()) and take the gradient of the result."
            )
        return Replicate()
    return placement


def is_linear(placements: Sequence[Placement]) -> bool:
    """Whether a tensor so placed has a cotangent: no addends of max, product ..."""
    return all(p.linear for p in placements if isinstance(p, Partial))


def show(placements: Sequence[Placement]) -> str:
    """Placements as short text: ``(S(0), R)``."""
    return "(" + ", ".join(str(p) for p in placements) + ")"
