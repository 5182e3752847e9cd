"""The exception that speaks of placements."""

from __future__ import annotations


class ShardingError(ValueError):
    """A layout that cannot be, or an operation that a layout does not allow.

    The message names the function, what it got, what it expected, and the call
    that mends it. It is raised on every rank alike, before anything is moved.
    """
