"""PyTorch's tutorial on tensor and sequence parallelism, with our import line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama import Args, Transformer, loss_of
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    count_collectives,
    init_device_mesh,
    simulate,
)
from dtensor.styles import (
    ColwiseParallel,
    DataParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MESHES = [((2,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp"))]


def tutorial(
    model: nn.Module, tp_mesh: DeviceMesh, typed_heads: bool, more: Any = ()
) -> nn.Module:
    """The tutorial's code; ``typed_heads`` is its later form.

    ``more`` are styles of attention's inputs on other axes.
    """
    model = parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=Shard(1),
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Replicate()
            ),
        },
    )
    rest = Replicate() if typed_heads else None
    for transformer_block in model.layers:  # type: ignore[union-attr]
        layer_tp_plan = {
            "attention_norm": SequenceParallel(),
            "attention": [
                PrepareModuleInput(
                    input_layouts=(Shard(1), rest),
                    desired_input_layouts=(Replicate(), rest),
                ),
                *more,
            ],
            "attention.wq": ColwiseParallel(use_local_output=not typed_heads),
            "attention.wk": ColwiseParallel(use_local_output=not typed_heads),
            "attention.wv": ColwiseParallel(use_local_output=not typed_heads),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        if not typed_heads:
            attn_layer = transformer_block.attention
            attn_layer.n_heads = attn_layer.n_heads // tp_mesh.size("tp")
            attn_layer.n_kv_heads = attn_layer.n_kv_heads // tp_mesh.size("tp")
        parallelize_module(
            module=transformer_block,
            device_mesh=tp_mesh,
            parallelize_plan=layer_tp_plan,
        )
    return model


def serial_model(args: Args) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(args).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms: away from one, so that they count
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens_of(batch: int, length: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (batch, length + 1), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def close(got: Any, want: Any) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def check_gradients(serial: nn.Module, model: nn.Module) -> None:
    for (name, p), q in zip(serial.named_parameters(), model.parameters(), strict=True):
        assert isinstance(q.grad, DTensor), name
        assert q.grad.placements == q.placements, name  # type: ignore[attr-defined]
        close(q.grad, p.grad)


@pytest.mark.parametrize("typed_heads", [False, True], ids=["local", "typed"])
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
@pytest.mark.parametrize("length", [8, 5])
def test_equals_the_serial_model(
    shape: tuple[int, ...], names: tuple[str, ...], length: int, typed_heads: bool
) -> None:
    serial = serial_model(Args())
    tokens, targets = tokens_of(2, length)
    want = serial(tokens)
    loss_of(want, targets).backward()
    ways = ["whole mesh"]
    if len(shape) > 1:
        # Local heads go with the local batch, typed ones with the batch of all ranks.
        ways += ["its tp axis", *(["batch over dp"] if typed_heads else [])]

    def program(way: str) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = copy.deepcopy(serial)
        model.zero_grad()
        if way == "batch over dp":
            parallelize_module(model, mesh, DataParallel())
            # Of attention's inputs only the first is split with the batch.
            rows = (Shard(0), Replicate())
            tutorial(
                model,
                mesh,
                typed_heads,
                [
                    PrepareModuleInput(
                        input_layouts=rows, desired_input_layouts=rows, mesh_dim="dp"
                    )
                ],
            )
            here, size = mesh.get_local_rank("dp"), mesh.size("dp")
            got = model(tokens.chunk(size)[here])
            close(got, want.chunk(size)[here])
            (loss_of(got, targets.chunk(size)[here]) / size).backward()
        else:
            tutorial(model, mesh if way == "whole mesh" else mesh["tp"], typed_heads)
            got = model(tokens)
            assert type(got) is Tensor
            close(got, want)
            loss_of(got, targets).backward()
        check_gradients(serial, model)

    for way in ways:
        simulate(program, torch.Size(shape).numel(), args=(way,))


def test_grouped_queries() -> None:
    serial = serial_model(Args(n_kv_heads=2))
    tokens, targets = tokens_of(3, 6)
    want = serial(tokens)
    loss_of(want, targets).backward()

    def program(typed_heads: bool) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = copy.deepcopy(serial)
        model.zero_grad()
        got = tutorial(model, mesh, typed_heads)(tokens)
        close(got, want)
        loss_of(got, targets).backward()
        check_gradients(serial, model)

    for typed_heads in (False, True):
        simulate(program, 2, args=(typed_heads,))


def test_sequence_parallel_sends_no_activation_by_all_reduce() -> None:
    args = Args()
    serial = serial_model(args)
    tokens, targets = tokens_of(2, 8)
    layers, activation = args.n_layers, 2 * 8 * args.dim * 8  # bytes of (B, T, C)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tutorial(copy.deepcopy(serial), mesh, False)
        with count_collectives() as forward:
            logits = model(tokens)
        # The embedding and both halves of each block end in a reduce-scatter; both
        # halves and the head begin with an all-gather, and the logits are gathered.
        # Each norm compares the lengths of the parts that it is handed.
        norms = 2 * layers + 1
        assert forward.calls("all_reduce") == 0
        assert forward.calls("reduce_scatter") == 2 * layers + 1
        assert forward.calls("all_gather") == (2 * layers + 1) + 1 + norms
        assert forward.calls() == forward.calls("reduce_scatter") + forward.calls(
            "all_gather"
        )
        assert forward.bytes("reduce_scatter") == (2 * layers + 1) * activation // 2
        with count_collectives() as backward:
            loss_of(logits, targets).backward()
        # The transposes; one all-reduce is left, of the gradients of all norms.
        assert backward.calls("reduce_scatter") == 2 * layers + 1
        assert backward.calls("all_gather") == 2 * layers + 1
        assert backward.calls("all_reduce") == 1
        assert backward.bytes("all_reduce") == norms * args.dim * 8

    simulate(program, 2)
