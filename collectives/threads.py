"""Ranks as threads of one process: the exchange they meet in, and their turns.

One rank runs at a time. It keeps its turn until it waits in a collective or ends, and
the ranks that can go on take theirs in a fixed order. So a simulated program is
deterministic, a mismatch or a deadlock is seen the moment it happens, and each rank
can have random number generators of its own although torch has one per process: they
are exchanged where the turn passes on.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from dtensor.collectives.communicator import Call, CollectiveError
from dtensor.collectives.reductions import Reduction

_Combine = Callable[[list[Any]], list[Any]]


class _Gate:
    """Where one thread of one rank waits for its turn."""

    __slots__ = ("lock", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        self.lock.acquire()


class _Round:
    """One collective that some of its ranks have reached."""

    __slots__ = ("calls", "error", "gates", "posts", "ranks", "results")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: dict[int, Call] = {}
        self.posts: dict[int, Any] = {}
        self.gates: dict[int, _Gate] = {}
        self.results: list[Any] = []
        self.error: str | None = None


class Generators:
    """The states of torch's, Python's and NumPy's global generators.

    NumPy's is slow to read and write, so it is touched only where it moved: a draw
    changes the words of its Mersenne twister, save where it hands out the second half
    of a pair of normals.
    """

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy: Any = None
        self._words: bytes | None = None

    def read(self) -> tuple[torch.Tensor, Any, Any]:
        """The present states."""
        words = self._twister()
        if words is None or words != self._words or self._numpy[3]:
            self._numpy, self._words = np.random.get_state(), words
        self._python = random.getstate()
        return torch.get_rng_state(), self._python, self._numpy

    def write(self, states: tuple[torch.Tensor, Any, Any]) -> None:
        """Put states back; ``read`` must have been called since the last draw."""
        torch.set_rng_state(states[0])
        if states[1] is not self._python:
            random.setstate(states[1])
            self._python = states[1]
        if states[2] is not self._numpy:
            np.random.set_state(states[2])
            self._numpy, self._words = states[2], self._twister()

    @staticmethod
    def _twister() -> bytes | None:
        source: Any = getattr(np.random, "get_bit_generator")()  # noqa: B009 - no stub
        if not isinstance(source, np.random.MT19937):
            return None
        # 624 words and a position.
        return ctypes.string_at(source.ctypes.state_address, 4 * 625)


class Hub:
    """What the ranks of one simulated world share.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: int | None = None
        self._lock = threading.Lock()
        self._running: int | None = None
        self._ready: deque[_Gate] = deque()
        self._rounds: dict[tuple[tuple[int, ...], int], _Round] = {}
        self._ended: dict[int, str] = {}
        self._over: str | None = None
        self._free = False
        self._generators = Generators()
        self._states = [self._generators.read()] * size

    # ----------------------------------------------------------------- life of a rank
    def seat(self, rank: int) -> _Gate:
        """Queue a rank for its first turn; its thread must acquire the gate's lock."""
        gate = _Gate(rank)
        self._ready.append(gate)
        return gate

    def start(self) -> None:
        """Give the first rank its turn."""
        with self._lock:
            self._pass_on()

    def over(self) -> bool:
        """Whether the world was stopped, or a rank has failed."""
        return self._over is not None

    def end(self, rank: int, error: BaseException | None) -> None:
        """A rank's function returned or raised: release who waits for it."""
        with self._lock:
            if error is None:
                self._ended[rank] = f"rank {rank} has ended"
            else:
                kind = type(error).__name__
                self._ended[rank] = f"rank {rank} raised {kind}"
                if self.failed is None and self._over is None:
                    self.failed = rank
                    self._over = self._ended[rank]
            for round_ in list(self._rounds.values()):
                if self._over is not None:
                    self._fail(round_, f"{self._over} before it came here.")
                elif rank in round_.ranks:
                    text = f"{self._ended[rank]} and will not come here."
                    self._fail(round_, text)
            if self._running == rank:
                self._running = None
            self._pass_on()

    def stop(self, why: str) -> None:
        """Release every waiting rank at once; called from outside the world."""
        with self._lock:
            if self._over is None:
                self._over = why
            for round_ in list(self._rounds.values()):
                self._fail(round_, f"{why}.")
            self._free = True
            while self._ready:
                self._ready.popleft().lock.release()

    def states(self) -> list[str]:
        """What each rank is doing, in words."""
        with self._lock:
            waits = {
                rank: f"rank {rank} waits in {round_.calls[rank]}"
                for round_ in self._rounds.values()
                for rank in round_.gates
            }
            rows = []
            for rank in range(self.size):
                if rank in waits:
                    rows.append(waits[rank])
                elif rank in self._ended:
                    rows.append(self._ended[rank])
                elif rank == self._running:
                    rows.append(f"rank {rank} runs")
                else:
                    rows.append(f"rank {rank} waits for its turn")
            return rows

    # -------------------------------------------------------------------- the exchange
    def exchange(
        self, ranks: tuple[int, ...], call: Call, post: Any, combine: _Combine
    ) -> Any:
        """Wait for all of ``ranks``, and return this rank's part of the result.

        Args:
            ranks: World ranks that take part, in axis order.
            call: What this rank calls.
            post: What it brings.
            combine: Makes the results of all ranks from the posts of all ranks, in
                axis order; runs once, on the rank that comes last. It raises
                ``ValueError`` where the posts do not fit together.

        Raises:
            CollectiveError: The ranks disagree, a rank has gone, or none can go on.
        """
        me = call.rank
        with self._lock:
            if self._over is not None:
                raise CollectiveError(call, f"{self._over}.")
            for rank in ranks:
                if rank in self._ended:
                    text = f"{self._ended[rank]} and will not come here."
                    raise CollectiveError(call, text)
            key = (ranks, call.sequence)
            round_ = self._rounds.get(key)
            if round_ is None:
                round_ = self._rounds[key] = _Round(ranks)
            for other in round_.calls.values():
                if not _alike(other, call):
                    text = f"the ranks disagree, got {call}, and {other}."
                    self._fail(round_, text)
                    raise CollectiveError(call, text)
            round_.calls[me] = call
            round_.posts[me] = post
            if len(round_.posts) == len(ranks):
                try:
                    posts = [round_.posts[rank] for rank in ranks]
                    round_.results = combine(posts)
                except ValueError as error:
                    self._fail(round_, str(error))
                    raise CollectiveError(call, str(error)) from None
                except BaseException as error:
                    self._fail(round_, f"rank {me} raised {type(error).__name__}.")
                    raise
                self._release(round_)
                return round_.results[ranks.index(me)]
            gate = round_.gates[me] = _Gate(me)
            self._states[me] = self._generators.read()
            if self._running == me:
                self._running = None
            self._pass_on()
        gate.lock.acquire()
        if round_.error is not None:
            raise CollectiveError(call, round_.error)
        return round_.results[ranks.index(me)]

    # ------------------------------------------------- with the lock held, from here on
    def _fail(self, round_: _Round, text: str) -> None:
        round_.error = text
        self._release(round_)

    def _release(self, round_: _Round) -> None:
        """Let everyone in the round go on, in axis order."""
        for key in [k for k, r in self._rounds.items() if r is round_]:
            del self._rounds[key]
        for rank in round_.ranks:
            gate = round_.gates.pop(rank, None)
            if gate is None:
                continue
            if self._free:
                gate.lock.release()
            else:
                self._ready.append(gate)

    def _pass_on(self) -> None:
        """Give the turn to the next rank that can go on, if nobody has it."""
        if self._running is not None or self._free:
            return
        if not self._ready and self._rounds:
            waits = [
                str(round_.calls[rank])
                for round_ in self._rounds.values()
                for rank in sorted(round_.gates)
            ]
            ended = sorted(self._ended.values())
            text = f"no rank can go on: {'; '.join(waits + ended)}."
            for round_ in list(self._rounds.values()):
                self._fail(round_, text)
        if self._ready:
            gate = self._ready.popleft()
            self._running = gate.rank
            self._generators.write(self._states[gate.rank])
            gate.lock.release()


