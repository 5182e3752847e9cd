"""What got slower than an earlier run, beyond the noise of both runs.

Ours is compared by its ratio to each peer, which was timed in the same rounds, so that a
slower machine is no regression. The noise has two parts: the bounds of each median, and
what moved from run to run although its code did not: the peers, against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dtensor.benchmarks.harness import OURS, Measure
from dtensor.benchmarks.results import Result
from dtensor.benchmarks.spread import Spread, paired_ratio
from dtensor.benchmarks.tables import Table

FLOOR = 0.03  # changes below are never told
_SETTING = ("CPU", "cores", "python", "torch", "mpi4py", "MPI", "GPU")
_HEAD = ("measure", "against", "was", "is", "change", "noise")


@dataclass(frozen=True, slots=True)
class Change:
    """A measure in both runs.

    Attributes:
        suite: Its suite.
        name: Of the measure.
        against: The peers it was compared by, or "itself".
        was: The earlier value: ratio to the peer, or ours in the measure's unit.
        now: The later one.
        noise: Relative change that this comparison cannot tell from nothing.
    """

    suite: str
    name: str
    against: str
    was: float
    now: float
    noise: float

    @property
    def factor(self) -> float:
        """Later by earlier; above 1 is slower."""
        if self.was == 0:
            return 1.0 if self.now == 0 else math.inf
        return self.now / self.was

    @property
    def slower(self) -> bool:
        """Whether it is a regression."""
        return self.factor > 1 + self.noise

    @property
    def faster(self) -> bool:
        """Whether it is a gain."""
        return self.factor * (1 + self.noise) < 1


def _shared(old: Result, new: Result) -> Iterator[tuple[str, Measure, Measure]]:
    """(suite, earlier, later) of the measures in both."""
    for name, suite in new.suites.items():
        if name not in old.suites:
            continue
        before = {m.name: m for m in old.suites[name].measures}
        for later in suite.measures:
            if later.name in before:
                yield name, before[later.name], later


def _peers(before: Measure, later: Measure) -> list[str]:
    return [p for p in later.peers if p in before.samples]


def noise_of_suites(old: Result, new: Result) -> dict[str, float]:
    """Per suite the relative change that its peers show from run to run.

    The 95 % quantile over the measures of how far the ratio of two peers moved; of how
    far the one peer moved, where there is one; at least ``FLOOR``.
    """
    moved: dict[str, list[float]] = {}
    for suite, before, later in _shared(old, new):
        moves = moved.setdefault(suite, [])
        peers = _peers(before, later)
        if later.unit != "s" or not peers:
            continue
        values = []
        for m in (before, later):
            first = m.samples[peers[0]]
            second = m.samples[peers[1]] if len(peers) > 1 else [1.0] * len(first)
            values.append(paired_ratio(first, second).median)
        if min(values) > 0:
            moves.append(abs(math.log(values[1] / values[0])))
    return {
        suite: max(FLOOR, math.expm1(float(np.quantile(moves, 0.95))) if moves else 0.0)
        for suite, moves in moved.items()
    }


def _width(spread: Spread) -> float:
    """Half of the relative width of a median's bounds."""
    return (spread.high - spread.low) / (2 * spread.median) if spread.median else 0.0


def compare(old: Result, new: Result) -> list[Change]:
    """Compare the measures that both runs have.

    Of several peers the one counts against which the change is smallest beside its
    noise: a peer that got faster by chance makes no regression.

    Args:
        old: The earlier run.
        new: The later one.

    Returns:
        A change per measure, in the later run's order.
    """
    noise, out = noise_of_suites(old, new), []
    for suite, before, later in _shared(old, new):
        found = []
        for peer in _peers(before, later) or [OURS]:
            if peer == OURS:
                was, now = before.spread(), later.spread()
            else:
                was, now = before.ratio(peer), later.ratio(peer)
            base = FLOOR if later.unit == "B" else noise[suite]
            total = math.hypot(base, _width(was), _width(now))
            against = "itself" if peer == OURS else peer
            found.append(
                Change(suite, later.name, against, was.median, now.median, total)
            )
        out.append(min(found, key=lambda c: c.factor / (1 + c.noise)))
    return out


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What the runs' environments differ in, in words."""
    return [
        f"{key}: {old.get(key, 'none')} -> {new.get(key, 'none')}"
        for key in _SETTING
        if old.get(key) != new.get(key)
    ]


def missing(old: Result, new: Result) -> list[str]:
    """Suites and measures of the earlier run that a suite of the later one lacks."""
    out = [f"suite {name} failed" for name in new.failures]
    for name, suite in new.suites.items():
        now = {m.name for m in suite.measures}
        if name in old.suites:
            lost = [m.name for m in old.suites[name].measures if m.name not in now]
            out += [f"{name}: {label}" for label in lost]
    return out


def table_of(changes: list[Change], title: str) -> Table:
    """Changes as a table, the largest first."""
    rows = [
        (
            f"{c.suite}: {c.name}",
            c.against,
            f"{c.was:.3g}",
            f"{c.now:.3g}",
            f"{100 * (c.factor - 1):+.0f} %",
            f"{100 * c.noise:.0f} %",
        )
        for c in sorted(changes, key=lambda c: -c.factor)
    ]
    return Table(title, _HEAD, tuple(rows))
