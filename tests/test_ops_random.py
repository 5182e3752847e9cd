"""Random ops: one global sample for every mesh and placement, alike on all copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, T, eighths, options, place, positive, unit

import dtensor
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Shard,
    count_collectives,
    get_rank,
    init_device_mesh,
    redistribution,
    simulate,
)
from dtensor.placement import Placements, PlacementsLike, Replicate
from dtensor.rules import distributions
from dtensor.tensor import local_of

A = eighths(5, 3)
OPS: dict[str, tuple[Callable[..., Any], T]] = {
    "normal_": (lambda x: (x * 1).normal_(1.0, 2.0), A),
    "uniform_": (lambda x: (x * 1).uniform_(-1, 1), A),
    "bernoulli_": (lambda x: (x * 1).bernoulli_(0.5), A),
    "exponential_": (lambda x: (x * 1).exponential_(), A),
    "geometric_": (lambda x: (x * 1).geometric_(0.5), A),
    "cauchy_": (lambda x: (x * 1).cauchy_(), A),
    "log_normal_": (lambda x: (x * 1).log_normal_(), A),
    "random_": (lambda x: (x * 1).random_(10), A),
    "rand_like": (torch.rand_like, A),
    "randn_like": (torch.randn_like, A),
    "randint_like": (lambda x: torch.randint_like(x, 0, 10), A),
    "randn_like dtype": (lambda x: torch.randn_like(x, dtype=torch.float32), A),
    "bernoulli": (torch.bernoulli, unit(5, 3).abs()),
    "bernoulli number": (lambda x: torch.bernoulli(x, 0.25), A),
    "bernoulli_ tensor": (lambda x: (x * 1).bernoulli_(x * x / 16), A),
    "poisson": (torch.poisson, positive(5, 3)),
    "binomial": (lambda x: torch.binomial(x.abs().ceil(), x * 0 + 0.5), A),
    "gamma": (torch._standard_gamma, positive(5, 3)),
    "multinomial": (lambda x: torch.multinomial(x, 2), positive(5, 3)),
    "normal": (lambda x: torch.normal(x, 2.0), A),
    "normal std": (lambda x: torch.normal(1.0, x.abs()), A),
    "normal both": (lambda x: torch.normal(x, x.abs()), A),
    "randint_like low": (lambda x: torch.randint_like(x, high=9, low=-9), A),
    "complex": (lambda x: torch.randn_like(x, dtype=torch.complex64), A),
    "half": (lambda x: torch.rand_like(x, dtype=torch.bfloat16), A),
    "dropout": (lambda x: F.dropout(x, 0.5), A),
    "dropout inplace": (lambda x: F.dropout(x * 1, 0.5, inplace=True), A),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), eighths(2, 5, 3)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.5), eighths(2, 5, 3, 3)),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], A),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, True), A),
    "feature_alpha_dropout": (
        lambda x: F.feature_alpha_dropout(x, 0.5, True),
        eighths(2, 5, 3),
    ),
    "rrelu": (lambda x: F.rrelu(x, training=True), A),
    "rrelu_": (lambda x: F.rrelu(x * 1, training=True, inplace=True), A),
    "fractional pool": (
        lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
        eighths(2, 3, 5, 5),
    ),
    "lstm dropout": (
        lambda x: torch.lstm(
            x,
            (x.new_zeros(2, 2, 3), x.new_zeros(2, 2, 3)),
            [x[0, :1, :1].expand(12, 3) * w for w in (1, 2)]
            + [x[0, :1, :1].expand(12, 3) * w for w in (3, 4)],
            False,
            2,
            0.5,
            True,
            False,
            True,
        )[0],
        eighths(2, 4, 3),
    ),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), A),
    "attention dropout": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        eighths(2, 4, 5, 2),
    ),
    "init normal": (lambda x: torch.nn.init.normal_(x * 1), A),
    "init xavier": (lambda x: torch.nn.init.xavier_uniform_(x * 1), A),
    "init kaiming": (lambda x: torch.nn.init.kaiming_uniform_(x * 1), A),
    "init orthogonal": (lambda x: torch.nn.init.orthogonal_(x * 1), A),
    "init trunc": (lambda x: torch.nn.init.trunc_normal_(x * 1), A),
}
# In place, not linear: addends are refused.
REFUSING = {"rrelu_", "init orthogonal"}
# Sums follow the sample; their order depends on the layout.
COMPUTED = {"gumbel_softmax", "attention dropout", "init orthogonal", "lstm dropout"}


def samples(mesh: DeviceMesh, seed_by_rank: bool) -> dict[str, dict[str, T]]:
    """Each op's whole sample for each placement, on one rank."""
    found: dict[str, dict[str, T]] = {}
    with redistribution("allow"):
        for name, (op, t) in OPS.items():
            for p in options(t, mesh.ndim)[:: 1 if mesh.ndim == 1 else 3]:
                if name in REFUSING and any(q.is_partial() for q in p):
                    continue
                torch.manual_seed(3 + (get_rank() if seed_by_rank else 0))
                out = op(place(t, mesh, p))
                assert isinstance(out, DTensor), name
                assert local_of(out).shape == out._spec.local_shape, (name, p)
                found.setdefault(name, {})[str(p)] = out.full_tensor()
    return found


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["one axis", "two axes"])
@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_one_sample(mesh: DeviceMesh, seed_by_rank: bool) -> None:
    ranks = simulate(samples, args=(mesh, seed_by_rank))
    for name in OPS:
        first = next(iter(ranks[0][name].values()))
        assert first.abs().unique().numel() > 1 or name == "geometric_", name
        for rank, found in enumerate(ranks):
            for p, got in found[name].items():
                same = torch.allclose if name in COMPUTED else torch.equal
                assert same(got, first), f"{name} at {p} on rank {rank}"


