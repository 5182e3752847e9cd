"""Buffers of results come back to the pool once nobody holds them."""

from typing import Any

import pytest
import torch

from dtensor.collectives.memory import SMALLEST, Pool

COUNT = SMALLEST // 4


def test_a_buffer_is_given_again_once_it_is_free() -> None:
    pool = Pool()
    x = pool.empty(COUNT, torch.float32)
    first = x.data_ptr()
    y = pool.empty(COUNT, torch.float32)
    assert y.data_ptr() != first and x.shape == (COUNT,) and pool.held == 2 * SMALLEST
    del x
    assert pool.empty(COUNT // 2, torch.float64).data_ptr() == first
    assert pool.held == 2 * SMALLEST


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x[1:2],
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: x.detach(),
        lambda x: memoryview(x.numpy()),
    ],
)
def test_whoever_holds_the_memory_keeps_it(hold: Any) -> None:
    pool = Pool()
    x = pool.empty(COUNT, torch.float32)
    first, held = x.data_ptr(), hold(x)
    del x
    assert pool.empty(COUNT, torch.float32).data_ptr() != first
    del held
    assert pool.empty(COUNT, torch.float32).data_ptr() == first


def test_autograd_holds_what_it_saved() -> None:
    pool = Pool()
    x = pool.empty(COUNT, torch.float32)
    w = x.requires_grad_()
    out = (w * w).sum()
    first = x.data_ptr()
    del x, w
    assert pool.empty(COUNT, torch.float32).data_ptr() != first  # saved for backward
    out.backward()


def test_small_ones_are_torchs_and_large_ones_are_not_kept() -> None:
    pool = Pool(limit=2 * SMALLEST)
    assert pool.empty(COUNT - 1, torch.float32).numel() == COUNT - 1
    assert pool.empty(4 * COUNT, torch.float32).numel() == 4 * COUNT
    assert pool.held == 0
    kept = [pool.empty(COUNT, torch.float32) for _ in range(3)]
    assert pool.held == 2 * SMALLEST and len({x.data_ptr() for x in kept}) == 3
    del kept
    pool.empty(2 * COUNT, torch.float32)  # idle ones make room
    assert pool.held == 2 * SMALLEST


def test_a_resized_buffer_is_not_taken_for_its_old_size() -> None:
    pool = Pool()
    x = pool.empty(COUNT, torch.float32)
    x.resize_(4 * COUNT)
    del x
    y = pool.empty(COUNT, torch.float32)
    assert y.untyped_storage().nbytes() == SMALLEST
