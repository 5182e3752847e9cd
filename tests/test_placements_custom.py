"""User-defined placements: the protocol, its two plug-ins, and what breaks a law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    get_rank,
    init_device_mesh,
    simulate,
)
from dtensor.block_cyclic import BlockCyclic
from dtensor.custom_placement import CustomPlacement, Shape
from dtensor.ragged import RaggedShard
from dtensor.tensor import local_of
from dtensor.testing import LawBroken, check_placement

F64 = torch.float64
R = Replicate()
LAWS = {"data", "dtypes", "local shape", "redistribution", "round trip"}
SMALL = ((5, 3), (0, 3))


@pytest.mark.parametrize(
    "placement",
    [
        R,
        Shard(0),
        Shard(-1),
        Partial(),
        Partial("avg"),
        *(Partial(op) for op in ("max", "min", "product", "band", "bor", "bxor")),
        BlockCyclic(0, 1),
        BlockCyclic(-1, 2, zigzag=True),
    ],
    ids=str,
)
def test_the_laws_hold(placement: Placement) -> None:
    counts = check_placement(placement, ranks=(2, 3), shapes=SMALL)
    assert LAWS <= set(counts)
    addends = placement.reduce_op if isinstance(placement, Partial) else ""
    bits = addends in ("band", "bor", "bxor")
    assert ("second derivative" in counts) == (not bits)
    assert ("adjoint" in counts) == (
        not bits and addends not in ("max", "min", "product")
    )


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 0, 7), (2, 3, 2)])
def test_the_laws_hold_for_ragged_pieces(sizes: tuple[int, ...]) -> None:
    counts = check_placement(RaggedShard(0, sizes), ranks=(2, 3), shapes=[(7, 3)])
    assert LAWS | {"adjoint", "second derivative"} == set(counts)


def test_no_shape_fits() -> None:
    with pytest.raises(ValueError, match="fits none of the shapes"):
        check_placement(RaggedShard(0, (3, 3)), ranks=(3,), shapes=[(6,)])


class Halves(CustomPlacement):
    """Equal pieces of dim 0, the plain way; the wrong ones differ in one point."""

    __slots__ = ()

    def check(self, what: str, shape: Shape, parts: int) -> None:
        if not shape or shape[0] % parts:
            raise ShardingError(f"{what}: uneven")

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        return (shape[0] // parts, *shape[1:])

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        return x.chunk(parts)[index]

    def assemble(self, shards: list[torch.Tensor], shape: Shape) -> torch.Tensor:  # type: ignore[override]
        return torch.cat(list(shards))


@dataclass(frozen=True)
class Plain(Halves):
    """Nothing wrong."""


@dataclass(frozen=True)
class WrongShape(Halves):
    """Says that it holds one more row than it does."""

    def local_shape(self, shape: Shape, parts: int, index: int) -> Shape:
        return (shape[0] // parts + 1, *shape[1:])


@dataclass(frozen=True)
class WrongOrder(Halves):
    """Puts the pieces together the last first."""

    def assemble(self, shards: list[torch.Tensor], shape: Shape) -> torch.Tensor:  # type: ignore[override]
        return torch.cat(list(reversed(shards)))


class Doubled(torch.autograd.Function):
    """The identity with twice the gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


@dataclass(frozen=True)
class WrongAdjoint(Halves):
    """Doubles the gradient on the way back."""

    def split(self, x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        return Doubled.apply(x.chunk(parts)[index])  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(
    ("placement", "law"),
    [
        (WrongShape(), "local shape"),
        (WrongOrder(), "round trip"),
        (WrongAdjoint(), "adjoint"),
    ],
)
def test_a_broken_law_is_named(placement: Placement, law: str) -> None:
    with pytest.raises(LawBroken, match=f"breaks the law '{law}'") as caught:
        check_placement(placement, ranks=(2,), shapes=[(4, 2)])
    assert caught.value.law == law
    assert set(check_placement(Plain(), ranks=(2,), shapes=[(4, 2)])) >= LAWS


def test_zigzag_gives_each_rank_an_early_and_a_late_block() -> None:
    def program() -> list[float]:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.arange(8), mesh, [BlockCyclic(0, 1, zigzag=True)])
        assert "Cyclic(0: 1, zigzag)" in repr(x)
        return local_of(x).tolist()

    assert simulate(program, 4) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_ops_keep_what_treats_each_index_by_itself() -> None:
    full = torch.arange(21.0, dtype=F64).view(7, 3)
    weight = torch.arange(6.0, dtype=F64).view(3, 2)

    def program() -> None:
        mesh = init_device_mesh("cpu", (3,))
        w = distribute_tensor(weight, mesh, [R])
        for p in (RaggedShard(0, (2, 0, 5)), BlockCyclic(0, 2)):
            x = distribute_tensor(full, mesh, [p]).requires_grad_()
            with count_collectives() as c:
                y = ((x * 2 + 1).relu() @ w).softmax(-1).t()
            assert c.calls() == 0 and y.placements == (p.at_dim(1),)
            plain = full.clone().requires_grad_()
            want = ((plain * 2 + 1).relu() @ weight).softmax(-1).t()
            torch.testing.assert_close(y.full_tensor(), want.detach())
            y.pow(2).sum().backward()
            want.pow(2).sum().backward()
            assert x.grad is not None and plain.grad is not None
            assert x.grad.placements == (p,)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            for call in (
                lambda x: x.sum(0),
                lambda x: x.sum(),
                lambda x: x.mean(),
                lambda x: x.reshape(-1),
                lambda x: x.cumsum(0),
                lambda x: x[2:5],
                lambda x: x.amax(0),
            ):
                got = call(x.detach()).full_tensor()
                torch.testing.assert_close(got, call(full))

    simulate(program, 3)


