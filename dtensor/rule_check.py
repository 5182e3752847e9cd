"""A check for those who write sharding rules: is every legal row right?

``check_rule`` runs an op on simulated ranks with its operands in every combination of
placements and compares values, shapes, dtypes and gradients with the single process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.collectives.counter import count_collectives
from dtensor.collectives.simulate import simulate
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import get_rank, get_world_size
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.policy import redistribution
from dtensor.spec import spec_of
from dtensor.tensor import DTensor, local_of

T = torch.Tensor


class RuleBroken(AssertionError):
    """A row of a rule is wrong; the message names the placements and what differs."""


def check_rule(
    fn: Callable[..., Any],
    samples: Sequence[Sequence[T]],
    *,
    ranks: Sequence[int] = (2, 3),
    rtol: float | None = None,
    rows: int = 64,
    timeout: float = 120,
) -> dict[str, int]:
    """Compare an op with the single process in every combination of placements.

    Each operand is replicated, cut along each of its dims, and, where its dtype adds
    up, made of addends. Sizes that the ranks do not divide show what uneven and empty
    shards do; give some.

    Args:
        fn: The op: takes tensors, gives a tensor or a sequence that has some.
        samples: The operands of each call to try, plain tensors; gradients of the
            floating ones are compared. ``float64`` leaves no doubt about rounding.
        ranks: Sizes of the mesh to try.
        rtol: Relative tolerance of the comparison; None: 1000 times the precision of
            the dtype.
        rows: Combinations of placements to try per sample and mesh; a seeded sample
            where there are more.
        timeout: Seconds for each mesh.

    Returns:
        ``{"rows": combinations tried, "without communication": so many of them}``.

    Raises:
        RuleBroken: A row gives another result than the single process.
        ValueError: There is no sample, or one without tensors.

    Example:
        >>> counts = check_rule(torch.mm, [(torch.ones(4, 3), torch.ones(3, 5))])
        >>> counts["rows"]
        32
    """
    if not samples or any(not s for s in samples):
        raise ValueError(
            f"check_rule: nothing to try, got {len(samples)} samples, expected at least "
            "one, each with the operands of a call. Call check_rule(fn, [(x, y), ...])."
        )
    tried = silent = 0
    for n in ranks:
        for sample in samples:
            wanted = _serial(fn, sample)
            found = simulate(
                _program, n, (fn, sample, wanted, rtol, rows), None, timeout
            )
            for rank_rows in zip(*found, strict=True):
                wrong = next((w for w, _ in rank_rows if w), "")
                if wrong:
                    raise RuleBroken(f"check_rule: {wrong}")
                tried += 1
                silent += all(calls == 0 for _, calls in rank_rows)
    return {"rows": tried, "without communication": silent}


def _tensors(out: Any) -> list[T]:
    if isinstance(out, T):
        return [out]
    return (
        [t for o in out for t in _tensors(o)] if isinstance(out, (list, tuple)) else []
    )


def _flows(t: T) -> bool:
    return t.is_floating_point() or t.is_complex()


def _seed(t: T) -> T:
    n = torch.arange(t.numel(), dtype=torch.float64)
    return (torch.cos(n) + 0.25).reshape(t.shape).to(t.dtype)


Wanted = tuple[list[T], "list[T | None]"]


def _serial(fn: Callable[..., Any], sample: Sequence[T]) -> Wanted:
    leaves = [t.detach().clone().requires_grad_(_flows(t)) for t in sample]
    outs = _tensors(fn(*leaves))
    return outs, _gradients(outs, leaves)


def _gradients(outs: Sequence[T], leaves: Sequence[T]) -> list[T | None]:
    ends = [o for o in outs if o.requires_grad]
    if not ends:
        return []
    seeds = []
    for o in ends:
        seed = _seed(o)
        if isinstance(o, DTensor):
            seed = DTensor.from_local(seed, o.device_mesh, [Replicate()])
        seeds.append(seed)
    into = [t for t in leaves if t.requires_grad]
    return list(torch.autograd.grad(ends, into, seeds, allow_unused=True))


def _options(t: T) -> list[Placement]:
    shards: list[Placement] = [Shard(d) for d in range(t.ndim)]
    return [Replicate(), *shards, *([Partial()] if _flows(t) else [])]


def _placed(t: T, mesh: DeviceMesh, p: Placement, seed: int) -> DTensor:
    """The tensor in a placement; no addend is zero, and all are unlike."""
    if p.is_partial():
        g = torch.Generator().manual_seed(seed)
        n = mesh.size()
        addends = [
            torch.randn(t.shape, generator=g, dtype=t.dtype) for _ in range(n - 1)
        ]
        addends.append(t - sum(addends))
        return DTensor.from_local(addends[get_rank()], mesh, [p])
    part = (
        t.narrow(p.dim, *spec_of(mesh, (p,), t.shape).block(p.dim))
        if isinstance(p, Shard)
        else t
    )
    return DTensor.from_local(part.clone(), mesh, [p], shape=t.shape)


def _program(
    fn: Callable[..., Any],
    sample: Sequence[T],
    wanted: Wanted,
    rtol: float | None,
    rows: int,
) -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (get_world_size(),))
    every = list(itertools.product(*[_options(t.detach()) for t in sample]))
    if len(every) > rows:
        every = [every[0], *random.Random(0).sample(every[1:], rows - 1)]
    return [_row(fn, sample, mesh, row, wanted, rtol) for row in every]


def _row(
    fn: Callable[..., Any],
    sample: Sequence[T],
    mesh: DeviceMesh,
    row: Sequence[Placement],
    wanted: Wanted,
    rtol: float | None,
) -> tuple[str, int]:
    given = []
    for i, (t, p) in enumerate(zip(sample, row, strict=True)):
        given.append(_placed(t.detach(), mesh, p, i).requires_grad_(_flows(t)))
    before = [local_of(d).detach().clone() for d in given]
    where = (
        f"with operands of shapes {[tuple(t.shape) for t in sample]} placed "
        f"{[str(p) for p in row]} on {mesh.size()} ranks"
    )
    with redistribution("allow"):
        with count_collectives() as count:
            outs = _tensors(fn(*given))
        if len(outs) != len(wanted[0]):
            return f"got {len(outs)} results, expected {len(wanted[0])}, {where}", 0
        for k, (o, w) in enumerate(zip(outs, wanted[0], strict=True)):
            wrong = _unlike(o, w.detach(), rtol)
            if wrong:
                return f"result {k} {wrong}, {where}", 0
        grads = _gradients(outs, given)
        for k, (g, v) in enumerate(zip(grads, wanted[1], strict=True)):
            if g is None and v is None:
                continue
            zero = torch.zeros_like(given[k]) if g is None else g
            w = v if v is not None else torch.zeros(zero.shape, dtype=zero.dtype)
            wrong = _unlike(zero, w, rtol)
            if wrong:
                return f"gradient {k} {wrong}, {where}", 0
    for k, (d, b) in enumerate(zip(given, before, strict=True)):
        if not torch.equal(local_of(d).detach(), b):
            return f"operand {k} was changed, {where}", 0
    return "", count.calls()


def _unlike(got: T, want: T, rtol: float | None) -> str:
    """How a result differs from the single process's."""
    if not isinstance(got, DTensor):
        return f"is a {type(got).__name__}, expected a DTensor"
    if got.shape != want.shape or got.dtype != want.dtype:
        return (
            f"is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} "
            f"{want.dtype}"
        )
    local = local_of(got)
    if local.shape != got._spec.local_shape:
        return (
            f"has a shard of {tuple(local.shape)}, but its placements "
            f"{[str(p) for p in got.placements]} ask for {tuple(got._spec.local_shape)}"
        )
    full: T = DTensor.full_tensor(got).detach()
    if rtol is None:
        rtol = 1000 * torch.finfo(want.dtype).eps if _flows(want) else 0.0
    scale = float(want.abs().max()) if want.numel() and _flows(want) else 0.0
    if torch.allclose(full, want, rtol, rtol * max(1.0, scale), equal_nan=True):
        return ""
    return (
        f"placed {[str(p) for p in got.placements]} differs: got "
        f"{full.flatten()[:4].tolist()}, expected {want.flatten()[:4].tolist()}"
    )
