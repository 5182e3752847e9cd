"""The matmul family, linear, addmm and einsum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, Case, assert_right, eighths, integers

from dtensor import Replicate, Shard, ShardingError, distribute_tensor, simulate

MK, KN = eighths(5, 6), eighths(6, 3)
E = torch.einsum


def products() -> list[Case]:
    t = torch
    b = eighths
    return [
        Case("matmul", t.matmul, [MK, KN]),
        Case("@", lambda x, y: x @ y, [MK, KN]),
        Case("mm", t.mm, [MK, KN]),
        Case("matmul 1-1", t.matmul, [b(5), b(5, seed=1)]),
        Case("matmul 1-2", t.matmul, [b(6), KN]),
        Case("matmul 2-1", t.matmul, [MK, b(6)]),
        Case("matmul 3-1", t.matmul, [b(2, 5, 6), b(6)]),
        Case("matmul 1-3", t.matmul, [b(6), b(2, 6, 3)]),
        Case("matmul 3-2", t.matmul, [b(2, 5, 6), KN]),
        Case("matmul 2-3", t.matmul, [MK, b(2, 6, 3)]),
        Case("matmul 3-3", t.matmul, [b(5, 2, 6), b(5, 6, 3)]),
        Case("matmul 4-3", t.matmul, [b(2, 3, 2, 4), b(3, 4, 2)]),
        Case("matmul broadcast", t.matmul, [b(2, 1, 3, 4), b(1, 5, 4, 2)]),
        Case("matmul k=1", t.matmul, [b(5, 1), b(1, 3)]),
        Case("matmul k=0", t.matmul, [b(5, 0), b(0, 3)]),
        Case("matmul m=0", t.matmul, [b(0, 6), KN]),
        Case("matmul k=2", t.matmul, [b(5, 2), b(2, 3)]),
        Case("matmul ints", t.matmul, [integers(5, 6), integers(6, 3)]),
        Case("bmm", t.bmm, [b(5, 2, 6), b(5, 6, 3)]),
        Case("mv", t.mv, [MK, b(6)]),
        Case("dot", t.dot, [b(5), b(5, seed=1)]),
        Case("vdot", t.vdot, [b(5), b(5, seed=1)]),
        Case("inner", t.inner, [b(5, 3), b(2, 3)]),
        Case("outer", t.outer, [b(5), b(2)]),
        Case("ger", t.ger, [b(5), b(2)]),
        Case("linear", F.linear, [b(2, 5, 6), b(3, 6)]),
        Case("linear bias", F.linear, [b(2, 5, 6), b(3, 6), b(3)]),
        Case("linear 1-d", F.linear, [b(6), b(3, 6), b(3)]),
        Case("linear 2-d", F.linear, [MK, b(5, 6), b(5)]),
        Case("linear vector", F.linear, [MK, b(6)]),
        Case("linear one", F.linear, [MK, b(1, 6), b(1)]),
        Case("linear d=0", F.linear, [b(5, 0), b(3, 0), b(3)]),
        Case("bilinear", F.bilinear, [b(5, 2), b(5, 3), b(4, 2, 3), b(4)]),
        Case("addmm", t.addmm, [b(5, 3), MK, KN]),
        Case("addmm row", t.addmm, [b(3), MK, KN]),
        Case("addmm column", t.addmm, [b(5, 1), MK, KN]),
        Case("addmm 0-d", t.addmm, [b(), MK, KN]),
        Case(
            "addmm beta alpha",
            lambda c, x, y: t.addmm(c, x, y, beta=2, alpha=3),
            [b(3), MK, KN],
        ),
        Case("addmm m=1", t.addmm, [b(1, 3), b(1, 6), KN]),
        Case("addmv", t.addmv, [b(5), MK, b(6)]),
        Case("addmv one", t.addmv, [b(1), MK, b(6)]),
        Case("addr", t.addr, [b(5, 3), b(5), b(3)]),
        Case("baddbmm", t.baddbmm, [b(5, 2, 3), b(5, 2, 6), b(5, 6, 3)]),
        Case("baddbmm row", t.baddbmm, [b(1, 1, 3), b(5, 2, 6), b(5, 6, 3)]),
        Case("baddbmm vector", t.baddbmm, [b(3), b(5, 2, 6), b(5, 6, 3)]),
        Case("addbmm", t.addbmm, [b(2, 3), b(5, 2, 6), b(5, 6, 3)]),
        Case("multi_dot", lambda *x: t.linalg.multi_dot(x), [MK, KN, b(3, 2)]),
        Case("tensordot", lambda x, y: t.tensordot(x, y, 1), [MK, KN]),
        Case(
            "tensordot dims",
            lambda x, y: t.tensordot(x, y, ([1, 0], [0, 1])),
            [MK, b(6, 5)],
        ),
        Case("kron", t.kron, [b(2, 3), b(3, 2)]),
        Case("cdist", t.cdist, [b(5, 3), b(2, 3)], grad=False),
        Case("cross", t.cross, [b(5, 3), b(5, 3, seed=1)]),
        Case("trace", t.trace, [b(5, 3)]),
        Case("matrix_power", lambda x: t.matrix_power(x, 2), [b(3, 3)]),
        Case("inverse", t.linalg.inv, [b(3, 3) + 5 * t.eye(3).double()]),
        Case("solve", t.linalg.solve, [b(3, 3) + 5 * t.eye(3).double(), b(3, 2)]),
        Case(
            "cholesky", lambda x: t.linalg.cholesky(x @ x.mT), [2 * t.eye(3).double()]
        ),
        Case("det", t.linalg.det, [b(3, 3)]),
        Case("svdvals", t.linalg.svdvals, [b(3, 2)]),
    ]


def einsums() -> list[Case]:
    b = eighths

    def e(text: str, *args: torch.Tensor) -> Case:
        return Case(f"einsum {text}", lambda *x: E(text, *x), list(args))

    return [
        e("ij,jk->ik", MK, KN),
        e("ij,jk", MK, KN),
        e("ij->ji", MK),
        e("ij->", MK),
        e("ij->i", MK),
        e("ii->i", b(5, 5)),
        e("ii", b(5, 5)),
        e("bij,bjk->bik", b(2, 5, 6), b(2, 6, 3)),
        e("bhqd,bhkd->bhqk", b(2, 4, 3, 5), b(2, 4, 2, 5)),
        e("i,j->ij", b(5), b(3)),
        e("ij,ij->", MK, MK.clone()),
        e("ij,jk,kl->il", MK, KN, b(3, 2)),
        e("...ij,...jk->...ik", b(2, 5, 6), b(2, 6, 3)),
        e("ij,j->ij", MK, b(1)),
        e("b...,b...->b", MK, MK.clone()),
        e("ij , jk -> ik", MK, KN),
        Case("einsum list", lambda x, y: E("ij,jk->ik", [x, y]), [MK, KN]),
        Case("einsum sublists", lambda x, y: E(x, [0, 1], y, [1, 2], [0, 2]), [MK, KN]),
        e("iJ,Jk->ik", MK, KN),
    ]


FAMILIES = {"products": products, "einsums": einsums}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=8)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)


def test_whole_numbers_with_a_factor_that_is_none() -> None:
    # On an empty piece of the summed dim torch would refuse, on that rank alone.
    i = integers
    cases = [
        Case(name, fn, [i(1), i(5, 5, 5), i(5, 5, 10)], grad=False)
        for name, fn in (
            ("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.2, alpha=0.6)),
            ("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=0.2, alpha=0.6)),
            ("addmm", lambda c, a, b: torch.addmm(c, a[0], b[0], beta=0.2, alpha=0.6)),
        )
    ]
    assert_right(cases, LINE, limit=20)


def test_addbmm_in_place_keeps_the_target_s_shape() -> None:
    def program() -> None:
        c = distribute_tensor(eighths(1), LINE, [Replicate()])
        a = distribute_tensor(eighths(5, 5, 5), LINE, [Shard(0)])
        with pytest.raises(ShardingError, match=r"addbmm_: a DTensor keeps its shape"):
            c.addbmm_(a, a)

    simulate(program, ranks=4)
