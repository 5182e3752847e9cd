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
    simulate,
)
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
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