def test_dropout_gradient_uses_the_mask() -> None:
    def program() -> None:
        for p in options(A, 1):
            torch.manual_seed(1)
            x = place(A, LINE, p).requires_grad_()
            y = F.dropout(x, 0.25)
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
            wanted = (y.detach().full_tensor() / A).round(decimals=6)
            assert torch.allclose(g.full_tensor(), wanted, atol=1e-6), p

    simulate(program)


def test_samples_differ_from_call_to_call_and_follow_the_seed() -> None:
    def program() -> list[T]:
        whole: Placements = (Replicate(),)
        x = place(A, LINE, whole)
        torch.manual_seed(5)
        one, two = torch.rand_like(x), torch.rand_like(x)
        torch.manual_seed(5)
        again = torch.rand_like(x)
        return [o.full_tensor() for o in (one, two, again)]  # type: ignore[attr-defined]

    one, two, again = simulate(program)[0]
    assert not torch.equal(one, two)
    assert torch.equal(one, again)


# ---- factories and fills, over meshes and layouts ------------------------------------
MESHES = [
    init_device_mesh("cpu", (1,)),
    init_device_mesh("cpu", (2,)),
    init_device_mesh("cpu", (4,)),
    init_device_mesh("cpu", (2, 2)),
]
LAYOUTS: list[Callable[[int], list[Any]]] = [
    lambda axes: [Replicate()] * axes,
    lambda axes: [Shard(0)] * axes,
    lambda axes: [Shard(1)] * axes,
    lambda axes: [Shard(-1)] * axes,
    lambda axes: [Shard(0), Shard(-1)][:axes],
    lambda axes: [Shard(0, depth=1), Shard(0, depth=0)][:axes],
    lambda axes: [Replicate(), Shard(1)][-axes:],
    lambda axes: [Partial(), Shard(-1)][:axes],
]
SHAPES = [(5, 3), (1, 9), (2, 3, 4), (3, 0), (6, 130)]
MADE: dict[str, Callable[..., DTensor]] = {
    "rand": dtensor.rand,
    "randn": dtensor.randn,
    "rand double": lambda *s, **k: dtensor.rand(*s, dtype=torch.float64, **k),
    "rand bfloat16": lambda *s, **k: dtensor.rand(*s, dtype=torch.bfloat16, **k),
    "randn half": lambda *s, **k: dtensor.randn(*s, dtype=torch.float16, **k),
    "randn complex": lambda *s, **k: dtensor.randn(*s, dtype=torch.complex64, **k),
    "randint": lambda *s, **k: dtensor.randint(-5, 9, s, **k),
    "randint wide": lambda *s, **k: dtensor.randint(-(2**62), 2**62, s, **k),
    "randperm": lambda *s, **k: dtensor.randperm(math.prod(s), **k),
}


