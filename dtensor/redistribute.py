"""Redistribution: a shortest path between placements.

States are placement tuples; a step changes the placement along one mesh axis by
one collective (or by none); the plan is the cheapest path by latency and bytes.
Shards of several axes on one dim are nested, the first axis outermost, so only
the innermost axis of a dim may take up or give up that dim: what a step sees is
then always one block cut by ``chunk_sizes``, even or not.

=============  =============  ===================  ==================
from           to             step                 adjoint
=============  =============  ===================  ==================
Shard(d)       Replicate      all-gather           reduce-scatter
Partial        Replicate      all-reduce           all-reduce
Partial        Shard(d)       reduce-scatter       all-gather
Shard(i)       Shard(j)       all-to-all           all-to-all
Replicate      Shard(d)       slice                zero-pad
Replicate      Partial(sum)   keep on coord. 0     keep on coord. 0
Replicate      Partial(avg)   nothing              nothing
Partial(sum)   Partial(avg)   times axis size      times axis size
=============  =============  ===================  ==================
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives import functional
from dtensor.errors import ShardingError
from dtensor.mesh.chunks import chunk_offset, chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Placements, Replicate, Shard, show
from dtensor.spec import Spec, communicator_in

LATENCY = 20e-6  # seconds per collective
SECONDS_PER_BYTE = 1e-9
LOCAL_SECONDS_PER_BYTE = 1e-11

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One transition: the placement along ``axis`` goes from ``src`` to ``dst``.

    Attributes:
        axis: Index of the mesh axis.
        src: Placement before.
        dst: Placement after.
        verb: The collective, or ``"local"``.
        elements: Elements sent per rank (an estimate that is alike on all ranks).
        seconds: Modelled time.
    """

    axis: int
    src: Placement
    dst: Placement
    verb: str
    elements: float
    seconds: float


def local_elements(
    mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]
) -> float:
    """Elements of a shard of average size; the same number on all ranks."""
    n = float(math.prod(shape))
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            n /= mesh.shape[axis]
    return n


def step_between(
    mesh: DeviceMesh,
    state: Placements,
    axis: int,
    dst: Placement,
    shape: tuple[int, ...],
    itemsize: int,
) -> Step | None:
    """The step from ``state`` to ``dst`` along ``axis``, or None if there is none."""
    src, parts = state[axis], mesh.shape[axis]
    inner = state[axis + 1 :]
    if (
        isinstance(src, Shard)
        and src in inner
        or isinstance(dst, Shard)
        and dst in inner
    ):
        return None
    size = local_elements(mesh, state, shape)
    others = (parts - 1) / parts
    if isinstance(src, Replicate):
        verb, sent = "local", 0.0
    elif isinstance(src, Shard):
        if isinstance(dst, Partial):
            return None
        gather = isinstance(dst, Replicate)
        verb = "all_gather" if gather else "all_to_all"
        sent = size * (parts - 1) if gather else size * others
    elif isinstance(dst, Replicate):
        verb, sent = "all_reduce", 2 * size * others
    elif isinstance(dst, Shard):
        verb, sent = "reduce_scatter", size * others
    else:
        verb, sent = "local", 0.0
    if parts == 1:
        verb, sent = "local", 0.0
    seconds = size * itemsize * LOCAL_SECONDS_PER_BYTE + 1e-7
    if verb != "local":
        seconds += LATENCY + sent * itemsize * SECONDS_PER_BYTE
    return Step(axis, src, dst, verb, sent, seconds)


def plan_steps(
    mesh: DeviceMesh,
    src: Placements,
    dst: Placements,
    shape: tuple[int, ...],
    itemsize: int = 4,
) -> tuple[Step, ...]:
    """The cheapest steps from ``src`` to ``dst`` (Dijkstra over placement tuples).

    The result depends on the arguments alone, so all ranks find the same plan.

    Args:
        mesh: The mesh.
        src: Placements before, one per axis.
        dst: Placements after.
        shape: Global shape in elements.
        itemsize: Bytes per element, for the cost.

    Raises:
        ShardingError: No path (never for Shard, Replicate and Partial).
    """
    useful: set[Placement] = {Replicate()}
    useful.update(p for p in src + dst if isinstance(p, Shard))
    if any(src.count(p) > 1 or dst.count(p) > 1 for p in useful):
        useful.update(Shard(d) for d in range(len(shape)))
    targets = sorted(useful, key=str)
    best: dict[Placements, float] = {src: 0.0}
    queue: list[tuple[float, int, Placements, tuple[Step, ...]]] = [(0.0, 0, src, ())]
    pushed = 0
    while queue:
        cost, _, state, path = heapq.heappop(queue)
        if state == dst:
            return path
        if cost > best[state]:
            continue
        for axis in range(mesh.ndim):
            options = [*targets, dst[axis]] if dst[axis] not in useful else targets
            for p in options:
                if p == state[axis]:
                    continue
                step = step_between(mesh, state, axis, p, shape, itemsize)
                if step is None:
                    continue
                after = (*state[:axis], p, *state[axis + 1 :])
                total = cost + step.seconds
                if total < best.get(after, math.inf):
                    best[after] = total
                    pushed += 1
                    heapq.heappush(queue, (total, pushed, after, (*path, step)))
    raise ShardingError(
        f"redistribute: there is no way from {show(src)} to {show(dst)} on {mesh!r}. "
        "Redistribute to Replicate() first."
    )


