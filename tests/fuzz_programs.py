"""Random programs: a few ops on a few tensors, on shards against plain torch.

A program is data: inputs with shapes and placements, and steps, each an op and whole
numbers that choose its operands and arguments. ``agreed`` runs it both ways and says
what differs. Values are multiples of 1/8; where a difference is one of rounding at a
tie or a jump it does not come again with other values, so only what persists counts.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from op_harness import eighths, place

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    init_device_mesh,
    redistribution,
    simulate,
)
from dtensor.placement import Placement, Placements

T = torch.Tensor
MESHES = {
    "4": init_device_mesh("cpu", (4,)),
    "3": init_device_mesh("cpu", (3,)),
    "2x2": init_device_mesh("cpu", (2, 2)),
}
SHAPES: list[tuple[int, ...]] = [
    (4, 6), (6, 4), (5, 3), (8,), (6,), (2, 3, 4), (4, 1), (1, 6), (3, 5), (7, 2),
    (2, 4, 2), (1,), (), (4, 4), (0, 3), (12, 2),
]  # fmt: skip
LARGEST = 600  # elements: programs that grow beyond are cut short


class Skip(Exception):
    """The step does not apply to what its numbers chose."""


def need(condition: bool) -> None:
    """Skip the step unless."""
    if not condition:
        raise Skip


Step = Callable[[Sequence[T], int, int, int], Any]
STEPS: dict[str, Step] = {}


def step(f: Step) -> Step:
    """Decorator: a step of programs.

    It gets the tensors so far, with the chosen one first and a second choice next, and
    three numbers; it gives one tensor or several.
    """
    STEPS[f.__name__] = f
    return f


def dim_of(x: T, i: int) -> int:
    """A dim of a tensor that has some."""
    need(x.ndim > 0)
    return i % x.ndim


def single(f: Callable[[T], T], name: str) -> None:
    """A step of one tensor and no numbers."""
    STEPS[name] = lambda ts, i, j, k: f(ts[0])


for _name, _f in {
    "neg": torch.neg,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "abs": torch.abs,
    "sin": torch.sin,
    "square": lambda x: x * x / 4,
    "root": lambda x: (x.abs() + 1).sqrt(),
    "log": lambda x: (x * x + 1).log(),
    "gelu": F.gelu,
    "scaled": lambda x: 2 - x * 0.5,
    "shifted": lambda x: x + 1,
    "clamped": lambda x: x.clamp(-1, 1.5),
    "detached": lambda x: x.detach() * x,
    "number": lambda x: x * float(x.sum() / max(1, x.numel())),
    "standard": lambda x: (x - x.mean()) / (x.numel() + 1),
}.items():
    single(_f, _name)  # type: ignore[arg-type]


def pair(f: Callable[[T, T], T], name: str) -> None:
    """A step of two tensors that broadcast."""

    def run(ts: Sequence[T], i: int, j: int, k: int) -> T:
        try:
            torch.broadcast_shapes(ts[0].shape, ts[1].shape)
        except RuntimeError:
            raise Skip from None
        return f(ts[0], ts[1])

    STEPS[name] = run


for _name, _g in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda x, y: x * y / 2,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "where_number": lambda x, y: torch.where(x.isnan(), y, x),
    "lerp": lambda x, y: torch.lerp(*torch.broadcast_tensors(x, y), 0.25),
    "hypot": lambda x, y: torch.hypot(x, y + 3),
    "masked": lambda x, y: x.expand(torch.broadcast_shapes(x.shape, y.shape)).masked_fill(y > 0, 0.5),
}.items():  # fmt: skip
    pair(_g, _name)


@step
def matmul(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x, y = ts[0], ts[1]
    need(x.ndim > 0 and y.ndim > 0)
    if x.shape[-1] != y.shape[-min(2, y.ndim)]:
        y = y.transpose(-1, -2) if y.ndim > 1 else y
    need(x.shape[-1] == y.shape[-min(2, y.ndim)])
    if x.ndim > 2 and y.ndim > 2:
        need(x.shape[0] == y.shape[0])
    return x @ y / 4


@step
def linear(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x, w = ts[0], ts[1]
    need(x.ndim > 0 and w.ndim == 2 and x.shape[-1] == w.shape[1])
    return F.linear(x, w, w[:, 0])


@step
def einsum(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x, y = ts[0], ts[1]
    need(x.ndim == 2 and y.ndim == 2 and x.shape[0] == y.shape[0])
    return torch.einsum("ab,ac->bc", x, y) / 4


REDUCTIONS: list[Callable[..., T]] = [
    torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp,
    lambda x, d, keepdim: torch.linalg.vector_norm(x + 4, 2, d, keepdim=keepdim),
    lambda x, d, keepdim: torch.var(x, d, correction=0, keepdim=keepdim),
    lambda x, d, keepdim: torch.max(x, d[0] if isinstance(d, tuple) else d, keepdim=keepdim).values,
    lambda x, d, keepdim: torch.prod(x * 0.5, d[0] if isinstance(d, tuple) else d, keepdim=keepdim),
    lambda x, d, keepdim: torch.argmax(x, d[0] if isinstance(d, tuple) else d, keepdim=keepdim) * 0.5,
    lambda x, d, keepdim: (x > 0).any(d, keepdim=keepdim).to(x.dtype),
]  # fmt: skip


@step
def reduced(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, j)
    need(x.numel() > 0)
    dims = (d, (d + 1) % x.ndim) if k % 4 == 3 and x.ndim > 1 else (d,)
    return REDUCTIONS[i % len(REDUCTIONS)](x, dims, keepdim=k % 2 == 1)


@step
def reduced_whole(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    need(x.numel() > 1)
    whole = [x.sum, x.mean, x.max, x.norm, lambda: x.std(correction=0), x.amin]
    return whole[i % len(whole)]()


ALONG: list[Callable[[T, int], T]] = [
    torch.softmax, torch.log_softmax, torch.cumsum,
    lambda x, d: torch.cumprod(x * 0.5 + 2, d),
    lambda x, d: torch.logcumsumexp(x, d),
    lambda x, d: torch.sort(x, d).values,
    lambda x, d: torch.topk(x, max(1, x.shape[d] // 2), d).values,
    lambda x, d: torch.flip(x, (d,)),
    lambda x, d: torch.roll(x, 2, d),
    lambda x, d: torch.diff(x, dim=d),
    lambda x, d: torch.cummax(x, d).values,
    lambda x, d: x.unbind(d)[0],
    lambda x, d: F.normalize(x + 4, dim=d),
    lambda x, d: torch.repeat_interleave(x, 2, d),
    lambda x, d: torch.stack([x, x * 2], d),
    lambda x, d: torch.index_select(x, d, torch.arange(x.shape[d] - 1, -1, -1)),
    lambda x, d: torch.cat([x, x + 1], d),
]  # fmt: skip


@step
def along(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, j)
    need(x.shape[d] > 0)
    return ALONG[i % len(ALONG)](x, d)


@step
def joined(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x, y = ts[0], ts[1]
    d = dim_of(x, i)
    rest = [n for e, n in enumerate(x.shape) if e != d]
    need(y.ndim == x.ndim and rest == [n for e, n in enumerate(y.shape) if e != d])
    return torch.cat([x, y, x], d)


@step
def split(ts: Sequence[T], i: int, j: int, k: int) -> Any:
    x = ts[0]
    d = dim_of(x, i)
    need(x.shape[d] > 1)
    return list((x.chunk(2, d) if k % 2 else x.split(1 + j % x.shape[d], d))[:2])


@step
def sliced(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, i)
    start = j % (x.shape[d] + 1)
    index: list[Any] = [slice(None)] * x.ndim
    index[d] = slice(start, start + k % (x.shape[d] + 2), 1 + (i + j) % 2)
    return x[tuple(index)]


@step
def picked(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, i)
    need(x.shape[d] > 0)
    index: list[Any] = [slice(None)] * x.ndim
    if k % 3 == 0:
        index[d] = j % x.shape[d]
    elif k % 3 == 1:
        index[d] = [j % x.shape[d], k % x.shape[d], -1]
    else:
        index[d] = torch.tensor([[k % x.shape[d]], [j % x.shape[d]]])
    return x[tuple(index)]


@step
def gathered(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, i)
    need(x.shape[d] > 0)
    index = torch.arange(x.numel()).view(x.shape) * (1 + j % 3) % x.shape[d]
    return x.gather(d, index)


@step
def scattered(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, i)
    need(x.shape[d] > 0)
    index = torch.arange(x.numel()).view(x.shape) * (1 + j % 3) % x.shape[d]
    return x.scatter_add(d, index, x * 0.5)


@step
def reshaped(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    n = x.numel()
    need(n > 0)
    divisors = [m for m in range(1, n + 1) if n % m == 0]
    a = divisors[i % len(divisors)]
    rest = n // a
    if k % 3 == 0:
        return x.reshape(-1)
    if k % 3 == 1:
        return x.reshape(a, -1)
    smaller = [m for m in range(1, rest + 1) if rest % m == 0]
    b = smaller[j % len(smaller)]
    return x.reshape(a, b, rest // b)


@step
def merged(ts: Sequence[T], i: int, j: int, k: int) -> T:
    need(ts[0].ndim > 1)
    d = i % (ts[0].ndim - 1)
    return ts[0].flatten(d, d + 1)


@step
def unmerged(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    d = dim_of(x, i)
    need(x.shape[d] > 0)
    divisors = [m for m in range(1, x.shape[d] + 1) if x.shape[d] % m == 0]
    return x.unflatten(d, (divisors[j % len(divisors)], -1))


@step
def permuted(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    a, b = dim_of(x, i), dim_of(x, j)
    return x.transpose(a, b)


@step
def stretched(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    if k % 3 == 0:
        return x.unsqueeze(i % (x.ndim + 1))
    if k % 3 == 1:
        return x.expand(2, *x.shape)
    return x.squeeze()


@step
def padded(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    need(x.ndim > 0)
    pads = [i % 2, j % 3] if x.ndim == 1 or k % 2 else [0, 0, i % 2, j % 3]
    return F.pad(x, pads, value=float(k % 2))


@step
def triangle(ts: Sequence[T], i: int, j: int, k: int) -> T:
    need(ts[0].ndim > 1)
    return torch.tril(ts[0], i % 3 - 1)


@step
def normed(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    need(x.ndim > 0 and x.shape[-1] > 1)
    if k % 2:
        return F.rms_norm(x, x.shape[-1:], eps=0.1)
    return F.layer_norm(x, x.shape[-1:], eps=0.1)


@step
def lost(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x, y = ts[0], ts[1]
    if x.shape == y.shape and x.numel():
        return F.mse_loss(x, y, reduction=("mean", "sum", "none")[k % 3])
    need(x.ndim == 2 and x.numel() > 0)
    target = torch.arange(x.shape[0]) % x.shape[1]
    return F.cross_entropy(x, target, reduction=("mean", "sum", "none")[k % 3])


@step
def attended(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    need(x.ndim == 3 and x.numel() > 0)
    return F.scaled_dot_product_attention(x, x * 0.5, x, is_causal=k % 2 == 1)


@step
def written(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0].clone()
    d = dim_of(x, i)
    index: list[Any] = [slice(None)] * x.ndim
    start = j % (x.shape[d] + 1)
    index[d] = slice(start, start + 1 + k % 3)
    match k % 5:
        case 0:
            x[tuple(index)] = 0.5
        case 1:
            x[tuple(index)] += 1
        case 2:
            x[tuple(index)].mul_(2)
        case 3:
            x[tuple(index)] = ts[0][tuple(index)] * 3
        case _:
            x.add_(ts[0], alpha=0.5)
    return x


@step
def written_whole(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0].clone()
    if k % 4 == 0:
        return x.mul_(0.5).add_(1)
    if k % 4 == 1:
        return x.clamp_(-1, 1)
    if k % 4 == 2:
        return x.view(-1).add_(1).view(x.shape)
    return x.copy_(ts[0] * 2)


@step
def moved(ts: Sequence[T], i: int, j: int, k: int) -> T:
    x = ts[0]
    if not isinstance(x, DTensor):
        return x * 1
    rng = random.Random(i * 100 + j * 10 + k)
    return x.redistribute(placements=drawn_placements(x, x.device_mesh, rng)) * 1


IN_PLACE = {"written", "written_whole"}


def drawn_placements(x: T, mesh: DeviceMesh, rng: random.Random) -> Placements:
    """Random placements for a tensor."""
    out: list[Placement] = []
    for _ in range(mesh.ndim):
        one: list[Placement] = [Replicate(), Partial()]
        one += [Shard(d) for d in range(x.ndim)] * 2
        out.append(rng.choice(one))
    return tuple(out)


@dataclass(frozen=True)
class Program:
    """Inputs and steps.

    Attributes:
        mesh: Name of the mesh.
        inputs: Number of a shape, and of the draw of placements, per input.
        steps: Per step: name, two choices of operands, three numbers.
    """

    mesh: str
    inputs: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, int, int, int, int, int], ...]


def run(program: Program, given: list[T], taken: list[bool] | None) -> list[T]:
    """Run a program; ``taken`` says which steps apply, or is filled where it is empty.

    On shards the steps that plain tensors took are taken, and no others.
    """
    found = list(given)
    plain = taken is not None and not taken
    for n, (name, a, b, i, j, k) in enumerate(program.steps):
        if not plain and taken is not None and not taken[n]:
            continue
        x, y = found[a % len(found)], found[b % len(found)]
        try:
            out = STEPS[name]([x, y], i, j, k)
        except (Skip, RuntimeError, IndexError, ValueError):
            if not plain:
                raise
            assert taken is not None
            taken.append(False)
            continue
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        if plain:
            assert taken is not None
            fits = all(o.numel() <= LARGEST and o.ndim < 5 for o in outs)
            fits = fits and all(bool(o.isfinite().all()) for o in outs)
            taken.append(fits)
            if not fits:
                continue
        found += outs
    return found


def weighed(results: Sequence[T]) -> T:
    """One number that depends on all results; no two elements weigh alike."""
    total: Any = 0.0
    for n, r in enumerate(results):
        w = torch.cos(torch.arange(math.prod(r.shape), dtype=torch.float64) + n)
        w = w.view(r.shape)
        if isinstance(r, DTensor):
            whole = (Replicate(),) * r.device_mesh.ndim
            w = DTensor.from_local(w, r.device_mesh, whole, run_check=False)
        total = total + (r * w).sum()
    return total  # type: ignore[no-any-return]


def agreed(program: Program, seed: int = 0) -> str:
    """Run a program both ways; what differs, ``"refused"``, or an empty text."""
    mesh = MESHES[program.mesh]
    shapes = [SHAPES[s % len(SHAPES)] for s, _ in program.inputs]
    values = [eighths(*s, seed=seed + n) for n, s in enumerate(shapes)]
    leaves = [v.clone().requires_grad_() for v in values]
    taken: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run(program, leaves, taken)[len(leaves) :]
        if not wanted:
            return ""
        loss = weighed(wanted)
        if not loss.requires_grad:
            return ""
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        if not all(g is None or bool(g.isfinite().all()) for g in grads):
            return ""

        def compare() -> str:
            mine = []
            for n, (v, (_, draw)) in enumerate(zip(values, program.inputs)):
                places = drawn_placements(v, mesh, random.Random(draw))
                mine.append(place(v, mesh, places, seed=n).requires_grad_())
            with redistribution("allow"):
                try:
                    got = run(program, mine, taken)[len(mine) :]
                except ShardingError:
                    last = {s[0] for s, t in zip(program.steps, taken) if t}
                    if last & IN_PLACE:
                        return "refused"
                    raise
                found = torch.autograd.grad(weighed(got), mine, allow_unused=True)
                for n, (g, w) in enumerate(zip(got, wanted)):
                    wrong = unlike(g, w)
                    if wrong:
                        return f"result {n}: {wrong}"
                for n, (g, w) in enumerate(zip(found, grads)):
                    wrong = unlike(g, w)
                    if wrong:
                        return f"gradient {n}: {wrong}"
            return ""

        return next((r for r in simulate(compare, mesh.size()) if r), "")


def unlike(got: Any, want: T | None) -> str:
    """How two values differ."""
    if got is None or want is None:
        rest = got if got is not None else want
        whole = rest.full_tensor() if isinstance(rest, DTensor) else rest
        zero = whole is None or not bool(whole.any())
        return "" if zero else f"got {got}, expected {want}"
    full, want = got.detach().full_tensor(), want.detach()
    if full.shape != want.shape or full.dtype != want.dtype:
        return f"got {full.shape} {full.dtype}, expected {want.shape} {want.dtype}"
    scale = max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    if torch.allclose(full, want, 1e-8, 1e-9 * scale, equal_nan=True):
        return ""
    return f"got {full.flatten()[:6].tolist()}, expected {want.flatten()[:6].tolist()}"


def difference(program: Program) -> str:
    """What is wrong with a program whatever its values, or an empty text."""
    first = agreed(program)
    if not first or first == "refused":
        return first
    for seed in (100, 200):  # a tie or a jump does not come again
        if not agreed(program, seed):
            return ""
    return first
