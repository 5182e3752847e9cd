"""fully_shard: one process's numbers, whole parameters only while they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from sharded_helpers import (
    FSDP,
    R,
    check_gradients,
    local_loss_on,
    loss_on,
    mesh_of,
    mine,
    serial,
    unit_bytes,
    watched,
)
from sharded_runs import SERIAL, WAYS, distance, lay_out, make_model, train
from torch import Tensor, nn

from dtensor import (
    count_collectives,
    distribute_tensor,
    no_grad_sync,
    simulate,
)
from dtensor.styles.saved import state_of
from dtensor.styles.unit import UNIT

import gpt  # isort: skip - found by way of sharded_runs


@cache
def serial_run() -> list[Tensor]:
    return simulate(lambda: train(SERIAL), ranks=1, timeout=300)[0]


@pytest.mark.parametrize("name", WAYS)
def test_twenty_steps_equal_one_process(name: str) -> None:
    """AdamW, dropout, two micro-batches; losses and parameters."""
    way, want = WAYS[name], serial_run()
    ranks = torch.Size(way.shape).numel()
    for got in simulate(lambda: train(way), ranks=ranks, timeout=300):
        assert distance(got, want) < 1e-9


@pytest.mark.mpi
def test_twenty_steps_equal_one_process_under_mpiexec(
    mpi_run: Callable[..., Any],
) -> None:
    done = mpi_run("fully_shard_equals_serial.py", 4, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 4


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_parameters_are_a_piece_and_one_open_block(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """In forward and backward alike: 1/N, the model's own unit, and one block."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=4, dim=16, vocab=16, context=8)
        total = sum(p.numel() for p in model.parameters())
        lay_out(model, mesh, FSDP)
        held = sum(p.to_local().numel() for p in model.parameters())
        # All dims but that of the scalars' kind divide by four here.
        assert held == total // 4
        buffers = mine(found)
        block, own = unit_bytes(model.blocks[0]), unit_bytes(model)
        forward, backward = [], []

        def probe(module: nn.Module, args: Any, out: Tensor) -> None:
            forward.append(buffers.bytes())
            if out.requires_grad:
                out.register_hook(lambda g: backward.append(buffers.bytes()))

        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Dropout)):
                module.register_forward_hook(probe)
        for _ in range(2):
            forward.clear(), backward.clear()
            loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
            assert max(forward) == own + block and len(forward) == 4 * 8 + 2
            assert buffers.bytes() == 0  # autograd holds none
            loss.backward()
            assert max(backward) == own + block and len(backward) == len(forward)
            assert buffers.bytes() == 0
            with torch.no_grad():
                loss_on(model, mesh) if not local else local_loss_on(model, mesh)
            assert buffers.bytes() == 0
        assert not state_of(model.head.weight._spec.world).buffers

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)


@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_collectives_of_a_step(local: bool, keep: bool) -> None:
    """Per unit one all-gather forward, one backward, one reduce-scatter."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP, reshard_after_forward=not keep)
        units = 3 + 1
        for _ in range(2):
            with count_collectives() as forward:
                loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
            assert forward.calls("all_gather", "dp") == units
            assert forward.calls() == units + (0 if local else 1)  # the loss itself
            with count_collectives() as backward:
                loss.backward()
            gathers = 0 if keep else units
            assert backward.calls("all_gather", "dp") == gathers
            assert backward.calls("reduce_scatter", "dp") == units
            assert backward.calls() == gathers + units
            size = sum(p.numel() for p in model.parameters()) * 8
            assert backward.bytes("reduce_scatter") == size * 3 // 4
            assert forward.bytes("all_gather") == size * 3 // 4
        with torch.no_grad(), count_collectives() as counted:
            loss_on(model, mesh)
        # With nothing in between, what the last one kept is not what it was told.
        assert counted.calls("all_gather") == units

    simulate(program, ranks=4)


def test_hybrid_reduces_once_over_the_replicas() -> None:
    way = WAYS["hybrid"]

    def program() -> None:
        mesh = mesh_of(2, 2, names=way.names)
        model = make_model(0.0)
        lay_out(model, mesh, way)
        with no_grad_sync(), count_collectives() as first:
            loss = loss_on(model, mesh, way) / 2
            reduced = first.calls("all_reduce", "replica")  # of the loss
            loss.backward()
        assert first.calls("all_reduce", "replica") == reduced
        assert first.calls("reduce_scatter", "dp") == 3
        loss = loss_on(model, mesh, way) / 2
        with count_collectives() as second:
            loss.backward()
        # One bucket of pieces of gradients.
        assert second.calls("all_reduce", "replica") == 1
        pieces = sum(p.to_local().numel() for p in model.parameters())
        assert second.bytes("all_reduce", "replica") == 8 * pieces
        check_gradients(model, serial())

    simulate(program, ranks=4)


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
def test_gathering_early_changes_neither_numbers_nor_counts(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """The order of a backend that overlaps, on one that does not."""
    monkeypatch.setattr("dtensor.styles.unit.overlaps", lambda comm: True)

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP)
        buffers = mine(found)
        block, own = unit_bytes(model.blocks[0]), unit_bytes(model)
        most = []
        for inner in model.blocks:
            inner.norm2.register_forward_hook(lambda *_: most.append(buffers.bytes()))
        for step in range(3):
            most.clear()
            model.zero_grad()
            with count_collectives() as counted:
                loss = local_loss_on(model, mesh) if local else loss_on(model, mesh)
                loss.backward()
            assert counted.calls("all_gather") == 8
            assert counted.calls("reduce_scatter") == 4
            ahead = [own + 2 * block] * 2 + [own + block]
            assert most == (ahead if step else [own + block] * 3)
            assert buffers.bytes() == 0
            if step == 0:
                check_order(model)
        model.eval()
        with torch.no_grad():
            model.blocks[0](distribute_tensor(torch.ones(4, 2, 12).double(), mesh, [R]))
        assert buffers.bytes() == 0  # what was fetched for nothing is let go of

    def check_order(model: gpt.GPT) -> None:
        chain, unit = [], model.__dict__[UNIT]
        while unit is not None:
            chain.append(unit)
            unit = unit.after() if unit.after is not None else None
        assert chain == [m.__dict__[UNIT] for m in (model, *model.blocks)]

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)
