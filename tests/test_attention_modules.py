"""torch's attention modules in laid-out models; tied and uneven vocabularies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_heads import Attention, check_equal, close, on_meshes, plan_of, run, sample
from torch import Tensor, nn

from dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)

R, S = Replicate(), Shard
MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.zeros(2, 5, dtype=torch.bool)
PADDED[1, 3:] = True
SIZES: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}


def self_attention() -> nn.Module:
    return nn.MultiheadAttention(16, 8, **SIZES)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 8, 22, **SIZES, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(
        encoder_layer(norm_first=True),  # type: ignore[arg-type]
        2,
        enable_nested_tensor=False,
    )


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(16, 8, 22, **SIZES)


Calls = Callable[[Any, Any], Any]
CASES: dict[str, tuple[Callable[[], nn.Module], str, Calls]] = {
    "attention": (self_attention, "", lambda m, x: m(x, x, x)[0]),
    "attention, masked": (
        self_attention,
        "",
        lambda m, x: m(
            x, x, x, key_padding_mask=PADDED, attn_mask=MASK, need_weights=False
        )[0],
    ),
    "encoder layer": (encoder_layer, "", lambda m, x: m(x)),
    "encoder layer, padded": (
        encoder_layer,
        "",
        lambda m, x: m(x, src_mask=MASK, src_key_padding_mask=PADDED),
    ),
    "encoder": (encoder, "layers.*.", lambda m, x: m(x, mask=MASK)),
    "decoder layer": (decoder_layer, "", lambda m, x: m(x, x * 2, tgt_mask=MASK)),
}


@on_meshes
@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
@pytest.mark.parametrize("name", CASES)
def test_modules_of_torch(name: str, local: bool, shape: Any, names: Any) -> None:
    """The feed-forward is cut; attention is computed whole, or gathers its weights."""
    make, path, call = CASES[name]
    torch.manual_seed(0)
    serial = make()
    for p in serial.parameters():
        nn.init.normal_(p, std=0.5)
    a = sample(2, 5, 16).requires_grad_()
    want = call(serial, a)
    want.pow(2).sum().backward()
    quiet = copy.deepcopy(serial).eval()
    row = RowwiseParallel(use_local_output=local)
    plan: dict[str, Any] = {"out_proj": row}
    if "attention" not in name:
        first = ColwiseParallel() if local else Colwise()
        plan = {f"{path}linear1": first, f"{path}linear2": row}

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        parallelize_module(model, mesh, plan)
        b = a.detach().clone()
        if not local:
            b = distribute_tensor(b, mesh, [R] * mesh.ndim)
        b.requires_grad_()
        got = call(model, b)
        assert isinstance(got, DTensor) != local
        close(got, want)
        got.pow(2).sum().backward()
        close(b.grad, a.grad)
        check_equal(serial, model)
        model.eval()
        with torch.no_grad():  # where torch would take its fused way
            close(call(model, b), call(quiet, a))

    run(program, shape, names)


# ---- heads over tp, all else over dp --------------------------------------------------------
@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
@pytest.mark.parametrize(
    ("form", "kv_heads"),
    [("split", 8), ("split", 1), ("row", 8), ("row", 1), ("interleaved", 8)],
)
def test_heads_under_fully_shard(form: str, kv_heads: int, local: bool) -> None:
    torch.manual_seed(0)
    serial = Attention(form, 8, kv_heads).double()
    x = sample(4, 5, 12)
    serial(x).pow(2).sum().backward()

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        parallelize_module(model, mesh, plan_of(form, 8, kv_heads, local))
        fully_shard(model, mesh=mesh, mesh_dim="dp")
        mine = distribute_tensor(x, mesh, [S(0), R])
        for _ in range(2):
            model.zero_grad()
            y = model(mine.to_local() if local else mine)
            y.pow(2).sum().backward()
        check_equal(serial, model)

    run(program, (2, 2), ("dp", "tp"))


# ---- the vocabulary ---------------------------------------------------------------------------
class Tied(nn.Module):
    """A table of 19 words that makes the stream, and the scores from it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(19, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 19, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.words(ids)))


@on_meshes
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sp"])
def test_a_tied_table_cut_by_words(sequence: bool, shape: Any, names: Any) -> None:
    torch.manual_seed(0)
    serial = Tied().double()
    ids = torch.randint(0, 19, (2, 5), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(1, 1).flatten()

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    want = serial(ids)
    loss_of(want, targets).backward()
    cut = S(1) if sequence else R
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=R, output_layouts=cut),
        "head": ColwiseParallel(
            input_layouts=cut, output_layouts=S(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        parallelize_module(model, mesh, plan)
        weight: Any = model.words.weight
        assert model.head.weight is weight
        assert weight.placements[-1] == S(0)
        logits = model(ids)
        assert logits.placements[-1] == S(2)
        close(logits, want)
        loss_of(logits, targets).backward()
        check_equal(serial, model)

    run(program, shape, names)


def test_masks_are_brought_to_heads_of_this_rank() -> None:
    """A per-head mask for local heads, over a batch that is split as well."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention("split", 8, 2).double()

        def forward(self, x: Any, bias: Any = None) -> Any:
            q, k, v = (y.transpose(1, 2) for y in self.attention.projected(x))
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            b, t, _ = x.shape
            return self.attention.out(y.transpose(1, 2).reshape(b, t, -1))

    torch.manual_seed(0)
    serial, x, bias = Masked(), sample(4, 5, 12), sample(8, 5, 5, seed=1)
    a = bias.clone().requires_grad_()
    want = serial(x, a)
    want.pow(2).sum().backward()

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        parallelize_module(model, mesh, DataParallel())
        plan = {f"attention.{k}": v for k, v in plan_of("split", 8, 2, True).items()}
        plan[""] = PrepareModuleInput(
            input_kwarg_layouts={"bias": R},
            desired_input_kwarg_layouts={"bias": S(0)},
            use_local_output=True,
        )
        parallelize_module(model, mesh, plan)
        here = mesh.get_local_rank("dp")
        got = model(x.chunk(2)[here], bias=bias)
        close(got, want.chunk(2)[here])
        got.pow(2).sum().backward()
        check_equal(serial, model)

    run(program, (2, 2), ("dp", "tp"))
