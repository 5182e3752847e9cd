"""Switches that rule implicit communication and mixed operands; all nest."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from dtensor.errors import ShardingError
from dtensor.mesh.world import current_world

POLICIES = ("allow", "warn", "error")
_POLICY: ContextVar[str | None] = ContextVar("dtensor_redistribution", default=None)


@contextlib.contextmanager
def redistribution(policy: str) -> Iterator[None]:
    """Rule implicit communication inside: ``"allow"``, ``"warn"`` or ``"error"``.

    Outside of any such scope a rule may redistribute its operands in silence, and an
    op that has no rule warns once, with the bytes it gathers. What an op computes
    across ranks (the maximum and the sum of a softmax, the count of a mean loss) is not
    a redistribution and is always allowed.

    Example:
        >>> with redistribution("error"):
        ...     pass  # an op that would have to move an operand raises
    """
    if policy not in POLICIES:
        raise ValueError(
            f"redistribution: unknown policy, got {policy!r}, expected one of "
            f"{', '.join(POLICIES)}."
        )
    token = _POLICY.set(policy)
    try:
        yield
    finally:
        _POLICY.reset(token)


_PROMOTE: ContextVar[bool] = ContextVar("dtensor_promote_plain", default=False)


@contextlib.contextmanager
def promote_plain(placement: str | None = "replicate") -> Iterator[None]:
    """Take plain floating tensors among DTensors as whole values, alike on all ranks.

    Outside of such a scope they are an error: they could be shards.

    Args:
        placement: ``"replicate"``, or None to make them an error again inside.

    Example:
        >>> with promote_plain("replicate"):
        ...     pass  # dtensor * plain
    """
    if placement not in ("replicate", None):
        raise ValueError(
            f"promote_plain: unknown placement, got {placement!r}, expected "
            "'replicate' or None."
        )
    token = _PROMOTE.set(placement is not None)
    try:
        yield
    finally:
        _PROMOTE.reset(token)


def promotes() -> bool:
    """Whether a scope takes plain tensors as replicated."""
    return _PROMOTE.get()


class RedistributionWarning(UserWarning):
    """An op moved operands between ranks without being asked to."""


def judge(op: str, what: str, nbytes: float, mend: str, without_rule: bool) -> None:
    """Let the policy decide on an implicit redistribution, before anything moves.

    Args:
        op: Name of the op.
        what: The operands and their placements.
        nbytes: Bytes sent per rank, about.
        mend: The call that makes it explicit.
        without_rule: Whether the op has no rule and everything is gathered.
    """
    policy = _POLICY.get()
    if policy == "allow" or policy is None and not without_rule:
        return
    reason = "has no sharding rule and gathers" if without_rule else "redistributes"
    text = (
        f"{op}: {reason} its operands {what}, about {nbytes:.0f} bytes per rank. {mend}"
    )
    if policy == "error":
        raise ShardingError(text)
    warned = current_world().memo.setdefault("warned", set())
    if (op, policy) not in warned:
        warned.add((op, policy))
        warnings.warn(text, RedistributionWarning, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames up the first one is that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[
        0
    ] in ("dtensor", "torch"):
        level, frame = level + 1, frame.f_back
    return level