RENUMBERED: list[Any] = [
    lambda x: x[2:6],
    lambda x: x[-1],
    lambda x: x[::2],
    lambda x: x[[0, 3]],
    lambda x: x[1:, 1],
    lambda x: x.narrow(0, 2, 4),
    lambda x: x.select(0, 3),
    lambda x: x.split(3)[1],
    lambda x: x.chunk(2)[1],
    lambda x: torch.tensor_split(x, 3)[2],
    lambda x: x.unbind(0)[3],
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x.diff(dim=0),
    lambda x: x.cumsum(0),
    lambda x: x.cummax(0).values,
    lambda x: x.sort(0).values,
    lambda x: x.topk(2, 0).values,
    lambda x: x.median(0).values,
    lambda x: x.softmax(0),
    lambda x: x.argmax(0),
    lambda x: x.max(0).indices,
    lambda x: x.var(0),
    lambda x: x.logsumexp(0),
    lambda x: x.prod(0),
    lambda x: x.index_select(0, torch.tensor([1, 4])),
    lambda x: x.gather(0, torch.full((2, 3), 4)),
    lambda x: x.take_along_dim(torch.full((2, 3), 4), 0),
    lambda x: x.scatter(0, torch.full((1, 3), 5), 0.0),
    lambda x: x.index_fill(0, torch.tensor([1, 6]), 2.0),
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat([x, x[:, :1]], 1),
    lambda x: torch.stack([x, x]),
    lambda x: x.repeat(2, 1),
    lambda x: x.tril(),
    lambda x: x.diagonal(),
    lambda x: x.unfold(0, 2, 2),
    lambda x: torch.nn.functional.pad(x, (0, 0, 1, 1)),
    lambda x: torch.nn.functional.layer_norm(x, (8, 3)),
    lambda x: x.flatten(),
    lambda x: x.view(4, 6),
    lambda x: x @ x.t(),
    lambda x: torch.einsum("ab,ac->bc", x, x),
]


@pytest.mark.parametrize("p", [BlockCyclic(0, 1), RaggedShard(0, (3, 5))], ids=str)
def test_ops_that_see_the_order_of_indices_are_right(p: Placement) -> None:
    """Along the dim that a placement of one's own deals out, as along any other."""
    full = torch.arange(24.0, dtype=F64).view(8, 3).cos()

    def program() -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        wrong = []
        for i, call in enumerate(RENUMBERED):
            x = distribute_tensor(full, mesh, [p]).requires_grad_()
            plain = full.clone().requires_grad_()
            got, want = call(x), call(plain)
            good = torch.allclose(got.full_tensor().detach(), want.detach())
            if good and want.requires_grad:
                got.pow(2).sum().backward()
                want.pow(2).sum().backward()
                assert x.grad is not None and plain.grad is not None
                good = torch.allclose(x.grad.full_tensor(), plain.grad)  # type: ignore[attr-defined]
            if not good:
                wrong.append(i)
        return wrong

    assert simulate(program, 2, timeout=100) == [[], []]


def test_ragged_goes_to_any_shard_in_one_exchange() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        full = torch.arange(21.0).view(7, 3)
        x = distribute_tensor(full, mesh, [RaggedShard(0, (1, 6, 0))])
        for dst in (Shard(0), Shard(1)):
            for a, b in ((x, dst), (x.redistribute([dst]), x.placements[0])):
                with count_collectives() as c:
                    y = a.redistribute([b])
                assert [*c.rows()] == [("all_to_all", "tp")]
                assert torch.equal(y.full_tensor(), full)
        assert "all-to-all" in str(x.explain_redistribute([Shard(1)]))

    simulate(program, 3)


def test_ragged_pieces_may_be_handed_in() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        piece = torch.full((1 + 3 * get_rank(), 2), float(get_rank()))
        with pytest.raises(ShardingError, match=r"\[RaggedShard\(0, \(1, 4\)\)\]"):
            DTensor.from_local(piece, mesh, [Shard(0)])
        x = DTensor.from_local(piece, mesh, [RaggedShard(0, (1, 4))])
        assert x.shape == (5, 2)
        assert x.full_tensor().sum() == 8
        with pytest.raises(ShardingError, match="does not fit"):
            distribute_tensor(torch.ones(6), mesh, [RaggedShard(0, (1, 4))])
        with pytest.raises(ShardingError, match="the global shape cannot be told"):
            DTensor.from_local(piece, mesh, [RaggedShard(0, (1, 4))], run_check=False)

    simulate(program, 2)


def test_on_a_grid_a_custom_placement_deals_out_what_the_others_leave() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(48.0, dtype=F64).view(8, 6)
        cyclic = BlockCyclic(0, 1)
        layouts = [
            (Shard(0), cyclic),
            (cyclic, Shard(0)),
            (cyclic, Shard(1)),
            (cyclic, cyclic),
            (Partial(), cyclic),
            (RaggedShard(1, (1, 5)), R),
            (Shard(1), Shard(0)),
            (R, Partial()),
        ]
        for src in layouts:
            for dst in layouts:
                x = distribute_tensor(full, mesh, src).requires_grad_()
                y = x.redistribute(dst)
                torch.testing.assert_close(y.full_tensor(), full, msg=f"{src} {dst}")
                y.pow(2).sum().backward()
                assert x.grad is not None
                torch.testing.assert_close(x.grad.full_tensor(), 2 * full)
        assert x.redistribute((Shard(0), cyclic))._spec.local_shape == (2, 6)

    simulate(program, 4, timeout=100)
