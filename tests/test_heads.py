"""Projections cut between attention heads: fused, grouped-query, shared by ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama import Args, Transformer, loss_of
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Sections,
    Shard,
    ShardingError,
    count_collectives,
    distribute_tensor,
    full_state_dict,
    init_device_mesh,
    redistribution,
    simulate,
)
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    FusedColwise,
    FusedQKV,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    layout_of,
    parallelize_module,
)
from dtensor.testing import check_placement

R, S = Replicate(), Shard
F64 = torch.float64
MESHES = [((2,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp"))]
on_meshes = pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)


def run(program: Callable[..., Any], shape: Any = (2,), names: Any = ("tp",)) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return simulate(program, torch.Size(shape).numel(), args=(mesh,), timeout=100)


def close(got: Any, want: Any, atol: float = 1e-9) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def check_equal(serial: nn.Module, model: nn.Module) -> None:
    """Parameters, and gradients where there are any, equal the serial ones."""
    for (name, p), q in zip(serial.named_parameters(), model.parameters(), strict=True):
        assert isinstance(q, DTensor), name
        close(q.detach(), p.detach())
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert q.grad.placements == q.placements, name  # type: ignore[attr-defined]
            close(q.grad, p.grad)


def sample(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=F64)


# ---- the placement -----------------------------------------------------------------------
@pytest.mark.parametrize("dim", [0, -1])
def test_sections_keep_the_laws(dim: int) -> None:
    shape = (16, 3) if dim == 0 else (3, 16)
    counts = check_placement(Sections(dim, (4, 8, 4)), ranks=(2, 4), shapes=[shape])
    assert {"round trip", "adjoint", "second derivative"} <= set(counts)


KEPT: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda x: x.split(8, -1)[1], S(2)),
    (lambda x: x.chunk(3, -1)[2], S(2)),
    (lambda x: x.split([8, 16], -1)[1], Sections(2, (8, 8))),
    (lambda x: x[..., 8:16], S(2)),
    (lambda x: x[..., -8:], S(2)),
    (lambda x: x.narrow(2, 0, 16), Sections(2, (8, 8))),
    (lambda x: x.view(2, 3, 3, 4, 2), S(3)),
    (lambda x: x.unflatten(-1, (3, 4, 2)), S(3)),
    (lambda x: x.reshape(2, 3, 3, 1, 8), S(4)),
    (lambda x: x.view(6, 24), Sections(1, (8, 8, 8))),
    (lambda x: x.relu() * 2, Sections(2, (8, 8, 8))),
]
MOVED: list[Callable[[Any], Any]] = [
    lambda x: x.split(6, -1)[1],
    lambda x: x[..., 4:12],
    lambda x: x[..., 8:16:2],
    lambda x: x[0, :, 8:16],
    lambda x: x.view(2, 3, 2, 12),
    lambda x: x.view(2, 3, 6, 4),
    lambda x: x.view(6 * 24),
    lambda x: x.unbind(-1)[9],
    lambda x: x.sum(-1),
]


@pytest.mark.parametrize(
    "p", [(Sections(2, (8, 8, 8)),), (S(0), Sections(2, (8, 8, 8)))]
)
def test_slices_and_views_of_sections(p: Any) -> None:
    whole = sample(2, 3, 24)

    def program(mesh: DeviceMesh) -> None:
        for call, place in [*KEPT, *((call, None) for call in MOVED)]:
            x = distribute_tensor(whole, mesh, p).requires_grad_()
            plain = whole.clone().requires_grad_()
            with count_collectives() as c:
                got = call(x)
            want = call(plain)
            close(got.detach(), want.detach())
            if place is not None:
                assert c.calls() == 0
                assert got.placements[-1] == place
            want.pow(2).sum().backward()
            got.pow(2).sum().backward()
            close(x.grad, plain.grad)

    run(program, (2,) * len(p), ("dp", "tp")[-len(p) :])


# ---- attention of all kinds --------------------------------------------------------------
class Attention(nn.Module):
    """Grouped-query attention; ``form`` says how its projections are made."""

    def __init__(self, form: str, heads: int = 8, kv_heads: int = 8) -> None:
        super().__init__()
        self.form, self.heads, self.kv_heads, self.width = form, heads, kv_heads, 4
        q, k = heads * 4, kv_heads * 4
        if form == "split":
            self.wq, self.wk, self.wv = (nn.Linear(12, n) for n in (q, k, k))
        else:
            self.qkv = nn.Linear(12, q + 2 * k)
        self.out = nn.Linear(q, 12)

    def projected(self, x: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values as (B, T, heads, channels)."""
        b, t, _ = x.shape
        h, k, d = self.heads, self.kv_heads, self.width
        if self.form == "split":
            made = self.wq(x), self.wk(x), self.wv(x)
            q, keys, values = (y.view(b, t, -1, d) for y in made)
            return q, keys, values
        y = self.qkv(x)
        if self.form == "interleaved":
            y = y.view(b, t, -1, h // k + 2, d)
            q = y[:, :, :, : h // k].reshape(b, t, -1, d)
            return q, y[:, :, :, -2], y[:, :, :, -1]
        if type(y) is Tensor:  # of this rank, or all: the same proportions
            h, k = self.mine(y.shape[-1])
        q, keys, values = y.split([h * d, k * d, k * d], -1)
        return q.view(b, t, h, d), keys.view(b, t, k, d), values.view(b, t, k, d)

    def mine(self, features: int) -> tuple[int, int]:
        whole = self.heads + 2 * self.kv_heads
        here = features // self.width
        if here == whole:
            return self.heads, self.kv_heads
        parts = next(
            n
            for n in (2, 4)
            if self.heads // n + 2 * max(1, self.kv_heads // n) == here
        )
        return self.heads // parts, max(1, self.kv_heads // parts)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.projected(x))
        if k.shape[1] != q.shape[1]:
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


def plan_of(form: str, heads: int, kv_heads: int, local: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "out": RowwiseParallel(use_local_output=local),
    }
    if form == "split":
        plan["wq"] = ColwiseParallel(heads=heads, use_local_output=local)
        for name in ("wk", "wv"):
            plan[name] = ColwiseParallel(kv_heads=kv_heads, use_local_output=local)
    else:
        plan["qkv"] = FusedQKV(
            heads,
            kv_heads,
            interleaved=form == "interleaved",
            use_local_output=local,
        )
    return plan


FORMS = [
    (form, kv_heads)
    for form in ("split", "row", "interleaved")
    for kv_heads in (8, 4, 2, 1)
]


@on_meshes
@pytest.mark.parametrize("local", [True, False], ids=["local", "typed"])
@pytest.mark.parametrize(("form", "kv_heads"), FORMS, ids=str)
def test_attention_equals_the_serial_one(
    form: str, kv_heads: int, local: bool, shape: Any, names: Any
) -> None:
    torch.manual_seed(0)
    serial = Attention(form, 8, kv_heads).double()
    a = sample(2, 5, 12).requires_grad_()
    want = serial(a)
    want.pow(2).sum().backward()
    refused = form == "interleaved" and kv_heads % shape[-1] != 0

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        model.zero_grad()
        plan = plan_of(form, 8, kv_heads, local)
        if refused:
            with pytest.raises(ShardingError, match="go through a group of heads"):
                parallelize_module(model, mesh, plan)
            return
        parallelize_module(model, mesh, plan)
        b = a.detach().clone().requires_grad_()
        got = model(b)
        assert isinstance(got, DTensor) != local
        close(got, want)
        got.pow(2).sum().backward()
        close(b.grad, a.grad)
        check_equal(serial, model)

    run(program, shape, names)


@pytest.mark.parametrize(("form", "kv_heads"), [("split", 2), ("row", 8), ("row", 2)])
def test_what_is_stored_and_sent(form: str, kv_heads: int) -> None:
    """Each rank computes its own heads; a shared head is sent in no forward of its own."""
    torch.manual_seed(0)
    serial = Attention(form, 8, kv_heads).double()
    x = sample(2, 5, 12)

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        parallelize_module(model, mesh, plan_of(form, 8, kv_heads, True))
        placements = {name: p[0] for name, p in layout_of(model).items()}
        with count_collectives() as forward:
            y = model(x)
        assert forward.calls("all_reduce") == 1
        with count_collectives() as backward:
            y.sum().backward()
        if form == "split":
            assert placements["wq.weight"] == S(0)
            assert placements["wk.weight"] == placements["wv.bias"] == R
            q, k, v = model.projected(x)
            assert q.shape[2:] == (2, 4) and k.shape[2:] == v.shape[2:] == (1, 4)
            assert forward.calls() == 1
            # Of all that is replicated: the shared heads, and the bias of the output.
            assert backward.calls() == backward.calls("all_reduce") == 1
            elements = 2 * (8 * 12 + 8) + 12
            assert backward.bytes() == elements * 8 * 2 * 3 // 4
        else:
            sizes = (32, 4 * kv_heads, 4 * kv_heads)
            assert placements["qkv.weight"] == Sections(0, sizes)
            mine: Any = model.qkv.weight
            assert mine.to_local().shape == (sum(sizes) // 4, 12)
            shared = 2 * (kv_heads < 4)  # of weight and bias
            assert forward.calls("all_gather") == shared
            assert backward.calls("reduce_scatter") == shared
            assert forward.calls() == 1 + shared

    run(program, (4,))


@pytest.mark.parametrize(
    ("form", "kv_heads"), [("split", 2), ("row", 2), ("row", 8), ("interleaved", 8)]
)
def test_state_is_that_of_one_process(form: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    serial, other = (Attention(form, 8, kv_heads).double() for _ in range(2))

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        parallelize_module(model, mesh, plan_of(form, 8, kv_heads, True))
        whole = full_state_dict(model, rank0_only=False)
        for name, value in serial.state_dict().items():
            assert torch.equal(whole[name], value), name
        model.load_state_dict(other.state_dict())
        check_equal(other, model)
        model.load_state_dict(serial.state_dict(), assign=True)
        check_equal(serial, model)
        twin = copy.deepcopy(model)
        close(twin(sample(2, 3, 12)), serial(sample(2, 3, 12)))
        memory = io.BytesIO()
        torch.save(model.state_dict(), memory)
        memory.seek(0)
        twin.load_state_dict(torch.load(memory))
        check_equal(serial, twin)
        # From another layout of the same module.
        plan = {"**": ColwiseParallel(output_layouts=R)}
        second = parallelize_module(copy.deepcopy(other), mesh, plan)
        second.load_state_dict(model.state_dict())
        check_equal(serial, second)

    run(program, (4,))


def test_shared_heads_stay_equal_through_training() -> None:
    torch.manual_seed(0)
    serial = Attention("split", 8, 2).double()
    x = sample(2, 5, 12)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()

    def program(mesh: DeviceMesh) -> list[float]:
        one, model = copy.deepcopy(serial), copy.deepcopy(serial)
        parallelize_module(model, mesh, plan_of("split", 8, 2, True))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, model)]
        for _ in range(5):
            step(one, optimizers[0])
            step(model, optimizers[1])
        check_equal(one, model)
        found: list[float] = model.wk.weight.to_local().flatten().tolist()  # type: ignore[operator,union-attr]
        return found

    first, *others = run(program, (4,))
    assert all(first == other for other in others)


def test_grouped_query_attention_of_torch() -> None:
    """``enable_gqa`` with queries cut by heads and fewer heads of keys than ranks."""
    q, k, v = sample(2, 8, 5, 4), sample(2, 2, 5, 4, seed=1), sample(2, 2, 5, 4, seed=2)
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True)
    want.pow(2).sum().backward()

    def program(mesh: DeviceMesh) -> None:
        for place in (R, S(1), S(0)):
            made = [
                distribute_tensor(t, mesh, [p]).requires_grad_()
                for t, p in zip((q, k, v), (S(1), place, place), strict=True)
            ]
            with count_collectives() as c:
                got = F.scaled_dot_product_attention(
                    *made, is_causal=True, enable_gqa=True
                )
            if place == R:
                assert c.calls() == 0 and got.placements == (S(1),)
            close(got, want)
            got.pow(2).sum().backward()
            for a, b in zip(made, plain, strict=True):
                close(a.grad, b.grad)

    run(program, (4,))


# ---- plans that would cut a head -----------------------------------------------------------
@pytest.mark.parametrize(
    ("style", "features", "text"),
    [
        (Colwise(heads=2), 8, "go through a head, got 2 heads on 4 ranks"),
        (
            ColwiseParallel(heads=6),
            24,
            "got 6 heads on 4 ranks, expected ranks that div",
        ),
        (
            ColwiseParallel(heads=3),
            8,
            "got 8 features and heads 3, expected a multiple",
        ),
        (
            ColwiseParallel(kv_heads=3),
            12,
            "parts of two heads of keys and values, got 3",
        ),
        (
            ColwiseParallel(heads=4, kv_heads=4),
            8,
            "got heads 4 and kv_heads 4, expected",
        ),
        (FusedQKV(2), 12, "go through a head, got 2 heads on 4 ranks"),
        (FusedQKV(8, 2), 26, "got 26 features and heads of q, k and v together 12"),
        (FusedQKV(12, 3), 36, "parts of two heads of keys and values, got 3 of them"),
        (FusedQKV(8, 2, interleaved=True), 24, "got 2 heads of keys on 4 ranks"),
        (FusedQKV(8, 1), 20, "got 1 heads of 2 channels on 4 ranks"),
        (FusedColwise((8, 6)), 14, "expected a number that divides every section"),
    ],
    ids=str,
)
def test_a_cut_through_a_head_is_refused(style: Any, features: int, text: str) -> None:
    def program(mesh: DeviceMesh) -> None:
        model = nn.Sequential(nn.Linear(4, features))
        before = dict(model.named_parameters())
        with pytest.raises(ShardingError, match=text):
            parallelize_module(model, mesh, {"0": style})
        assert dict(model.named_parameters()) == before
        assert type(model[0].weight) is nn.Parameter

    run(program, (4,))


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(
        ShardingError, match="got 8 heads and kv_heads 3, expected a div"
    ):
        FusedQKV(8, 3)
    with pytest.raises(ShardingError, match="Sections: sizes must be lengths of one"):
        Sections(0, (4, 0))

    def program(mesh: DeviceMesh) -> None:
        with pytest.raises(
            TypeError, match="only a linear's features are heads, got Em"
        ):
            parallelize_module(nn.Embedding(4, 8), mesh, ColwiseParallel(heads=4))
        with pytest.raises(TypeError, match="FusedQKV: .*got Embedding|got Embedding"):
            parallelize_module(nn.Embedding(4, 12), mesh, FusedQKV(2))
        linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
        with pytest.raises(ValueError, match="'weight' of '.*Linear' is parametrized"):
            parallelize_module(linear, mesh, ColwiseParallel(kv_heads=1))
        with pytest.raises(ShardingError, match="section.* add up to the dim"):
            distribute_tensor(torch.ones(8), mesh, [Sections(0, (2, 4))])

    run(program)


def test_a_plan_that_does_not_speak_of_heads() -> None:
    """The model says what a head is: local pieces of one are refused by name."""
    model = Transformer(Args(n_heads=4, n_kv_heads=2)).double()

    def program(mesh: DeviceMesh) -> None:
        text = (
            r"the cut of 'layers\.0\.attention\.wk' would go through a head, got 2 heads "
            r"of 4 channels .* on 4 ranks.* Write ColwiseParallel\(kv_heads=2\)"
        )
        with pytest.raises(ShardingError, match=text):
            parallelize_module(
                copy.deepcopy(model),
                mesh,
                {"layers.*.attention.w[qkv]": ColwiseParallel()},
            )
        # DTensors know that they are cut; a view to heads is right, and is no secret.
        plan = {"layers.*.attention.w[qkv]": Colwise()}
        typed = parallelize_module(copy.deepcopy(model), mesh, plan)
        tokens = torch.arange(6).view(1, 6)
        x = distribute_tensor(tokens, mesh, [R])
        torch.testing.assert_close(typed(x).full_tensor(), model(tokens))
        with (
            redistribution("error"),
            pytest.raises(ShardingError, match="view: redistr"),
        ):
            typed(x)

    run(program, (4,))


# ---- a whole model -------------------------------------------------------------------------
def llama_plan(
    args: Args, mesh: DeviceMesh, sequence: bool, local: bool
) -> dict[str, Any]:
    cut = S(1) if sequence else R
    norm: Any = SequenceParallel() if sequence else None
    rest = None if local else R
    block: dict[str, Any] = {
        "attention": PrepareModuleInput(
            input_layouts=(cut, rest), desired_input_layouts=(R, rest)
        ),
        "attention.wq": ColwiseParallel(heads=args.n_heads, use_local_output=local),
        "attention.w[kv]": ColwiseParallel(
            kv_heads=args.n_kv_heads, use_local_output=local
        ),
        "attention.wo": RowwiseParallel(output_layouts=cut),
        "feed_forward": PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(R,)
        ),
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=cut),
    }
    if norm is not None:
        block |= {"attention_norm": norm, "ffn_norm": norm}
    plan: dict[str, Any] = {
        "layers.*": block,
        "tok_embeddings": RowwiseParallel(input_layouts=R, output_layouts=cut),
        "output": ColwiseParallel(input_layouts=cut, output_layouts=R),
    }
    return plan | ({"norm": norm} if norm is not None else {})


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize("local", [False, True], ids=["typed", "local"])
@pytest.mark.parametrize(("shape", "names"), MESHES[1:], ids=str)
def test_llama_with_grouped_queries_trains_as_serially(
    shape: Any, names: Any, local: bool, sequence: bool
) -> None:
    """8 heads of queries, 2 of keys; 4 ranks share them. Vocabulary and length uneven."""
    args = Args(dim=32, n_heads=8, n_kv_heads=2, vocab=19)
    torch.manual_seed(0)
    serial = Transformer(args).double()
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 19, (5, 2, 8), generator=g)

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for row in tokens:
            optimizer.zero_grad()
            loss = loss_of(model(row[:, :-1]), row[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    one = copy.deepcopy(serial)
    want = train(one)

    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(serial)
        if local:  # the tutorial's edit: heads of this rank
            ranks = mesh.size("tp")
            for layer in model.layers:
                layer.attention.n_heads //= ranks  # type: ignore[operator,union-attr]
                layer.attention.n_kv_heads = max(1, args.n_kv_heads // ranks)  # type: ignore[union-attr]
        parallelize_module(model, mesh, llama_plan(args, mesh, sequence, local))
        got = train(model)
        assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-9
        check_equal(one, model)

    run(program, shape, names)


def test_a_gated_feed_forward_in_one_linear() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

        def forward(self, x: Any) -> Any:
            gate, value = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * value)

    torch.manual_seed(0)
    serial = Gated().double()
    x = sample(2, 3, 6)
    want = serial(x)
    want.pow(2).sum().backward()

    def program(mesh: DeviceMesh) -> None:
        for local in (True, False):
            model = copy.deepcopy(serial)
            model.zero_grad()
            plan = {
                "up": FusedColwise((8, 8), use_local_output=local),
                "down": RowwiseParallel(),
            }
            parallelize_module(model, mesh, plan)
            with count_collectives() as c:
                got = model(x)
            assert c.calls() == c.calls("all_reduce") == 1
            close(got, want)
            got.pow(2).sum().backward()
            check_equal(serial, model)

    for shape in ((2,), (4,)):
        run(program, shape)
