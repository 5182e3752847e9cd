"""What the tests of the guards share: values, layouts and a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
    simulate,
)

torch.set_num_threads(1)

PLACES = (Shard(0), Shard(1), Replicate(), Partial())


def gen(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal values, the same on every rank."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=dtype)


def line(n: int = 2) -> Any:
    """A mesh of one axis, named tp."""
    return init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))


def lay(x: torch.Tensor, *places: Any, mesh: Any = None) -> DTensor:
    """``x`` laid out over the ambient line; nothing is sent."""
    return distribute_tensor(x, mesh or line(), list(places), src_data_rank=None)


def ranks(n: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs on ``n`` simulated ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**kwargs: Any) -> None:
            simulate(test, ranks=n, kwargs=kwargs, timeout=180)

        return run

    return decorate


def refused(text: str, fn: Callable[[], Any], error: Any = ShardingError) -> None:
    """``fn`` raises, with a message that matches ``text``."""
    with pytest.raises(error, match=text):
        fn()


def same(got: Any, want: torch.Tensor, what: object = "") -> None:
    """The global value of ``got`` is ``want``."""
    if isinstance(got, DTensor):
        got = got.full_tensor()
    assert type(got) is torch.Tensor, what
    torch.testing.assert_close(
        got.detach(), want.detach(), msg=lambda m: f"{what}: {m}"
    )


def leaves(values: Sequence[torch.Tensor], places: Sequence[Any]) -> tuple[Any, Any]:
    """DTensor leaves and plain leaves of the same global values."""
    laid = [lay(v, p).requires_grad_() for v, p in zip(values, places, strict=True)]
    return laid, [v.clone().requires_grad_() for v in values]
