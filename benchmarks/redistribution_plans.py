"""Bytes of our redistribution plans against those of PyTorch's DTensor.

For every pair of placements on small meshes: the plan that PyTorch makes (read from its
planner, on a process group that moves nothing) and ours with latency zero, both priced
alike: bytes that a rank sends. Writes the table in docs/redistribution_plans.md.

    python benchmarks/redistribution_plans.py [--write] [--mesh 2x2]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from dtensor import Partial, Replicate, Shard, init_device_mesh
from dtensor.costs import CostTable
from dtensor.placement import Placement, Placements, show
from dtensor.plan import plan_steps
from dtensor.steps import VERBS, average_shard, sent_by

SIDE = 1024
MESHES = ((4,), (2, 2), (2, 4), (2, 2, 2))
PAGE = Path(__file__).parent.parent / "docs" / "redistribution_plans.md"
KINDS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


def torch_placement(p: Placement) -> Any:
    """PyTorch's spelling of a placement."""
    if isinstance(p, Shard):
        return TorchShard(p.dim)
    return TorchPartial(p.reduce_op) if isinstance(p, Partial) else TorchReplicate()


def ours(p: Any) -> Placement:
    """Our spelling of one of PyTorch's."""
    if p.is_shard():
        return Shard(p.dim)
    return Partial(p.reduce_op) if p.is_partial() else Replicate()


def torch_bytes(
    mesh: Any, shape: tuple[int, ...], src: Placements, dst: Placements
) -> Any:
    """Bytes a rank sends in PyTorch's plan, and the number of collectives."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    t = torch.empty(SIDE, SIDE, device="meta")
    meta = TensorMeta(t.shape, t.stride(), t.dtype)
    before, after = (
        DTensorSpec(mesh, tuple(map(torch_placement, places)), tensor_meta=meta)
        for places in (src, dst)
    )
    state, sent, calls = list(src), 0.0, 0
    for info in _redistribute._gen_transform_infos_non_cached(before, after):
        axis = info.mesh_dim
        old, new = map(ours, info.src_dst_placements)
        if old == new:
            continue
        local = type(old) is Shard and isinstance(new, Partial)
        verb = "local" if local else VERBS[type(old), type(new)]
        size = average_shard(shape, tuple(state), SIDE * SIDE)
        sent += 4 * sent_by(verb, size, shape[axis])
        calls += verb != "local"
        state[axis] = new
    return sent, calls


def compare(
    mesh_shape: tuple[int, ...],
) -> list[tuple[str, str, float, int, float, int]]:
    """One row per pair: from, to, PyTorch's bytes and calls, ours."""
    torch_mesh = dist.device_mesh.init_device_mesh("cpu", mesh_shape)
    mesh = init_device_mesh("cpu", mesh_shape)
    free = CostTable((0.0,) * mesh.ndim, (1e-9,) * mesh.ndim, 0.0, 0.0)
    rows = []
    states = [tuple(p) for p in itertools.product(KINDS, repeat=mesh.ndim)]
    for src, dst in itertools.product(states, states):
        theirs = torch_bytes(torch_mesh, mesh_shape, src, dst)
        steps = plan_steps(mesh, src, dst, (SIDE, SIDE), 4, free)
        sent = 4 * sum(s.elements for s in steps)
        calls = sum(s.verb != "local" for s in steps)
        rows.append((show(src), show(dst), *theirs, sent, calls))
    return rows


def page(tables: dict[tuple[int, ...], Any]) -> str:
    """The page in docs/."""
    out = [
        "# Bytes of redistribution plans, against PyTorch's DTensor",
        "",
        "Written by `python benchmarks/redistribution_plans.py --write`; "
        f"torch {torch.__version__.partition('+')[0]}.",
        "For every pair of placements out of R, S(0), S(1), P on each axis: bytes that a "
        f"rank sends for a {SIDE} x {SIDE} float32 tensor, both plans priced by the same "
        "formulas (all-gather: (n-1) shards; all-reduce: 2(n-1)/n; reduce-scatter and "
        "all-to-all: (n-1)/n), ours made with latency zero. PyTorch's plan is read from "
        "its planner. A step from a shard into addends sends nothing with us (padding).",
        "",
        "| mesh | pairs | ours sends less | the same | more | bytes, all pairs: PyTorch "
        "| ours | collectives: PyTorch | ours |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for shape, rows in tables.items():
        less = sum(r[4] < r[2] - 1 for r in rows)
        more = sum(r[4] > r[2] + 1 for r in rows)
        out.append(
            f"| {' x '.join(map(str, shape))} | {len(rows)} | {less} | "
            f"{len(rows) - less - more} | {more} | {mib(sum(r[2] for r in rows))} | "
            f"{mib(sum(r[4] for r in rows))} | {sum(r[3] for r in rows)} | "
            f"{sum(r[5] for r in rows)} |"
        )
    grid = tables.get((2, 2), ())
    out += [
        "",
        "Pairs on 2 x 2 where the plans send unlike bytes:",
        "",
        "| from | to | PyTorch | collectives | ours | collectives |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for a, b, theirs, calls, sent, mine in grid:
        if abs(theirs - sent) > 1:
            cells = f"{mib(theirs)} | {calls} | {mib(sent)} | {mine}"
            out.append(f"| {a} | {b} | {cells} |")
    return "\n".join(out) + "\n"


def mib(n: float) -> str:
    """Bytes in MiB."""
    return f"{n / 2**20:.2f} MiB"


def main() -> None:
    """Compare, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page in docs/")
    parser.add_argument("--mesh", action="append", help="one mesh alone, such as 2x4")
    options = parser.parse_args()
    meshes = [tuple(map(int, m.split("x"))) for m in options.mesh or ()]
    if meshes and options.write:
        parser.error("--write takes all meshes")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tables = {}
    for shape in meshes or MESHES:
        size = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        tables[shape] = compare(shape)
        dist.destroy_process_group()
    text = page(tables)
    print(text)
    if options.write:
        PAGE.write_text(text)
    worse = [r for rows in tables.values() for r in rows if r[4] > r[2] + 1]
    if worse:
        raise SystemExit(f"{len(worse)} pairs send more than PyTorch, first {worse[0]}")


if __name__ == "__main__":
    main()
