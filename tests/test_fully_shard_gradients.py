"""fully_shard: every way to a gradient, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sharded_helpers import (
    FSDP,
    close,
    local_loss_on,
    loss_on,
    mesh_of,
    mine,
    watched,
)
from sharded_runs import WAYS, lay_out, make_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtensor import (
    DTensor,
    count_collectives,
    simulate,
)
from dtensor.styles.saved import state_of

import gpt  # isort: skip - found by way of sharded_runs


def repeated(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    loss().backward()
    (3 * loss()).backward()
    return [p.grad for p in model.parameters()]


def together(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    """Two forwards, one backward."""
    (loss() + 3 * loss()).backward()
    return [p.grad for p in model.parameters()]


def retained(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    value = loss()
    value.backward(retain_graph=True)
    (3 * value).backward()
    return [p.grad for p in model.parameters()]


def functional(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    found = list(torch.autograd.grad(loss(), list(model.parameters())))
    assert all(p.grad is None for p in model.parameters())
    return found


def second(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels are differentiable once
        first = torch.autograd.grad(loss(), parameters, create_graph=True)
        norm: Any = sum(g.square().sum() for g in first)
        if not isinstance(norm, DTensor):
            norm = norm / 1
        return list(torch.autograd.grad(norm, parameters))


def inside(model: gpt.GPT, loss: Callable[[], Tensor], reentrant: bool) -> list[Any]:
    """The forward of each unit is what is computed again."""
    for block in model.blocks:
        plain = block.forward
        block.forward = partial(checkpoint, plain, use_reentrant=reentrant)  # type: ignore[method-assign]
    return repeated(model, loss)


class Again(nn.Module):
    """A block called through ``checkpoint``."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def outside(model: gpt.GPT, loss: Callable[[], Tensor], reentrant: bool) -> list[Any]:
    """The call of each unit is what is computed again."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Again(block, reentrant)
    return repeated(model, loss)


def attention_alone(model: gpt.GPT, loss: Callable[[], Tensor]) -> list[Any]:
    """A part of a unit is what is computed again."""
    for block in model.blocks:
        plain = block.attention.forward
        block.attention.forward = partial(checkpoint, plain, use_reentrant=False)
    return repeated(model, loss)


GRADIENTS: dict[str, Callable[..., list[Any]]] = {
    "repeated": repeated,
    "together": together,
    "retained": retained,
    "functional": functional,
    "second": second,
    "checkpoint inside": partial(inside, reentrant=False),
    "reentrant inside": partial(inside, reentrant=True),
    "checkpoint outside": partial(outside, reentrant=False),
    "reentrant outside": partial(outside, reentrant=True),
    "checkpoint of a part": attention_alone,
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("kind", ["dtensor", "kept", "local", "tp"])
def test_every_way_to_a_gradient(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "local" and name == "second":
        pytest.skip("a norm of gradients is a DTensor; the loss of a piece is not")
    model = make_model(0.0)
    want = GRADIENTS[name](model, lambda: loss_on(model, None))
    way = WAYS["fsdp x tp"] if kind == "tp" else FSDP

    def program() -> None:
        mesh = mesh_of(*way.shape, names=way.names)
        model = make_model(0.0)
        lay_out(model, mesh, way, reshard_after_forward=kind != "kept")

        def loss() -> Tensor:
            if kind == "local":
                return local_loss_on(model, mesh)
            return loss_on(model, mesh, way)

        got = GRADIENTS[name](model, loss)
        for g, w in zip(got, want, strict=True):
            close(g, w)
        del got
        assert all(p.placements[0].is_shard(0) for p in model.parameters())
        assert not state_of(model.head.weight._spec.world).buffers
        if name != "second":
            model.zero_grad()
            assert mine(found).bytes() == 0

    with watched(monkeypatch) as found:
        simulate(program, ranks=4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", [inside, outside])
def test_what_is_computed_again_gathers_once_and_keeps_nothing(
    where: Callable[..., Any], reentrant: bool
) -> None:
    """Checkpoints see all activations: ours do not hide them from theirs."""

    def program() -> None:
        mesh = mesh_of(4)
        model = make_model(0.0, layers=3)
        lay_out(model, mesh, FSDP)
        kept: list[StorageWeakRef] = []

        def note(module: nn.Module, args: Any, out: Tensor) -> None:
            kept.append(StorageWeakRef(out.untyped_storage()))

        for block in model.blocks:
            block.mlp.up.register_forward_hook(note)
        loss = loss_on(model, mesh)
        assert len(kept) == 3 and not any(ref.expired() for ref in kept)
        del loss
        where(model, lambda: loss_on(model, mesh), reentrant)
        kept.clear()
        with count_collectives() as forward:
            loss = loss_on(model, mesh)
        assert forward.calls("all_gather") == 4
        with count_collectives() as backward:
            loss.backward()
        assert backward.calls("all_gather") == 4
        assert backward.calls("reduce_scatter") == 4

        loss = loss_on(model, mesh)
        assert kept and all(ref.expired() for ref in kept)
        del loss

    simulate(program, ranks=4)
