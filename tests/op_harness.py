"""Compare ops on DTensors with plain torch: values, shapes, dtypes and gradients.

A ``Case`` is a function of plain tensors. ``failures`` runs a table of cases on
simulated ranks, each with every combination of placements of its operands (or a
seeded sample of them), all inside one ``simulate``. Operands hold multiples of 1/8, and
the addends of Partial ones too, so sums are exact and floor, eq and the like agree.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    init_device_mesh,
    redistribution,
    simulate,
)
from dtensor.placement import Placements, show
from dtensor.spec import spec_of
from dtensor.tensor import local_of

T = torch.Tensor
torch.set_num_threads(1)
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@dataclass
class Case:
    """One call to check.

    Attributes:
        name: Name in messages.
        fn: The program, on plain tensors or on DTensors.
        args: Its tensors.
        grad: Whether gradients are compared (of the floating operands).
        may_refuse: A ShardingError is right in some placements (writes in place).
        fixed: Operands (by index) that stay plain tensors.
        whole: Operands that are only ever Replicate.
        rtol: Relative tolerance.
    """

    name: str
    fn: Callable[..., Any]
    args: Sequence[T]
    grad: bool = True
    may_refuse: bool = False
    fixed: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    rtol: float = 1e-9


def eighths(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> T:
    """Multiples of 1/8 in (-3, 3), none of them whole numbers or zero."""
    g = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    x = torch.randint(-24, 24, shape, generator=g)
    x = torch.where(x % 8 == 0, x + 3, x)
    return (x / 8).to(dtype)


def positive(*shape: int, seed: int = 0) -> T:
    """Multiples of 1/8 in (0, 3)."""
    return eighths(*shape, seed=seed).abs()


def unit(*shape: int, seed: int = 0) -> T:
    """Multiples of 1/32 in (-1, 1)."""
    return eighths(*shape, seed=seed) / 4


def integers(*shape: int, low: int = 0, high: int = 5, seed: int = 0) -> T:
    """Whole numbers."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=g)


def booleans(*shape: int, seed: int = 0) -> T:
    """True and False."""
    return integers(*shape, high=2, seed=seed).bool()


def options(t: T, axes: int) -> list[Placements]:
    """All placements of a tensor on a mesh of so many axes."""
    one: list[Placement] = [Replicate()]
    one += [Shard(d) for d in range(t.ndim)]
    if t.dtype != torch.bool:
        one.append(Partial())
    if t.is_floating_point() or t.is_complex():
        one.append(Partial("avg"))
    return list(itertools.product(one, repeat=axes))


def place(t: T, mesh: DeviceMesh, placements: Placements, seed: int = 0) -> DTensor:
    """Distribute a tensor; the addends of Partial axes are all unlike zero."""
    spec = spec_of(mesh, placements, t.shape)
    assert spec.coordinate is not None
    count, index, factor = 1, 0, 1
    for axis, p in enumerate(placements):
        if p.is_partial():
            index = index * mesh.shape[axis] + spec.coordinate[axis]
            count *= mesh.shape[axis]
            factor *= mesh.shape[axis] if p == Partial("avg") else 1
    with torch.no_grad():
        part = t
        if count > 1:
            g = torch.Generator().manual_seed(seed)
            addends = [
                (torch.randint(-16, 16, t.shape, generator=g) / 8).to(t.dtype)
                for _ in range(count - 1)
            ]
            addends.append(t - sum(addends))
            part = addends[index] * factor
        for d in range(t.ndim):
            part = part.narrow(d, *spec.block(d, mesh.ndim))
        part = part.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=t.shape)


