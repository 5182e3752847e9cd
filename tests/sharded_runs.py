"""Training runs laid out in every data-parallel way, for tests that compare them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtensor import (
    Colwise,
    DeviceMesh,
    DTensor,
    PrepareModuleInput,
    Replicate,
    Rowwise,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    manual_seed,
    no_grad_sync,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt  # noqa: E402

STEPS, BATCH, LENGTH, MICRO = 20, 8, 6, 2


@dataclass(frozen=True)
class Way:
    """A mesh, and what is done on it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    sharded: tuple[str, ...] = ()  # axes of fully_shard
    batch: tuple[str, ...] = ("dp",)  # axes that cut the batch
    sequence: bool = False
    options: dict[str, Any] = field(default_factory=dict)


SERIAL = Way((1,), ("dp",))
WAYS = {
    "dp=4": Way((4,), ("dp",)),
    "fsdp=4": Way((4,), ("dp",), ("dp",)),
    "fsdp=3, uneven": Way((3,), ("dp",), ("dp",)),
    "fsdp=4, kept": Way(
        (4,), ("dp",), ("dp",), options={"reshard_after_forward": False}
    ),
    "hybrid": Way((2, 2), ("replica", "dp"), ("dp",), ("replica", "dp")),
    "two axes": Way((2, 2), ("a", "b"), ("a", "b"), ("a", "b")),
    "fsdp x tp": Way((2, 2), ("dp", "tp"), ("dp",)),
    "tp x fsdp": Way((2, 2), ("tp", "dp"), ("dp",)),
    "fsdp x tp, sequence": Way((2, 2), ("dp", "tp"), ("dp",), sequence=True),
}


def make_model(dropout: float = 0.1, **sizes: int) -> gpt.GPT:
    """A GPT whose dims leave short and empty shards on 3 and 4 ranks."""
    given = {"vocab": 13, "context": LENGTH, "dim": 12, "layers": 2, "heads": 2}
    torch.manual_seed(0)
    return gpt.GPT(gpt.Config(dropout=dropout, **(given | sizes))).double()


def tensor_plan(sequence: bool) -> dict[str, Any]:
    """The blocks over "tp", with DTensors between the modules."""
    if not sequence:
        return {
            "blocks.*.attention": {"qkv": Colwise, "out": Rowwise},
            "blocks.*.mlp": {"up": Colwise, "down": Rowwise},
        }
    norm = SequenceParallel()
    back = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    enter = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), mesh_dim="tp"
    )
    return {
        "blocks.*": {"norm1": norm, "norm2": norm, "dropout": norm},
        "blocks.*.attention": {"": enter, "qkv": Colwise, "out": back},
        "blocks.*.mlp": {"": enter, "up": Colwise, "down": back},
        "norm": norm,
    }


def lay_out(model: gpt.GPT, mesh: DeviceMesh, way: Way, **options: Any) -> None:
    """``parallelize_module`` where there is tensor parallelism, then ``fully_shard``."""
    if "tp" in way.names:
        parallelize_module(model, mesh, tensor_plan(way.sequence))
    elif not way.sharded:
        parallelize_module(model, mesh, {})  # replicated
    if way.sharded:
        given = {"mesh_dim": way.sharded, **way.options, **options}
        for block in model.blocks:
            fully_shard(block, mesh, **given)
        fully_shard(model, mesh, **given)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same codes and targets on every rank."""
    generator = torch.Generator().manual_seed(3)
    drawn = [
        torch.randint(0, 13, (BATCH, LENGTH + 1), generator=generator)
        for _ in range(steps)
    ]
    return [(codes[:, :-1], codes[:, 1:]) for codes in drawn]


def place(x: Tensor, mesh: DeviceMesh, way: Way) -> DTensor:
    """A batch that every rank holds, cut over the axes of the batch."""
    cut = [Shard(0) if name in way.batch else Replicate() for name in way.names]
    return distribute_tensor(x, mesh, cut, src_data_rank=None)


def train(way: Way, steps: int = STEPS, **options: Any) -> list[Tensor]:
    """Losses of some steps with accumulation and clipping, then all parameters."""
    mesh = init_device_mesh("cpu", way.shape, mesh_dim_names=way.names)
    model = make_model()
    lay_out(model, mesh, way, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    losses = []
    with mesh:
        manual_seed(7)
        for codes, targets in batches(steps):
            optimizer.zero_grad()
            pairs = zip(codes.chunk(MICRO), targets.chunk(MICRO), strict=True)
            parts = []
            for number, pair in enumerate(pairs):
                x, y = (place(t, mesh, way) for t in pair)
                loss = gpt.loss_of(model, x, y) / MICRO
                if number < MICRO - 1:
                    with no_grad_sync():
                        loss.backward()
                else:
                    loss.backward()
                parts.append(loss.detach().full_tensor())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(torch.stack(parts).sum())
    whole = [p.detach().full_tensor() for p in model.parameters()]
    return [torch.stack(losses), *whole]


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference of two runs; nan where anything is nan."""
    apart = [(a - b).abs().max() for a, b in zip(got, want, strict=True)]
    return float(torch.stack(apart).max())