class Mask(torch.autograd.Function):
    """Keep the value where this rank leads its row, zero elsewhere.

    Replicate -> Partial(sum): the addends of the row then add up to the value. The
    adjoint is the mask again: the cotangent of a Partial is replicated, that of a
    Replicate is a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lead: bool) -> torch.Tensor:
        """A copy of ``x`` on the lead, zeros elsewhere."""
        ctx.lead = lead
        return x.clone() if lead else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The mask of the cotangent."""
        return Mask.apply(grads[0], ctx.lead), None  # type: ignore[no-untyped-call]


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same local tensor as a plain ``torch.Tensor``, autograd kept."""
    if type(x) is torch.Tensor:
        return x
    with NoTF():
        return x.as_subclass(torch.Tensor)


def alias(x: torch.Tensor) -> torch.Tensor:
    """A fresh plain tensor on the same storage, autograd kept."""
    with NoTF():
        return x.view_as(x)


def move_of(spec: Spec, step: Step) -> Move:
    """What this rank does in ``step``, starting from ``spec``.

    Args:
        spec: Spec before the step.
        step: The step.

    Returns:
        A differentiable function from local shard to local shard.
    """
    mesh, axis, src, dst = spec.mesh, step.axis, step.src, step.dst
    parts = mesh.shape[axis]
    if parts == 1:
        return alias
    at = spec.coordinate[axis] if spec.coordinate else 0
    if isinstance(src, Replicate):
        if isinstance(dst, Shard):
            length = spec.block(dst.dim, axis)[1]
            dim, start = dst.dim, chunk_offset(length, parts, at)
            size = chunk_sizes(length, parts)[at]
            return lambda x: x.narrow(dim, start, size).clone()
        if isinstance(dst, Partial) and dst.reduce_op == "sum":
            return lambda x: Mask.apply(x, at == 0)  # type: ignore[no-untyped-call]
        return alias
    if isinstance(src, Partial) and isinstance(dst, Partial):
        factor = parts if dst.reduce_op == "avg" else 1 / parts
        return lambda x: x * factor
    comm = communicator_in(spec.world, mesh, axis)
    if isinstance(src, Partial):
        op = src.reduce_op
        if isinstance(dst, Replicate):
            return lambda x: functional.all_reduce(x, comm, op)
        assert isinstance(dst, Shard), "the table of steps has no other row"
        dim, sizes = dst.dim, chunk_sizes(spec.block(dst.dim, axis)[1], parts)
        return lambda x: functional.reduce_scatter(x, comm, dim, sizes, op)
    assert isinstance(src, Shard), "the table of steps has no other row"
    a = src.dim
    a_sizes = chunk_sizes(spec.block(a, axis)[1], parts)
    if isinstance(dst, Replicate):
        return lambda x: functional.all_gather(x, comm, a, a_sizes)
    assert isinstance(dst, Shard), "the table of steps has no other row"
    b = dst.dim
    b_sizes = chunk_sizes(spec.block(b, axis)[1], parts)
    return lambda x: functional.all_to_all(x, comm, b, a, b_sizes, a_sizes)


@dataclass(frozen=True, slots=True)
class Transition:
    """A plan made ready for this rank: the steps and what to do in each.

    Attributes:
        src: Spec before.
        dst: Spec after.
        steps: The steps, alike on all ranks.
        moves: This rank's part in each step.
    """

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]
    moves: tuple[Move, ...]

    @property
    def communicates(self) -> bool:
        """Whether any step moves data between ranks."""
        return any(s.verb != "local" for s in self.steps)

    @property
    def elements(self) -> float:
        """Elements sent per rank, all steps together (an average)."""
        return sum(s.elements for s in self.steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the steps on a local shard; the result is a plain local tensor."""
        x = plain(x)
        for move in self.moves:
            x = move(x)
        return x


def transition(src: Spec, dst: Spec) -> Transition:
    """The cached transition between two specs of one tensor on one mesh."""
    key = ("transition", dst)
    found = src.memo.get(key)
    if found is None:
        if src.coordinate is None:
            found = Transition(src, dst, (), ())
        else:
            steps = plan_steps(src.mesh, src.placements, dst.placements, src.shape)
            spec, moves = src, []
            for step in steps:
                moves.append(move_of(spec, step))
                after = list(spec.placements)
                after[step.axis] = step.dst
                spec = spec.replace(tuple(after))
            found = Transition(src, dst, steps, tuple(moves))
        src.memo[key] = found
    return found
