"""Writes into views that broke once: every one reaches the base or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_helpers import gen, lay, ranks, refused

from dtensor import Shard, redistribution

WRITES: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda v: v.normal_(),
    "uniform_": lambda v: v.detach().uniform_(),
    "init": lambda v: torch.nn.init.normal_(v),
    "dropout_": lambda v: torch.dropout_(v, 0.5, True),
    "F.dropout": lambda v: F.dropout(v, 0.5, True, inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
@ranks(2)
def test_random_writes_into_a_gathered_view_are_refused(name: str) -> None:
    """They filled the gathered copy; the base kept its values, without an error."""
    with redistribution("allow"):
        base = lay(gen(4, 4), Shard(0))
        refused("cannot reach the base", lambda: WRITES[name](base[1]))
        WRITES[name](base[:, 1])  # a view of the shard: reaches the base
        assert not torch.equal(base.full_tensor(), gen(4, 4))
