"""Styles that only say what goes into and out of a module."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.styles import (
    Layout,
    ParallelStyle,
    Port,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)

R, S, P = Replicate(), Shard, Partial()
ROWS = S(0)
WHOLE = torch.arange(24.0, dtype=torch.float64).view(4, 3, 2)


def run(program: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    return simulate(program, ranks, args=(mesh, *args))


def close(got: Any, want: Any) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def mine(x: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


class Seen(nn.Module):
    """Keeps what it was called with; gives twice the first and the others."""

    def forward(self, a: Any, b: Any = None, scale: Any = None) -> Any:
        self.got = (a, b, scale)
        out = a * 2 if scale is None else a * 2 * scale
        return (out, b) if b is not None else out


# ---- inputs ------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [R, S(0), S(1), S(-1), P], ids=str)
@pytest.mark.parametrize("wanted", [R, S(0), S(2), None], ids=str)
@pytest.mark.parametrize("local", [False, True])
def test_every_input_layout(given: Any, wanted: Any, local: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        style = (
            PrepareModuleInput(
                input_layouts=given,
                desired_input_layouts=wanted,
                use_local_output=local,
            )
            if wanted is not None
            else PrepareModuleInput(
                input_layouts=(given,),
                desired_input_layouts=(None,),
                use_local_output=local,
            )
        )
        net = parallelize_module(Seen(), mesh, style)
        place = given if not isinstance(given, Shard) else S(given.dim % 3)
        goal = place if wanted is None else wanted
        if isinstance(place, Shard):
            plain = mine(WHOLE, mesh, place.dim)
        else:
            plain = WHOLE / 2 if place == P else WHOLE
        for x in (plain, distribute_tensor(WHOLE, mesh, [S(1)])):
            if isinstance(x, DTensor) and wanted is None:
                continue  # it stays where it is
            net(x)
            got: Any = net.got[0]
            assert isinstance(got, DTensor) != local
            if local:
                whole = [R if goal == P else goal]
                sent = distribute_tensor(WHOLE, mesh, whole).to_local()
                close(got * 2 if goal == P else got, sent)
            else:
                assert got.placements == (goal,)
                close(got, WHOLE)

    run(program)


@pytest.mark.parametrize("local", [False, True])
def test_gradient_through_gathered_inputs(local: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        net = parallelize_module(
            Seen(),
            mesh,
            PrepareModuleInput(
                input_layouts=S(0), desired_input_layouts=R, use_local_output=local
            ),
        )
        x = mine(WHOLE, mesh).clone().requires_grad_()
        with count_collectives() as c:
            y = net(x)
        assert c.calls("all_gather") == 2  # the value, and the lengths of the parts
        (y * WHOLE if local else y.to_local() * WHOLE).sum().backward()
        assert x.grad is not None
        close(x.grad, 2 * mine(WHOLE, mesh))

    run(program)


def test_inputs_by_name() -> None:
    """By keyword, by position, left out; the others are left alone."""

    def program(mesh: DeviceMesh) -> None:
        style = PrepareModuleInput(
            input_kwarg_layouts={"scale": S(0), "b": S(1)},
            desired_input_kwarg_layouts={"scale": R, "b": S(0)},
        )
        net = parallelize_module(Seen(), mesh, style)
        part, a = mine(WHOLE, mesh), WHOLE.tolist()
        for args, kwargs in (
            ((1.0,), {"scale": part}),
            ((1.0, None, part), {}),
            ((1.0, mine(WHOLE, mesh, 1)), {"scale": part}),
        ):
            net(*args, **kwargs)
            got: Any = net.got
            assert got[0] == 1.0
            assert got[2].placements == (R,)
            close(got[2], WHOLE)
            if len(args) == 2:
                assert got[1].placements == (S(0),)
                close(got[1], WHOLE)
        net(2.0)
        assert net.got == (2.0, None, None)
        assert a == WHOLE.tolist()

    run(program)


def test_counts_and_kinds_of_inputs() -> None:
    def program(mesh: DeviceMesh) -> None:
        def net(**layouts: Any) -> nn.Module:
            return parallelize_module(Seen(), mesh, PrepareModuleInput(**layouts))

        one = net(input_layouts=(S(0),), desired_input_layouts=(R,))
        text = (
            r"Seen: the style describes 1 positional inputs on axis 'tp', got 2\. "
            r"Give the style one placement \(or None\) per tensor"
        )
        with pytest.raises(ValueError, match=text):
            one(WHOLE, WHOLE)
        with pytest.raises(ValueError, match=r"got 0 and the keyword inputs \['a'\]"):
            one(a=WHOLE)
        two = net(input_layouts=(R, R), desired_input_layouts=(R, R))
        two(WHOLE, None)
        text = "Seen: the style gives input 1 a placement, got str, expected a tensor"
        with pytest.raises(TypeError, match=text):
            two(WHOLE, "b")
        deep = net(input_layouts=S(5), desired_input_layouts=R)
        with pytest.raises(ValueError, match=r"S\(5\) shards a dim .* of 3 dims"):
            deep(WHOLE)
        keyword: Any = {
            "input_kwarg_layouts": {"sclae": R},
            "desired_input_kwarg_layouts": {"sclae": R},
        }
        with pytest.raises(ValueError, match="'Seen' does not take, got 'sclae'"):
            net(**keyword)

    run(program)


def test_arguments_that_do_not_fit() -> None:
    for layouts, text in (
        ({"input_layouts": S(0)}, "input_layouts and desired_input_layouts do not m"),
        (
            {"input_layouts": (S(0), None), "desired_input_layouts": R},
            r"got \(Shard\(dim=0\), None\) and \(Replicate\(\),\), expected as many",
        ),
        ({}, "there is nothing to bring anywhere"),
        ({"input_kwarg_layouts": {"x": R}}, r"got \['x'\] and \[\], expected the same"),
    ):
        with pytest.raises(ValueError, match=text):
            PrepareModuleInput(**layouts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input_layouts is not a row of placements"):
        PrepareModuleInput(input_layouts=3, desired_input_layouts=R)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input_layouts is not a placement, got 3"):
        PrepareModuleInput(input_layouts=(3,), desired_input_layouts=R)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R)


# ---- outputs -----------------------------------------------------------------------------
class Gives(nn.Module):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        return self.make(x)


@pytest.mark.parametrize("local", [False, True])
def test_every_form_of_output(local: bool) -> None:
    def program(mesh: DeviceMesh) -> None:
        part = mine(WHOLE, mesh)
        Two = namedtuple("Two", "a b")

        def check(x: Any) -> None:
            assert isinstance(x, DTensor) != local
            close(x, WHOLE)

        def net(make: Any, given: Any = ROWS, wanted: Any = R) -> Any:
            style = PrepareModuleOutput(
                output_layouts=given,
                desired_output_layouts=wanted,
                use_local_output=local,
            )
            return parallelize_module(Gives(make), mesh, style)(part)

        check(net(lambda x: x))
        (out,) = net(lambda x: (x,))
        check(out)
        for make in (lambda x: (x, "b"), lambda x: [x, "b"], lambda x: Two(x, "b")):
            out = net(make, (S(0), None), (R, None))
            assert type(out) is type(make(0))
            check(out[0])
            assert out[1] == "b"
        typed = net(
            lambda x: (x, distribute_tensor(WHOLE, mesh, [S(0)])),
            (S(0), None),
            (R, None),
        )
        assert isinstance(typed[1], DTensor)  # None: as the module gave it

    run(program)


def test_dicts_of_outputs_and_wrong_counts() -> None:
    class All(ParallelStyle):
        def layout(self, module: nn.Module) -> Layout:
            return Layout(outputs=Port(S(0), R, local=True))

    def program(mesh: DeviceMesh) -> None:
        part = mine(WHOLE, mesh)
        net = parallelize_module(Gives(lambda x: OrderedDict(a=x, b=1)), mesh, All())
        out = net(part)
        assert type(out) is OrderedDict and out["b"] == 1
        close(out["a"], WHOLE)
        style = PrepareModuleOutput(
            output_layouts=(S(0), S(0)), desired_output_layouts=(R, R)
        )
        for make, count in ((lambda x: x, 1), (lambda x: (x, x, x), 3)):
            net = parallelize_module(Gives(make), mesh, style)
            text = f"Gives: the style describes 2 outputs on axis 'tp', got {count}"
            with pytest.raises(ValueError, match=text):
                net(part)

    run(program)


def test_input_and_output_together() -> None:
    style = PrepareModuleInputOutput(
        input_layouts=(S(0),),
        desired_input_layouts=(R,),
        use_local_input=True,
        output_layouts=(R,),
        desired_output_layouts=(S(1),),
        use_local_output=False,
    )

    def program(mesh: DeviceMesh) -> None:
        net = parallelize_module(Seen(), mesh, style)
        out = net(mine(WHOLE, mesh))
        close(net.got[0], WHOLE)  # type: ignore[index]
        assert type(net.got[0]) is Tensor  # type: ignore[index]
        assert out.placements == (S(1),)
        close(out, 2 * WHOLE)

    run(program)
    assert "PrepareModuleInput(input_layouts=(Shard(dim=0),)" in repr(style)


def test_a_module_that_computes_on_local_parts_gets_whole_gradients() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2).double()
            self.scale = nn.Parameter(torch.tensor([2.0, 3.0]).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.norm(x) * self.scale)

    style = PrepareModuleInputOutput(
        input_layouts=R,
        desired_input_layouts=S(0),
        use_local_input=True,
        output_layouts=S(0),
        desired_output_layouts=R,
    )

    def program(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        serial = Inner()
        model = parallelize_module(copy.deepcopy(serial), mesh, style)
        a, b = WHOLE.clone().requires_grad_(), WHOLE.clone().requires_grad_()
        want, got = serial(a), model(b)
        assert type(got) is Tensor
        close(got, want)
        (want * WHOLE).sum().backward()
        (got * WHOLE).sum().backward()
        close(b.grad, a.grad)
        for name, p in serial.named_parameters():
            close(model.get_parameter(name).grad, p.grad)

    run(program)
    run(program, ranks=3)


# ---- masks, keywords, containers -----------------------------------------------------------
class Masked(nn.Module):
    """Attention over heads with a mask, a bias and options that are no tensors."""

    def forward(
        self,
        q: Any,
        mask: Any = None,
        *,
        bias: Any = None,
        rotary: Any = None,
        options: Any = None,
        causal: bool = False,
        scale: float = 1.0,
    ) -> Any:
        assert isinstance(causal, bool) and isinstance(scale, float)
        scores = q @ q.transpose(-2, -1) * scale
        if bias is not None:
            scores = scores + bias
        if rotary is not None:
            cos, sin = rotary
            scores = scores * cos + sin
        if mask is not None:
            scores = scores.masked_fill(mask.logical_not(), -1e9)
        if options is not None:
            scores = scores * options["gain"]
        return scores.softmax(-1) @ q


def masked_inputs(heads: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = make(2, heads, 4, 4) > -1
    return {
        "q": make(2, heads, 4, 3),
        "mask": mask | torch.eye(4, dtype=torch.bool),
        "bias": make(2, heads, 4, 4),
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
@pytest.mark.parametrize("place", [S(1), S(0), R], ids=["heads", "batch", "whole"])
@pytest.mark.parametrize("handed", [R, S(1), S(2)], ids=["whole", "heads", "sequence"])
def test_masks_go_where_the_queries_are(
    place: Any, handed: Any, local: bool, ranks: int
) -> None:
    """Queries cut by heads or batch; masks are handed in whole, or cut in any way."""
    given = masked_inputs(4)
    a = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in given.items()}
    want = Masked()(a["q"], a["mask"], bias=a["bias"])
    want.square().sum().backward()
    style = PrepareModuleInputOutput(
        input_kwarg_layouts={"q": place, "mask": handed, "bias": handed},
        desired_input_kwarg_layouts={"q": place, "mask": place, "bias": place},
        use_local_input=local,
        output_layouts=(place,),
        desired_output_layouts=(R,),
    )

    def program(mesh: DeviceMesh) -> None:
        def part(x: Tensor, p: Any) -> Tensor:
            if not isinstance(p, Shard):
                return x
            return distribute_tensor(x, mesh, [p]).to_local()

        net = parallelize_module(Masked(), mesh, style)
        q = part(given["q"], place).clone().requires_grad_()
        bias = part(given["bias"], handed).clone().requires_grad_()
        mask = part(given["mask"], handed)
        got = net(q, mask, bias=bias)
        assert type(got) is Tensor
        close(got, want)
        got.square().sum().backward()
        for x, name, p in ((q, "q", place), (bias, "bias", handed)):
            close(x.grad, part(a[name].grad, p))  # type: ignore[arg-type]
        # By keyword, left out, None; what is no tensor passes.
        close(net(q, mask=mask, bias=bias, causal=True, scale=1.0), want)
        plain = Masked()(a["q"])
        close(net(q, None), plain)
        close(net(q, None, bias=None), plain)

    if place == S(0) and ranks == 4:
        return  # a batch of two: see test_every_input_layout for empty parts
    run(program, ranks=ranks)


@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
def test_inputs_in_tuples_and_dicts(local: bool) -> None:
    """One placement for all tensors in it; the containers stay of their kinds."""
    q = masked_inputs(4)["q"]
    g = torch.Generator().manual_seed(1)
    cos, sin, gain = (torch.randn(4, 1, 4, generator=g).double() for _ in range(3))
    Pair = namedtuple("Pair", "cos sin")
    a = [t.clone().requires_grad_() for t in (cos, sin, gain)]
    want = Masked()(q, rotary=(a[0], a[1]), options={"gain": a[2]})
    want.square().sum().backward()
    style = PrepareModuleInput(
        input_layouts=(S(1), None),
        desired_input_layouts=(S(1), None),
        input_kwarg_layouts={"rotary": R, "options": R},
        desired_input_kwarg_layouts={"rotary": S(0), "options": S(0)},
        use_local_output=local,
    )

    def program(mesh: DeviceMesh) -> None:
        net = parallelize_module(Masked(), mesh, style)
        mine_of = mine(q, mesh, 1)
        seen = []
        net.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
        for make in (tuple, list, lambda pair: Pair(*pair)):
            b = [t.clone().requires_grad_() for t in (cos, sin, gain)]
            options = {"gain": b[2], "name": "x", "none": None}
            got = net(mine_of, None, rotary=make(b[:2]), options=options)
            assert type(seen[-1]["rotary"]) is type(make(b[:2]))
            assert seen[-1]["options"]["name"] == "x"
            assert options["gain"] is b[2]  # the caller's dict is left alone
            whole = got if not local else DTensor.from_local(got, mesh, [S(1)])
            close(whole, want)
            whole.square().sum().backward()
            for x, y in zip(b, a, strict=True):
                close(x.grad, y.grad)
        with pytest.raises(
            TypeError, match="gives input 'rotary' a placement, got tup"
        ):
            net(mine_of, None, rotary=(1.0, 2.0))

    run(program)
