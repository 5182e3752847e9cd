"""Linear algebra and Fourier transforms: batch dims stay cut, matrices are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_harness import GRID, LINE, Case, assert_right, eighths, place

from dtensor import (
    Replicate,
    Shard,
    count_collectives,
    redistribution,
    simulate,
)

T = torch.Tensor
L = torch.linalg
eye = torch.eye(3, dtype=torch.float64)
# Well-conditioned matrices in a batch that does not divide evenly.
MATRICES = eighths(5, 3, 3) / 8 + 2 * eye
POSITIVE = MATRICES @ MATRICES.mT + eye
LOWER = MATRICES.tril()
WIDE, RHS, VECTORS = eighths(5, 3, 2), eighths(5, 3, 2, seed=3), eighths(5, 3)
A, B = eighths(5, 3), eighths(3, 4, seed=2)


def decompositions() -> list[Case]:
    def of(f: Callable[..., Any], *args: Any) -> Callable[[T], Any]:
        def program(x: T) -> Any:
            out = f(x, *args)
            return tuple(out) if isinstance(out, tuple) else out

        return program

    one: dict[str, tuple[Callable[..., Any], T]] = {
        "cholesky": (L.cholesky, POSITIVE),
        "torch.cholesky_inverse": (torch.cholesky_inverse, LOWER),
        "det": (L.det, MATRICES),
        "logdet": (torch.logdet, POSITIVE),
        "slogdet": (L.slogdet, MATRICES),
        "inv": (L.inv, MATRICES),
        "pinv": (L.pinv, WIDE),
        "eigh": (lambda x: L.eigh(x + x.mT)[0], MATRICES),
        "svdvals": (L.svdvals, WIDE),
        "qr": (L.qr, WIDE),
        "matrix_exp": (torch.matrix_exp, MATRICES),
        "matrix_norm": (L.matrix_norm, WIDE),
        "nuc": (lambda x: L.matrix_norm(x, "nuc"), WIDE),
        "norm of vectors": (lambda x: L.norm(x, 2, 0), A),
        "lu_factor": (lambda x: L.lu_factor(x)[0], MATRICES),
        "lu": (L.lu, MATRICES),
        "trace": (torch.trace, A),
        "trace wide": (torch.trace, B),
        "renorm": (lambda x: x.renorm(2, 0, 1.0), A),
        "trapezoid": (lambda x: torch.trapezoid(x, dim=0), A),
        "cumulative_trapezoid": (lambda x: torch.cumulative_trapezoid(x), A),
        "gradient": (lambda x: tuple(torch.gradient(x, dim=(0, 1))), eighths(5, 4)),
        "cov": (torch.cov, A),
        "corrcoef": (torch.corrcoef, A),
        "vander": (L.vander, A),
        "matrix_rank": (L.matrix_rank, MATRICES),
    }
    cases = [Case(n, of(f), [x]) for n, (f, x) in one.items()]
    cases += [Case(f"power {n}", of(L.matrix_power, n), [MATRICES]) for n in (-1, 0, 3)]
    return cases


def products() -> list[Case]:
    t = torch
    return [
        Case("solve", L.solve, [MATRICES, RHS]),
        Case("solve vectors", L.solve, [MATRICES, VECTORS]),
        Case("solve one", L.solve, [MATRICES[0], A[:3]]),
        # whose shards look like a batch of vectors
        Case("solve few", L.solve, [eighths(8, 2, 2) / 8 + 2 * eye[:2, :2], A[:2, :2]]),
        Case(
            "triangular",
            lambda a, b: L.solve_triangular(a, b, upper=False),
            [LOWER, RHS],
        ),
        Case("cholesky_solve", t.cholesky_solve, [RHS, LOWER]),
        Case("tensordot", lambda a, b: t.tensordot(a, b, 1), [A, B]),
        Case(
            "tensordot 2",
            lambda a, b: t.tensordot(a, b, ([2, 0], [1, 2])),
            [eighths(2, 5, 3), eighths(4, 3, 2)],
        ),
        Case("inner", t.inner, [A, eighths(4, 3)]),
        Case("vecdot", L.vecdot, [A, eighths(3)]),
        Case("vecdot 0", lambda a, b: L.vecdot(a, b, dim=0), [A, eighths(5, 1)]),
        Case("kron", t.kron, [A, B]),
        Case("kron even", t.kron, [eighths(4, 4), A]),
        Case("cross", lambda a, b: L.cross(a, b), [A, eighths(5, 3, seed=2)]),
        Case("cross 3", t.cross, [eighths(3, 3), eighths(3, 3, seed=2)]),
        Case("multi_dot", lambda *x: L.multi_dot(x), [A, B, eighths(4, 2)]),
        Case("multi_dot v", lambda *x: L.multi_dot(x), [eighths(5), A, eighths(3)]),
        Case("chain", t.chain_matmul, [A, B, eighths(4, 2)]),
        Case("addr", lambda c, a, b: t.addr(c, a, b), [A, eighths(5), eighths(3)]),
        Case("addr row", t.addr, [eighths(3), eighths(5), eighths(3, seed=4)]),
        Case("addbmm", t.addbmm, [eighths(2, 4), eighths(5, 2, 3), eighths(5, 3, 4)]),
        Case(
            "addbmm beta",
            lambda c, a, b: t.addbmm(c, a, b, beta=0.5, alpha=2.0),
            [eighths(4), eighths(5, 2, 3), eighths(5, 3, 4)],
        ),
        Case("baddbmm", t.baddbmm, [eighths(4), eighths(5, 2, 3), eighths(5, 3, 4)]),
    ]


def transforms() -> list[Case]:
    f = torch.fft
    x = eighths(5, 4, 6)
    one: dict[str, Callable[[T], Any]] = {
        "fft": lambda x: f.fft(x).abs(),
        "fft n": lambda x: f.fft(x, 8, 1).abs(),
        "rfft": lambda x: f.rfft(x, dim=0).real,
        "irfft": lambda x: f.irfft(f.rfft(x)),
        "fft2": lambda x: f.fft2(x).imag,
        "rfftn": lambda x: f.irfftn(f.rfftn(x, dim=(1, 2)), dim=(1, 2)),
        "fftn": lambda x: f.fftn(x).abs(),
        "fftn s": lambda x: f.fftn(x, (3, 5)).abs(),
        "hfft": lambda x: f.hfft(x, dim=1),
        "fftshift": lambda x: f.fftshift(x, 1),
        "ifftshift": lambda x: f.ifftshift(x),
        "stft": lambda x: torch.stft(
            x[0], 4, return_complex=True, window=None, center=False
        ).abs(),
    }
    return [Case(n, g, [x]) for n, g in one.items() if n != "stft"]


FAMILIES = {
    "decompositions": decompositions,
    "products": products,
    "transforms": transforms,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)


def test_a_batch_stays_where_it_is() -> None:
    """Nothing is sent, and the results are cut as the batch is."""

    def program() -> None:
        m, r = (place(t, LINE, (Shard(0),)) for t in (MATRICES, RHS))
        whole = place(MATRICES[0], LINE, (Replicate(),))
        calls: list[Callable[[], Any]] = [
            lambda: L.inv(m),
            lambda: L.det(m),
            lambda: L.svd(m)[1],
            lambda: L.solve(m, r),
            lambda: L.solve(whole, r),
            lambda: L.matrix_norm(m),
            lambda: torch.fft.fft2(m),
            lambda: torch.cdist(m, m),
            lambda: torch.linalg.cross(m, m, dim=2),
            lambda: torch.kron(place(eighths(4, 2), LINE, (Shard(0),)), whole),
        ]
        with redistribution("error"), count_collectives() as c:
            for call in calls:
                assert call().placements == (Shard(0),)
        assert c.calls() == 0

    simulate(program, ranks=4)
