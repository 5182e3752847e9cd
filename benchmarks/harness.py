"""What a suite is made of: measures, their bars, and samples taken in turn.

A suite is a function from ``Options`` to measures (``registry.py`` lists them). Every
rank runs it, and rank 0's result counts. All candidates of a measure (``"ours"`` and its
peers) are timed within each round, in an order drawn anew, alike on all ranks: what else
the machine does meets all of them, and ratios are taken per round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtensor.benchmarks.spread import Spread, paired_ratio, spread_of

OURS = "ours"
Call = Callable[[], object]
Samples = dict[str, list[float]]


class Ranks(Protocol):
    """What the harness needs of the ranks that measure together."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def barrier(self) -> None:
        """Wait for all; called by all."""

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one; called by all."""

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks; called by all."""


class Alone:
    """A world of one."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        """There is no one to wait for."""

    def slowest(self, values: Sequence[float]) -> list[float]:
        """This rank's own."""
        return list(values)

    def share(self, value: Any) -> Any:
        """This rank's own."""
        return value


@dataclass(frozen=True, slots=True)
class Bar:
    """What ours must reach: ``ours <= ratio * peer + plus``.

    Attributes:
        peer: Name of the peer, or "" for a limit by itself (``ours <= plus``).
        ratio: Of ours to the peer.
        plus: What is allowed beyond that, in the unit of the samples.
        upper: Whether the 95 % upper bound of the median must reach it, instead of the
            median.
    """

    peer: str
    ratio: float = 0.0
    plus: float = 0.0
    upper: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """Samples of one thing, ours and those of the peers.

    Attributes:
        label: What was measured; with ``group`` unique within the suite.
        samples: Per candidate a list of values, "ours" among them; entry i of all
            lists is of round i. Lower is better.
        bars: What must be reached.
        extras: Further columns, such as bytes.
        group: Heading under which the table shows it.
        unit: ``"s"``, ``"B"``, or ``"x"`` for what is a ratio already.
        x: Place on the axis of a plot (bytes, ranks ...), where there is one.
    """

    label: str
    samples: Mapping[str, Sequence[float]]
    bars: tuple[Bar, ...] = ()
    extras: Mapping[str, str | float] = field(default_factory=dict)
    group: str = ""
    unit: str = "s"
    x: float | None = None

    @property
    def name(self) -> str:
        """Group and label."""
        return f"{self.group}: {self.label}" if self.group else self.label

    @property
    def peers(self) -> list[str]:
        """All candidates but ours, in order."""
        return [name for name in self.samples if name != OURS]

    def spread(self, candidate: str = OURS) -> Spread:
        """Median and spread of a candidate."""
        return spread_of(self.samples[candidate])

    def ratio(self, peer: str, plus: float = 0.0) -> Spread:
        """Ours by the peer's, per round."""
        return paired_ratio(self.samples[OURS], self.samples[peer], plus)

    def reached(self, bar: Bar) -> bool | None:
        """Whether a bar is reached; None where its peer was not measured."""
        if not bar.peer:
            spread, limit = self.spread(), bar.plus
        elif bar.peer not in self.samples:
            return None
        else:
            spread, limit = self.ratio(bar.peer, bar.plus), bar.ratio
        return (spread.high if bar.upper else spread.median) <= limit


@dataclass(frozen=True, slots=True)
class Options:
    """What a suite is asked for.

    Attributes:
        ranks: The ranks that run it.
        quick: Fewer sizes, for a look that takes a minute.
        tiny: The smallest sizes alone: whether it works, not how fast. Implies quick.
        rounds: Samples of each candidate.
        device: ``"cpu"`` or ``"cuda"``.
        tell: Called with (done, total, what comes next) as the suite goes on.
    """

    ranks: Ranks = field(default_factory=Alone)
    quick: bool = False
    tiny: bool = False
    rounds: int = 25
    device: str = "cpu"
    tell: Callable[[int, int, str], None] = lambda done, total, label: None


