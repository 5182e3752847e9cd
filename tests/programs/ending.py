"""Ends, or fails to end, in the way that its argument names; rank 1 is at fault.

Before rank 1 does so it prints ``at SECONDS``, the time of day.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch

import dtensor
from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.collectives.functional import permute

way = sys.argv[1]
rank, size = dtensor.get_rank(), dtensor.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def at_fault(here: str) -> bool:
    """Whether this rank is to go wrong here; says when."""
    if way != here or rank != 1:
        return False
    print(f"at {time.time()}", file=sys.stderr, flush=True)
    return True


class Spiteful(torch.autograd.Function):
    """The identity, whose backward raises on rank 1."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, cotangent: torch.Tensor) -> torch.Tensor:
        if at_fault("backward"):
            raise ValueError("out of backward")
        return cotangent


spite: Any = Spiteful.apply


def train() -> None:
    """Three steps of a layer that needs a collective in forward and in backward."""
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]).requires_grad_()
    x = distribute_tensor(torch.ones(2, 8), mesh, [Replicate()]).requires_grad_()
    for step in range(3):
        if step == 1 and at_fault("forward"):
            raise ValueError("out of forward")
        if step == 1 and at_fault("exit late"):
            sys.exit(0)
        if step == 1 and at_fault("exit by name"):
            raise SystemExit(4)
        product: Any = x @ weight
        local = spite(product.to_local())
        hidden: Any = dtensor.DTensor.from_local(local, mesh, [Shard(1)])
        (hidden * hidden).sum().redistribute(mesh, [Replicate()]).backward()
    print(f"rank {rank} is done")


if at_fault("early"):
    raise ValueError("out of nowhere")
if at_fault("exit early"):
    sys.exit(0)
if at_fault("exit code"):
    sys.exit(3)
if at_fault("other hook"):
    sys.excepthook = sys.__excepthook__
    raise ValueError("past the hook")
if way == "all exit":
    sys.exit(5)
if way == "no collective":
    print(f"rank {rank} is done")
    sys.exit(0)
if way == "slow":  # others wait, and rightly so
    time.sleep(4.0 if rank == 1 else 0.0)
if way == "child":
    code = "import dtensor; print(f'child of {dtensor.get_rank()}')"
    subprocess.run([sys.executable, "-c", code], check=True)
if way == "leave first":
    # Rank 0 waits for rank 2 alone; rank 1 has sent what it had to, and ends.
    permute(torch.ones(2), mesh, 1)
    time.sleep(5.0 if rank == 2 else 0.0)
    permute(torch.ones(2), mesh, 1)
    print(f"rank {rank} is done")
    sys.exit(0)
if way == "apart":  # each waits for the other, in vain
    train()
    print("waiting", flush=True)
    if rank == 1:
        time.sleep(300)
    distribute_tensor(torch.ones(2), mesh, [Shard(0)]).full_tensor()
train()