def everything(mesh: DeviceMesh, seed: int | None) -> dict[str, dict[str, T]]:
    """All of ``MADE`` and the fills of float32, on one mesh: by name, then layout."""
    found: dict[str, dict[str, T]] = {}

    def note(name: str, places: Any, made: DTensor) -> None:
        found.setdefault(name, {})[str(places)] = made.full_tensor().clone()

    for layout in LAYOUTS:
        places: PlacementsLike = layout(mesh.ndim)
        if seed is None:
            torch.manual_seed(17 if get_rank() == 0 else 100 + get_rank())
        else:
            dtensor.manual_seed(seed, mesh)
        for shape in SHAPES:
            for name, make in MADE.items():
                at = places
                if name == "randperm":
                    at = [Shard(0) if p.is_shard() else p for p in layout(mesh.ndim)]
                note(
                    f"{name} {shape}", at, make(*shape, device_mesh=mesh, placements=at)
                )
        x = dtensor.zeros(7, 5, device_mesh=mesh, placements=places)
        for name in FILL_OPS:
            note(name, places, FILL_OPS[name](x))
        y = dtensor.zeros(7, 5, device_mesh=mesh, placements=places).t()
        note("transposed", places, y.uniform_())
    return found


FILL_OPS: dict[str, Callable[[Any], DTensor]] = {
    "normal_": lambda x: x.normal_(1, 2),
    "uniform_": lambda x: x.uniform_(-3, 1),
    "exponential_": lambda x: x.exponential_(2.5),
    "log_normal_": lambda x: x.log_normal_(0.1, 0.5),
    "cauchy_": lambda x: x.cauchy_(1, 3),
    "geometric_": lambda x: x.geometric_(0.2),
    "random_": lambda x: x.random_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.3),
}


@pytest.mark.parametrize("seed", [None, 5])
def test_bitwise_equal_over_layouts_and_meshes(seed: int | None) -> None:
    wanted: dict[str, T] = {}
    for mesh in MESHES:
        for found in simulate(everything, ranks=mesh.size(), args=(mesh, seed)):
            for name, layouts in found.items():
                first = wanted.setdefault(name, next(iter(layouts.values())))
                for places, got in layouts.items():
                    same = torch.equal(got, first)
                    assert same, f"{name} at {places} on {mesh}"
    assert len(wanted) > 50


def test_custom_placements_hold_the_same_sample() -> None:
    def program() -> tuple[T, T]:
        made = []
        for p in (Replicate(), RaggedShard(0, (3, 0, 4, 2))):
            torch.manual_seed(4)
            x = dtensor.zeros(9, 3, device_mesh=LINE, placements=[p])
            made.append(x.normal_().full_tensor())
        return made[0], made[1]

    for whole, ragged in simulate(program):
        assert torch.equal(whole, ragged)


