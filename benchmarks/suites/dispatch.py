"""What one op costs: plain torch, ours, and PyTorch's DTensor, on 8x8 tensors.

A world of one: nothing is sent, so that what is left is the dispatch. Batches are
Shard(0), weights Replicate. Three modes: without grad; forward, with the graph recorded;
forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.benchmarks import peers
from dtensor.benchmarks.harness import (
    OURS,
    Bar,
    Call,
    Measure,
    Options,
    calibrate,
    interleave,
    summarize,
)

N = 8  # all sizes: small, so that the work itself costs next to nothing
KINDS = (OURS, peers.PLAIN, peers.PYTORCH)


@dataclass(frozen=True, slots=True)
class Op:
    """An op and its operands.

    Attributes:
        name: For the table.
        run: From operands to the result.
        batches: Shapes of operands that are Shard(0).
        weights: Shapes of operands that are Replicate.
        indices: Numbers of those batches that hold class numbers.
        masks: Numbers of those batches that hold booleans.
    """

    name: str
    run: Callable[..., torch.Tensor]
    batches: tuple[tuple[int, ...], ...] = ((N, N),)
    weights: tuple[tuple[int, ...], ...] = ()
    indices: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()


_HEADS = (N, 2, N, 4)  # batch, heads, sequence, width of a head

OPS = (
    Op("add", lambda a, b: a + b, ((N, N), (N, N))),
    Op("mul by a number", lambda a: a * 2.0),
    Op("relu", torch.relu),
    Op("gelu", F.gelu),
    Op("where", torch.where, ((N, N), (N, N), (N, N)), masks=(0,)),
    Op("mm", torch.mm, weights=((N, N),)),
    Op("bmm", torch.bmm, ((N, N, N), (N, N, N))),
    Op("linear", F.linear, weights=((N, N), (N,))),
    Op("view", lambda a: a.view(N, 2, N // 2)),
    Op("transpose", lambda a: a.transpose(0, 1)),
    Op("cat", lambda a, b: torch.cat((a, b), 1), ((N, N), (N, N))),
    Op("sum", lambda a: a.sum()),
    Op("mean over a dim", lambda a: a.mean(1)),
    Op("softmax", lambda a: torch.softmax(a, -1)),
    Op("layer_norm", lambda a, w, b: F.layer_norm(a, (N,), w, b), weights=((N,), (N,))),
    Op("rms_norm", lambda a, w: F.rms_norm(a, (N,), w), weights=((N,),)),
    Op("sdpa", F.scaled_dot_product_attention, (_HEADS, _HEADS, _HEADS)),
    Op("cross_entropy", F.cross_entropy, ((N, N), (N,)), indices=(1,)),
    Op("embedding", F.embedding, ((N, N),), weights=((N, N),), indices=(0,)),
    Op("relu(a @ b) * a", lambda a, b: torch.relu(a @ b) * a, weights=((N, N),)),
)
MODES = ("no grad", "forward", "forward+backward")
BARS = {
    ("no grad", peers.PYTORCH): 0.5,
    ("forward+backward", peers.PYTORCH): 0.35,
    ("forward+backward", peers.PLAIN): 1.5,
}


def operands(op: Op, kind: str, grad: bool) -> list[torch.Tensor]:
    """Equal values for each kind; leaves where they require grad."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = peers.meshes((1,))
    out = []
    for i, shape in enumerate((*op.batches, *op.weights)):
        if i in op.indices:
            t = torch.randint(N, shape, generator=generator)
        else:
            t = torch.randn(shape, generator=generator)
        t = t > 0 if i in op.masks else t
        batch = i < len(op.batches)
        if kind == OURS:
            t = distribute_tensor(t, ours, [Shard(0) if batch else Replicate()])
        elif kind == peers.PYTORCH:
            place = TorchShard(0) if batch else TorchReplicate()
            t = torch_distribute(t, theirs, [place])
        out.append(t.requires_grad_(grad and t.is_floating_point()))
    return out


def make_call(op: Op, kind: str, mode: str) -> Call:
    """What is timed."""
    args: list[Any] = operands(op, kind, mode != "no grad")
    run = op.run
    if mode != "forward+backward":
        return lambda: run(*args)
    out = run(*args)
    seed = (torch.ones_like(out).detach(),) if out.ndim else ()
    leaves = [t for t in args if t.requires_grad]

    def both() -> None:
        run(*args).backward(*seed)
        for leaf in leaves:
            leaf.grad = None

    return both


def run(options: Options) -> list[Measure]:
    """Time all ops in all modes."""
    ops = OPS[::7] if options.tiny else OPS
    least = 0.002 if options.quick else 0.005
    total, done, out = len(ops) * len(MODES), 0, []
    # PyTorch's DTensor has no rule for the fused attention of CPUs, and none for a
    # causal mask: all candidates run plain attention in parts.
    with peers.torch_world(options.ranks), sdpa_kernel(SDPBackend.MATH):
        for mode in MODES:
            rows = []
            with torch.set_grad_enabled(mode != "no grad"):
                for op in ops:
                    options.tell(done, total, f"{op.name}, {mode}")
                    calls = {kind: make_call(op, kind, mode) for kind in KINDS}
                    inner = (
                        dict.fromkeys(calls, 1)
                        if options.tiny
                        else calibrate(calls, options.ranks, least)
                    )
                    times = interleave(calls, options.rounds, inner, options.ranks)
                    rows.append(Measure(op.name, times, group=mode))
                    done += 1
            out += rows
            for peer in (peers.PYTORCH, peers.PLAIN):
                ratio = BARS.get((mode, peer))
                bars = () if ratio is None else (Bar(peer, ratio),)
                out.append(summarize(rows, peer, bars, group=mode))
    return out
