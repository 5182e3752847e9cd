"""Guards of DESIGN section 1: users' autograd.Functions, module hooks, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guard_helpers import PLACES, gen, lay, leaves, line, ranks, refused, same
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, count_collectives, get_rank

SEEN: dict[int, list[Any]] = {}


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        SEEN.setdefault(get_rank(), []).append((g, y))
        return g * y


class Clip(Function):
    """Returns its input; clips the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        return g.clamp(-0.5, 0.5)


class Mixed(Function):
    """Two outputs, a number among the inputs, setup_context."""

    @staticmethod
    def forward(x: Any, w: Any, k: float = 2.0) -> Any:
        return x * w * k, x + w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, k = inputs
        ctx.save_for_backward(x, w)
        ctx.k = k

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w * ctx.k + h, g * x * ctx.k + h, None


class Triple(Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        return g * 3


def program(x: Any, w: Any) -> Any:
    a, b = Mixed.apply(Clip.apply(Exp.apply(x) * 5), w)
    return Triple.apply(a * 1).square().sum() + b.pow(3).sum()


@pytest.mark.parametrize("px", PLACES, ids=str)
@pytest.mark.parametrize("pw", PLACES, ids=str)
@ranks(2)
def test_s1_function_first_and_second_derivatives(px: Any, pw: Any) -> None:
    """1: backward of a user's Function gets dual cotangents; twice."""
    (x, w), (xr, wr) = leaves([gen(3, 4), gen(3, 4, seed=1)], [px, pw])
    first = torch.autograd.grad(program(x, w), (x, w), create_graph=True)
    wanted = torch.autograd.grad(program(xr, wr), (xr, wr), create_graph=True)
    for g, want in zip(first, wanted, strict=True):
        same(g, want)
    scalar = sum(g.square().sum() for g in first)
    want_scalar = sum(g.square().sum() for g in wanted)
    second = torch.autograd.grad(scalar, (x, w))
    for g, want in zip(second, torch.autograd.grad(want_scalar, (xr, wr)), strict=True):
        same(g, want)


@ranks(2)
def test_s1_function_cotangents_are_dual_dtensors() -> None:
    """1: what backward sees: a Partial cotangent and a typed saved output."""
    SEEN[get_rank()] = []
    x = lay(gen(3, 4), Replicate()).requires_grad_()
    (Exp.apply(x) * lay(gen(3, 4), Shard(0))).sum().backward()
    ((g, y),) = SEEN[get_rank()]
    assert type(g) is DTensor and g.placements == (Partial(),)
    assert type(y) is DTensor and y.placements == (Replicate(),)
    assert x.grad.placements == (Replicate(),)


@ranks(2)
def test_s1_function_clipping_reduces_first() -> None:
    """1: clamp of a Partial cotangent is the clamp of its sum, not of its addends."""
    x = lay(gen(4, 4), Replicate()).requires_grad_()
    w = gen(4, 4, seed=2)
    (Clip.apply(x) @ lay(w, Shard(1))).sum().backward()
    want = (torch.ones(4, 4, dtype=torch.float64) @ w.T).clamp(-0.5, 0.5)
    same(x.grad, want)


@ranks(2)
def test_s1_function_returned_input_is_typed() -> None:
    """1: torch gives a returned input back as a plain view; it must be a DTensor."""
    x = lay(gen(4, 2), Shard(0))
    for t in (x, x.clone().requires_grad_()):
        y = Clip.apply(t)
        assert type(y) is DTensor and y.placements == (Shard(0),) and y is not t
    with torch.no_grad():
        assert type(Clip.apply(x)) is DTensor


@ranks(2)
def test_s1_function_moves_no_gradient_that_nobody_wants() -> None:
    """1: an input without grad: what backward returns for it is not redistributed."""
    x = lay(gen(4, 4), Shard(0)).requires_grad_()
    w = lay(gen(4, 4), Replicate())
    y, _ = Mixed.apply(x, w)
    with count_collectives() as c:
        y.sum().backward()
    assert c.calls() == 0
    same(x.grad, 2 * gen(4, 4))


@ranks(2)
def test_s1_function_dirty_input_keeps_its_identity() -> None:
    """1: mark_dirty."""
    x = lay(gen(4, 2), Shard(0)).requires_grad_()
    y = x * 1
    assert Triple.apply(y) is y
    y.sum().backward()
    same(x.grad, torch.full((4, 2), 3.0, dtype=torch.float64))


@ranks(2)
def test_s1_function_without_dtensors_is_torchs() -> None:
    """1: plain tensors pass through, with the user's own class."""
    x = gen(3).requires_grad_()
    y = Exp.apply(x)
    assert y.grad_fn._forward_cls is Exp
    assert torch.autograd.Function.apply.__doc__ is None
    assert torch.autograd.Function.apply.__name__ == "apply"
    y.sum().backward()
    assert type(x.grad) is torch.Tensor


@ranks(2)
def test_s1_function_broadcast_gradient_is_summed() -> None:
    """1: torch sums a returned gradient to the input's shape; so do we."""

    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, s: Any) -> Any:
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
            x, s = ctx.saved_tensors
            return g * s, g * x

    for shape in ((), (4,), (3, 1)):
        (x, s), (xr, sr) = leaves(
            [gen(3, 4), gen(*shape, seed=1)], [Shard(0), Replicate()]
        )
        Scale.apply(x, s).square().sum().backward()
        Scale.apply(xr, sr).square().sum().backward()
        same(s.grad, sr.grad)
        same(x.grad, xr.grad)


