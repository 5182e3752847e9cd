"""SequenceParallel and ReplicateParallel, shared inputs, parts taken for copies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    manual_seed,
    simulate,
)
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    layout_of,
    parallelize_module,
)

R, S = Replicate(), Shard
WHOLE = torch.arange(24.0, dtype=torch.float64).view(4, 3, 2)


def run(program: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    return simulate(program, ranks, args=(mesh, *args))


def close(got: Any, want: Any) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("local", [False, True])
def test_sequence_parallel(ranks: int, dim: int, local: bool) -> None:
    """Uneven and empty parts too."""

    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        serial = nn.LayerNorm(2).double()
        nn.init.normal_(serial.weight)
        model = copy.deepcopy(serial)
        style = SequenceParallel(sequence_dim=dim, use_local_output=local)
        parallelize_module(model, mesh, style)
        assert layout_of(model) == {"weight": (R,), "bias": (R,)}
        a = WHOLE.clone().requires_grad_()
        typed = distribute_tensor(WHOLE, mesh, [S(dim)])
        b = typed.to_local().clone().requires_grad_()
        want, got = serial(a), model(b)
        if local:
            assert type(got) is Tensor
            got = DTensor.from_local(got, mesh, [S(dim)])
        assert got.placements == (S(dim),)
        close(got, want)
        (want * WHOLE).sum().backward()
        (got * typed).sum().backward()
        for name, p in serial.named_parameters():
            close(model.get_parameter(name).grad, p.grad)
        close(DTensor.from_local(b.grad, mesh, [S(dim)]), a.grad)
        with count_collectives() as c:  # a DTensor is brought there
            out = model(distribute_tensor(WHOLE, mesh, [R]).detach())
        assert isinstance(out, DTensor) != local
        assert c.calls() == 1 if ranks > 1 else c.calls() == 0

    run(program, ranks=ranks)


def test_replicate_parallel() -> None:
    def program(mesh: DeviceMesh) -> None:
        for local in (False, True):
            serial = nn.Linear(2, 3).double()
            model = copy.deepcopy(serial)
            style = ReplicateParallel(use_local_output=local)
            parallelize_module(model, mesh, style, src_data_rank=None)
            for x in (WHOLE, distribute_tensor(WHOLE, mesh, [S(0)])):
                model.zero_grad()
                serial.zero_grad()
                out = model(x)
                assert isinstance(out, DTensor) != local
                assert local or out.placements == (R,)
                want = serial(WHOLE)
                close(out, want)
                out.square().sum().backward()
                want.square().sum().backward()
                close(model.weight.grad, serial.weight.grad)

    run(program)


# ---- a part taken for a copy -----------------------------------------------------------------
def test_a_part_that_reaches_a_module_without_a_style_is_told() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=R, output_layouts=S(0)),
        "2": ColwiseParallel(input_layouts=S(0), output_layouts=R),
    }
    ids = torch.tensor([0, 3, 4, 1])

    def program(mesh: DeviceMesh) -> Tensor:
        model = parallelize_module(copy.deepcopy(net), mesh, plan)
        model(ids)
        out: Tensor = model(ids)
        return out

    text = r"^1: runs on a plain piece of a tensor \(S\(0\) on axis 'tp'\) but has"
    with pytest.warns(UserWarning, match=text) as caught:
        run(program)
    assert len(caught) == 2  # once per rank
    plan["1"] = SequenceParallel(sequence_dim=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for out in run(program):
            torch.testing.assert_close(out, net(ids))


def test_siblings_share_what_is_brought_to_them() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(2, 4).double() for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.q(x) * self.k(x) * self.v(x)

    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        serial = Branches()
        model = parallelize_module(copy.deepcopy(serial), mesh, {"*": Colwise})
        a = WHOLE.clone().requires_grad_()
        b = distribute_tensor(WHOLE, mesh, [S(0)]).requires_grad_()
        with count_collectives() as c:
            got = model(b)
        assert c.calls() == c.calls("all_gather") == 1
        want = serial(a)
        close(got, want)
        want.square().sum().backward()
        with count_collectives() as c:
            got.square().sum().backward()
        assert c.calls("reduce_scatter") == 1
        assert a.grad is not None
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
        with torch.inference_mode():
            close(model(WHOLE), serial(WHOLE))

    run(program)


# ---- a block -----------------------------------------------------------------------------
class Block(nn.Module):
    """Two halves on a residual stream; the dropout is on the stream's side of each."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        for half in "ab":
            self.add_module(f"norm_{half}", nn.LayerNorm(6))
            self.add_module(f"up_{half}", nn.Linear(6, 8))
            self.add_module(f"down_{half}", nn.Linear(8, 6))
            self.add_module(f"drop_{half}", nn.Dropout(drop))

    def forward(self, x: Any) -> Any:
        for half in "ab":
            norm, up, down, drop = (
                self.get_submodule(f"{name}_{half}")
                for name in ("norm", "up", "down", "drop")
            )
            x = x + drop(down(torch.tanh(up(norm(x)))))
        return x


def block(drop: float = 0.0) -> Block:
    torch.manual_seed(0)
    made = Block(drop).double()
    for name, p in made.named_parameters():
        if name.startswith("norm"):
            nn.init.normal_(p)
    return made


