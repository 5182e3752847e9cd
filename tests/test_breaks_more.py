"""Programs as users report them, against plain torch, in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_helpers import gen, lay, line, ranks, refused, same
from torch import nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    redistribution,
)

LAYOUTS = (Replicate(), Shard(0), Shard(1))

# Writes that do not fit: of a number or a row that one rank alone would write.
UNFIT: dict[str, Callable[[Any, Any], Any]] = {
    "row": lambda x, y: x.__setitem__(0, y[0, :5]),
    "column": lambda x, y: x.__setitem__((slice(None), 0), y[0]),
    "rows": lambda x, y: x.__setitem__([0, 1], y[:3]),
    "number": lambda x, y: x.__setitem__((0, 6), 1.0),
    "number of a tensor": lambda x, y: x.__setitem__((0, torch.tensor(6)), 1.0),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[0, :4], 0, 4),
    "select_scatter, stretched": lambda x, y: torch.select_scatter(x, y[0, :1], 0, 4),
}


@pytest.mark.parametrize("name", UNFIT)
@ranks(3)
def test_a_write_that_does_not_fit_is_refused_on_every_rank(name: str) -> None:
    """The rank that had the row raised; the others went on to the next collective."""
    with redistribution("allow"):
        for placement in LAYOUTS:
            x = lay(gen(5, 6), placement, mesh=line(3))
            y = lay(gen(5, 6, seed=1), Replicate(), mesh=line(3))
            with pytest.raises((ValueError, IndexError, RuntimeError)):
                UNFIT[name](x, y)
            same(x, gen(5, 6))


@ranks(2)
def test_a_mask_of_another_shape_is_refused() -> None:
    """It was taken for one of the first rows, without an error."""
    with redistribution("allow"):
        for placement in LAYOUTS:
            x = lay(gen(5, 6), placement)
            with pytest.raises(IndexError, match="mask"):
                x[x[:4] > 0] = 1.0
            with pytest.raises(IndexError, match="mask"):
                x[x[:4] > 0]
            with pytest.raises(IndexError, match="mask"):
                x[..., x[0, :4] > 0]
            x[..., x[0] > 0] = 2.0
            want = gen(5, 6)
            want[..., want[0] > 0] = 2.0
            same(x, want)


def turns(x: Any) -> list[Any]:
    """In-place views, and what is computed of them."""
    y, z, w = x * 1, x * 2, x * 3
    y.t_().mul_(2)
    z.transpose_(0, -1)
    z.unsqueeze_(1)
    w.unsqueeze_(-1)
    w.squeeze_().swapaxes_(0, 1)
    v = x * 1
    v.unsqueeze_(0).swapdims_(1, 2)
    v.squeeze_(0)
    return [y, y.sum(0), z, z[0] @ x, w, v, v * y]


@ranks(2)
def test_views_in_place_take_the_layout_along() -> None:
    """They were refused; ``nn.init.orthogonal_`` needs them."""
    with redistribution("allow"):
        for placement in (*LAYOUTS, Partial()):
            plain: Any = gen(4, 6).requires_grad_()
            x = lay(gen(4, 6), placement).requires_grad_()
            for a, b in zip(turns(x), turns(plain), strict=True):
                same(a, b)
            sum((t * t).sum() for t in turns(x)).backward()
            sum((t * t).sum() for t in turns(plain)).backward()
            same(x.grad, plain.grad)


@ranks(2)
def test_views_in_place_that_would_move_or_mislead_are_refused() -> None:
    """Others hold such a tensor by its layout."""
    with redistribution("allow"):
        one = lay(gen(1, 6), Shard(0))
        refused("nothing can be moved", lambda: one.squeeze_(0))
        refused("nothing can be moved", lambda: one.squeeze_())
        leaf = lay(gen(4, 6), Shard(0)).requires_grad_()
        with torch.no_grad():
            refused("a leaf that requires grad", leaf.t_, RuntimeError)
        base = lay(gen(4, 6), Shard(0))
        row = base[1]  # from one rank to all
        refused("cannot be turned in place", lambda: row.unsqueeze_(0))
        base.t_()
        refused("Take the view anew", lambda: row + 1)
        refused("Take the view anew", lambda: row.zero_())
        same(base, gen(4, 6).t())


@ranks(2)
def test_initialisers_that_turn_or_make_into_their_target() -> None:
    """``orthogonal_`` of a wide matrix and ``eye_`` failed."""
    mesh = line()
    with redistribution("allow"):
        samples = []
        for placement in LAYOUTS:
            x = distribute_tensor(torch.zeros(5, 7), mesh, [placement])
            torch.manual_seed(3)
            nn.init.orthogonal_(x)
            samples.append(x.full_tensor().clone())
            same(nn.init.eye_(nn.Parameter(x)), torch.eye(5, 7))
        assert torch.equal(samples[0], samples[1])
        assert torch.equal(samples[0], samples[2])
        product = samples[0] @ samples[0].t()
        assert torch.allclose(product, torch.eye(5), atol=1e-5)
        v = lay(gen(4), Shard(0))
        same(torch.arange(4, out=v), torch.arange(4.0).double())
        refused("does not fit", lambda: torch.eye(3, out=v))
        refused("x.normal_", lambda: torch.randn(4, out=v))


@ranks(2)
def test_a_plain_tensor_lends_its_dtype() -> None:
    """``type_as`` and ``to`` of a plain tensor asked whether it was a shard."""
    for placement in LAYOUTS:
        x: Any = lay(gen(4, 6), placement)
        plain = torch.zeros(3, dtype=torch.float32)
        assert x.type_as(plain).placements == (placement,)
        same(x.type_as(plain), gen(4, 6).float())
        same(x.to(plain), gen(4, 6).float())
        assert type(plain.type_as(x)) is torch.Tensor
        assert plain.to(x).dtype == torch.float64


@ranks(2)
def test_parameters_of_random_ops_are_checked() -> None:
    """A probability of nine was a sure one; a negative deviation was turned round."""
    x = lay(torch.full((4, 2), 9.0), Shard(0))
    refused("probability", lambda: torch.bernoulli(x), RuntimeError)
    refused("zero or more", lambda: torch.normal(x, -x), RuntimeError)


@ranks(4)
def test_flatten_goes_by_its_old_name_too() -> None:
    """PyTorch's programs say ``mesh._flatten``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh._flatten("all") is mesh.flatten("all")