def combinations(
    case: Case, axes: int, limit: int
) -> list[tuple[Placements | None, ...]]:
    """Placements of all operands: all combinations, or all Replicate and a sample."""
    lists: list[list[Placements | None]] = []
    for i, t in enumerate(case.args):
        if i in case.fixed:
            lists.append([None])
        elif i in case.whole:
            lists.append([(Replicate(),) * axes])
        else:
            lists.append([*options(t, axes)])
    total = math.prod(len(x) for x in lists)
    if total <= limit:
        return list(itertools.product(*lists))
    rng = random.Random(case.name)
    chosen = [tuple(x[0] for x in lists)]  # all replicated
    chosen += [tuple(rng.choice(x) for x in lists) for _ in range(limit)]
    return list(dict.fromkeys(chosen))


def flat(out: Any) -> list[Any]:
    """Tensors and numbers of a result, in order."""
    if isinstance(out, (tuple, list)):
        return [x for o in out for x in flat(o)]
    return [out]


def differentiable(t: Any) -> bool:
    """Whether a tensor can have a gradient."""
    return isinstance(t, T) and (t.is_floating_point() or t.is_complex())


def run_plain(case: Case) -> tuple[list[Any], list[T | None], Exception | None]:
    """Results and gradients on plain tensors, or what was raised."""
    args = [t.clone() for t in case.args]
    for i, t in enumerate(args):
        if case.grad and differentiable(t) and i not in case.fixed:
            t.requires_grad_()
    try:
        outs = flat(case.fn(*args))
    except Exception as e:
        return [], [], e
    try:
        return outs, gradients(case, outs, args, weight_of), None
    except (RuntimeError, NotImplementedError):  # torch has no derivative
        return outs, [], None


def weight_of(out: T) -> T:
    """A cotangent for a result."""
    return eighths(*out.shape, seed=99).to(out.dtype)


def gradients(
    case: Case, outs: list[Any], args: list[Any], weigh: Callable[[Any], Any]
) -> list[T | None]:
    """Gradients of all operands that require grad."""
    if not case.grad:
        return []
    ends = [o for o in outs if isinstance(o, T) and o.requires_grad]
    into = [a for a in args if isinstance(a, T) and a.requires_grad]
    if not ends or not into:
        return []
    return list(
        torch.autograd.grad(ends, into, [weigh(o) for o in ends], allow_unused=True)
    )


def difference(what: str, got: Any, wanted: Any, rtol: float) -> str | None:
    """What is wrong with one result, or None."""
    if not isinstance(wanted, T):
        same = got == wanted or (got != got and wanted != wanted)
        return None if same else f"{what}: got {got!r}, expected {wanted!r}"
    if not isinstance(got, DTensor):
        return f"{what}: got a {type(got).__name__}, expected a DTensor"
    if tuple(got.shape) != tuple(wanted.shape) or got.dtype != wanted.dtype:
        return (
            f"{what}: got {tuple(got.shape)} {got.dtype}, expected "
            f"{tuple(wanted.shape)} {wanted.dtype}"
        )
    local = local_of(got)
    if local.shape != got._spec.local_shape:
        return (
            f"{what}: the shard has shape {tuple(local.shape)}, its spec "
            f"{got._spec} says {tuple(got._spec.local_shape)}"
        )
    full = got.detach().full_tensor()
    want = wanted.detach()
    if full.dtype == torch.bool or not (full.is_floating_point() or full.is_complex()):
        same = torch.equal(full, want)
    else:
        same = torch.allclose(full, want, rtol, rtol, equal_nan=True)
    if same:
        return None
    return (
        f"{what} placed {show(got.placements)}: values differ, got "
        f"{full.flatten()[:6].tolist()}, expected {want.flatten()[:6].tolist()}"
    )