def _alike(one: Call, other: Call) -> bool:
    return (one.verb, one.dtype, one.agree) == (other.verb, other.dtype, other.agree)


class ThreadsChannel:
    """The verbs among the threads of one hub.

    Args:
        hub: What the simulated ranks share.
        ranks: World ranks of the axis, in order.
        rank: Position of this rank among them.
    """

    kind: ClassVar[str] = "cpu"
    averages: ClassVar[bool] = False
    short: ClassVar[frozenset[torch.dtype]] = frozenset()

    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int) -> None:
        self.sequence = 0
        self._hub = hub
        self._ranks = ranks
        self._rank = rank

    def all_reduce(self, call: Call, x: torch.Tensor, row: Reduction) -> torch.Tensor:
        """Fold in axis order, once for all."""

        def combine(posts: list[torch.Tensor]) -> list[torch.Tensor]:
            total = _fold(posts, row)
            return [total] + [total.clone() for _ in posts[1:]]

        return self._meet(call, x, combine)

    def all_gather(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...]
    ) -> torch.Tensor:
        """Join, once for all."""

        def combine(posts: list[torch.Tensor]) -> list[torch.Tensor]:
            joined = torch.cat([post.view(-1) for post in posts])
            return [joined] + [joined.clone() for _ in posts[1:]]

        return self._meet(call, x, combine)

    def reduce_scatter(
        self, call: Call, x: torch.Tensor, counts: tuple[int, ...], row: Reduction
    ) -> torch.Tensor:
        """Fold in axis order, then cut."""

        def combine(posts: list[torch.Tensor]) -> list[torch.Tensor]:
            total = _fold(posts, row).view(-1)
            return [piece.clone() for piece in total.split_with_sizes(list(counts))]

        return self._meet(call, x, combine)

    def all_to_all(
        self,
        call: Call,
        x: torch.Tensor,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
    ) -> torch.Tensor:
        """Cut what each sends, join what each receives."""
        post = (x.view(-1).split_with_sizes(list(send_counts)), recv_counts)

        def combine(posts: list[Any]) -> list[torch.Tensor]:
            for i, (pieces, _) in enumerate(posts):
                for j, (_, expected) in enumerate(posts):
                    if pieces[j].numel() != expected[i]:
                        raise ValueError(
                            f"the counts disagree, rank {self._ranks[i]} sends "
                            f"{pieces[j].numel()} elements to rank {self._ranks[j]}, "
                            f"which expects {expected[i]}."
                        )
            return [
                torch.cat([pieces[j] for pieces, _ in posts]) for j in range(len(posts))
            ]

        return self._meet(call, post, combine)

    def broadcast(self, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
        """Copy from the root."""

        def combine(posts: list[torch.Tensor]) -> list[torch.Tensor]:
            return [posts[root].clone() for _ in posts]

        return self._meet(call, x, combine)

    def permute(
        self,
        call: Call,
        x: torch.Tensor,
        dest: int | None,
        source: int | None,
        count: int,
    ) -> torch.Tensor:
        """Send and receive at most one buffer."""

        def combine(posts: list[Any]) -> list[torch.Tensor]:
            results = []
            for i, (mine, to, origin, expected) in enumerate(posts):
                if to is not None and posts[to][2] != i:
                    raise ValueError(
                        f"the partners disagree, rank {self._ranks[i]} sends to rank "
                        f"{self._ranks[to]}, which does not receive from it."
                    )
                if origin is None:
                    results.append(mine.new_empty(0))
                    continue
                theirs, their_dest = posts[origin][:2]
                if their_dest != i or theirs.numel() != expected:
                    raise ValueError(
                        f"the partners disagree, rank {self._ranks[i]} expects "
                        f"{expected} elements from rank {self._ranks[origin]}, which "
                        f"sends {theirs.numel()} to "
                        f"{'nobody' if their_dest is None else self._ranks[their_dest]}."
                    )
                results.append(theirs.reshape(-1).clone())
            return results

        return self._meet(call, (x, dest, source, count), combine)

    def barrier(self, call: Call) -> None:
        """Wait for all."""
        self._hub.exchange(self._ranks, call, None, lambda posts: posts)

    def _meet(self, call: Call, post: Any, combine: _Combine) -> torch.Tensor:
        result = self._hub.exchange(self._ranks, call, post, combine)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"exchange: not a tensor, got {type(result).__name__}.")
        return result


def _fold(posts: list[torch.Tensor], row: Reduction) -> torch.Tensor:
    total = posts[0]
    for post in posts[1:]:
        total = row.function(total, post)
    return total
