"""Cross-entropy with every combination of its arguments, against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import place

import dtensor
from dtensor import (
    BlockCyclic,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    init_device_mesh,
    loss_parallel,
    redistribution,
    simulate,
)
from dtensor.placement import Placements

T = torch.Tensor
torch.set_num_threads(1)
R = Replicate()
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
REDUCTIONS = ("none", "mean", "sum")
# (samples, classes, ...): even, uneven, with an empty shard on 4 ranks, one sample
SHAPES = [(4, 8), (5, 7), (3, 5), (3, 6, 2), (7,)]
TOLERANCE = dict(rtol=1e-12, atol=1e-12)


def normal(*shape: int, seed: int = 0) -> T:
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=g, dtype=torch.float64)


def classes_of(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else shape[0]


def targets(shape: tuple[int, ...], ignore: int | None) -> T:
    """Classes of all samples, the first and the last class among them."""
    n = classes_of(shape)
    batch = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    t = (torch.arange(torch.Size(batch).numel()) * 5 % n).view(batch)
    if ignore is not None and t.ndim:
        t.view(-1)[1] = ignore
    return t


def combinations(
    shape: tuple[int, ...], kinds: tuple[str, ...] = ("classes", "probabilities")
) -> Iterator[dict[str, Any]]:
    for kind, weighted, reduction, smoothing, z in itertools.product(
        kinds, (False, True), REDUCTIONS, (0.0, 0.2), (0.0, 0.01)
    ):
        for ignore in (None, -100, 3) if kind == "classes" else (None,):
            yield dict(
                shape=shape,
                kind=kind,
                weighted=weighted,
                reduction=reduction,
                smoothing=smoothing,
                z=z,
                ignore=ignore,
            )


def loss_of(how: dict[str, Any], x: T, target: T, weight: T | None) -> T:
    """By torch's own function, unless there is a z-loss."""
    rest: dict[str, Any] = dict(
        reduction=how["reduction"], label_smoothing=how["smoothing"]
    )
    if how["ignore"] is not None:
        rest["ignore_index"] = how["ignore"]
    if how["z"]:
        return dtensor.cross_entropy(x, target, weight, z_loss=how["z"], **rest)
    return F.cross_entropy(x, target, weight, **rest)


def operands(how: dict[str, Any]) -> tuple[T, T, T | None]:
    shape = how["shape"]
    if how["kind"] == "classes":
        target = targets(shape, how["ignore"])
    else:
        target = normal(*shape, seed=1).softmax(1 if len(shape) > 1 else 0)
    weight = normal(classes_of(shape), seed=2).abs() if how["weighted"] else None
    return normal(*shape), target, weight


def differentiable(how: dict[str, Any], *given: T | None) -> list[Any]:
    """The operands that torch has a gradient for, as leaves."""
    out = []
    for i, t in enumerate(given):
        leaf = t is not None and (i == 0 or how["kind"] == "probabilities")
        out.append(t.detach().clone().requires_grad_() if leaf else t)
    return out


