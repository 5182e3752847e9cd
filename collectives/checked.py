"""The communicator callers see: checks arguments, counts, and prepares buffers.

A backend's channel below it gets contiguous tensors of dtypes it can reduce, in memory
that it can read, and never sees an axis of one rank. Whatever is refused is refused
from arguments that are the same on all ranks, before anything is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from dtensor.collectives.communicator import Call, Channel
from dtensor.collectives.counter import Tally
from dtensor.collectives.reductions import REDUCTIONS, Reduction, reduction

# Floats too short to add up in: reduced in the wide type and rounded once.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.complex32: torch.complex64,
}
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2})
# Same bits under sums, products and bitwise folds; torch adds only the signed ones.
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class Alone:
    """The channel of an axis of one rank: only a sequence number."""

    def __init__(self) -> None:
        self.sequence = 0


class CheckedCommunicator:
    """A ``Communicator`` over a backend's channel.

    Args:
        ranks: World ranks of the axis, in order.
        world_rank: World rank of the caller, one of ``ranks``.
        axis: Label for messages and counts.
        channel: The backend's channel, or an ``Alone`` where there is one rank.
        tally: Where calls are counted.
        device: The channel of tensors on the ranks' devices, None where these are
            copied to the host and back. Objects always go over ``channel``.
    """

    __slots__ = (
        "_channel",
        "_device",
        "_near",
        "_sequencer",
        "_tally",
        "axis",
        "rank",
        "ranks",
        "size",
    )

    def __init__(
        self,
        ranks: tuple[int, ...],
        world_rank: int,
        axis: str,
        channel: Channel | Alone,
        tally: Tally,
        device: Channel | None = None,
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)
        self.axis = axis
        self._sequencer = channel
        self._channel: Channel | None = None if isinstance(channel, Alone) else channel
        self._device = self._channel if device is None else device
        reads_host = device is not None and device.kind == "cpu"
        self._near = device if reads_host else self._channel
        self._tally = tally

    def __repr__(self) -> str:
        return f"Communicator(axis={self.axis!r}, rank={self.rank}, ranks={self.ranks})"

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Fold the tensors of all ranks; see ``Communicator``."""
        row = reduction("all_reduce", op, x.dtype)
        n = self.size
        sent = 2 * (n - 1) * x.numel() * x.element_size() // n
        call = self._call("all_reduce", x, sent, (("op", op),), same_shape=True)
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x)
        wide, row = _to_wire(x, row, channel)
        out = channel.all_reduce(call, wide, row)
        return _from_wire(out, x, op, n, row)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Join the elements of all ranks; see ``Communicator``."""
        counts = self._counts("all_gather", "counts", counts)
        self._same("all_gather", "elements of x", x.numel(), counts[self.rank])
        sent = (self.size - 1) * sum(counts) * x.element_size() // self.size
        call = self._call("all_gather", x, sent, (("counts", counts),))
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x).view(-1)
        return _back(channel.all_gather(call, _ready(x, channel), counts), x)

    def reduce_scatter(
        self, x: torch.Tensor, counts: Sequence[int], op: str = "sum"
    ) -> torch.Tensor:
        """Fold and keep this rank's stretch; see ``Communicator``."""
        row = reduction("reduce_scatter", op, x.dtype)
        counts = self._counts("reduce_scatter", "counts", counts)
        self._same("reduce_scatter", "elements of x", x.numel(), sum(counts))
        n = self.size
        sent = (n - 1) * x.numel() * x.element_size() // n
        agree = (("op", op), ("counts", counts))
        call = self._call("reduce_scatter", x, sent, agree)
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x).view(-1)
        wide, row = _to_wire(x, row, channel)
        out = channel.reduce_scatter(call, wide, counts, row)
        return _from_wire(out, x, op, n, row)

    def all_to_all(
        self,
        x: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> torch.Tensor:
        """Exchange stretches; see ``Communicator``."""
        send_counts = self._counts("all_to_all", "send_counts", send_counts)
        recv_counts = self._counts("all_to_all", "recv_counts", recv_counts)
        self._same("all_to_all", "elements of x", x.numel(), sum(send_counts))
        own = send_counts[self.rank]
        self._same("all_to_all", "own stretch sent", own, recv_counts[self.rank])
        sent = (x.numel() - own) * x.element_size()
        call = self._call("all_to_all", x, sent)
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x).view(-1)
        return _back(
            channel.all_to_all(call, _ready(x, channel), send_counts, recv_counts), x
        )

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """The tensor of position ``root``; see ``Communicator``."""
        root = self._position("broadcast", "root", root)
        sent = (self.size - 1) * x.numel() * x.element_size() // self.size
        call = self._call("broadcast", x, sent, (("root", root),), same_shape=True)
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x)
        return _back(channel.broadcast(call, _ready(x, channel), root), x)

    def permute(
        self, x: torch.Tensor, dest: int | None, source: int | None, count: int
    ) -> torch.Tensor:
        """Send to one rank, receive from one; see ``Communicator``."""
        if dest is not None:
            dest = self._position("permute", "dest", dest)
        if source is not None:
            source = self._position("permute", "source", source)
        else:
            self._same("permute", "count without a source", count, 0)
        if (dest == self.rank) != (source == self.rank):
            raise ValueError(
                f"permute: a rank that sends to itself receives from itself, got dest "
                f"{dest} and source {source} on position {self.rank} of axis "
                f"{self.axis!r}, expected both or neither. Pass None for no partner."
            )
        away = dest is not None and dest != self.rank
        sent = x.numel() * x.element_size() if away else 0
        call = self._call("permute", x, sent)
        if dest == self.rank and source == self.rank:
            self._same("permute", "count from itself", count, x.numel())
        channel = self._near if x.is_cpu else self._device
        if channel is None:
            return _copy(x).view(-1) if source is not None else x.new_empty(0)
        return _back(channel.permute(call, _ready(x, channel), dest, source, count), x)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks, pickled; see ``Communicator``."""
        data = pickle.dumps(obj)
        channel = self._channel
        if channel is None:
            self._call("all_gather_object", None, 0)
            return [pickle.loads(data)]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        one = (1,) * self.size
        call = self._call("all_gather_object", None, None)
        lengths = channel.all_gather(call, torch.tensor([len(data)]), one).tolist()
        counts = tuple(int(n) for n in lengths)
        sent = (self.size - 1) * sum(counts) // self.size
        call = self._call("all_gather_object", None, sent)
        joined = channel.all_gather(call, mine, counts).numpy().tobytes()
        objects, start = [], 0
        for n in counts:
            objects.append(pickle.loads(joined[start : start + n]))
            start += n
        return objects

    def barrier(self) -> None:
        """Wait until every rank of the axis is here; see ``Communicator``."""
        call = self._call("barrier", None, 0)
        if self._device is not None:
            self._device.barrier(call)

    # --------------------------------------------------------------------- checks
    def _call(
        self,
        verb: str,
        x: torch.Tensor | None,
        sent: int | None,
        agree: tuple[tuple[str, Any], ...] = (),
        *,
        same_shape: bool = False,
    ) -> Call:
        """Number and count the call (``sent`` None: part of another, not counted)."""
        self._sequencer.sequence += 1
        if sent is not None:
            self._tally.add(verb, self.axis, sent)
        shape = () if x is None else x.shape
        if same_shape:
            agree = (*agree, ("shape", shape))
        return Call(
            verb,
            self.axis,
            self.ranks[self.rank],
            self._sequencer.sequence,
            shape,
            None if x is None else x.dtype,
            agree,
        )

    def _counts(self, verb: str, name: str, counts: Sequence[int]) -> tuple[int, ...]:
        counts = tuple(counts)
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(
                f"{verb}: {name} do not fit the axis, got {counts} on axis "
                f"{self.axis!r}, expected {self.size} numbers of zero or more. "
                f"Give one count of elements per rank."
            )
        return counts

    def _same(self, verb: str, what: str, got: int, expected: int) -> None:
        if got != expected:
            raise ValueError(
                f"{verb}: {what}: got {got} on position {self.rank} of axis "
                f"{self.axis!r}, expected {expected}. Make tensor and counts agree."
            )

    def _position(self, verb: str, name: str, position: int) -> int:
        if isinstance(position, bool) or not 0 <= position < self.size:
            raise ValueError(
                f"{verb}: {name} is not a position of the axis, got {position!r} on "
                f"axis {self.axis!r}, expected 0 to {self.size - 1}. Positions count "
                f"along the axis; they are not world ranks."
            )
        return position


def _ready(x: torch.Tensor, channel: Channel) -> torch.Tensor:
    """The values of ``x``, contiguous, detached, in memory that ``channel`` reads."""
    if x.layout is not torch.strided or x.dtype in _QUANTIZED or x.is_meta:
        raise TypeError(
            f"collective: the tensor has no plain buffer, got layout {x.layout} on "
            f"{x.device}, expected a strided tensor with values. Use x.to_dense()."
        )
    x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if channel.kind == "cpu" and not x.is_cpu:
        x = x.cpu()
    if x._is_zerotensor():  # a gradient known to be zero, without memory
        return x.clone()
    return x.contiguous()


def _copy(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return x.clone(memory_format=torch.contiguous_format)


def _back(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result on the device of the input."""
    return out if x.is_cpu or not out.is_cpu else out.to(x.device)


