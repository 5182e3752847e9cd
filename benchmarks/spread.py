"""Medians, their uncertainty, and ratios of paired samples.

Neighbouring rounds share what else the machine does, so samples are not independent:
the bootstrap draws runs of neighbours, not single samples (moving blocks; Kuensch, The
Annals of Statistics 17, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and how sure it is.

    Attributes:
        median: Of the samples.
        low: 5 % quantile of the bootstrapped median: it lies above with 95 %.
        high: 95 % quantile of the bootstrapped median: it lies below with 95 %.
        first: First quartile of the samples themselves.
        third: Third quartile of the samples themselves.
    """

    median: float
    low: float
    high: float
    first: float
    third: float


def draw_medians(values: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Any:
    """Medians of ``draws`` resamplings, a numpy array; the same at each call.

    Args:
        values: At least one sample, in the order they were taken.
        draws: How many.
        seed: Of the drawing.

    Raises:
        ValueError: There is no sample.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        raise ValueError(
            "draw_medians: no samples, got an empty list, expected at least one. "
            "Give interleave at least one round."
        )
    block = max(1, round(math.sqrt(x.size)))
    starts = np.random.default_rng(seed).integers(
        0, x.size, size=(draws, -(-x.size // block))
    )
    picks = (starts[:, :, None] + np.arange(block)) % x.size
    return np.median(x[picks.reshape(draws, -1)[:, : x.size]], axis=1)


def spread_of(values: Sequence[float]) -> Spread:
    """Median of samples with its bounds and the quartiles of the samples.

    Example:
        >>> spread_of([2.0, 2.0, 2.0]).high
        2.0
    """
    medians = draw_medians(values)
    x = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(medians, (0.05, 0.95))
    first, middle, third = np.quantile(x, (0.25, 0.5, 0.75))
    return Spread(float(middle), float(low), float(high), float(first), float(third))


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], plus: float = 0.0
) -> Spread:
    """Median over the rounds of ``(ours - plus) / theirs``.

    Both were measured in one round, so what slows a round slows both.

    Args:
        ours: A sample per round.
        theirs: A sample per round, in the same order.
        plus: What ours may cost beyond theirs, in the samples' unit.

    Raises:
        ValueError: Not as many of the one as of the other.

    Example:
        >>> paired_ratio([1.0, 2.0], [2.0, 4.0]).median
        0.5
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"paired_ratio: samples that are no pairs, got {len(ours)} and "
            f"{len(theirs)}, expected equal numbers. Take both from one interleave."
        )
    return spread_of([(a - plus) / b for a, b in zip(ours, theirs)])
