"""Training the example for a few steps, for the tests that compare such runs."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402
from corpus import Corpus, read_text  # noqa: E402

from dtensor import DTensor  # noqa: E402

STEPS = 20
TINY = train_lm.Options(
    steps=STEPS, batch=8, context=8, dim=16, layers=2, heads=4, dtype="float64"
)
MESHES = {
    (4,): ("tp",),
    (2, 2): ("dp", "tp"),
    (1, 4): ("dp", "tp"),
    (4, 1): ("dp", "tp"),
}


@cache
def corpus() -> Corpus:
    found = Corpus(read_text())
    found.batch(1, 8, torch.Generator())  # fills what is computed once
    return found


def full(grad: torch.Tensor | None) -> torch.Tensor:
    """The whole gradient, detached."""
    assert grad is not None
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole.detach().clone()


def history(trainer: train_lm.Trainer) -> list[list[torch.Tensor]]:
    """Per step: the loss and the whole gradient of every parameter."""
    rows = []
    for _ in range(STEPS):
        row = [torch.tensor(trainer.step(), dtype=torch.float64)]
        row += [full(p.grad) for p in trainer.model.parameters()]
        rows.append(row)
    return rows


def distance(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> float:
    """Largest difference of two histories."""
    apart = [
        (a - b).abs().max()
        for row, right in zip(got, want, strict=True)
        for a, b in zip(row, right, strict=True)
    ]
    return float(torch.stack(apart).max())  # nan where anything is nan
