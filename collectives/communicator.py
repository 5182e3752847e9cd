"""The protocol every communicator follows, and the error they raise.

A communicator moves buffers between the ranks of one mesh axis. It takes and gives
plain tensors, and knows nothing of autograd or of distributed tensors.

Two layers: a ``Communicator`` is what callers see; a ``Channel`` is what a backend
implements, with arguments already checked and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from dtensor.collectives.reductions import Reduction


class Call(NamedTuple):
    """One call of a verb on one rank: what errors name and what ranks must agree on.

    A tuple, since one is made for every call and must cost little.

    Attributes:
        verb: The collective, for example ``"all_reduce"``.
        axis: Label of the mesh axis.
        rank: World rank of the caller.
        sequence: Number of this call among those of the same ranks, from one.
        shape: Shape of the tensor passed in.
        dtype: Its dtype, or None where no tensor is passed.
        agree: What must be the same on all ranks besides verb and dtype: reduction,
            root, counts or shape, whichever the verb has.
    """

    verb: str
    axis: str
    rank: int
    sequence: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    agree: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """The call in words, for messages."""
        text = (
            f"{self.verb} on axis {self.axis!r} (rank {self.rank}, call "
            f"{self.sequence}, shape {tuple(self.shape)}, dtype {dtype_name(self.dtype)}"
        )
        for name, value in self.agree:
            if name != "shape":
                text += f", {name} {value}"
        return text + ")"


def dtype_name(dtype: torch.dtype | None) -> str:
    """A dtype as messages name it: ``float32``, or ``none``."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


class CollectiveError(RuntimeError):
    """A collective could not be carried out.

    Attributes:
        rank: World rank that raised it.
        axis: Label of the mesh axis.
        verb: The collective.
        sequence: Number of the call among those of the same ranks, from one.
        shape: Shape of the tensor passed in.
        dtype: Its dtype, or None where no tensor is passed.
    """

    def __init__(self, call: Call, what: str) -> None:
        super().__init__(f"{call.verb}: {what} In {call}.")
        self.rank = call.rank
        self.axis = call.axis
        self.verb = call.verb
        self.sequence = call.sequence
        self.shape = tuple(call.shape)
        self.dtype = call.dtype


class Communicator(Protocol):
    """Moves plain tensors between the ranks of one axis.

    Every verb must be called by every rank of the axis, in the same order, with the
    same dtype. ``counts`` are elements per rank of the axis: zero and uneven ones are
    fine. Results are new contiguous tensors on the device of the input; all ranks get
    the same bits wherever all get the same value. The float8 types are reduced in
    float32 and rounded once; so are float16 and bfloat16 on the host, while NCCL rounds
    them after each addition.

    Attributes:
        rank: Position of this rank in the axis.
        size: Number of ranks in the axis.
        ranks: Their world ranks, in order.
        axis: Label of the axis, for messages and counts.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def axis(self) -> str: ...

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Fold the tensors of all ranks; same shape."""

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Join the elements of all ranks in rank order; 1-D, ``sum(counts)``."""

    def reduce_scatter(
        self, x: torch.Tensor, counts: Sequence[int], op: str = "sum"
    ) -> torch.Tensor:
        """Fold, and keep this rank's stretch; 1-D, ``counts[rank]``."""

    def all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> torch.Tensor:
        """Send stretch r to rank r, join what comes in rank order; 1-D."""

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """The tensor of position ``root``; all pass one of its shape and dtype."""

    def permute(
        self, x: torch.Tensor, dest: int | None, source: int | None, count: int
    ) -> torch.Tensor:
        """Send to ``dest``, receive ``count`` elements from ``source``; 1-D."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The (pickled) objects of all ranks, in rank order."""

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""


class Channel(Protocol):
    """What a backend implements: the verbs on checked, contiguous tensors.

    Attributes:
        sequence: Number of the last call.
        kind: Kind of device whose memory it reads; ``"cpu"``: others' is copied first.
        averages: Whether it folds an average; otherwise it gets a sum in its place.
        short: Floats of 16 bits and less that it folds as they are; others arrive
            widened.
    """

    sequence: int

    @property
    def kind(self) -> str: ...

    averages: ClassVar[bool]
    short: ClassVar[frozenset[torch.dtype]]

    def all_reduce(self, call: Call, x: torch.Tensor, row: Reduction) -> torch.Tensor:
        """Fold."""

    def all_gather(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...]
    ) -> torch.Tensor:
        """Join."""

    def reduce_scatter(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        """Fold and keep a stretch."""

    def all_to_all(
        self,
        call: Call,
        x: torch.Tensor,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
    ) -> torch.Tensor:
        """Exchange stretches."""

    def broadcast(self, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy from the root; the result has the shape of ``x``."""

    def permute(
        self,
        call: Call,
        x: torch.Tensor,
        dest: int | None,
        source: int | None,
        count: int,
    ) -> torch.Tensor:
        """Send and receive at most one buffer."""

    def barrier(self, call: Call) -> None:
        """Wait for all."""