def check(
    case: Case,
    mesh: DeviceMesh,
    placements: Sequence[Placements | None],
    reference: tuple[list[Any], list[T | None], Exception | None],
) -> str | None:
    """Run one case in one combination of placements; what is wrong, or None."""
    outs, grads, error = reference
    args: list[Any] = []
    before = []
    for i, (t, p) in enumerate(zip(case.args, placements, strict=True)):
        d: Any = t.clone() if p is None else place(t, mesh, p, seed=i)
        before.append(local_of(d).clone())
        if case.grad and differentiable(t) and p is not None:
            d.requires_grad_()
        args.append(d)
    try:
        got = flat(case.fn(*args))
    except Exception as e:
        if error is not None:
            return None
        if case.may_refuse and isinstance(e, ShardingError):
            return "refused"
        where = traceback.extract_tb(e.__traceback__)[-1]
        return (
            f"{type(e).__name__}: {str(e)[:300]} "
            f"({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        )
    if error is not None:
        return f"plain torch raises {error!r}, here nothing was raised"
    if len(got) != len(outs):
        return f"got {len(got)} results, expected {len(outs)}"
    for k, (g, w) in enumerate(zip(got, outs, strict=True)):
        wrong = difference(f"result {k}", g, w, case.rtol)
        if wrong:
            return wrong

    def weigh(o: DTensor) -> DTensor:
        whole = (Replicate(),) * mesh.ndim
        w = eighths(*o.shape, seed=99).to(o.dtype)
        return DTensor.from_local(w, mesh, whole, run_check=False)

    if grads:
        found = gradients(case, got, args, weigh)
        owners = [a for a in args if isinstance(a, T) and a.requires_grad]
        if len(found) != len(grads):
            return f"got {len(found)} gradients, expected {len(grads)}"
        for k, (g, w) in enumerate(zip(found, grads, strict=True)):
            if w is None or g is None:
                zero = not (isinstance(g, DTensor) and bool(g.full_tensor().any()))
                if w is None and not zero or w is not None and bool(w.any()):
                    return f"gradient {k}: got {g}, expected {w}"
                continue
            wrong = difference(f"gradient {k}", g, w, case.rtol)
            if wrong:
                return wrong
            if g.placements != owners[k].placements:  # type: ignore[attr-defined]
                return f"gradient {k}: placed {g.placements}"  # type: ignore[attr-defined]
    for k, (a, b) in enumerate(zip(args, before, strict=True)):
        if not torch.allclose(local_of(a), b, 0, 0, equal_nan=True):
            return f"operand {k} was changed"
    return None


def failures(
    cases: Sequence[Case], mesh: DeviceMesh, limit: int = 12, show_all: bool = False
) -> list[str]:
    """Everything that is wrong with a table of cases on one mesh.

    Args:
        cases: The table.
        mesh: ``LINE`` or ``GRID``.
        limit: Combinations of placements per case (a sample where there are more).
        show_all: Keep all failures of a case, not only the first three.
    """
    with warnings.catch_warnings():  # torch's own, about shapes and dtypes
        warnings.simplefilter("ignore")
        return _failures(cases, mesh, limit, show_all)


def _failures(
    cases: Sequence[Case], mesh: DeviceMesh, limit: int, show_all: bool
) -> list[str]:
    references = [run_plain(c) for c in cases]
    now: dict[str, str] = {}

    def program() -> list[str]:
        found = []
        with redistribution("allow"):
            for case, reference in zip(cases, references, strict=True):
                wrong, refused = [], 0
                rows = combinations(case, mesh.ndim, limit)
                for row in rows:
                    text = ", ".join("plain" if p is None else show(p) for p in row)
                    now["case"] = f"{case.name} at {text}"
                    problem = check(case, mesh, row, reference)
                    if problem == "refused":
                        refused += 1
                    elif problem:
                        wrong.append(f"{case.name} at {text}: {problem}")
                if refused and refused == len(rows):
                    wrong.append(f"{case.name}: refused in every placement")
                found += wrong if show_all else wrong[:3]
        return found

    try:
        results = simulate(program, ranks=mesh.size(), timeout=300)
    except Exception as e:
        raise AssertionError(f"while running {now.get('case')}: {e!r}") from e
    return list(dict.fromkeys(line for found in results for line in found))


def assert_right(cases: Sequence[Case], mesh: DeviceMesh, limit: int = 12) -> None:
    """Fail with a list of all that is wrong."""
    found = failures(cases, mesh, limit)
    assert not found, "\n" + "\n".join(found)