@ranks(2)
def test_what_a_pad_puts_in_belongs_to_the_plan() -> None:
    """Addends padded with zero, then with one: the plan of the first was taken."""
    with redistribution("allow"):
        x = lay(gen(4, 6), Partial())
        for value in (0.0, 1.0, 0.0, 2.5):
            want = torch.nn.functional.pad(gen(4, 6), (1, 2), value=value)
            same(torch.nn.functional.pad(x, (1, 2), value=value), want, value)
            same(torch.constant_pad_nd(x, (1, 2), value), want, value)


@ranks(3)
def test_ranks_outside_follow_views_in_place_and_have_no_numbers() -> None:
    """Their placeholders get the layout; a number of theirs was an obscure error."""
    mesh = DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(gen(4, 6), mesh, [Shard(0)]).requires_grad_()
    y = x * 2
    y.t_().unsqueeze_(0)
    assert y.shape == (1, 6, 4)
    loss = (y * y).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    if mesh.get_coordinate() is None:
        refused("this rank is outside", loss.item)
        refused("this rank is outside", lambda: bool(loss > 0))
    else:
        assert loss.item() == pytest.approx(float((gen(4, 6) * 2).square().sum()))
        same(x.grad, 8 * gen(4, 6))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 5, proj_size=3, bidirectional=True),
    "gru": lambda: nn.GRU(6, 5, batch_first=True),
    "rnn": lambda: nn.RNN(6, 5),
}


@pytest.mark.parametrize("name", RECURRENT)
@ranks(2)
def test_recurrent_modules_start_from_zero(name: str) -> None:
    """The zeros that such a module makes were plain tensors that might be shards."""
    torch.manual_seed(0)
    plain = RECURRENT[name]().double()
    laid = distribute_module(copy.deepcopy(plain), line())
    with redistribution("allow"):
        for placement in (*LAYOUTS, Shard(2)):
            x = lay(gen(4, 3, 6), placement)
            same(laid(x)[0], plain(gen(4, 3, 6))[0])
        state = gen(1, 3, 5) if name == "rnn" else None
        if state is not None:  # a state with values stays a question
            refused("could be a whole value or a shard", lambda: laid(x, state))


@ranks(2)
def test_cells_start_from_zero() -> None:
    """A single step, likewise."""
    torch.manual_seed(0)
    plain = nn.LSTMCell(6, 5).double()
    laid = distribute_module(copy.deepcopy(plain), line())
    with redistribution("allow"):
        same(laid(lay(gen(3, 6), Shard(0)))[1], plain(gen(3, 6))[1])


@ranks(2)
def test_addends_are_added_before_they_are_rounded() -> None:
    """A narrowing cast rounded each addend: what cancels was lost, or infinite."""
    mesh = line()
    rank = mesh.get_local_rank()
    local = torch.tensor([100000.25, -70000.0]) * (1 if rank else -1)
    local = local + torch.tensor([0.25, 1.0]) * rank
    with redistribution("allow"):
        x: Any = DTensor.from_local(local, mesh, [Partial()])
        for dtype in (torch.float16, torch.bfloat16):
            want = torch.tensor([0.25, 1.0]).to(dtype)
            same(x.to(dtype), want)
            same(x.type(dtype), want)
            same(x.half() if dtype == torch.float16 else x.bfloat16(), want)
        assert x.double().placements == (Partial(),)
        assert x.float().placements == (Partial(),)
        count: Any = DTensor.from_local(
            torch.tensor([2**40 + rank]) * (2 * rank - 1), mesh, [Partial()]
        )
        same(count.float(), torch.tensor([1.0]))


@ranks(2)
def test_booleans_that_are_picked_or_added_are_no_addends() -> None:
    """Rows of a cut table of booleans were to be summed: an obscure error."""
    table = gen(4, 3) > 0
    index = torch.tensor([1, 3])
    with redistribution("allow"):
        for placement in LAYOUTS:
            for want in (gen(4, 3), table, gen(4, 3)):
                x, at = lay(want, placement), index[:, None].expand(2, 3)
                same(F.embedding(index, x), F.embedding(index, want))
                same(x.index_add(0, index, x[:2]), want.index_add(0, index, want[:2]))
                same(x.scatter_add(0, at, x[:2]), want.scatter_add(0, at, want[:2]))
