"""Placements: how the shards along one mesh axis make up the global value.

One placement per mesh axis. ``Shard(d)``: the shards are concatenated along dim
``d``. ``Replicate()``: every shard is the value. ``Partial(op)``: the value is the
reduction of the shards. Placements are data; they never communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor.errors import ShardingError

PARTIAL_OPS = ("sum", "avg")


class Placement:
    """Base of the placements; the queries are those of PyTorch."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a ``Shard`` (of ``dim``, if given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether this is ``Replicate``."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a ``Partial`` (of ``reduce_op``, if given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Each rank of the axis holds a piece of dim ``dim``, cut as ``torch.chunk`` does.

    Args:
        dim: The tensor dim. A negative one counts from the end and is made
            positive where the layout of a tensor is built.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(
                f"Shard: the dim must be an int, got {self.dim!r}. "
                "Write Shard(0) to cut the first dim."
            )

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Each rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank of the axis holds an addend; the value is their reduction.

    Args:
        reduce_op: ``"sum"`` or ``"avg"``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in PARTIAL_OPS:
            raise ShardingError(
                f"Partial: unknown reduction, got {self.reduce_op!r}, expected one "
                f"of {', '.join(PARTIAL_OPS)}. Write Partial('sum')."
            )

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
            p = Shard(dim)
        out.append(p)
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
        return Replicate()
    return placement


def show(placements: Sequence[Placement]) -> str:
    """Placements as short text: ``(S(0), R)``."""
    return "(" + ", ".join(str(p) for p in placements) + ")"
