"""Softmax and scans along cut dims, with infinities, empty shards and many dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, Case, assert_right, eighths, integers, place

from dtensor import Shard, count_collectives, redistribution, simulate

INF, NAN = float("inf"), float("nan")
A, CUBE, TALL = eighths(5, 3), eighths(2, 5, 3), eighths(9, 2)
ROWS = torch.tensor(
    [[-INF, 1, 2.0], [-INF, -INF, 3], [-INF, 1, 0], [2, -INF, 1], [-INF, 2, -INF]],
    dtype=torch.float64,
)
NANS = torch.tensor(
    [[1, 2, 2.0], [NAN, 3, 2], [3, 3, 0], [4, NAN, 1], [0, NAN, 5]], dtype=torch.float64
)
TIED = torch.tensor(
    [[1, 2, 2.0], [2, 2, -1], [2, -1, 0], [-1, -1, 2], [0, 2, 2]], dtype=torch.float64
)
ZEROS = torch.tensor(
    [[0, 2, 2.0], [1, 0, 3], [2, 3, 0], [0, 1, 2], [1.5, 0, 2]], dtype=torch.float64
)


def softmaxes() -> list[Case]:
    t = torch
    cases = []
    for n in "softmax log_softmax softmin".split():
        f = getattr(F, n)
        for name, x in [("A", A), ("cube", CUBE), ("rows", ROWS), ("tall", TALL)]:
            for d in (0, 1):
                cases.append(Case(f"{n} {name} {d}", lambda x, f=f, d=d: f(x, d), [x]))
        cases.append(Case(f"{n} nan", lambda x, f=f: f(x, 0), [NANS], grad=False))
        cases.append(
            Case(f"{n} half", lambda x, f=f: f(x, 0), [A.to(t.bfloat16)], rtol=0.02)
        )
        cases.append(
            Case(
                f"{n} dtype", lambda x, f=f: f(x, 0, dtype=t.float64), [integers(5, 3)]
            )
        )
        cases.append(
            Case(f"{n} all -inf", lambda x, f=f: f(x, 0), [A - INF], grad=False)
        )
    return cases


def scans() -> list[Case]:
    t = torch
    cases = []
    for n in "cumsum cumprod cummax cummin logcumsumexp".split():
        f = getattr(t, n)
        for name, x in [("ties", TIED), ("zeros", ZEROS), ("tall", TALL)]:
            for d in (0, 1):
                cases.append(Case(f"{n} {name} {d}", lambda x, f=f, d=d: f(x, d), [x]))
        if n != "logcumsumexp":
            cases.append(Case(f"{n} ints", lambda x, f=f: f(x, 0), [integers(5, 3)]))
            cases.append(Case(f"{n} bools", lambda x, f=f: f(x, 0), [TIED > 0]))
        cases.append(Case(f"{n} nan", lambda x, f=f: f(x, 0), [NANS], grad=False))
        cases.append(Case(f"{n} inf", lambda x, f=f: f(x, 0), [ROWS], grad=False))
    return [
        *cases,
        Case("cumsum dtype", lambda x: x.cumsum(0, dtype=t.float32), [A], rtol=1e-5),
        Case("cumsum_", lambda x: x.clone().cumsum_(0), [A], may_refuse=True),
        Case("cumprod_", lambda x: x.clone().cumprod_(0), [ZEROS], may_refuse=True),
        Case("cumsum complex", lambda x: x.cumsum(0), [t.complex(A, A)]),
        Case("cumprod complex", lambda x: x.cumprod(0), [t.complex(A, A)]),
    ]


def orders() -> list[Case]:
    t = torch
    distinct = (t.randperm(36, generator=t.Generator().manual_seed(3)) / 4).view(12, 3)
    distinct = distinct.double()
    g = t.Generator().manual_seed(4)
    many = (t.randperm(60, generator=g) / 4).view(20, 3).double()
    seq = many.sort(0)[0].T.contiguous()
    return [
        Case("topk", lambda x: tuple(x.topk(2, 0)), [many]),
        Case(
            "topk nan",
            lambda x: tuple(x.topk(2, 0)),
            [t.cat([NANS[:, :1], many[:, :1]])],
        ),
        Case("topk small", lambda x: tuple(x.topk(2, 0, False)), [distinct]),
        Case("topk ints", lambda x: tuple(x.topk(2, 0)), [(many * 4).long()]),
        Case("topk all", lambda x: tuple(x.topk(12, 0)), [distinct]),
        Case("topk unsorted", lambda x: tuple(x.topk(2, 0, sorted=False)), [many]),
        Case("msort", lambda x: x.msort(), [distinct]),
        Case("sort stable", lambda x: tuple(x.sort(stable=True, dim=0)), [TIED]),
        Case("sort kw", lambda x: tuple(x.sort(dim=0, descending=True)), [distinct]),
        Case("argsort stable", lambda x: x.argsort(dim=0, stable=True), [TIED]),
        Case("kthvalue", lambda x: tuple(x.kthvalue(3, 0, True)), [distinct]),
        Case("quantile", lambda x: x.quantile(0.3, 0), [distinct]),
        Case("quantile all", lambda x: x.quantile(0.3), [distinct]),
        Case(
            "quantile q",
            lambda x: (
                x.quantile(x.new_tensor([0.25, 0.5]), 1, keepdim=True)
                if type(x) is t.Tensor
                else t.stack([x.quantile(q, 1, keepdim=True) for q in (0.25, 0.5)])
            ),
            [distinct],
        ),
        Case("nanquantile", lambda x: x.nanquantile(0.3, 0), [NANS]),
        Case("searchsorted", t.searchsorted, [seq, many.T[:, :4].contiguous()]),
        Case("searchsorted 1", t.searchsorted, [seq[0], A]),
        Case("bucketize", t.bucketize, [A, seq[0]]),
        Case("histc", lambda x: t.histc(x, 4), [A], grad=False),
        Case("histc range", lambda x: t.histc(x, 4, -1, 1), [A], grad=False),
        Case("histc alike", lambda x: t.histc(x, 4), [A * 0], grad=False),
    ]


FAMILIES = {"softmaxes": softmaxes, "scans": scans, "orders": orders}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=4)


def test_softmax_sends_two_numbers_per_row() -> None:
    """Forward two small all-reduces, backward one; PyTorch's DTensor gathers."""

    def program() -> None:
        x = place(eighths(16, 512), LINE, (Shard(1),)).requires_grad_()
        with redistribution("error"):
            with count_collectives() as c:
                out = x.softmax(1)
            assert out.placements == (Shard(1),)
            assert c.calls() == 2 and c.bytes() <= 2 * 2 * 16 * 8
            with count_collectives() as c:
                torch.autograd.grad((out * out).sum(), x)
            assert c.bytes() <= 3 * 16 * 8

    simulate(program, ranks=4)