def gradients(loss: T, given: list[Any]) -> list[T]:
    """Of the loss, samples weighted unlike each other."""
    if loss.ndim:
        w = torch.arange(1.0, loss.numel() + 1).to(loss.dtype).view(loss.shape)
        loss = (
            loss
            * (
                DTensor.from_local(w, loss.device_mesh, run_check=False)  # type: ignore[attr-defined]
                if isinstance(loss, DTensor)
                else w
            )
        ).sum()
    wanted = [t for t in given if t is not None and t.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


def layouts(how: dict[str, Any], mesh: DeviceMesh) -> list[list[Placements]]:
    """Placements of logits, target and weight: the classes are cut in all of them."""
    at = 1 if len(how["shape"]) > 1 else 0
    C, same = Shard(at), how["kind"] == "probabilities"
    if mesh.ndim == 1:
        rows: list[Any] = [
            [(C,), (C if same else R,), (R,)],
            [(C,), (R,), (Shard(0),)],
        ]
        if at:
            rows.append([(C,), (Shard(0),), (R,)])
        return rows
    if not at:
        return [[(C, R), (C, R) if same else (R, R), (R, R)]]
    return [
        [(Shard(0), C), (Shard(0), C if same else R), (R, Shard(0))],
        [(C, Shard(0)), (R, Shard(0)), (R, R)],
        [(C, C), (R, C) if same else (R, R), (Shard(0), R)],
        [(R, C), (R, R), (R, R)],
    ]


def wrong_in(how: dict[str, Any], mesh: DeviceMesh, reference: Any) -> list[str]:
    found = []
    for k, row in enumerate(layouts(how, mesh)):
        x, target, weight = operands(how)
        given = [
            None if t is None else place(t, mesh, p)
            for t, p in zip((x, target, weight), row, strict=True)
        ]
        given = differentiable(how, *given)
        before = None if given[0] is None else given[0].to_local().clone()
        with count_collectives() as c:
            loss = loss_of(how, *given)
        pairs = [(loss, reference[0])]
        pairs += zip(gradients(loss, given), reference[1], strict=True)
        for i, (got, want) in enumerate(pairs):
            if not torch.allclose(got.full_tensor(), want, **TOLERANCE):  # type: ignore
                found.append(f"{how} at {row}, {i}: {got.full_tensor()} {want}")  # type: ignore
            if got.dtype != want.dtype:
                found.append(f"{how} at {row}, {i}: {got.dtype} {want.dtype}")
        if k == 0 and c.calls() != c.calls("all_reduce"):
            found.append(f"{how} at {row}: an operand moved: {c.table()}")
        if not torch.equal(given[0].to_local(), before):
            found.append(f"{how} at {row}: the logits changed")
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
def test_every_combination(shape: tuple[int, ...], mesh: DeviceMesh) -> None:
    hows = list(combinations(shape))
    references = []
    for how in hows:
        given = differentiable(how, *operands(how))
        loss = loss_of(how, *given)
        references.append((loss.detach(), gradients(loss, given)))

    def program() -> list[str]:
        return [
            line
            for how, reference in zip(hows, references, strict=True)
            for line in wrong_in(how, mesh, reference)
        ]

    found = simulate(program, ranks=mesh.size(), timeout=300)
    assert not any(found), "\n".join(dict.fromkeys(x for f in found for x in f[:9]))


def test_sends_numbers_per_sample() -> None:
    """O(batch) bytes, forward and backward, whatever the number of classes."""
    n, item = 16, 8

    def program(classes: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
        x = place(normal(n, classes), LINE, (Shard(1),)).requires_grad_()
        with count_collectives() as forward:
            loss = F.cross_entropy(x, targets((n, classes), None))
        with count_collectives() as backward:
            loss.backward()
        return forward.rows(), backward.rows()

    share = 2 * 3 / 4
    for classes in (64, 4096):
        for forward, backward in simulate(program, ranks=4, args=(classes,)):
            # the maxima; the sums of exponentials and the logits of the targets
            sent = int(share * n * item) + int(share * 2 * n * item)
            assert forward == {("all_reduce", "tp"): (2, sent)}
            assert backward == {("all_reduce", "tp"): (1, int(share * item))}


def test_sends_on_two_axes() -> None:
    """The samples' axis moves two numbers, the classes' axis its few per sample."""
    n, classes = 8, 64

    def program(weighted: bool) -> dict[Any, Any]:
        x = place(normal(n, classes), GRID, (Shard(0), Shard(1))).requires_grad_()
        target = place(targets((n, classes), None), GRID, (Shard(0), R))
        weight = None
        if weighted:
            weight = place(normal(classes).abs(), GRID, (R, Shard(0)))
        with count_collectives() as c:
            F.cross_entropy(x, target, weight)
        return c.rows()

    mine = n // 2
    for rows in simulate(program, ranks=4, args=(False,)):
        assert rows[("all_reduce", "tp")] == (2, 3 * mine * 8)
        assert rows[("all_reduce", "dp")] == (1, 2 * 8)
    for rows in simulate(program, ranks=4, args=(True,)):
        assert rows[("all_reduce", "tp")] == (2, 4 * mine * 8)
        assert rows[("all_reduce", "dp")] == (1, 2 * 8)


def test_nll_of_cut_classes_sends_nothing() -> None:
    def program() -> None:
        x = place(normal(6, 7), LINE, (Shard(1),)).requires_grad_()
        target = targets((6, 7), -100)
        logs = F.log_softmax(x, 1)
        with count_collectives() as c:
            loss = F.nll_loss(logs, target)
        assert c.calls() == 0
        assert loss.placements == (Partial(),)  # type: ignore[attr-defined]
        want = F.nll_loss(F.log_softmax(normal(6, 7), 1), target)
        torch.testing.assert_close(loss.full_tensor(), want, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
def test_nll(mesh: DeviceMesh) -> None:
    def program() -> None:
        for shape, weighted, reduction, ignore in itertools.product(
            SHAPES, (False, True), REDUCTIONS, (None, 3)
        ):
            at = 1 if len(shape) > 1 else 0
            target = targets(shape, ignore)
            weight = normal(classes_of(shape), seed=2).abs() if weighted else None
            rest: Any = dict(reduction=reduction, ignore_index=ignore or -100)
            places: Any = (Shard(at),) if mesh.ndim == 1 else (Shard(0), Shard(at))
            x = normal(*shape).requires_grad_()
            want = F.nll_loss(F.log_softmax(x, at), target, weight, **rest)
            (slope,) = gradients(want, [x])
            d = place(normal(*shape), mesh, places).requires_grad_()
            w = None if weight is None else place(weight, mesh, (R,) * mesh.ndim)
            got = F.nll_loss(F.log_softmax(d, at), target, w, **rest)
            (back,) = gradients(got, [d])
            torch.testing.assert_close(got.full_tensor(), want, **TOLERANCE)  # type: ignore
            torch.testing.assert_close(back.full_tensor(), slope, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


def test_second_derivatives() -> None:
    x, target = normal(4, 7), targets((4, 7), None)
    along = normal(4, 7, seed=5)

    def twice(x: T, along: T) -> T:
        x = x.detach().requires_grad_()
        loss = dtensor.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((slope * along).sum(), x)
        return second

    want = twice(x, along)

    def program() -> None:
        for mesh, p in ((LINE, (Shard(1),)), (GRID, (Shard(0), Shard(1)))):
            got = twice(place(x, mesh, p), place(along, mesh, p))
            torch.testing.assert_close(got.full_tensor(), want, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


def test_three_axes() -> None:
    """Classes cut by two axes, samples by the third."""
    x, target = normal(6, 11), targets((6, 11), -100)
    weight = normal(11, seed=2).abs()
    leaf = x.clone().requires_grad_()
    want = F.cross_entropy(leaf, target, weight, label_smoothing=0.1)
    want.backward()

    def program() -> None:
        d = place(x, CUBE, (Shard(1), Shard(0), Shard(1))).requires_grad_()
        w = place(weight, CUBE, (R, R, R))
        loss = F.cross_entropy(d, target, w, label_smoothing=0.1)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), want, **TOLERANCE)  # type: ignore
        torch.testing.assert_close(d.grad.full_tensor(), leaf.grad, **TOLERANCE)  # type: ignore

    simulate(program, ranks=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    """The dtype is torch's; halves are summed in float32."""
    x, target = normal(6, 9).to(dtype), targets((6, 9), None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = F.cross_entropy(x, target)
    exact = F.cross_entropy(x.double(), target)

    def program() -> None:
        d = place(x, LINE, (Shard(1),)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = F.cross_entropy(d, target)
        assert got.dtype == want.dtype
        got.backward()
        assert d.grad is not None and d.grad.dtype == dtype
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(
            got.full_tensor().double(),
            exact,
            rtol=2 * eps,
            atol=2 * eps,  # type: ignore
        )

    simulate(program, ranks=4)


def test_infinite_logits() -> None:
    """A masked class counts for nothing; a target there has an infinite loss."""
    x, target = normal(4, 6), targets((4, 6), None)
    x[:, 3] = -torch.inf
    x[0, 0] = -torch.inf
    want = F.cross_entropy(x, target, reduction="none")
    assert want.isinf().any() and want.isfinite().any()

    def program() -> None:
        got = F.cross_entropy(place(x, LINE, (Shard(1),)), target, reduction="none")
        torch.testing.assert_close(got.full_tensor(), want, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


def test_nothing_to_count() -> None:
    def program() -> None:
        none = torch.full((4,), -100)
        d = place(normal(4, 6), LINE, (Shard(1),)).requires_grad_()
        loss = F.cross_entropy(d, none)
        assert loss.isnan().item()
        total = F.cross_entropy(d, none, reduction="sum")
        total.backward()
        assert total.item() == 0 and not d.grad.full_tensor().any()  # type: ignore
        empty = place(normal(0, 6), LINE, (Shard(1),))
        assert F.cross_entropy(empty, none[:0]).isnan().item()
        assert F.cross_entropy(empty, none[:0], reduction="none").shape == (0,)

    simulate(program, ranks=4)


def test_scaled_in_place() -> None:
    """Programs write ``loss /= steps``."""

    def program() -> None:
        for reduction in REDUCTIONS:
            d = place(normal(4, 6), LINE, (Shard(1),)).requires_grad_()
            loss = F.cross_entropy(d, targets((4, 6), None), reduction=reduction)
            loss /= 4
            loss.sum().backward()

    simulate(program, ranks=4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_target_out_of_range(reduction: str) -> None:
    """All ranks raise alike, before anything is sent."""

    def program() -> str:
        target = targets((4, 7), -100)
        target[2] = 7
        x = place(normal(4, 7), LINE, (Shard(1),))
        with count_collectives() as c, pytest.raises(IndexError) as error:
            F.cross_entropy(x, target, reduction=reduction)
        assert c.calls() == 0
        return str(error.value)

    text = (
        "cross_entropy: target out of range, got 7, expected 0 to 6 (the classes of the "
        "whole tensor) or ignore_index=-100. Map such targets to ignore_index."
    )
    assert simulate(program, ranks=4) == [text] * 4


@pytest.mark.parametrize("cut", [(Shard(0), Shard(1)), (Shard(0), R)], ids=str)
def test_target_out_of_range_elsewhere(cut: Placements) -> None:
    """Of a mean over cut samples, ranks without the wrong target raise as well."""

    def program() -> tuple[int, str]:
        target = targets((4, 7), None)
        target[3] = -5
        x = place(normal(4, 7), GRID, cut)
        t = place(target, GRID, (Shard(0), R))
        with pytest.raises(IndexError) as error:
            F.cross_entropy(x, t)
        return GRID.get_local_rank("dp"), str(error.value)

    for dp, text in simulate(program, ranks=4):
        assert ("got -5" if dp else "got such a target on another rank") in text


def test_wrong_arguments() -> None:
    """What torch refuses is refused, alike on all ranks and before anything is sent."""
    x, target = normal(4, 7), targets((4, 7), None)
    calls: list[tuple[Any, ...]] = [
        (x, target[:3]),
        (x, target.double()),
        (x, target.int()),
        (x, target, normal(6)),
        (x, target, normal(7).float()),
        (x, target, None, dict(label_smoothing=1.5)),
        (x, normal(4, 6)),
        (x, normal(4, 7).long()),
    ]
    for a, t, *rest in calls:
        weight = rest[0] if rest else None
        kw = rest[1] if len(rest) > 1 else {}
        with pytest.raises((RuntimeError, ValueError)) as plain:
            F.cross_entropy(a, t, weight, **kw)

        def program(a: T = a, t: T = t, w: T | None = weight, kw: Any = kw) -> Any:
            d = place(a, LINE, (Shard(1),))
            t = place(t, LINE, (R,))
            w = None if w is None else place(w, LINE, (R,))
            with count_collectives() as c, pytest.raises(Exception) as error:  # noqa: B017
                F.cross_entropy(d, t, w, **kw)
            return c.calls(), error.type

        for sent, kind in simulate(program, ranks=4):
            assert sent == 0 and kind is plain.type

    def unknown() -> None:
        d = place(x, LINE, (Shard(1),))
        F.cross_entropy(d, target, label_smoothing=0.5)
        with pytest.raises(RuntimeError, match="label_smoothing is a share, got 1.5"):
            F.cross_entropy(d, target, label_smoothing=1.5)
        with pytest.raises(
            ValueError, match="cross_entropy: no such reduction, got 'x'"
        ):
            dtensor.cross_entropy(place(x, LINE, (Shard(1),)), target, reduction="x")

    simulate(unknown, ranks=4)


def test_never_moves_logits() -> None:
    """Whatever lies unlike, it is the small operands that move."""
    x, target, weight = normal(4, 8), targets((4, 8), None), normal(8, seed=2).abs()
    want = F.cross_entropy(x, target, weight)

    def program() -> None:
        with redistribution("error"):
            d = place(x, LINE, (Shard(1),))
            got = F.cross_entropy(d, target, place(weight, LINE, (R,)))
        torch.testing.assert_close(got.full_tensor(), want, **TOLERANCE)  # type: ignore
        t, w = place(target, LINE, (Shard(0),)), place(weight, LINE, (Partial(),))
        with count_collectives() as c:
            got = F.cross_entropy(d, t, w)
        assert c.bytes("all_gather") == 3 * 8  # the targets
        torch.testing.assert_close(got.full_tensor(), want, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


def test_loss_parallel() -> None:
    """It nests, an exception leaves it, and it refuses what would gather."""
    x, target = normal(4, 8), targets((4, 8), None)
    want = F.cross_entropy(x, target)

    def program() -> None:
        own = DTensor.from_local(
            normal(4, 2), LINE, [BlockCyclic(1, 1)], run_check=False, shape=(4, 8)
        )
        F.cross_entropy(own, target)
        with pytest.raises(KeyError), loss_parallel():
            raise KeyError
        F.cross_entropy(own, target)
        with loss_parallel():
            with loss_parallel():
                pass
            with count_collectives() as c, pytest.raises(ShardingError) as error:
                F.cross_entropy(own, target)
            assert c.calls() == 0
            d = place(x, LINE, (Shard(1),)).requires_grad_()
            loss = F.cross_entropy(d, target)
            loss.backward()
        assert "under loss_parallel logits of shape (4, 8) would be" in str(error.value)
        torch.testing.assert_close(loss.full_tensor(), want, **TOLERANCE)  # type: ignore

    simulate(program, ranks=4)


def test_z_loss_of_plain_tensors() -> None:
    x, target = normal(4, 6), targets((4, 6), -100)
    z = torch.logsumexp(x, 1).square() * 0.1
    kept = target != -100
    each = F.cross_entropy(x, target, reduction="none") + z * kept
    for reduction, want in (
        ("none", each),
        ("sum", each.sum()),
        ("mean", each.sum() / kept.sum()),
    ):
        got = dtensor.cross_entropy(x, target, reduction=reduction, z_loss=0.1)
        torch.testing.assert_close(got, want, **TOLERANCE)
