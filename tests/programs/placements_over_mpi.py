"""Placements over MPI, on four ranks: orders, reductions, fused moves, two meshes.

mpiexec -n 4 python placements_over_mpi.py
"""

from __future__ import annotations

import itertools

import torch

from dtensor import (
    BlockCyclic,
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    calibrate,
    distribute_tensor,
    get_rank,
    init_device_mesh,
)

torch.set_num_threads(1)
R = Replicate()


def say(text: str) -> None:
    """Print on rank 0."""
    if get_rank() == 0:
        print(f"ok {text}", flush=True)


def require(holds: bool, what: object) -> None:
    """End the job where a check fails."""
    if not holds:
        raise RuntimeError(f"rank {get_rank()}: {what}")


def main() -> None:
    """All checks, one after another."""
    grid = init_device_mesh("cpu", (2, 2))
    full = torch.arange(35, dtype=torch.float64).view(7, 5)
    layouts = [
        (R, R),
        (Shard(0), Shard(0)),
        (Shard(0, depth=1), Shard(0, depth=0)),
        (Shard(1), Shard(0)),
        (Partial(), Partial()),
        (Partial("max"), Partial("product")),
        (BlockCyclic(0, 2), R),
    ]
    for src, dst in itertools.product(layouts, repeat=2):
        x = distribute_tensor(full, grid, src)
        y = x.redistribute(dst)
        require(torch.equal(y.full_tensor(), full), (src, dst))
    say("pairs")
    for op in ("max", "min", "product"):
        leaf = torch.full((3,), 1.0 + get_rank(), requires_grad=True)
        z = DTensor.from_local(leaf, grid, [Partial(op)] * 2).redistribute([R, R])
        z.sum().backward()
        stack = torch.arange(1.0, 5.0, requires_grad=True)
        {"max": stack.amax, "min": stack.amin, "product": stack.prod}[op]().backward()
        assert leaf.grad is not None and stack.grad is not None
        require(leaf.grad[0] == stack.grad[get_rank()], op)
    say("gradients")
    line = DeviceMesh("cpu", [2, 0, 3, 1])
    for dst in (Shard(0), Shard(1), RaggedShard(0, (1, 0, 5, 1))):
        x = distribute_tensor(full, grid, [Shard(1), R])
        y = x.redistribute(line, [dst])
        require(torch.equal(y.full_tensor(), full), dst)
        require(
            torch.equal(y.redistribute(grid, [R, Shard(0)]).full_tensor(), full), dst
        )
    left, right = DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 2, 3])
    for src, dst in itertools.product((R, Shard(0), Shard(1)), repeat=2):
        w = distribute_tensor(full, left, [src], src_data_rank=None)
        w.requires_grad_()
        y = w.sin().redistribute(right, [dst])
        y.pow(2).sum().backward()
        if left.coordinate is not None:
            plain = full.clone().requires_grad_()
            plain.sin().pow(2).sum().backward()
            assert w.grad is not None and plain.grad is not None
            torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
    big = torch.arange(1 << 20, dtype=torch.float64).view(1024, 1024)
    y = distribute_tensor(big, line, [Shard(0)]).redistribute([Shard(1)])
    require(torch.equal(y.full_tensor(), big), "large shards")
    say("meshes")
    table = calibrate(grid, large=1 << 16, repeats=2)
    require(min(table.latency) > 0, table)
    say("prices")


if __name__ == "__main__":
    main()
