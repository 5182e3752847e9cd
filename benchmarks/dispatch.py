"""Dispatch overhead, ours against PyTorch's DTensor, interleaved in one process.

Run ``python benchmarks/dispatch.py``: a world of one, 8x8 tensors, one thread. Each
round times every candidate once, in turn; the table shows medians over the rounds and
the median of the per-round ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute

import dtensor

Body = Callable[[], Any]
BARS = {"add": 0.55, "mm": 0.65, "matmul+relu+mul, forward and backward": 0.35}


def operands(kind: str, grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 8x8 tensors, plain, ours or PyTorch's; S(0) and R as in a column split."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 8, generator=generator) for _ in range(2))
    if kind == "ours":
        mesh = dtensor.init_device_mesh("cpu", (1,))
        a = dtensor.distribute_tensor(a, mesh, [dtensor.Shard(0)])
        b = dtensor.distribute_tensor(b, mesh, [dtensor.Replicate()])
    elif kind == "pytorch":
        group = torch_mesh("cpu", (1,))
        a = torch_distribute(a, group, [TorchShard(0)])
        b = torch_distribute(b, group, [TorchReplicate()])
    return a.requires_grad_(grad), b.requires_grad_(grad)


def bodies(kind: str) -> dict[str, Body]:
    """The timed calls of one candidate."""
    a, b = operands(kind, grad=False)
    ga, gb = operands(kind, grad=True)
    seed = torch.ones_like(torch.relu(ga @ gb) * ga).detach()

    def both() -> None:
        (torch.relu(ga @ gb) * ga).backward(seed)
        ga.grad = gb.grad = None

    return {
        "add": lambda: a + a,
        "mm": lambda: torch.mm(a, b),
        "matmul+relu+mul, forward and backward": both,
    }


def seconds(body: Body, calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        body()
    return (time.perf_counter() - start) / calls


def measure(rounds: int = 25, calls: int = 300) -> dict[str, dict[str, float]]:
    """Median microseconds of every candidate and the median ratio, per body."""
    table = {kind: bodies(kind) for kind in ("plain", "ours", "pytorch")}
    out = {}
    for name in BARS:
        times: dict[str, list[float]] = {kind: [] for kind in table}
        for kind in table:
            seconds(table[kind][name], calls)
        for _ in range(rounds):
            for kind in table:
                times[kind].append(seconds(table[kind][name], calls))
        row = {kind: statistics.median(t) * 1e6 for kind, t in times.items()}
        pairs = zip(times["ours"], times["pytorch"], strict=True)
        row["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
        out[name] = row
    return out


def main() -> None:
    """Print the table; exit 1 where a bar is missed and ``--strict`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        result = measure(options.rounds, options.calls)
    finally:
        dist.destroy_process_group()
    width = max(map(len, result))
    print(f"{'us per call':{width}}  plain   ours  PyTorch  ratio   bar")
    missed = False
    for name, row in result.items():
        missed |= row["ratio"] > BARS[name]
        print(
            f"{name:{width}} {row['plain']:6.1f} {row['ours']:6.1f} "
            f"{row['pytorch']:8.1f} {row['ratio']:6.2f} {BARS[name]:5.2f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
    if options.strict and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