def plan_of(sequence: bool, local: bool, drop: bool) -> dict[str, Any]:
    stream = S(1) if sequence else R
    plan: dict[str, Any] = {
        "up_*": ColwiseParallel(input_layouts=stream, use_local_output=local),
        "down_*": RowwiseParallel(output_layouts=stream, use_local_output=local),
    }
    if sequence:
        plan["norm_*"] = SequenceParallel(use_local_output=local)
        if drop:
            plan["drop_*"] = SequenceParallel(use_local_output=local)
    return plan


def stream_of(
    whole: Tensor, mesh: DeviceMesh, sequence: bool, local: bool
) -> tuple[Tensor, Callable[[Any], Any]]:
    """The input as a rank has it, and what makes a result of the same layout whole."""
    places: list[Any] = [S(1) if sequence else R]
    if mesh.ndim > 1:
        places = [S(0), *places]
    typed = distribute_tensor(whole, mesh, places)
    if not local:
        return typed.requires_grad_(), lambda y: y

    def joined(y: Any) -> Any:
        assert type(y) is Tensor
        return DTensor.from_local(y, mesh, places)

    return typed.to_local().clone().requires_grad_(), joined


GRIDS = [((2,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp"))]


@pytest.mark.parametrize("length", [8, 5, 3])
@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
@pytest.mark.parametrize(("shape", "names"), GRIDS, ids=str)
def test_a_block_on_parts_of_the_sequence(
    shape: tuple[int, ...], names: tuple[str, ...], local: bool, length: int
) -> None:
    """Values and all gradients; on uneven and empty parts too."""
    serial = block()
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(4, length, 6, generator=g, dtype=torch.float64)
    a = whole.clone().requires_grad_()
    want = serial(a)
    want.square().sum().backward()

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        if local and mesh.ndim > 1:
            parallelize_module(model, mesh, DataParallel())
        parallelize_module(model, mesh, plan_of(True, local, False))
        x, joined = stream_of(whole, mesh, True, local)
        y = model(x)
        close(joined(y), want)
        y.square().sum().backward()
        close(joined(x.grad), a.grad)
        for name, p in serial.named_parameters():
            q = model.get_parameter(name)
            assert isinstance(q.grad, DTensor)
            assert q.grad.placements == q.placements  # type: ignore[attr-defined]
            close(q.grad, p.grad)

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    simulate(program, mesh.size(), args=(mesh,))


@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
def test_all_reduces_become_gathers_and_scatters_of_the_same_bytes(local: bool) -> None:
    whole = torch.randn(2, 8, 6, dtype=torch.float64)
    compared = 4 if local else 0  # lengths of the plain parts at norms and linears

    def counted(mesh: DeviceMesh, sequence: bool) -> tuple[Any, Any]:
        model = block()
        parallelize_module(model, mesh, plan_of(sequence, local, False))
        x, _ = stream_of(whole, mesh, sequence, local)
        with count_collectives() as forward:
            y = model(x)
        with count_collectives() as backward:
            y.sum().backward()
        return forward, backward

    def program(mesh: DeviceMesh) -> None:
        one, back = counted(mesh, False)
        assert one.calls() == one.calls("all_reduce") == 2
        parts, parts_back = counted(mesh, True)
        activation = 2 * 8 * 6 * 8
        assert one.bytes() == 2 * activation * 2 * 3 // 4
        assert parts.calls("all_reduce") == 0
        assert parts.calls("reduce_scatter") == 2
        assert parts.calls("all_gather") == 2 + compared
        assert parts.bytes("reduce_scatter") == 2 * activation * 3 // 4
        extra = parts.bytes() - one.bytes()
        assert extra == 0 if not local else 0 < extra < compared * 1024
        # Backward: the transposes, and one bucket of all leaves that are replicated.
        assert parts_back.calls("reduce_scatter") == parts_back.calls("all_gather") == 2
        assert parts_back.calls("all_reduce") == 1
        leaves = 2 * (6 + 6 + 6)  # weights and biases of norms, biases of rowwise
        assert parts_back.bytes("all_reduce") == leaves * 8 * 2 * 3 // 4
        moved = parts_back.bytes() - parts_back.bytes("all_reduce")
        assert moved == 2 * activation * 2 * 3 // 4
        assert back.calls("all_reduce") >= 2

    run(program, ranks=4)


@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
def test_dropout_on_parts_of_the_sequence_is_one_sample(local: bool) -> None:
    """The mask is the one of one rank, cut; equally seeded ranks do not repeat it."""
    serial = block(0.5)
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 5, 6, generator=g, dtype=torch.float64)

    def program(mesh: DeviceMesh) -> list[Tensor]:
        model = copy.deepcopy(serial)
        parallelize_module(model, mesh, plan_of(True, local, True))
        manual_seed(7)
        torch.manual_seed(7)
        x, joined = stream_of(whole, mesh, True, local)
        y = model(x)
        y.square().sum().backward()
        found = [joined(y), joined(x.grad), *(p.grad for p in model.parameters())]
        return [t.full_tensor().detach() for t in found]

    (want,) = run(program, ranks=1)
    assert not torch.equal(want[0], copy.deepcopy(serial).eval()(whole))
    for ranks in (2, 4):
        for got in run(program, ranks=ranks):
            for t, u in zip(got, want, strict=True):
                close(t, u)