# ---- what is drawn -------------------------------------------------------------------
def one(draw: distributions.Draw, n: int, dtype: torch.dtype) -> T:
    """A sample of n elements, in one process."""
    mesh = init_device_mesh("cpu", (1,))
    spec = dtensor.spec.spec_of(mesh, (Replicate(),), (n,))
    return distributions.part(spec, (11, 3), draw, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("low, high", [(0, 1), (-1, 1), (0.1, 0.3), (-1000, 1)])
def test_rounding_keeps_uniforms_below_their_end(
    dtype: torch.dtype, low: float, high: float
) -> None:
    u = one(distributions.uniform(dtype, low, high), 200_000, dtype)
    assert u.min().double() >= torch.tensor(low, dtype=dtype).double()
    assert u.max().double() < high
    middle = (low + high) / 2
    assert abs(u.double().mean() - middle) < (high - low) / 200
    assert u.unique().numel() > 60


@pytest.mark.parametrize(
    "low, high",
    [(0, 2), (-3, 4), (0, 2**31), (5, 2**31 + 6), (-(2**62), 2**62)]
    + [(-(2**63), 2**63 - 1), (0, 2**63), (-(2**63), 2**63), (-(2**62) - 7, 2**63)],
)
def test_integers_fill_their_range(low: int, high: int) -> None:
    drawn = one(distributions.integers(low, high), 100_000, torch.int64)
    x = (drawn.double() - low) / float(high - low)
    assert drawn.min() >= low and drawn.max() <= high - 1
    if high - low < 10:
        assert drawn.unique().tolist() == list(range(low, high))
        assert (drawn - low).bincount().min() > 0.97 * 100_000 / (high - low)
    else:
        counts = torch.histc(x, 10, 0, 1)
        assert counts.min() > 9_600 and counts.max() < 10_400


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32]
)
def test_random_without_bounds_has_the_range_of_the_type(dtype: torch.dtype) -> None:
    drawn = one(distributions.any_integer(dtype), 20_000, dtype).double()
    top = torch.empty(20_000, dtype=dtype).random_().double().max()
    assert drawn.min() >= 0 and 0.99 * top < drawn.max() <= top * 1.01


def test_probabilities() -> None:
    for p in (0.0, 1e-3, 0.25, 0.5, 0.999, 1.0):
        mean = one(distributions.bernoulli(p), 100_000, torch.float64).mean()
        assert abs(mean - p) <= 4 * math.sqrt(p * (1 - p) / 100_000)
    g = one(distributions.geometric(torch.float64, 0.2), 100_000, torch.float64)
    assert g.min() == 1 and abs(g.mean() - 5) < 0.06
    e = one(distributions.exponential(torch.float16, 1e3), 100_000, torch.float16)
    assert e.min() > 0
    tiny = one(distributions.geometric(torch.int8, 1e-6), 1000, torch.int8)
    assert tiny.min() >= 1


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    def program() -> T:
        x = dtensor.randn(400, 500, device_mesh=LINE, placements=[Shard(0)])
        return F.alpha_dropout(x, 0.3, True).full_tensor()

    torch.manual_seed(0)
    y = simulate(program)[0]
    assert abs(y.mean()) < 0.01 and abs(y.var() - 1) < 0.02
    assert y.unique(return_counts=True)[1].max() > 55_000  # the dropped ones are alike


def test_features_are_dropped_as_a_whole() -> None:
    def program() -> T:
        x = dtensor.ones(8, 20, 3, 3, device_mesh=GRID, placements=[Shard(0), Shard(3)])
        y = F.dropout2d(x, 0.5)
        assert y.placements == x.placements
        return y.full_tensor()

    y = simulate(program)[0]
    assert set(y.unique().tolist()) == {0, 2}
    assert torch.equal(y.amax((2, 3)), y.amin((2, 3)))
    assert 40 < y.amax((2, 3)).count_nonzero() < 120


# ---- what it takes -------------------------------------------------------------------
def test_shards_are_independent_and_uniform() -> None:
    def program() -> T:
        torch.manual_seed(1)
        x = dtensor.rand(4, 40_000, device_mesh=LINE, placements=[Shard(0)])
        y = dtensor.rand(4, 40_000, device_mesh=LINE, placements=[Shard(0)])
        return torch.cat([x.to_local(), y.to_local()])

    rows = torch.cat(simulate(program)).double()
    together = torch.corrcoef(rows) - torch.eye(8)
    assert together.abs().max() < 4.5 / math.sqrt(40_000)
    steps = torch.arange(1, 40_001) / 40_000
    distance = (rows.sort(1).values - steps).abs().max(1).values
    assert distance.max() < 1.95 / math.sqrt(40_000)
    joint = torch.histogramdd(
        rows[:2].T.contiguous(), [8, 8], range=[0.0, 1, 0, 1]
    ).hist
    chi = ((joint - 625) ** 2 / 625).sum()
    assert 63 - 5 * math.sqrt(126) < chi < 63 + 5 * math.sqrt(126)


