"""Factories: one global value for every placement, on the ambient mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor
from dtensor import Partial, Replicate, Shard, ShardingError, init_device_mesh, simulate
from dtensor.factories import arange, empty, full, ones, rand, randn, zeros

MAKERS: dict[str, tuple[Callable[..., Any], torch.Tensor | None]] = {
    "zeros": (lambda **k: zeros(5, 3, **k), torch.zeros(5, 3)),
    "zeros of a sequence": (lambda **k: zeros((5, 3), **k), torch.zeros(5, 3)),
    "ones": (lambda **k: ones(5, 3, **k), torch.ones(5, 3)),
    "full": (lambda **k: full((5, 3), 2.5, **k), torch.full((5, 3), 2.5)),
    "empty": (lambda **k: empty(5, 3, **k), None),
    "rand": (lambda **k: rand(5, 3, **k), None),
    "randn": (lambda **k: randn([5, 3], **k), None),
}


@pytest.mark.parametrize("name", MAKERS)
def test_global_value(name: str) -> None:
    make, want = MAKERS[name]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        choices = [Shard(0), Replicate(), Partial()]
        seen = want
        for places in itertools.product(choices, choices):
            torch.manual_seed(5)
            x = make(device_mesh=mesh, placements=places)
            assert x.shape == (5, 3)
            assert x.placements == places
            if name == "empty":
                continue
            got = x.full_tensor()
            if seen is None:
                seen = got
            assert torch.equal(got, seen), places

    simulate(program, 4)


def test_arange() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for bounds in ((5,), (2, 9), (1.0, 4.0, 0.25), (0,)):
            for place in (Shard(0), Replicate(), Partial()):
                x = arange(*bounds, device_mesh=mesh, placements=place)
                assert x.placements == (place,)
                assert torch.equal(x.full_tensor(), torch.arange(*bounds))
        with pytest.raises(TypeError, match="bounds are numbers"):
            arange(torch.tensor(3), device_mesh=mesh)

    simulate(program, 3)


def test_the_ambient_mesh_and_leaves() -> None:
    def program() -> None:
        with pytest.raises(ValueError, match=r"zeros: No active device mesh"):
            zeros(2)
        with init_device_mesh("cpu", (2,)):
            x = ones(4, requires_grad=True, placements=Shard(0))
            (x * 3).sum().backward()
            assert x.grad is not None
            assert x.grad.full_tensor().tolist() == [3.0] * 4  # type: ignore[attr-defined]
            assert zeros(3).placements == (Replicate(),)
            assert zeros(3, device="meta").device.type == "meta"
            with pytest.raises(ShardingError, match="shards a dim that is not there"):
                zeros(3, placements=Shard(1))
            with pytest.raises(ValueError, match="sizes are zero or more"):
                zeros(-1)
            with pytest.raises(TypeError, match="sizes are integers"):
                zeros(1.5)
            with pytest.raises(ShardingError, match="has no meaning for torch.bool"):
                ones(3, dtype=torch.bool, placements=Partial())

    simulate(program, 2)


def test_unlike_seeds_give_one_sample() -> None:
    def program() -> torch.Tensor:
        torch.manual_seed(dtensor.get_rank())
        with init_device_mesh("cpu", (2,)):
            return randn(4, 4).to_local()

    a, b = simulate(program, 2)
    assert torch.equal(a, b)
