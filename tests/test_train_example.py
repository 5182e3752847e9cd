"""examples/train_lm.py: the laid-out model learns as the serial one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from train_helpers import MESHES, ROOT, TINY, corpus, distance, full, history

from dtensor import DeviceMesh, init_device_mesh, simulate

import gpt  # isort: skip - found by way of train_helpers
import report  # isort: skip
import train_lm  # isort: skip
from corpus import known_share  # isort: skip

Loss = Callable[[], torch.Tensor]
Tensors = list[torch.Tensor | None]


@cache
def serial() -> list[list[torch.Tensor]]:
    return history(train_lm.Trainer(TINY, corpus(), None))


@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_twenty_steps_equal_the_serial_run(shape: tuple[int, ...], local: bool) -> None:
    options = replace(TINY, local_activations=local)

    def program() -> list[list[torch.Tensor]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=MESHES[shape])
        return history(train_lm.Trainer(options, corpus(), mesh))

    want = serial()
    for got in simulate(program, ranks=4, timeout=300):
        assert distance(got, want) < 1e-9


def repeated(trainer: train_lm.Trainer, loss: Loss) -> Tensors:
    """Two backward passes, nothing zeroed in between."""
    loss().backward()
    (3 * loss()).backward()
    return [p.grad for p in trainer.model.parameters()]


def functional(trainer: train_lm.Trainer, loss: Loss) -> Tensors:
    """Gradients by ``torch.autograd.grad``; ``.grad`` stays as it was."""
    parameters = list(trainer.model.parameters())
    found = list(torch.autograd.grad(loss(), parameters))
    assert all(p.grad is None for p in parameters)
    return found


def second(trainer: train_lm.Trainer, loss: Loss) -> Tensors:
    """The gradient of the squared norm of the gradient."""
    parameters = list(trainer.model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels are differentiable once
        first = torch.autograd.grad(loss(), parameters, create_graph=True)
        norm: Any = sum(g.square().sum() for g in first)
        return list(torch.autograd.grad(norm, parameters))


def checkpointed(trainer: train_lm.Trainer, loss: Loss, reentrant: bool) -> Tensors:
    """Every block computed again in backward."""
    for block in trainer.model.blocks:
        plain = block.forward
        block.forward = partial(checkpoint, plain, use_reentrant=reentrant)
    return repeated(trainer, loss)


WAYS: dict[str, Callable[[train_lm.Trainer, Loss], Tensors]] = {
    "repeated": repeated,
    "functional": functional,
    "second": second,
    "reentrant": partial(checkpointed, reentrant=True),
    "checkpoint": partial(checkpointed, reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("local", [False, True], ids=["dtensor", "local"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_every_way_to_a_gradient_equals_the_serial_one(
    shape: tuple[int, ...], local: bool, way: str
) -> None:
    options = replace(TINY, local_activations=local)

    def gradients(mesh: DeviceMesh | None) -> list[torch.Tensor]:
        trainer = train_lm.Trainer(options, corpus(), mesh)
        batch = corpus().batch(8, 8, torch.Generator().manual_seed(0))
        tokens, targets = map(trainer.place, batch)
        split = trainer.data_ranks if local else 1

        def loss() -> torch.Tensor:
            return gpt.loss_of(trainer.model, tokens, targets) / split

        found = WAYS[way](trainer, loss)
        return [full(g) for g in found]

    def program() -> list[torch.Tensor]:
        return gradients(init_device_mesh("cpu", shape, mesh_dim_names=MESHES[shape]))

    want = gradients(None)
    assert max(g.abs().max() for g in want) > 1e-3
    for got in simulate(program, ranks=4):
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() < 1e-9


@pytest.mark.mpi
def test_twenty_steps_equal_the_serial_run_under_mpiexec(
    mpi_run: Callable[..., Any],
) -> None:
    done = mpi_run("train_equals_serial.py", 4, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 2 * len(MESHES)


@pytest.mark.mpi
def test_whole_program_under_mpiexec(
    mpi_run: Callable[..., Any], tmp_path: Path
) -> None:
    """The command of the README, with a tiny model, compared to one process."""
    flags = "--mesh dp=2,tp=2 --steps 20 --batch 8 --context 8 --dim 16 --layers 2"
    flags += " --dtype float64 --compare-serial --characters 5"
    script = ROOT / "examples" / "train_lm.py"
    done = mpi_run(script, 4, [*flags.split(), "--out", tmp_path], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    line = next(x for x in lines if x.startswith("largest differ"))
    assert float(line.rsplit(" ", 1)[1]) < 1e-9
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "blocks.*.attention.qkv.weight  (48, 16)       R, S(0)" in lines
    # Two all-reduces forward and two backward per block, and the leaf bucket.
    row = next(x for x in lines if x.startswith("all_reduce  tp"))
    assert row.split()[2] == str(4 * 2 + 1)


def test_split_of_the_text_keeps_held_out_text_out() -> None:
    text = corpus()
    assert sum(map(len, text.training)) + sum(map(len, text.held_out)) == len(text.text)
    assert 0.08 < sum(map(len, text.held_out)) / len(text.text) < 0.12
    whole = text.decode(torch.cat(text.training).tolist())
    tokens, targets = text.batch(64, 32, torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    runs = [text.decode(run.tolist()) for run in text.training]
    for row in tokens:
        window = text.decode(row.tolist())
        assert window in whole
        assert any(window in run for run in runs)


def test_words_that_occur_are_counted() -> None:
    assert known_share(["cut The function xqzzy returns cut"], corpus()) == 0.75


def test_mesh_texts_that_do_not_fit_are_refused() -> None:
    assert train_lm.make_mesh("") is None
    with pytest.raises(ValueError, match=r"--mesh: not a mesh, got 'pp=2'"):
        train_lm.make_mesh("pp=2")
    with pytest.raises(ValueError, match=r"does not fit the world, got 'dp=2,tp=2'"):
        train_lm.make_mesh("dp=2,tp=2")


def test_progress_speaks_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shown in (True, False):
        with report.Progress(2, shown=shown) as progress:
            progress.show(1, 3.25, 1000.0)
            progress.show(2, 3.0, 1000.0)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step     1/2  loss 3.250  1,000 tokens/s"
    assert len(out) == 2