def test_only_a_key_is_sent() -> None:
    """No op here moves its operands: eight bytes a call, nothing after a seed."""
    ops: list[Callable[[Any], Any]] = [
        torch.rand_like,
        torch.bernoulli,
        lambda x: torch.normal(x, 1.0),
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout2d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.empty_like(x).uniform_(),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5, True),
    ]

    def program() -> None:
        with redistribution("error"):
            for axis in (0, 1):
                x = dtensor.rand(4, 4, 3, 2, device_mesh=LINE, placements=[Shard(axis)])
                for op in ops:
                    with count_collectives() as counts:
                        assert op(x).placements == (Shard(axis),)
                    verbs = {verb for verb, _ in counts.rows()}
                    assert verbs == {"broadcast"} and counts.calls() == 1
            dtensor.manual_seed(3, LINE)
            for op in ops:
                with count_collectives() as counts:
                    op(x)
                assert counts.calls() == 0

    simulate(program)


def test_attention_with_dropout_is_attention() -> None:
    """With all but nothing dropped, masks and scales are as torch has them."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(5, 5, generator=g) < 0.6
    mask[2] = False  # a query that sees nothing
    cases: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": mask},
        {"enable_gqa": True},
    ]

    def program() -> None:
        for case in cases:
            few = slice(None, 2) if "enable_gqa" in case else slice(None)
            plain = [q, k[:, few], v[:, few]]
            wanted = F.scaled_dot_product_attention(*plain, **case)
            for p in (Replicate(), Shard(0), Shard(1)):
                args = [place(t, LINE, (p,)).requires_grad_() for t in plain]
                got = F.scaled_dot_product_attention(*args, dropout_p=1e-9, **case)
                whole = got.full_tensor()
                assert torch.allclose(whole, wanted, atol=1e-6), (case, p)
                grads = torch.autograd.grad(got.sum(), args)
                assert all(t.full_tensor().isfinite().all() for t in grads)

    with redistribution("allow"):
        simulate(program)


def test_fills_are_seen_by_autograd_and_other_views() -> None:
    def program() -> None:
        x = dtensor.zeros(6, 4, device_mesh=LINE, placements=[Shard(0)])
        y = x * 1
        version = y._version
        y.uniform_(1, 2)
        assert y._version > version
        rows = y[:, :2].zero_()
        assert rows.full_tensor().eq(0).all() and y.full_tensor()[:, 2:].ge(1).all()
        w = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            w.normal_()
        z = w * 2
        z.normal_()
        (g,) = torch.autograd.grad(z.sum(), w)
        assert g.full_tensor().eq(0).all()
        with torch.no_grad():
            w.normal_()
        assert w.full_tensor().ne(0).all()

    simulate(program)


def test_bad_parameters_are_refused_on_every_rank() -> None:
    def program() -> None:
        # Ranks 2 and 3 hold nothing.
        x = dtensor.zeros(2, 4, device_mesh=LINE, placements=[Shard(0)])
        for call in (
            lambda: x.uniform_(2, 1),
            lambda: x.normal_(0, -1),
            lambda: x.geometric_(2),
            lambda: x.random_(5, 3),
            lambda: torch.randint_like(x, 5, 3),
            lambda: torch.bernoulli(x, 2.0),
            lambda: dtensor.randint(5, 3, (4,), device_mesh=LINE),
            lambda: torch.normal(x, -1.0),
        ):
            with pytest.raises(RuntimeError):
                call()
        with pytest.raises(NotImplementedError):
            torch.rand_like(x, dtype=torch.int64)
        with pytest.raises(TypeError, match="randint: wants high and a size"):
            dtensor.randint((4,), device_mesh=LINE)
        with pytest.raises(ValueError, match="p is a probability, got 1.5"):
            torch.feature_alpha_dropout(x, 1.5, True)
        with pytest.raises(ValueError, match="rrelu: lower must not be above upper"):
            torch.rrelu(x, 0.5, 0.1, True)
        flat = dtensor.zeros(4, device_mesh=LINE, placements=[Shard(0)])
        with pytest.raises(
            ValueError, match="feature_dropout: drops features of dim 1"
        ):
            torch.feature_dropout(flat, 0.5, True)
        assert torch.equal(x.full_tensor(), torch.zeros(2, 4))

    simulate(program)
