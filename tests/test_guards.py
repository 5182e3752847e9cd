"""Guards of DESIGN section 1: a DTensor is its local shard, plus a type.

One test per sentence, in the order of the page; those on users' Functions, on copies
and on ways around ``__torch_function__`` lie in the ``test_guards_*`` files.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_helpers import PLACES, gen, lay, leaves, ranks, refused, same
from torch import nn

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    get_rank,
    init_device_mesh,
)
from dtensor.rules.table import RULES

T = torch.Tensor
PLAIN = torch._C.DisableTorchFunctionSubclass


# ---- 1.1 what it is ---------------------------------------------------------------
@ranks(2)
def test_s1_1_the_tensor_is_the_shard() -> None:
    """1.1: the C++ tensor is the local shard; the spec is interned and frozen."""
    x = lay(gen(5, 2), Shard(0))
    with PLAIN():
        assert T.size(x) == (3 if get_rank() == 0 else 2, 2)
    assert lay(gen(5, 2), Shard(0))._spec is x._spec
    assert pickle.loads(pickle.dumps(x._spec)) is x._spec
    assert list(x.__dict__) == ["_spec"]
    with pytest.raises(AttributeError, match="immutable"):
        x._spec.shape = (1,)
    assert type(x.to_local()) is T and x.to_local().data_ptr() == x.data_ptr()


@ranks(2)
def test_s1_1_reads_are_global() -> None:
    """1.1: shape, size, numel, stride, len, repr, iteration answer for the whole."""
    x = lay(gen(5, 2), Shard(0))
    assert x.shape == (5, 2) and x.size() == (5, 2) and x.size(0) == 5
    assert x.size(-1) == 2 and x.numel() == 10 and x.nelement() == 10
    assert x.stride() == (2, 1) and x.t().stride() == (1, 2) and len(x) == 5
    assert "shape=(5, 2), placements=(S(0))" in repr(x) and x.ndim == x.dim() == 2
    for row, want in zip(x, gen(5, 2), strict=True):
        same(row, want)
    with pytest.raises(TypeError, match="0-d"):
        len(lay(gen(1), Shard(0)).sum())


@ranks(2)
def test_s1_1_interception_is_by_torch_function() -> None:
    """1.1: no __torch_dispatch__, no wrapper tensor, no extra autograd node."""
    assert "__torch_dispatch__" not in DTensor.__dict__
    x = lay(gen(4), Shard(0)).requires_grad_()
    y = x + x
    assert y.grad_fn.name() == "AddBackward0"
    assert y.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    assert y.grad_fn.next_functions[0][0].variable is x


def test_s1_1_only_forward_rules() -> None:
    """1.1: there is no rule for any backward."""
    assert not [name for name in RULES if "backward" in name]


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
@ranks(2)
def test_s1_1_adamw_and_clipping_work_by_the_generic_rule(kind: str) -> None:
    """1.1: AdamW in its three forms, on sharded and replicated Parameters."""
    values = [gen(4, 3), gen(3, seed=1), gen(5, 3, seed=2)]
    places = [Shard(0), Replicate(), Shard(0)]
    nets = [
        [nn.Parameter(lay(v, p)) for v, p in zip(values, places, strict=True)],
        [nn.Parameter(v.clone()) for v in values],
    ]
    options = {"loop": {"foreach": False}}.get(kind, {kind: True})
    for ps in nets:
        optimizer = torch.optim.AdamW(ps, lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            ((ps[0] * ps[1]).sum() + (ps[2] @ ps[1]).square().sum()).backward()
            nn.utils.clip_grad_norm_(ps, 1.0)
            optimizer.step()
    for got, want in zip(*nets, strict=True):
        same(got, want)


# ---- 1.2 the guards ------------------------------------------------------------------
@ranks(2)
def test_s1_2_only_fresh_tensors_are_retyped() -> None:
    """1.2: an op that returns its input, or a tensor of the user's, leaves it alone."""
    x, c = lay(gen(4, 2), Shard(0)), torch.tensor(2.0, dtype=torch.float64)
    spec = x._spec
    for y in (
        x.contiguous(),
        x.to(torch.float64),
        x.double(),
        x.view(4, 2),
        x.expand(4, 2),
        F.dropout(x, training=False),
        x.requires_grad_(False),
        x.squeeze(),
        x.detach(),
    ):
        assert type(y) is DTensor and y._spec is spec and x._spec is spec
    _ = x * c, x + c, torch.where(x > 0, x, c)
    assert type(c) is T and not hasattr(c, "_spec")
    mask = torch.ones(4, 2, dtype=torch.bool)
    _ = x.masked_fill(mask, 0.0)
    assert type(mask) is T
    out = lay(gen(4, 2), Shard(0))
    assert torch.add(x, x, out=out) is out
    same(out, 2 * gen(4, 2))