@ranks(2)
def test_s1_function_once_differentiable() -> None:
    """1: once_differentiable: first right, second torch's own error."""

    class Sine(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return g * x.cos()

    x = lay(gen(3, 4), Replicate()).requires_grad_()
    w = lay(gen(3, 4, seed=1), Shard(0)).requires_grad_()
    (g,) = torch.autograd.grad((Sine.apply(x) * w).sum(), x, create_graph=True)
    same(g, gen(3, 4).cos() * gen(3, 4, seed=1))
    refused("differentiate twice", lambda: g.sum().backward(), RuntimeError)


@ranks(2)
def test_s1_function_none_and_unused_outputs() -> None:
    """1: None gradients, unused and integer outputs."""

    class Parts(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, flag: Any) -> Any:
            index = x.argmax(1)
            ctx.mark_non_differentiable(index)
            return x * 2, index, w * 3

        @staticmethod
        def backward(ctx: Any, g: Any, _: Any, h: Any) -> Any:  # type: ignore[override]
            assert type(h) is DTensor
            return g * 2, None, None

    (x, w), _ = leaves([gen(3, 4), gen(2)], [Shard(0), Replicate()])
    y, index, _ = Parts.apply(x, w, "flag")
    assert type(index) is DTensor and not index.requires_grad
    y.sum().backward()
    same(x.grad, torch.full((3, 4), 2.0, dtype=torch.float64))
    assert w.grad is None


@ranks(2)
def test_s1_function_plain_beside_dtensor() -> None:
    """1: a plain input's gradient is plain; a DTensor for it is refused, and back."""

    class Give(Function):
        answer: Any = None

        @staticmethod
        def forward(ctx: Any, x: Any, p: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
            return Give.answer(g)

    x = lay(gen(4), Shard(0)).requires_grad_()
    p = gen(3).requires_grad_()
    Give.answer = lambda g: (g, torch.ones(3, dtype=torch.float64))
    Give.apply(x, p).sum().backward()
    assert type(p.grad) is torch.Tensor
    Give.answer = lambda g: (g, g)
    refused(
        r"Give.backward: input 1 is no DTensor, got the gradient DTensor.*to_local",
        lambda: Give.apply(x, p).sum().backward(),
    )
    Give.answer = lambda g: (g.to_local(), None)
    refused(
        r"Give.backward: input 0 is a DTensor, got a plain shape \(2,\).*from_local",
        lambda: Give.apply(x, p).sum().backward(),
    )
    Give.answer = lambda g: (lay(gen(3), Replicate()), None)
    refused(
        r"Give.backward: the returned gradient does not fit.*expected shape \(4,\)",
        lambda: Give.apply(x, p).sum().backward(),
    )


@ranks(2)
def test_s1_function_that_makes_a_dtensor_of_plain_tensors() -> None:
    """1: no DTensor goes in, one comes out: its cotangent is typed as well."""

    class Enter(Function):
        @staticmethod
        def forward(ctx: Any, p: Any) -> Any:
            return DTensor.from_local(p * 1, line(), [Shard(0)], run_check=False)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
            assert type(g) is DTensor and g.placements == (Shard(0),)
            return g.to_local()

    p = gen(2).requires_grad_()
    (Enter.apply(p) * 2).sum().backward()
    same(p.grad, torch.full((2,), 2.0, dtype=torch.float64))


class Layer(torch.nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, x: Any) -> Any:
        return torch.relu(x @ self.w)


@pytest.mark.parametrize("px", PLACES, ids=str)
@ranks(2)
def test_s1_full_backward_hooks_get_and_give_dtensors(px: Any) -> None:
    """1: module full-backward hooks see duals; what they return counts."""
    nets = [Layer(lay(gen(4, 4, seed=3), Replicate())), Layer(gen(4, 4, seed=3))]
    (x,), (xr,) = leaves([gen(3, 4)], [px])
    seen: list[Any] = []
    for net in nets:
        net.register_full_backward_pre_hook(lambda _, go: (go[0].clamp(-1, 1),))
        net.register_full_backward_hook(
            lambda _, gi, go: seen.append((gi, go)) or (gi[0].clamp(-2, 2) * 2,)
        )
    nets[0](x).square().sum().backward()
    (gi, go), seen[:] = seen[0], []
    assert type(gi[0]) is DTensor and type(go[0]) is DTensor
    nets[1](xr).square().sum().backward()
    same(gi[0], seen[0][0][0])
    same(go[0], seen[0][1][0])
    same(x.grad, xr.grad)
    same(nets[0].w.grad, nets[1].w.grad)
    assert x.grad.placements == x.placements


@ranks(2)
def test_s1_register_hook_runs_with_torch_functions_on() -> None:
    """2: a tensor hook's clamp of a Partial cotangent reduces first."""
    x = lay(gen(4, 4), Replicate()).requires_grad_()
    w = gen(4, 4, seed=2)
    y = x * 1
    y.register_hook(lambda g: g.clamp(-0.5, 0.5))
    (y @ lay(w, Shard(1))).sum().backward()
    want = (torch.ones(4, 4, dtype=torch.float64) @ w.T).clamp(-0.5, 0.5)
    same(x.grad, want)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("px", PLACES, ids=str)
@ranks(2)
def test_s1_checkpoint(reentrant: bool, px: Any) -> None:
    """1: both checkpoints, over users' Functions, an inner leaf and dropout."""
    (x, w), (xr, wr) = leaves([gen(3, 4), gen(3, 4, seed=1)], [px, Replicate()])
    checkpoint(program, x, w, use_reentrant=reentrant).backward()
    program(xr, wr).backward()
    same(x.grad, xr.grad)
    same(w.grad, wr.grad)
    assert x.grad.placements == x.placements and w.grad.placements == w.placements


@ranks(2)
def test_s1_reentrant_checkpoint_closes_over_a_shared_leaf() -> None:
    """1: a leaf used in and outside of the checkpoint is reduced once per sum."""
    (x, w), (xr, wr) = leaves(
        [gen(3, 4), gen(4, 4, seed=1)], [Replicate(), Replicate()]
    )

    def run(x: Any, w: Any) -> Any:
        y = checkpoint(lambda t: (t @ w).sin(), x, use_reentrant=True)
        return (y @ w).square().sum()

    for _ in range(2):
        run(x, w).backward()
        run(xr, wr).backward()
    same(w.grad, wr.grad)
    same(x.grad, xr.grad)


@ranks(2)
def test_s1_saved_tensor_hooks_speak_of_shards() -> None:
    """1: pack hooks run with torch functions off; they are given plain shards."""
    seen: list[Any] = []

    def pack(t: Any) -> Any:
        seen.append(t)
        return t.clone()

    x = lay(gen(4, 4), Shard(0)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = Exp.apply(x).square().sum()
    assert seen and all(type(t) is torch.Tensor for t in seen)
    assert seen[0].shape == (2, 4)
    y.backward()
    xr = gen(4, 4).requires_grad_()
    xr.exp().square().sum().backward()
    same(x.grad, xr.grad)
    with torch.autograd.graph.save_on_cpu():
        z = Exp.apply(x).square().sum()
    x.grad = None
    z.backward()
    same(x.grad, xr.grad)


def test_install_is_idempotent() -> None:
    """1: interop wraps once."""
    before = torch.autograd.Function.__dict__["apply"]
    dtensor.interop.install()
    assert torch.autograd.Function.__dict__["apply"] is before