def _to_wire(
    x: torch.Tensor, row: Reduction, channel: Channel
) -> tuple[torch.Tensor, Reduction]:
    """The tensor in a dtype that backends can fold, and the fold to use on it."""
    ready = _ready(x, channel)
    dtype = x.dtype
    if row.name == "avg" and not channel.averages:
        row = REDUCTIONS["sum"]
    if dtype in _WIDE:
        if dtype not in channel.short:
            ready = ready.to(_WIDE[dtype])
    elif dtype is torch.bool:
        ready = ready.view(torch.uint8)
    elif dtype in _SIGNED:
        if row.name not in ("max", "min"):
            ready = ready.view(_SIGNED[dtype])
        elif dtype is torch.uint64:
            # Flipping the top bit maps the order of uint64 to that of int64.
            ready = ready.view(torch.int64) ^ torch.iinfo(torch.int64).min
        else:
            ready = ready.to(torch.int64)
    return ready, row


def _from_wire(
    out: torch.Tensor, x: torch.Tensor, op: str, n: int, row: Reduction
) -> torch.Tensor:
    """Undo ``_to_wire`` on the folded result; an average is divided before rounding."""
    dtype = x.dtype
    if op != row.name:  # avg, folded as a sum
        out = out.div_(n)
    if out.dtype is not dtype:
        if dtype is torch.uint64 and op in ("max", "min"):
            out = (out ^ torch.iinfo(torch.int64).min).view(dtype)
        elif out.element_size() == x.element_size() and dtype not in _WIDE:
            out = out.view(dtype)
        else:
            out = out.to(dtype)
    return _back(out, x)
