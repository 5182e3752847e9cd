"""``dry_run``: one rank of a world of any size, whose other ranks are not there.

Collectives are checked and counted as everywhere, and move nothing. What they give has
the right shape, dtype and device, and no value: it is filled with ``unknown(dtype)``,
NaN wherever the dtype has one, so that nothing computed from it looks right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from dtensor.collectives.communicator import Call, CollectiveError
from dtensor.collectives.reductions import Reduction
from dtensor.mesh.world import World, use_world


@contextmanager
def dry_run(world_size: int, rank: int = 0) -> Iterator[World]:
    """Be one rank of a world of ``world_size`` ranks that are not there.

    Meshes, specs, plans and local shards are those of that rank; collectives are
    counted (``count_collectives``) and send nothing. Their results have no values:
    NaN for floats and complex numbers, the least number for signed integers, the
    greatest for unsigned ones, True for booleans. Objects of other ranks are refused,
    and ``from_local`` compares with no one, as with ``run_check=False``.
    Blocks may nest; the world before is current again afterwards. Tensors of a dry
    world must not be used outside of it.

    Args:
        world_size: Number of ranks, one or more.
        rank: Which of them this process is.

    Raises:
        ValueError: They are not a size and a rank.

    Example:
        >>> from dtensor import Partial, DTensor, Replicate, count_collectives
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> with dry_run(65536, rank=7), count_collectives() as c:
        ...     mesh = init_device_mesh("cpu", (65536,), mesh_dim_names=("dp",))
        ...     x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        ...     y = x.redistribute(mesh, [Replicate()]).to_local()
        >>> y, c.calls("all_reduce", "dp"), c.bytes()
        (tensor([nan, nan, nan, nan]), 1, 31)
    """
    whole = all(type(n) is int for n in (world_size, rank))
    if not whole or not 0 <= rank < world_size:
        raise ValueError(
            f"dry_run: not a rank of a world, got world_size {world_size!r} and rank "
            f"{rank!r}, expected whole numbers with 0 <= rank < world_size. "
            f"Call for example dry_run(65536, rank=0)."
        )
    with use_world(World(rank, world_size, "dry")) as world:
        yield world


def unknown(dtype: torch.dtype) -> float | int | bool:
    """What stands for a value that this process does not know.

    Example:
        >>> unknown(torch.bfloat16), unknown(torch.int8), unknown(torch.uint8)
        (nan, -128, 255)
    """
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min if info.min < 0 else info.max


class DryChannel:
    """The channel of a row whose other ranks are not there.

    Args:
        rank: Position of this rank in the row.
    """

    kind = "cpu"
    averages: ClassVar[bool] = True
    short: ClassVar[frozenset[torch.dtype]] = frozenset(
        {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    )

    def __init__(self, rank: int) -> None:
        self.sequence = 0
        self._rank = rank

    def all_reduce(self, call: Call, x: torch.Tensor, row: Reduction) -> torch.Tensor:
        """Of the shape of ``x``."""
        return _blank(call, x, tuple(x.shape))

    def all_gather(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...]
    ) -> torch.Tensor:
        """Of all elements.

        Raises:
            CollectiveError: They are objects, whose number alone would be a value.
        """
        if call.verb == "all_gather_object":
            raise CollectiveError(
                call,
                "the objects of other ranks are not known in a dry world, got a call "
                "inside dry_run, expected ranks that are there. "
                "Use simulate(fn, ranks=N) or dtensor-run.",
            )
        return _blank(call, x, (sum(counts),))

    def reduce_scatter(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        """Of this rank's stretch."""
        return _blank(call, x, (counts[self._rank],))

    def all_to_all(
        self,
        call: Call,
        x: torch.Tensor,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
    ) -> torch.Tensor:
        """Of what would come."""
        return _blank(call, x, (sum(recv_counts),))

    def broadcast(self, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
        """The root has its own values; the others have none."""
        return x.clone() if root == self._rank else _blank(call, x, tuple(x.shape))

    def permute(
        self,
        call: Call,
        x: torch.Tensor,
        dest: int | None,
        source: int | None,
        count: int,
    ) -> torch.Tensor:
        """Of what would come."""
        return x.view(-1).clone() if source == self._rank else _blank(call, x, (count,))

    def barrier(self, call: Call) -> None:
        """There is no one to wait for."""


def _blank(call: Call, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # A bool comes as uint8, which 255 would not be read back from.
    value = 1 if call.dtype is torch.bool else unknown(x.dtype)
    return x.new_full(shape, value)
