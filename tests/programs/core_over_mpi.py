"""DTensors over MPI: run under mpiexec by tests/test_core_mpi.py."""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F

import dtensor
from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    get_rank,
    get_world_size,
    init_device_mesh,
)

F64 = torch.float64


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same random tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def grid() -> dtensor.DeviceMesh:
    """Two axes where the world allows it."""
    n = get_world_size()
    return init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))


def pairs() -> None:
    """Redistribution between all pairs, with uneven and empty shards."""
    mesh = grid()
    choices = [Shard(0), Shard(1), Replicate(), Partial()]
    full = values(5, 3)
    for src in itertools.product(choices, repeat=2):
        x = distribute_tensor(full, mesh, src)
        for dst in itertools.product(choices, repeat=2):
            y = x.redistribute(dst)
            torch.testing.assert_close(y.full_tensor(), full)


def training() -> None:
    """Three steps of AdamW equal plain torch, replicas bitwise alike."""
    mesh = grid()
    full = [values(7, 6), values(8, 6, seed=1), values(4, 8, seed=2), values(4, seed=3)]
    places = [
        (Replicate(), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
    ]
    data = distribute_tensor(full[0], mesh, (Shard(0), Replicate()))
    ours = [
        torch.nn.Parameter(distribute_tensor(t, mesh, p))
        for t, p in zip(full[1:], places, strict=True)
    ]
    plain = [torch.nn.Parameter(t.clone()) for t in full[1:]]
    optimizers = [torch.optim.AdamW(ps, lr=0.01, foreach=True) for ps in (ours, plain)]
    for _ in range(3):
        for x, (w1, w2, b), optimizer in zip(
            (data, full[0]), (ours, plain), optimizers, strict=True
        ):
            loss = F.linear(F.gelu(F.linear(x, w1)), w2, b).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([w1, w2, b], 0.1)
            optimizer.step()
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-9, atol=1e-9)
    everyone = mesh.flatten()
    copies = DTensor.from_local(ours[2].to_local().detach()[None], everyone, [Shard(0)])
    assert all(torch.equal(copies.full_tensor()[0], c) for c in copies.full_tensor())


def disagreement() -> None:
    """Shards that do not fit raise on every rank, and the ranks go on together."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    try:
        DTensor.from_local(torch.ones(1 + get_rank(), 2), mesh, [Shard(0)])
    except ShardingError as e:
        assert "rank 0: (1, 2)" in str(e), e
    else:
        raise AssertionError("accepted")
    total = distribute_tensor(torch.ones(5), mesh, [Shard(0)]).sum()
    assert float(total) == 5


def subset() -> None:
    """Ranks outside of a mesh hold nothing and do not wait."""
    mesh = dtensor.DeviceMesh("cpu", [get_world_size() - 1, 0])
    x = distribute_tensor(values(5, 2), mesh, [Shard(0)])
    y = (x * 2).sum(0)
    if mesh.coordinate is None:
        assert x.to_local().numel() == 0 and y.to_local().numel() == 0
    else:
        torch.testing.assert_close(y.full_tensor(), 2 * values(5, 2).sum(0))


def unlike_seeds() -> None:
    """Random ops agree although the ranks' generators do not."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    torch.manual_seed(get_rank())
    x = distribute_tensor(torch.ones(64), mesh, [Replicate()])
    local = F.dropout(x, 0.5).to_local()
    copies = DTensor.from_local(local[None], mesh, [Shard(0)]).full_tensor()
    assert all(torch.equal(copies[0], c) for c in copies)
    assert 0 < int((local == 0).sum()) < 64


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        globals()[name]()
        if get_rank() == 0:
            print(f"ok {name}", flush=True)
