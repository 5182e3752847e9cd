"""One model, one seed, every way to lay its training out: the same numbers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from train_helpers import STEPS, TINY, corpus, full

from dtensor import init_device_mesh, simulate

import train_lm  # isort: skip - found by way of train_helpers

# name -> mesh shape, its axes, flags
MODES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, bool]]] = {
    "dp": ((4,), ("dp",), {}),
    "fsdp": ((4,), ("dp",), {"fsdp": True}),
    "tp": ((4,), ("tp",), {}),
    "tp + sp": ((4,), ("tp",), {"sp": True}),
    "dp x tp": ((2, 2), ("dp", "tp"), {}),
    "fsdp x tp": ((2, 2), ("dp", "tp"), {"fsdp": True}),
    "fsdp x tp + sp": ((2, 2), ("dp", "tp"), {"fsdp": True, "sp": True}),
}
OPTIONS = replace(TINY, dropout=0.1, accumulate=2, clip=0.5)
Numbers = tuple[list[float], list[torch.Tensor]]


def trained(trainer: train_lm.Trainer) -> Numbers:
    """The losses of all steps, and the whole parameters after them."""
    losses = [trainer.step() for _ in range(STEPS)]
    return losses, [full(p) for p in trainer.model.parameters()]


def run(
    options: train_lm.Options, shape: tuple[int, ...], axes: tuple[str, ...]
) -> Numbers:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    torch.manual_seed(5)
    return trained(train_lm.Trainer(options, corpus(), mesh))


@cache
def one_process() -> Numbers:
    # A mesh of one rank: its dropout is the global sample that all layouts share.
    return simulate(run, 1, (OPTIONS, (1,), ("tp",)), timeout=300)[0]


def apart(got: Numbers, want: Numbers) -> float:
    losses = max(abs(a - b) for a, b in zip(got[0], want[0], strict=True))
    parameters = max(
        float((a - b).abs().max()) for a, b in zip(got[1], want[1], strict=True)
    )
    return max(losses, parameters)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_accumulation_clipping_and_adamw_in_every_mode(mode: str) -> None:
    shape, axes, flags = MODES[mode]
    for got in simulate(run, 4, (replace(OPTIONS, **flags), shape, axes), timeout=300):
        assert apart(got, one_process()) < 1e-9


def test_local_activations_accumulate_and_clip_as_one_process_does() -> None:
    options = replace(TINY, accumulate=2, clip=0.5)
    want = trained(train_lm.Trainer(options, corpus(), None))
    local = replace(options, local_activations=True)
    for shape, axes, fsdp in (
        ((4,), ("dp",), True),
        ((2, 2), ("dp", "tp"), False),
        ((2, 2), ("dp", "tp"), True),
    ):
        found = simulate(run, 4, (replace(local, fsdp=fsdp), shape, axes), timeout=300)
        for got in found:
            assert apart(got, want) < 1e-9


def test_the_clipping_and_the_dropout_matter() -> None:
    for options in (replace(OPTIONS, clip=None), replace(OPTIONS, dropout=0.0)):
        got = simulate(run, 1, (options, (1,), ("tp",)), timeout=300)[0]
        assert apart(got, one_process()) > 1e-3


def test_bfloat16_learns_about_the_same() -> None:
    options = replace(TINY, dtype="float32", bf16=True)
    want = trained(train_lm.Trainer(replace(options, bf16=False), corpus(), None))[0]
    for shape, axes, flags in MODES.values():
        found = simulate(run, 4, (replace(options, **flags), shape, axes), timeout=300)
        for losses, parameters in found:
            assert abs(losses[-1] - want[-1]) < 0.05
            assert {p.dtype for p in parameters} == {torch.float32}


@pytest.mark.parametrize(
    ("flags", "axes", "message"),
    [
        ({"fsdp": True}, ("tp",), "--fsdp: shards over the axis dp"),
        ({"sp": True}, ("dp",), "--sp: cuts DTensors over the axis tp"),
        ({"sp": True, "local_activations": True}, ("tp",), "--sp: cuts DTensors"),
        ({"accumulate": 3}, ("tp",), "--accumulate: must divide the batch"),
    ],
)
def test_flags_that_do_not_fit(
    flags: dict[str, bool], axes: tuple[str, ...], message: str
) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=axes)
    with pytest.raises(ValueError, match=message):
        train_lm.Trainer(replace(TINY, **flags), corpus(), mesh)


@pytest.mark.mpi
def test_all_flags_under_mpi(
    mpi_run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = Path(train_lm.__file__)
    flags = "--mesh dp=2,tp=2 --fsdp --sp --accumulate 2 --clip 1 --dropout 0.1 "
    flags += "--steps 3 --batch 8 --context 8 --dim 16 --layers 1 --characters 4 --out"
    done = mpi_run(script, 4, [*flags.split(), str(tmp_path)], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out loss" in done.stdout