def stft(x: Any) -> Any:
    return torch.view_as_real(
        torch.stft(x, 4, 2, window=None, return_complex=True, center=True)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["lrn", "stft", "kl_div", "normalize", "pairwise"])
@ranks(2)
def test_s1_2_python_level_functions_see_global_shapes(name: str, place: Any) -> None:
    """1.2: functions written in Python run on global shapes, whatever the layout."""
    call = {
        "lrn": lambda x: F.local_response_norm(x[:, None], 2),
        "stft": stft,
        "kl_div": lambda x: F.kl_div(
            x.log_softmax(1), x.softmax(1), reduction="batchmean"
        ),
        "normalize": lambda x: F.normalize(x, dim=0),
        "pairwise": lambda x: F.cosine_similarity(x, x * 2 + 1),
    }[name]
    (x,), (xr,) = leaves([gen(3, 8)], [place])
    y, want = call(x), call(xr)
    same(y, want, name)
    y.square().sum().backward()
    want.square().sum().backward()
    same(x.grad, xr.grad, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@ranks(2)
def test_s1_2_multi_head_attention(place: Any) -> None:
    """1.2: nn.MultiheadAttention with DTensor parameters and inputs."""
    torch.manual_seed(0)
    want = nn.MultiheadAttention(8, 2, batch_first=True).double()
    net = nn.MultiheadAttention(8, 2, batch_first=True).double()
    for owner in (net, net.out_proj):
        for k, v in list(owner.named_parameters(recurse=False)):
            setattr(owner, k, nn.Parameter(lay(v.detach(), Replicate())))
    net.load_state_dict(want.state_dict())
    (x,), (xr,) = leaves([gen(4, 3, 8)], [place])
    y, weights = net(x, x, x)
    yr, weights_r = want(xr, xr, xr)
    same(y, yr)
    same(weights, weights_r)
    y.square().sum().backward()
    yr.square().sum().backward()
    same(x.grad, xr.grad)
    same(net.in_proj_weight.grad, want.in_proj_weight.grad)


@pytest.mark.filterwarnings("ignore::dtensor.RedistributionWarning")
@ranks(2)
def test_s1_2_cache_keys_tell_1_true_and_1_0_apart() -> None:
    """1.2: 1 == True == 1.0, but not as arguments; the dtype counts."""
    n = torch.arange(4)
    x = lay(n, Shard(0))
    for value in (1, True, 1.0, 1, 1.0, True):
        assert (x + value).dtype == (n + value).dtype
        assert (x * value).dtype == (n * value).dtype
        assert (x / value).dtype == (n / value).dtype
    for index in (1, True, 0, False, 1):  # a bool is a mask, and adds a dim
        assert x[index].shape == n[index].shape
        same(x[index], n[index], index)
    y = lay(gen(2, 2), Replicate())
    for keep in (True, False, True):
        assert y.sum(1, keepdim=keep).shape == gen(2, 2).sum(1, keepdim=keep).shape
    for dtype in (torch.float32, torch.float64, torch.int64):
        z = lay(torch.ones(4, dtype=dtype), Shard(0))
        assert (z + z).dtype == dtype and z.sum().dtype == torch.ones(
            1, dtype=dtype
        ).sum().dtype


@ranks(2)
def test_s1_2_slices_are_keys() -> None:
    """1.2: slices are unhashable on Python 3.11; each has its own plan all the same."""
    v = gen(6, 4)
    x = lay(v, Shard(1))
    for index in (
        slice(1, 3),
        slice(0, 3),
        slice(1, 5, 2),
        slice(None, -1),
        (slice(None), slice(1, 2)),
        (Ellipsis, None, slice(2, 4)),
        (slice(1, 3), slice(True, 3)),
    ):
        same(x[index], v[index], index)


@ranks(2)
def test_s1_2_scalars_stay_out_of_the_key() -> None:
    """1.2: x * lr must not grow the cache."""
    x = lay(gen(4), Shard(0))
    _ = x * 0.5, x * 2, torch.add(x, x, alpha=0.3), x.clamp(0.0), [x.pow(2), x - 1]
    before = len(x._spec.plans)
    for i in range(20):
        _ = x * (0.1 * i), x * i, torch.add(x, x, alpha=0.01 * i), x.clamp(0.1 * i)
        _ = x.pow(i), x - i
        torch._foreach_mul_([x.clone()], 0.1 * i)
    assert len(x._spec.plans) - before <= 2
    same(x * 0.25, gen(4) * 0.25)


# ---- 1.3 plain tensors ------------------------------------------------------------------
@ranks(2)
def test_s1_3_a_floating_plain_tensor_is_refused() -> None:
    """1.3: mixed with DTensors it could be whole or a shard; the message says which."""
    x, p = lay(gen(4), Shard(0)), gen(4)
    text = (
        r"got a plain tensor of shape \(4,\) \(torch.float64\) mixed with DTensors on "
        r"DeviceMesh\('cpu', \(tp=2\)\); it could be a whole value or a shard. Say "
        r"which: DTensor.from_local\(t, mesh, \[Replicate\(\)\]\).*distribute_tensor"
    )
    with count_collectives() as c:
        for call in (
            lambda: x + p,
            lambda: p + x,
            lambda: torch.cat([x, p]),
            lambda: F.linear(x, p),
            lambda: torch.where(x > 0, x, p),
            lambda: x.mul_(p),
            lambda: F.mse_loss(x, p),
        ):
            refused(text, call)
        alone = torch.tensor(1.0, requires_grad=True)
        refused(r"got a plain tensor of shape \(\)", lambda: x * alone)
    assert c.calls() == 0


@ranks(2)
def test_s1_3_constants_indices_and_masks_are_accepted() -> None:
    """1.3: 0-dim constants, integer targets, indices, masks count as Replicate."""
    v, index = gen(4, 3), torch.tensor([2, 0, 1, 2])
    mask = v > 0
    for place in (Shard(0), Shard(1), Replicate(), Partial()):
        x = lay(v, place)
        same(x * torch.tensor(2.0), v * 2)
        same(x + torch.tensor(2.0), v + 2)
        same(F.cross_entropy(x, index), F.cross_entropy(v, index))
        same(x[index], v[index])
        same(x.masked_fill(mask, 0.0), v.masked_fill(mask, 0.0))
        same(torch.where(mask, x, x * 2), torch.where(mask, v, v * 2))
    table = lay(gen(5, 3), Shard(0))
    same(F.embedding(index, table), F.embedding(index, gen(5, 3)))


@ranks(2)
def test_s1_3_other_subclasses_and_meshes_are_refused() -> None:
    """1.3: a stranger's subclass, another mesh."""

    class Stranger(torch.Tensor):
        pass

    x = lay(gen(4), Shard(0))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    refused(
        r"different meshes.*distribute_tensor",
        lambda: x + lay(gen(4), Shard(0), mesh=other),
    )
    refused(r"Stranger", lambda: x + gen(4).as_subclass(Stranger), Exception)
