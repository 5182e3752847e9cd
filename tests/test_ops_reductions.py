"""Reductions and ops along dims, with empty and uneven shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import (
    GRID,
    LINE,
    Case,
    assert_right,
    booleans,
    eighths,
    integers,
    place,
)

from dtensor import Replicate, Shard, count_collectives, redistribution, simulate

A, N, M = eighths(5, 3), integers(5, 3), booleans(5, 3)
CUBE, EMPTY, ONE = eighths(2, 5, 3), eighths(0, 3), eighths(1)
# Distinct values, so that sort, max and median have one answer.
DISTINCT = (torch.randperm(15, generator=torch.Generator().manual_seed(3)) / 4).view(
    5, 3
)
DISTINCT = DISTINCT.double()

PLAIN = "sum nansum mean amax amin prod std var nanmean"
WITH_DIM = PLAIN + " logsumexp"


def reductions() -> list[Case]:
    t = torch
    cases = [Case(n, getattr(t, n), [A]) for n in PLAIN.split()]
    for n in WITH_DIM.split():
        f = getattr(t, n)
        cases.append(Case(f"{n}(0)", lambda x, f=f: f(x, 0), [A]))
        cases.append(
            Case(f"{n}(-1, keepdim)", lambda x, f=f: f(x, -1, keepdim=True), [A])
        )
        cases.append(Case(f"{n}(dim=1)", lambda x, f=f: f(x, dim=1), [CUBE]))
        if n != "prod":
            cases.append(Case(f"{n}((0, 2))", lambda x, f=f: f(x, dim=(0, 2)), [CUBE]))
            cases.append(
                Case(
                    f"{n}((1, 2), keep)",
                    lambda x, f=f: f(x, (1, 2), keepdim=True),
                    [CUBE],
                )
            )
    for n in "sum mean nansum prod".split():
        f = getattr(t, n)
        cases.append(
            Case(f"{n}(dtype)", lambda x, f=f: f(x, dtype=t.float32), [A], rtol=1e-5)
        )
        cases.append(
            Case(
                f"{n}(dim, dtype)",
                lambda x, f=f: f(x, 0, dtype=t.float32),
                [A],
                rtol=1e-5,
            )
        )
        cases.append(Case(f"{n} of nothing", lambda x, f=f: f(x), [EMPTY]))
        cases.append(Case(f"{n} along nothing", lambda x, f=f: f(x, 0), [EMPTY]))
        cases.append(Case(f"{n} beside nothing", lambda x, f=f: f(x, 1), [EMPTY]))
        cases.append(Case(f"{n} of one", lambda x, f=f: f(x), [ONE]))
        cases.append(Case(f"{n} of a number", lambda x, f=f: f(x), [eighths()]))
    cases += [
        Case("sum(int dtype)", lambda x: x.sum(0, dtype=t.int64), [A]),
        Case("sum of ints", lambda x: x.sum(), [N]),
        Case("sum of bools", lambda x: x.sum(1), [M]),
        Case("sum axis=", lambda x: t.sum(x, axis=1), [A]),
        Case("mean axis=", lambda x: t.mean(x, axis=0), [A]),
        Case("sum(dim=None)", lambda x: t.sum(x, dim=None), [A]),
        Case("sum(())", lambda x: t.sum(x, ()), [A]),
        Case("sum(keepdim)", lambda x: t.sum(x, dim=None, keepdim=True), [A]),
        Case("nansum", lambda x: x.sqrt().nansum(0), [A], grad=False),
        Case("nanmean", lambda x: (x.sqrt()).nanmean(1), [A], grad=False),
        Case("prod of ints", lambda x: x.prod(0), [N]),
        Case("max", lambda x: x.max(), [A]),
        Case("min", lambda x: x.min(), [A]),
        Case("max(dim)", lambda x: tuple(x.max(0)), [DISTINCT]),
        Case("min(dim)", lambda x: tuple(t.min(x, 1, keepdim=True)), [DISTINCT]),
        Case("max(other)", t.max, [A, eighths(5, 3, seed=8)]),
        Case("min(other)", t.min, [A, eighths(3)]),
        Case("median", lambda x: x.median(), [DISTINCT]),
        Case("median(dim)", lambda x: tuple(x.median(0)), [DISTINCT]),
        Case("nanmedian(dim)", lambda x: tuple(x.nanmedian(1)), [DISTINCT]),
        Case("mode()", lambda x: tuple(x.mode()), [A]),
        Case("mode", lambda x: tuple(x.mode(0)), [A]),
        Case("kthvalue", lambda x: tuple(x.kthvalue(2, 0)), [DISTINCT]),
        Case("argmax", lambda x: x.argmax(), [DISTINCT]),
        Case("argmax(dim)", lambda x: x.argmax(0), [DISTINCT]),
        Case("argmin(keepdim)", lambda x: x.argmin(1, keepdim=True), [DISTINCT]),
        Case("aminmax", lambda x: tuple(t.aminmax(x)), [A]),
        Case("any", lambda x: x.any(), [M]),
        Case("all(dim)", lambda x: x.all(0), [M]),
        Case("any(keepdim)", lambda x: x.any(1, keepdim=True), [A]),
        Case("count_nonzero", lambda x: t.count_nonzero(x, 0), [N]),
        Case("var(unbiased)", lambda x: x.var(0, False), [A]),
        Case("var(no dim)", lambda x: x.var(unbiased=False), [A]),
        Case("std(correction)", lambda x: x.std(1, correction=0), [A]),
        Case("std(dim, unbiased, keep)", lambda x: t.std(x, 1, True, True), [A]),
        Case("var_mean", lambda x: t.var_mean(x, 0), [A]),
        Case("std_mean", lambda x: t.std_mean(x), [A]),
        Case("var_mean(keep)", lambda x: t.var_mean(x, (0, 1), keepdim=True), [A]),
        Case("norm", lambda x: x.norm(), [A]),
        Case("norm(p, dim)", lambda x: t.norm(x, 1, 0), [A]),
        Case("norm(inf)", lambda x: t.norm(x, float("inf")), [DISTINCT]),
        Case("norm(fro)", lambda x: t.norm(x, dim=(0, 1)), [A]),
        *[
            Case(
                f"vector_norm({p})",
                lambda x, p=p: t.linalg.vector_norm(x, p),
                [DISTINCT + 0.125],
            )
            for p in (0, 0.5, 1, 2, 3, float("inf"), float("-inf"))
        ],
        Case("vector_norm(dim)", lambda x: t.linalg.vector_norm(x, 2, 0), [A]),
        Case(
            "vector_norm(keep)",
            lambda x: t.linalg.vector_norm(x, 1, 1, keepdim=True),
            [A],
        ),
        Case("vector_norm of nothing", lambda x: t.linalg.vector_norm(x), [EMPTY]),
        Case("linalg.norm", lambda x: t.linalg.norm(x), [A]),
        Case("dist", lambda x, y: t.dist(x, y, 2), [A, eighths(5, 3, seed=2)]),
        Case("normalize", lambda x: F.normalize(x, dim=0), [A]),
        Case("cosine_similarity", F.cosine_similarity, [A, eighths(5, 3, seed=2)]),
        Case("amax ties", lambda x: x.round().amax(0), [A]),
        Case("prod zeros", lambda x: x.round().prod(1), [A]),
    ]
    return cases


def along() -> list[Case]:
    t = torch
    return [
        *[
            Case(f"{n}({d})", lambda x, n=n, d=d: getattr(t, n)(x, d), [CUBE])
            for n in "cumsum cumprod softmax log_softmax logcumsumexp".split()
            for d in (0, -1)
        ],
        Case(
            "softmax(dtype)",
            lambda x: x.softmax(1, dtype=t.float64),
            [A.float()],
            rtol=1e-5,
        ),
        Case("F.softmax", lambda x: F.softmax(x, dim=-1), [A]),
        Case("F.softmin", lambda x: F.softmin(x, dim=-1), [A]),
        Case("F.log_softmax", lambda x: F.log_softmax(x, 0), [A]),
        Case("softmax 0-dim", lambda x: x.softmax(0), [eighths()]),
        Case("softmax beside nothing", lambda x: x.softmax(1), [EMPTY]),
        Case("softmax along nothing", lambda x: x.softmax(0), [EMPTY]),
        Case("cumsum(dtype)", lambda x: x.cumsum(0, dtype=t.int64), [A]),
        Case("cumsum of bools", lambda x: x.cumsum(1), [M]),
        Case("cummax", lambda x: tuple(x.cummax(0)), [DISTINCT]),
        Case("cummin", lambda x: tuple(x.cummin(1)), [DISTINCT]),
        Case("sort", lambda x: tuple(x.sort()), [DISTINCT]),
        Case("sort(0, descending)", lambda x: tuple(t.sort(x, 0, True)), [DISTINCT]),
        Case("sort(stable)", lambda x: tuple(t.sort(x, stable=True, dim=0)), [A]),
        Case("argsort", lambda x: x.argsort(1), [DISTINCT]),
        Case("argsort(stable)", lambda x: t.argsort(x, stable=True, dim=0), [A]),
        Case("topk", lambda x: tuple(x.topk(2)), [DISTINCT]),
        Case("topk(0)", lambda x: tuple(x.topk(2, 0, largest=False)), [DISTINCT]),
        Case("diff", lambda x: t.diff(x, dim=0), [A]),
        Case("flip", lambda x: x.flip(0), [A]),
        Case("flip_2", lambda x: t.flip(x, (0, 2)), [CUBE]),
        Case("roll", lambda x: t.roll(x, 2, 0), [A]),
        Case("roll_flat", lambda x: t.roll(x, 2), [A]),
        Case("roll_2", lambda x: t.roll(x, (1, 2), (0, 1)), [A]),
        Case("tril", lambda x: x.tril(), [CUBE]),
        Case("triu", lambda x: t.triu(x, 1), [A]),
        Case("renorm", lambda x: x.renorm(2, 0, 1.0), [A]),
        Case("trapezoid", lambda x: t.trapezoid(x, dim=0), [A]),
        Case("searchsorted", t.searchsorted, [DISTINCT.flatten().sort()[0], A]),
        Case("bincount", lambda x: t.bincount(x), [N.flatten()]),
        Case("histc", lambda x: t.histc(x, 4), [A], grad=False),
        Case("unique", lambda x: t.unique(x), [N]),
    ]


def test_a_norm_sends_norms() -> None:
    def program() -> None:
        x = place(eighths(64, 3), LINE, (Shard(0),))
        with count_collectives() as c:
            n = x.norm()
            torch.linalg.vector_norm(x, 1, 0)
        assert n.placements == (Replicate(),)
        assert c.bytes() <= 3 * 8 * 4 + 3 * 8

    simulate(program)


INF, NAN = float("inf"), float("nan")
TIED = torch.tensor(
    [[1, 2, 2.0], [2, 2, -1], [2, -1, 0], [-1, -1, 2], [0, 2, 2]], dtype=torch.float64
)
NANS = torch.tensor(
    [[1, NAN, 2.0], [NAN, 3, 2], [NAN, 1, 0], [4, NAN, 1], [0, 1, 5]],
    dtype=torch.float64,
)
ZEROS = torch.tensor(
    [[0, 2, 2.0], [1, 0, 3], [2, 3, 0], [0, 1, 2], [1.5, 0, 2]], dtype=torch.float64
)
INFS = torch.tensor(
    [[-INF, 1, 2.0], [-INF, -INF, 3], [-INF, 1, 0], [-INF, -INF, 1], [-INF, 2, -INF]],
    dtype=torch.float64,
)
EVEN, LONG = TIED[:4], eighths(9, 2)


def cut() -> list[Case]:
    """Along every dim, cut or not: ties, zeros, nan, infinities, all dtypes."""
    t = torch
    cases = []
    for n in "amax amin max min aminmax".split():
        f = getattr(t, n)
        for name, x in [("ties", TIED), ("nan", NANS), ("inf", INFS), ("even", EVEN)]:
            grad = not (name == "nan" and n in ("amax", "amin"))
            cases.append(Case(f"{n} {name}", lambda x, f=f: f(x), [x], grad=grad))
            for d in (0, 1):
                cases.append(
                    Case(
                        f"{n} {name} {d}",
                        lambda x, f=f, d=d: f(x, dim=d),
                        [x],
                        grad=grad,
                    )
                )
    for n in "argmax argmin amax max min aminmax any all count_nonzero prod".split():
        f = getattr(t, n)
        for name, x in [("int", TIED.long()), ("bool", TIED > 1), ("float", TIED)]:
            if n.startswith("arg") and name == "bool":
                continue
            cases.append(Case(f"{n} {name}", lambda x, f=f: f(x), [x]))
            cases.append(Case(f"{n} {name} 0", lambda x, f=f: f(x, dim=0), [x]))
            if n != "count_nonzero":
                cases.append(
                    Case(
                        f"{n} {name} keep",
                        lambda x, f=f: f(x, dim=-1, keepdim=True),
                        [x],
                    )
                )
    for n in "prod logsumexp nanmean".split():
        f = getattr(t, n)
        for name, x in [("zeros", ZEROS), ("inf", INFS), ("long", LONG)]:
            for d in (0, 1):
                grad = not (name == "inf" and n == "prod")
                cases.append(
                    Case(f"{n} {name} {d}", lambda x, f=f, d=d: f(x, d), [x], grad=grad)
                )
    cases += [
        Case("argmax nan", lambda x: x.argmax(), [NANS]),
        Case("argmin nan 0", lambda x: x.argmin(0), [NANS]),
        Case("any of bytes", lambda x: x.any(0), [TIED.clamp(0).to(t.uint8)]),
        Case("any 2", lambda x: x.any((0, 1)), [TIED > 1]),
        Case("all 2", lambda x: x.all((0, 2), keepdim=True), [CUBE > 0]),
        Case("prod(zeros)", lambda x: x.prod(), [ZEROS]),
        Case("nanmean nan", lambda x: x.nanmean(0), [NANS]),
        Case("nanmean of nan", lambda x: x.nanmean(), [NANS * NAN]),
        Case("logsumexp 2", lambda x: x.logsumexp((0, 2)), [CUBE]),
        Case("logsumexp int", lambda x: x.logsumexp(0), [N]),
        Case("std alike", lambda x: x.std(0), [t.ones(5, 3).double()]),
        Case("var half", lambda x: x.var(0), [A.to(t.bfloat16)], rtol=0.02),
        Case("var complex", lambda x: x.var(0), [t.complex(A, A.flip(0))]),
        Case("var_mean 2", lambda x: t.var_mean(x, (0, 2)), [CUBE]),
        Case("var big", lambda x: x.var(0, correction=7), [A]),
        Case("dist", lambda x, y: t.dist(x, y, 3), [A, eighths(5, 3, seed=2)]),
        Case("dist one", lambda x, y: t.dist(x, y), [A, eighths(3)]),
    ]
    for p in (0, 0.5, 1, 1.5, 2, 3, INF, -INF, -1):
        for name, x in [("zeros", ZEROS), ("ties", TIED), ("none", ZEROS * 0)]:
            for d in (None, 0):
                cases.append(
                    Case(
                        f"norm {p} {name} {d}",
                        lambda x, p=p, d=d: t.linalg.vector_norm(x, p, d),
                        [x],
                    )
                )
    return cases


def second(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gradient of the squared results; its own gradient is a second derivative."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        out = f(x)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((o * o).sum() for o in outs if o.is_floating_point())
        (found,) = torch.autograd.grad(total, x, create_graph=True)  # type: ignore
        return found

    return gradient


def twice() -> list[Case]:
    t = torch
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "amax": lambda x: x.amax(0),
        "max()": lambda x: x.max(),
        "max(0)": lambda x: tuple(x.max(0)),
        "prod": lambda x: x.prod(0),
        "prod()": lambda x: x.prod(),
        "logsumexp": lambda x: x.logsumexp(0),
        "var": lambda x: x.var(0),
        "std_mean": lambda x: t.std_mean(x, 0),
        "nanmean": lambda x: x.nanmean(0),
        "norm": lambda x: t.linalg.vector_norm(x, 2, 0),
        "norm 3": lambda x: t.linalg.vector_norm(x, 3, 0),
        "norm 1.5": lambda x: t.linalg.vector_norm(x, 1.5),
        "norm inf": lambda x: t.linalg.vector_norm(x, INF, 0),
        "softmax": lambda x: x.softmax(0),
        "log_softmax": lambda x: x.log_softmax(0),
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(0),
        "cummax": lambda x: tuple(x.cummax(0)),
        "logcumsumexp": lambda x: x.logcumsumexp(0),
        "topk": lambda x: tuple(x.topk(2, 0)),
    }
    held = {"prod", "prod()", "cumprod"}
    return [
        Case(f"{n} twice", second(f), [ZEROS if n in held else DISTINCT + 0.125])
        for n, f in functions.items()
    ]


FAMILIES = {"reductions": reductions, "along": along, "cut": cut, "twice": twice}


def test_results_travel_and_operands_stay() -> None:
    """One or two collectives of the results' size, and the other dim stays cut."""
    t = torch
    one: dict[str, Callable[[Any], Any]] = {
        "amax": lambda x: x.amax(0),
        "any": lambda x: (x > 0).any(0),
        "prod": lambda x: x.prod(0),
        "var": lambda x: x.var(0),
        "norm": lambda x: t.linalg.vector_norm(x, 2, 0),
        "norm inf": lambda x: t.linalg.vector_norm(x, INF, 0),
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(0),
    }
    two: dict[str, Callable[[Any], Any]] = {
        "max": lambda x: x.max(0)[0],
        "argmin": lambda x: x.argmin(0),
        "aminmax": lambda x: t.aminmax(x, dim=0)[0],
        "softmax": lambda x: x.softmax(0),
        "logsumexp": lambda x: x.logsumexp(0),
        "cummin": lambda x: x.cummin(0)[0],
        "topk": lambda x: x.topk(1, 0)[0],
    }
    none: dict[str, Callable[[Any], Any]] = {
        "nansum": lambda x: x.nansum(0),
        "count_nonzero": lambda x: t.count_nonzero(x, 0),
        "histc": lambda x: t.histc(x, 4, -4, 4),
    }

    def program() -> None:
        x = place(eighths(64, 4), GRID, (Shard(0), Shard(1)))
        with redistribution("error"):
            for calls, functions in enumerate((none, one, two)):
                for name, f in functions.items():
                    with count_collectives() as c:
                        out = f(x)
                    assert c.calls() == calls, name
                    assert c.bytes() <= 3 * 2 * 8 * calls, name
                    if calls:
                        assert out.placements[1].is_shard(), name

    simulate(program, ranks=4)


def test_an_empty_whole_is_an_error_everywhere() -> None:
    """Before anything is moved, on every rank."""
    t = torch

    def program() -> None:
        x = place(EMPTY, LINE, (Shard(0),))
        calls: list[Callable[[], Any]] = [
            lambda: x.amax(0),
            lambda: x.max(),
            lambda: x.max(0),
            lambda: x.argmin(),
            lambda: t.aminmax(x),
            lambda: t.linalg.vector_norm(x, INF, 0),
        ]
        with count_collectives() as c:
            for call in calls:
                with pytest.raises((RuntimeError, IndexError)):
                    call()
        assert c.calls() == 0

    simulate(program, ranks=4)


def test_moments_lose_no_digits() -> None:
    def program() -> None:
        x = eighths(64, 3) + 1e9
        for p in (Shard(0), Shard(1)):
            got = place(x, LINE, (p,)).var(0).full_tensor()
            torch.testing.assert_close(got, (x - 1e9).var(0), rtol=1e-12, atol=0)
        y = (eighths(64, 3) + 1e6).float()
        got = place(y, LINE, (Shard(0),)).var(0).full_tensor()
        torch.testing.assert_close(got, y.var(0), rtol=1e-5, atol=0)

    simulate(program, ranks=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)
