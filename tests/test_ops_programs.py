"""Random chains of 3 to 6 ops against plain torch, seeded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from op_harness import GRID, LINE, Case, T, assert_right, eighths

Step = Callable[[T, T], T]

# Each step gets the running value (2-d or 3-d) and a parameter of its last two sizes.
STEPS: dict[str, Callable[[random.Random], Step]] = {
    "relu": lambda r: lambda x, w: x.relu(),
    "tanh": lambda r: lambda x, w: x.tanh(),
    "add": lambda r: lambda x, w: x + w.mean(),
    "add row": lambda r: lambda x, w: x + x.mean(0, keepdim=True),
    "mul": lambda r: lambda x, w: x * 0.5,
    "residual": lambda r: lambda x, w: x + x.sigmoid(),
    "product": lambda r: lambda x, w: x @ w.reshape(-1)[: x.shape[-1]].diag(),
    "gram": lambda r: lambda x, w: x @ x.mT,
    "linear": lambda r: (
        lambda x, w: torch.nn.functional.linear(x, x.reshape(-1, x.shape[-1])[:3])
    ),
    "transpose": lambda r: lambda x, w: x.transpose(-1, -2),
    "flatten": lambda r: lambda x, w: x.reshape(-1, x.shape[-1]),
    "unflatten": lambda r: lambda x, w: x.reshape(x.shape[0], -1, 1).squeeze(-1),
    "unsqueeze": lambda r: (
        lambda x, w: x.unsqueeze(r.randint(0, 0)) if x.ndim == 2 else x[0]
    ),
    "softmax": lambda r,: lambda x, w: x.softmax(-1),
    "softmax 0": lambda r: lambda x, w: x.softmax(0),
    "norm": lambda r: lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "sum": lambda r: lambda x, w: x.sum(0, keepdim=True) + x,
    "max": lambda r: lambda x, w: x - x.amax(-1, keepdim=True),
    "cat": lambda r: lambda x, w: torch.cat([x, x * 2], r.choice((0, -1))),
    "stack": lambda r: lambda x, w: torch.stack([x, x]).sum(0),
    "chunk": lambda r: lambda x, w: x.chunk(2, 0)[0],
    "slice": lambda r: lambda x, w: x[..., : max(1, x.shape[-1] - 1)],
    "select": lambda r: lambda x, w: x[..., :1] * x,
    "cumsum": lambda r: lambda x, w: x.cumsum(0) / 4,
    "masked": lambda r: lambda x, w: x.masked_fill(x > 1, 0.0),
    "where": lambda r: lambda x, w: torch.where(x > 0, x, x * 0.25),
    "inplace": lambda r: lambda x, w: x.clone().mul_(0.5),
    "flip": lambda r: lambda x, w: x.flip(0),
    "einsum": lambda r: lambda x, w: torch.einsum("...ij,...kj->...ik", x, x) / 8,
    "weigh": lambda r: lambda x, w: x * w.sum(),
    "gather rows": lambda r: lambda x, w: x[[0, -1, 0]],
}


def chain(seed: int) -> Case:
    """A program of 3 to 6 steps on a small tensor."""
    rng = random.Random(seed)
    names = [rng.choice([*STEPS]) for _ in range(rng.randint(3, 6))]
    seeds = [rng.random() for _ in names]
    shape = rng.choice([(5, 3), (4, 4), (2, 5, 3), (1, 6), (3, 2, 2), (8, 2), (7, 5)])

    def program(x: T, w: T) -> T:
        for name, s in zip(names, seeds, strict=True):
            x = STEPS[name](random.Random(s))(x, w)
        return x

    label = f"{seed}: {shape} " + ", ".join(names)
    args = [eighths(*shape, seed=seed), eighths(shape[-1], 12, seed=seed + 1)]
    return Case(label, program, args, rtol=1e-7)


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
def test_chains(mesh: object) -> None:
    cases = [chain(seed) for seed in range(60)]
    assert_right(cases, mesh, limit=4)  # type: ignore[arg-type]


FAMILIES = {"chains": lambda: [chain(s) for s in range(300)]}
