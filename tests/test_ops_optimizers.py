"""Optimizers (foreach, fused, for-loop) and clipping against plain torch, 5 steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_harness import GRID, LINE, T, eighths, place

from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, simulate
from dtensor.placement import Placement, Placements

SHAPES = [(5, 3), (3,), (1, 4), (2, 0), ()]
optim = torch.optim
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p, **k: optim.SGD(p, 0.1, **k),
    "SGD momentum": lambda p, **k: optim.SGD(
        p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **k
    ),
    "Adam": lambda p, **k: optim.Adam(p, 0.1, weight_decay=0.1, **k),
    "Adam amsgrad": lambda p, **k: optim.Adam(p, 0.1, amsgrad=True, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, 0.1, **k),
    "AdamW maximize": lambda p, **k: optim.AdamW(p, 0.1, maximize=True, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 0.1, **k),
    "RMSprop": lambda p, **k: optim.RMSprop(p, 0.1, momentum=0.5, centered=True, **k),
    "Adadelta": lambda p, **k: optim.Adadelta(p, 0.1, **k),
    "Adamax": lambda p, **k: optim.Adamax(p, 0.1, **k),
    "NAdam": lambda p, **k: optim.NAdam(p, 0.1, **k),
    "RAdam": lambda p, **k: optim.RAdam(p, 0.1, **k),
    "ASGD": lambda p, **k: optim.ASGD(p, 0.1, **k),
    "Rprop": lambda p, **k: optim.Rprop(p, 0.1, **k),
}
FUSED = {
    "SGD",
    "SGD momentum",
    "Adam",
    "Adam amsgrad",
    "AdamW",
    "AdamW maximize",
    "Adagrad",
}
KINDS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
}


def layouts(mesh: DeviceMesh) -> list[list[Placements]]:
    """Placements of all parameters, a few unlike ones."""
    one: list[list[Placement]] = [
        [Replicate(), Shard(0), Shard(1), Shard(0), Replicate()],
        [Shard(0), Replicate(), Shard(0), Shard(1), Replicate()],
        [Shard(1), Shard(0), Replicate(), Replicate(), Replicate()],
    ]
    if mesh.ndim == 1:
        return [[(p,) for p in row] for row in one]
    return [
        [(p, q) for p, q in zip(a, b, strict=True)]
        for a, b in zip(one, one[1:] + one[:1], strict=True)
    ]


def steps(
    params: list[Any], make: Callable[..., Any], grad_of: Any, **kind: bool
) -> None:
    optimizer = make(params, **kind)
    for step in range(5):
        for i, p in enumerate(params):
            p.grad = grad_of(p, eighths(*SHAPES[i], seed=step), i)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
def test_optimizers(kind: str, mesh: DeviceMesh) -> None:
    names = [n for n in OPTIMIZERS if kind != "fused" or n in FUSED]
    wanted: dict[str, list[T]] = {}
    for name in names:
        params = [eighths(*s).requires_grad_() for s in SHAPES]
        steps(params, OPTIMIZERS[name], lambda p, g, i: g, **KINDS[kind])
        wanted[name] = params

    def program() -> list[str]:
        wrong = []
        for name in names:
            for row in layouts(mesh):
                params = [
                    torch.nn.Parameter(place(eighths(*s), mesh, p))
                    for s, p in zip(SHAPES, row, strict=True)
                ]

                def grad(p: Any, g: T, i: int, row: Any = row) -> DTensor:
                    return place(g, mesh, row[i])

                try:
                    steps(params, OPTIMIZERS[name], grad, **KINDS[kind])
                except Exception as e:
                    wrong.append(f"{name}: {type(e).__name__} {str(e)[:300]}")
                    continue
                for p, w in zip(params, wanted[name], strict=True):
                    got = p.full_tensor()  # type: ignore[attr-defined]
                    if not torch.allclose(got, w, 1e-9, 1e-9):
                        wrong.append(f"{name} at {p.placements}: {got} {w}")  # type: ignore[attr-defined]
        return wrong

    found = simulate(program)
    assert not any(found), "\n".join(dict.fromkeys(x for f in found for x in f))


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
def test_clip_grad_norm(order: float, foreach: bool | None, mesh: DeviceMesh) -> None:
    # torch has no inf norm of nothing
    shapes = [s if 0 not in s or order < 9 else (2, 2) for s in SHAPES]
    params = [eighths(*s).requires_grad_() for s in shapes]
    for i, p in enumerate(params):
        p.grad = eighths(*shapes[i], seed=5)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0, order, foreach=foreach)

    def program() -> None:
        for row in layouts(mesh):
            mine = [
                torch.nn.Parameter(place(eighths(*s), mesh, p))
                for s, p in zip(shapes, row, strict=True)
            ]
            for i, p in enumerate(mine):
                p.grad = place(eighths(*shapes[i], seed=5), mesh, row[i])
            got = torch.nn.utils.clip_grad_norm_(mine, 1.0, order, foreach=foreach)
            assert torch.allclose(got.full_tensor(), norm), row  # type: ignore[attr-defined]
            for p, w in zip(mine, params, strict=True):
                assert torch.allclose(p.grad.full_tensor(), w.grad)  # type: ignore

    simulate(program)


def test_foreach_ops() -> None:
    shapes = SHAPES[:3]
    a, b = [eighths(*s) for s in shapes], [eighths(*s, seed=4) for s in shapes]
    unary = "abs neg sqrt exp sign reciprocal sigmoid tanh floor ceil log1p"
    programs: dict[str, Callable[..., Any]] = {
        n: lambda x, y, n=n: getattr(torch, f"_foreach_{n}")([v.abs() for v in x])
        for n in unary.split()
    }
    programs |= {
        n: lambda x, y, n=n: getattr(torch, f"_foreach_{n}")(x, y)
        for n in "add sub mul div maximum minimum".split()
    }
    t: Any = torch
    programs |= {
        "add number": lambda x, y: t._foreach_add(x, 2),
        "add alpha": lambda x, y: t._foreach_add(x, y, alpha=3),
        "mul numbers": lambda x, y: t._foreach_mul(x, [1.0, 2.0, 3.0]),
        "mul 0-d": lambda x, y: t._foreach_mul(x, y[0].sum()),
        "lerp": lambda x, y: t._foreach_lerp(x, y, 0.25),
        "lerp tensors": lambda x, y: t._foreach_lerp(x, y, [v.tanh() for v in y]),
        "addcmul": lambda x, y: t._foreach_addcmul(x, y, y, value=2),
        "addcdiv": lambda x, y: t._foreach_addcdiv(
            x, y, [v.abs() for v in y], [1, 2, 3]
        ),
        "norm": lambda x, y: t._foreach_norm(x),
        "norm 1": lambda x, y: t._foreach_norm(x, 1),
        "norm inf": lambda x, y: t._foreach_norm(x, float("inf")),
        "pow": lambda x, y: t._foreach_pow([v.abs() for v in x], 2),
    }
    wanted = {n: f(a, b) for n, f in programs.items()}

    def program() -> list[str]:
        wrong = []
        P, R, S = Partial(), Replicate(), Shard(0)
        rows: list[list[Placement]] = [[R, R, R], [S, S, S], [P, P, P], [S, R, P]]
        for n, f in programs.items():
            for x in rows:
                for y in rows:
                    try:
                        got = f(
                            [place(v, LINE, (p,)) for v, p in zip(a, x, strict=True)],
                            [place(v, LINE, (p,)) for v, p in zip(b, y, strict=True)],
                        )
                        for g, w in zip(got, wanted[n], strict=True):
                            if not torch.allclose(g.full_tensor(), w):
                                wrong.append(f"_foreach_{n} at {x}, {y}: {g}")
                    except Exception as e:
                        wrong.append(f"_foreach_{n} at {x}, {y}: {e!r:.300}")
        return wrong

    found = simulate(program)
    assert not any(found), "\n".join(dict.fromkeys(x for f in found for x in f[:9]))