def seconds(body: Call, inner: int, wait: Call | None = None) -> float:
    """Seconds per call of ``inner`` calls in a row.

    Args:
        body: What is timed.
        inner: How many calls.
        wait: Called at the end, within the time: waits for what the calls left
            running, as ``torch.cuda.synchronize``.
    """
    calls = range(inner)
    start = time.perf_counter()
    for _ in calls:
        body()
    if wait is not None:
        wait()
    return (time.perf_counter() - start) / inner


def calibrate(
    calls: Mapping[str, Call],
    ranks: Ranks,
    least: float = 0.005,
    most: int = 1000,
    wait: Call | None = None,
) -> dict[str, int]:
    """Calls per sample so that a sample takes at least ``least`` seconds.

    Warms up as well. Called by all ranks; gives the same on all.

    Args:
        calls: The candidates.
        ranks: Who measures.
        least: Seconds.
        most: Calls at most.
        wait: As in ``seconds``.
    """
    counts = {}
    for name, body in calls.items():
        seconds(body, 1, wait)
        count = 1
        while True:
            ranks.barrier()
            took = ranks.slowest([seconds(body, count, wait)])[0] * count
            if took >= least or count >= most:
                break
            count = min(most, max(2 * count, round(count * least / max(took, 1e-7))))
        counts[name] = count
    return counts


def interleave(
    calls: Mapping[str, Call],
    rounds: int,
    inner: int | Mapping[str, int] | None = None,
    ranks: Ranks | None = None,
    seed: int = 0,
    wait: Call | None = None,
) -> Samples:
    """Time all candidates in turn, once a round, in an order drawn for each round.

    Called by all ranks. A sample begins with a barrier, and counts as the slowest
    rank's time. Garbage is collected between rounds, not within samples.

    Args:
        calls: The candidates by name.
        rounds: Samples of each.
        inner: Calls per sample, of all or by name; None: ``calibrate`` finds them.
        ranks: Who measures; None is this process alone.
        seed: Of the order.
        wait: As in ``seconds``.

    Returns:
        Seconds per call, a list per candidate; the same on all ranks.

    Example:
        >>> sorted(interleave({"ours": int, "dict": dict}, rounds=2, inner=3))
        ['dict', 'ours']
    """
    group: Ranks = Alone() if ranks is None else ranks
    if inner is None:
        inner = calibrate(calls, group, wait=wait)
    counts = dict.fromkeys(calls, inner) if isinstance(inner, int) else dict(inner)
    out: Samples = {name: [] for name in calls}
    drawn = random.Random(seed)
    order = list(calls)
    for name in order:
        seconds(calls[name], 3, wait)  # plans are made, caches filled
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # so that a collection looks at what the rounds made alone
    gc.disable()
    try:
        for _ in range(rounds):
            drawn.shuffle(order)
            for name in order:
                group.barrier()
                out[name].append(seconds(calls[name], counts[name], wait))
            gc.collect()
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
    return {name: group.slowest(values) for name, values in out.items()}


def summarize(
    measures: Sequence[Measure],
    peer: str,
    bars: tuple[Bar, ...] = (),
    label: str = "",
    group: str = "",
) -> Measure:
    """The median, over several measures, of ours by a peer's, per round.

    Args:
        measures: With equally many rounds.
        peer: All of them have it.
        bars: Against ``peer``, whose own value is 1 here.
        label: What the row says.
        group: Its heading.
    """
    ratios: list[list[float]] = [
        [a / b for a, b in zip(m.samples[OURS], m.samples[peer])] for m in measures
    ]
    middle = [spread_of(row).median for row in zip(*ratios)]
    label = label or f"median of {len(measures)}, ours / {peer}"
    samples: dict[str, Any] = {OURS: middle, peer: [1.0] * len(middle)}
    return Measure(label, samples, bars, group=group, unit="x")
