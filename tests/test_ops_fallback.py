"""Ops without a rule: gathered, right, and said once; a broad sample of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from op_harness import (
    GRID,
    LINE,
    Case,
    assert_right,
    eighths,
    integers,
    place,
    positive,
)

from dtensor import (
    RedistributionWarning,
    Replicate,
    Shard,
    ShardingError,
    redistribution,
    simulate,
)
from dtensor.rules.table import RULES

b = eighths
A, N, SQUARE = b(5, 3), integers(5, 3), b(4, 4) + 6 * torch.eye(4).double()


def functions() -> list[Case]:
    t, lin = torch, torch.linalg
    pair = [b(5, 3), b(5, 3, seed=1)]
    return [
        Case("addbmm", t.addbmm, [b(2, 3), b(5, 2, 4), b(5, 4, 3)]),
        Case("addr", t.addr, [b(5, 3), b(5), b(3)]),
        Case("aminmax", lambda x: tuple(t.aminmax(x, dim=0)), [A]),
        Case("argwhere", lambda x: t.argwhere(x > 0), [A]),
        Case("bincount", t.bincount, [integers(6)]),
        Case("block_diag", t.block_diag, [b(2, 2), b(1, 3)]),
        Case("bucketize", t.bucketize, [A, b(4).sort()[0]], grad=False),
        Case("cartesian_prod", t.cartesian_prod, [b(2), b(3)]),
        Case("cdist", t.cdist, [b(5, 3), b(2, 3)]),
        Case("combinations", t.combinations, [b(5)]),
        Case("corrcoef", t.corrcoef, [A]),
        Case("cov", t.cov, [A]),
        Case("cross", lambda x, y: lin.cross(x, y), pair),
        Case("cumulative_trapezoid", t.cumulative_trapezoid, [A]),
        Case("diag_embed", t.diag_embed, [A]),
        Case("diagflat", t.diagflat, [b(5)]),
        Case("diff", t.diff, [A]),
        Case("dist", t.dist, pair),
        Case("dstack", lambda x, y: t.dstack([x, y]), pair),
        Case("fft", t.fft.fft, [A]),
        Case("fft2", t.fft.fft2, [A]),
        Case("fftshift", t.fft.fftshift, [A]),
        Case("fliplr", t.fliplr, [A]),
        Case("flipud", t.flipud, [A]),
        Case("frexp", lambda x: t.frexp(x)[0], [A]),
        Case("gcd", t.gcd, [N, integers(5, 3, low=1)]),
        Case("gradient", lambda x: t.gradient(x), [A]),
        Case("histc", lambda x: t.histc(x, 4), [A], grad=False),
        Case("hsplit", lambda x: t.hsplit(x, 3), [A]),
        Case(
            "index_add", lambda x, y: x.index_add(0, t.tensor([0, 2]), y), [A, b(2, 3)]
        ),
        Case("index_fill", lambda x: x.index_fill(0, t.tensor([0, 2]), 1.0), [A]),
        Case("inner", t.inner, pair),
        Case("isin", t.isin, [N, integers(3)]),
        Case("kron", t.kron, [b(2, 3), b(3, 2)]),
        Case("kthvalue", lambda x: tuple(t.kthvalue(x, 2)), [A]),
        Case("lcm", t.lcm, [N, integers(5, 3, low=1)]),
        Case("cholesky", lambda x: lin.cholesky(x @ x.mT), [SQUARE]),
        Case("cond", lin.cond, [SQUARE], grad=False),
        Case("det", lin.det, [SQUARE]),
        Case("eigvalsh", lambda x: lin.eigvalsh(x + x.mT), [SQUARE]),
        Case("inv", lin.inv, [SQUARE]),
        Case("lstsq", lambda x, y: lin.lstsq(x, y)[0], [SQUARE, b(4, 2)]),
        Case("lu", lambda x: tuple(lin.lu(x)), [SQUARE]),
        Case("matrix_exp", lin.matrix_exp, [SQUARE / 8]),
        Case("matrix_norm", lin.matrix_norm, [A]),
        Case("matrix_power", lambda x: lin.matrix_power(x, 3), [SQUARE]),
        Case("matrix_rank", lin.matrix_rank, [A], grad=False),
        Case("multi_dot", lambda *x: lin.multi_dot(x), [b(5, 3), b(3, 2), b(2, 4)]),
        Case("norm nuc", lambda x: lin.norm(x, "nuc"), [A]),
        Case("pinv", lin.pinv, [SQUARE]),
        Case("slogdet", lambda x: lin.slogdet(x)[1], [SQUARE]),
        Case("solve", lin.solve, [SQUARE, b(4, 2)]),
        Case("svdvals", lin.svdvals, [A]),
        Case(
            "solve_triangular",
            lambda x, y: lin.solve_triangular(x, y, upper=True),
            [SQUARE, b(4, 2)],
        ),
        Case("vander", lambda x: lin.vander(x, N=3), [b(5)]),
        Case("masked_scatter", lambda x, y: x.masked_scatter(x > 0, y), pair),
        Case("masked_select", lambda x: x.masked_select(x > 0), [A]),
        Case("meshgrid", lambda x, y: t.meshgrid(x, y, indexing="ij"), [b(5), b(3)]),
        Case("quantile", lambda x: t.quantile(x, 0.5, 0), [A]),
        Case("renorm", lambda x: t.renorm(x, 2, 0, 1.0), [A]),
        Case("repeat_interleave", lambda x: t.repeat_interleave(x, 2, 1), [A]),
        Case("rot90", t.rot90, [A]),
        Case(
            "scatter",
            lambda x, y: x.scatter(0, integers(2, 3, high=5), y),
            [A, b(2, 3)],
            grad=False,
        ),
        Case(
            "scatter_reduce",
            lambda x, y: x.scatter_reduce(0, integers(2, 3, high=5), y, "amax"),
            [A, b(2, 3)],
            grad=False,
        ),
        Case("searchsorted", t.searchsorted, [b(6).sort()[0], A], grad=False),
        Case("take", lambda x: t.take(x, t.tensor([0, 7])), [A]),
        Case("tensordot", lambda x, y: t.tensordot(x, y, 2), pair),
        Case("trapezoid", t.trapezoid, [A]),
        Case("unfold", lambda x: x.unfold(0, 2, 2), [A]),
        Case("unique", lambda x: t.unique(x, return_inverse=True), [N]),
        Case("unique_consecutive", t.unique_consecutive, [N]),
        Case("vsplit", lambda x: t.vsplit(x, 5), [A]),
        Case("F.bilinear", F.bilinear, [b(5, 2), b(5, 3), b(4, 2, 3), b(4)]),
        Case("F.cosine_similarity", F.cosine_similarity, pair),
        Case(
            "F.ctc_loss",
            lambda x: F.ctc_loss(
                x.log_softmax(2),
                integers(2, 2, low=1, high=4),
                t.tensor([5, 5]),
                t.tensor([2, 2]),
            ),
            [b(5, 2, 4)],
        ),
        Case("F.fold", lambda x: F.fold(x, (3, 3), 2), [b(2, 8, 4)]),
        Case("F.multi_margin_loss", F.multi_margin_loss, [A, integers(5, high=3)]),
        Case("F.pairwise_distance", F.pairwise_distance, pair),
        Case("F.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [b(2, 4, 2, 2)]),
        Case("F.triplet_margin_loss", F.triplet_margin_loss, [*pair, b(5, 3, seed=2)]),
        Case("F.gaussian_nll_loss", F.gaussian_nll_loss, [*pair, positive(5, 3)]),
    ]


def test_on_one_axis() -> None:
    assert_right(functions(), LINE, limit=4)


def test_on_two_axes() -> None:
    assert_right(functions(), GRID, limit=2)


def test_it_warns_once_and_names_the_op_and_the_bytes() -> None:
    assert "unique_consecutive" not in RULES

    def program() -> None:
        x = place(A, LINE, (Shard(0),))
        torch.unique_consecutive(x)
        torch.unique_consecutive(x)
        torch.unique_consecutive(place(A, LINE, (Replicate(),)))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        simulate(program)
    messages = [str(w.message) for w in seen if w.category is RedistributionWarning]
    assert len(messages) == LINE.size()  # each rank says it once
    for m in messages:
        assert "unique_consecutive: has no sharding rule" in m and "bytes" in m


def test_the_error_policy_refuses_before_anything_moves() -> None:
    def program() -> None:
        x = place(A, LINE, (Shard(0),))
        with (
            redistribution("error"),
            pytest.raises(ShardingError, match="unique_consecutive"),
        ):
            torch.unique_consecutive(x)

    simulate(program)


def test_the_message_of_the_error_policy_names_the_cheapest_explicit_call() -> None:
    def program() -> str:
        x = place(torch.ones(8, 4), LINE, (Shard(0),))
        y = place(torch.ones(8, 4), LINE, (Shard(1),))
        with redistribution("error"), pytest.raises(ShardingError) as caught:
            _ = x.exp() * y.exp()
        text = str(caught.value)
        assert "mul" in text and "(8, 4)(S(0)), (8, 4)(S(1))" in text
        assert "on operand " in text and "x.redistribute([Shard(dim=" in text
        if "operand 0" in text:  # what it says mends it
            x = x.redistribute(placements=[Shard(1)])
        else:
            y = y.redistribute(placements=[Shard(0)])
        with redistribution("error"):
            _ = x.exp() * y.exp()
        with redistribution("error"), pytest.raises(ShardingError) as caught:
            torch.unique(x)
        return str(caught.value)

    text = simulate(program, ranks=4)[0]
    assert "unique" in text and "on operand 0: x.redistribute([Replicate()])" in text
