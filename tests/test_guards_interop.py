"""Guards of DESIGN section 1: ways around __torch_function__, each held by a test."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guard_helpers import gen, lay, line, ranks, refused, same
from torch import nn
from torch.utils.data import default_collate

from dtensor import DTensor, Partial, Replicate, Shard, ShardingError, count_collectives
from dtensor.interop import WRAPPED

T = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


OTHER = line.__code__


def addends() -> Any:
    """A 0-dim Partial of value 3: 1 on each of two ranks, and 1 more on the second."""
    from dtensor import get_rank

    part = torch.tensor(1.0 + get_rank(), dtype=torch.float64)
    return DTensor.from_local(part, line(), [Partial()], run_check=False)


def count() -> Any:
    """The 0-dim integer 3 as a Partial."""
    from dtensor import get_rank

    part = torch.tensor(1 + get_rank())
    return DTensor.from_local(part, line(), [Partial()], run_check=False)


def net() -> Any:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(lay(gen(4, 4, dtype=torch.float32), Shard(0)))
    layer.bias = nn.Parameter(lay(gen(4, dtype=torch.float32), Shard(0)))
    return layer


# ---- copies -----------------------------------------------------------------------
@ranks(2)
def test_s1_torch_tensor_of_a_dtensor() -> None:
    """1: torch.tensor(dt) is a detached copy in the same layout."""
    x = lay(gen(4), Shard(0)).requires_grad_()
    y = torch.tensor(x)
    assert type(y) is DTensor and y.placements == (Shard(0),) and not y.requires_grad
    assert y.data_ptr() != x.data_ptr()
    same(y, gen(4))
    z = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    assert z.dtype == torch.float32 and z.is_leaf and z.requires_grad
    same(torch.tensor([addends(), 1.0]).float(), torch.tensor([3.0, 1.0]))
    refused("one element", lambda: torch.tensor([x, x]), Exception)


@ranks(2)
def test_s1_as_tensor_and_asarray_of_a_dtensor() -> None:
    """1: as_tensor, asarray give the DTensor itself, or a cast of it."""
    x = lay(gen(4), Shard(0))
    assert torch.as_tensor(x) is x
    assert torch.asarray(x) is x
    for y in (torch.as_tensor(x, dtype=torch.float32), torch.asarray(x, copy=True)):
        assert type(y) is DTensor and y.shape == (4,) and y.data_ptr() != x.data_ptr()
        same(y, gen(4).to(y.dtype))
    w = lay(gen(4), Shard(0)).requires_grad_()
    assert torch.as_tensor(w) is w and not torch.asarray(w).requires_grad
    same(torch.as_tensor([addends()]).float(), torch.tensor([3.0]))


@ranks(2)
def test_s1_constructors_are_refused() -> None:
    """1: torch.Tensor(dt), new_tensor, new, set_, sparse constructors."""
    x, p = lay(gen(4), Shard(0)), gen(4)
    refused(r"torch.Tensor: would take this rank's shard.*x\.detach", lambda: T(x))
    refused(r"new_tensor: would take.*x\.to_local\(\)", lambda: p.new_tensor(x))
    refused(r"new: would take this rank's shard", lambda: p.new(x))
    refused(r"set_: would take.*x\.copy_\(y\)", lambda: p.set_(x))
    refused(r"set_: would take", lambda: x.set_(p))
    index = torch.tensor([[0, 1]])
    refused(
        r"sparse_coo_tensor: would take",
        lambda: torch.sparse_coo_tensor(index, x, (8,)),
    )
    same(T([addends()]), torch.tensor([3.0]))
    same(x.new_tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64))


# ---- numbers ----------------------------------------------------------------------
NUMBERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "full": lambda p, s, n: torch.full((2,), s),
    "full size": lambda p, s, n: torch.full((n,), s),
    "full kw": lambda p, s, n: torch.full((2,), fill_value=s),
    "full_like": lambda p, s, n: torch.full_like(p, s),
    "new_full": lambda p, s, n: p.new_full((2,), s),
    "arange": lambda p, s, n: torch.arange(n),
    "arange float": lambda p, s, n: torch.arange(0.0, s, 1.0),
    "linspace": lambda p, s, n: torch.linspace(0.0, s, n),
    "linspace tensor": lambda p, s, n: torch.linspace(p[0], s, n),
    "logspace": lambda p, s, n: torch.logspace(0.0, s, n),
    "zeros": lambda p, s, n: torch.zeros(n),
    "ones": lambda p, s, n: torch.ones((n, 2)),
    "randperm": lambda p, s, n: torch.randperm(n).sort().values,
    "randint": lambda p, s, n: torch.randint(n, (2, n)) * 0,
    "eye": lambda p, s, n: torch.eye(n),
    "add alpha": lambda p, s, n: torch.add(p, p, alpha=s),
    "sub": lambda p, s, n: torch.sub(p, p, alpha=s),
    "addcmul": lambda p, s, n: torch.addcmul(p, p, p, value=s),
    "addcdiv": lambda p, s, n: torch.addcdiv(p, p, p + 9, value=s),
    "addmm": lambda p, s, n: torch.addmm(p[:1], p[:, None], p[None], alpha=s, beta=s),
    "slice": lambda p, s, n: p[:n],
    "range": lambda p, s, n: torch.tensor(list(range(n))),
    "sqrt": lambda p, s, n: torch.tensor(math.sqrt(s)),
    "bool": lambda p, s, n: torch.tensor(bool(s)),
    "in": lambda p, s, n: torch.tensor([3 in [n], 4 in [n]]),
    "index": lambda p, s, n: torch.tensor([5, 6, 7, 8][n]),
    "sorted": lambda p, s, n: torch.tensor([float(v) for v in sorted([s, s - 1])]),
}


@pytest.mark.parametrize("name", NUMBERS)
@ranks(2)
def test_s1_a_dtensor_in_the_place_of_a_number(name: str) -> None:
    """1: full, full_like, alpha=, value=, arange ...: the whole value counts."""
    p = gen(4)
    out = NUMBERS[name](p, addends(), count())
    assert type(out) is torch.Tensor
    same(out, NUMBERS[name](p, torch.tensor(3.0, dtype=p.dtype), torch.tensor(3)))


@ranks(2)
def test_s1_numbers_beside_dtensors() -> None:
    """1: alpha=, value= and fill values of calls on DTensors."""
    x, v, s = lay(gen(4), Shard(0)), gen(4), addends()
    same(torch.add(x, x, alpha=s), v + 3 * v)
    same(x.add(lay(v, Partial()), alpha=s), v + 3 * v)
    same(torch.addcmul(x, x, x, value=s), v + 3 * v * v)
    same(torch.full_like(x, s), torch.full_like(v, 3))
    same(x.new_full((2,), s), v.new_full((2,), 3))
    same(x.clone().fill_(s), torch.full_like(v, 3))
    same(x.masked_fill(x > 0, s), v.masked_fill(v > 0, 3))


# ---- torch.func, compilers --------------------------------------------------------
def scalar(t: Any) -> Any:
    return (t * t).sum()


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap kwarg": lambda f, x: torch.vmap(lambda t, k: f(t) + f(k))(gen(4), k=x),
    "func.vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@ranks(2)
def test_s1_torch_func_is_refused(name: str) -> None:
    """1: vmap and torch.func see through to the shard: refused, arguments first."""
    text = r"a DTensor cannot be used inside torch.func or vmap.*torch.autograd.grad"
    x = lay(gen(4), Shard(0))
    with count_collectives() as c:
        refused(text, lambda: TRANSFORMS[name](scalar, x))
        refused(text, lambda: TRANSFORMS[name](lambda t: scalar(t) * x.sum(), gen(4)))
    assert c.calls() == 0
    same(x + x, 2 * gen(4))  # and after it, all is as before


def test_s1_torch_func_on_plain_tensors() -> None:
    """1: plain tensors go through as they did; no check is left behind."""
    before = DTensor.__dict__["__torch_function__"].__func__
    same(torch.func.grad(scalar)(gen(3)), 2 * gen(3))
    same(torch.vmap(lambda t: t * 2)(gen(3)), 2 * gen(3))
    same(torch.func.hessian(scalar)(gen(2)), 2 * torch.eye(2, dtype=torch.float64))
    assert DTensor.__dict__["__torch_function__"].__func__ is before


@ranks(2)
def test_s1_functional_call_works() -> None:
    """1: torch.func.functional_call with DTensor parameters, and its gradients."""
    layer = net()
    twice = {k: (v * 2).detach() for k, v in layer.named_parameters()}
    for v in twice.values():
        v.requires_grad_()
    x = lay(gen(2, 4, dtype=torch.float32), Replicate())
    out = torch.func.functional_call(layer, twice, (x,))
    same(out, layer(x).full_tensor() * 2)
    out.sum().backward()
    assert twice["weight"].grad.placements == (Shard(0),)
    assert layer.weight.grad is None


@pytest.mark.filterwarnings("ignore::dtensor.RedistributionWarning")
@ranks(2)
def test_s1_jit_and_export_are_refused() -> None:
    """1: trace, script and export would bake in the shard."""
    x = lay(gen(2, 4, dtype=torch.float32), Replicate())
    text = r"torch.jit.trace: would take this rank's shard.*plain tensors"
    refused(text, lambda: torch.jit.trace(lambda t: t * 2, (x,)))
    refused(text, lambda: torch.jit.trace(net(), (torch.ones(2, 4),)))
    refused(r"torch.jit.script: would take", lambda: torch.jit.script(net()))
    refused(r"torch.export.export: would", lambda: torch.export.export(net(), (x,)))
    refused(r"a scripted function: would", lambda: scripted()(lay(gen(4), Shard(0))))
    # A scripted module is called on whole values.
    same(torch.jit.script(nn.ReLU())(lay(gen(4), Shard(0))), gen(4).relu())


def scripted() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_relu_plus_one)


def _relu_plus_one(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.relu(x), torch.full([1], 1.0, dtype=torch.float64), alpha=1)


@pytest.mark.filterwarnings("ignore")
@ranks(1)
def test_s1_torch_compile_is_refused() -> None:
    """1: torch.compile refuses modules and functions with DTensors; plain ones run."""
    x = lay(gen(4), Replicate(), mesh=line(1))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(lay(gen(4, 4), Shard(0), mesh=line(1)))
    text = r"torch.compile: a Linear holds DTensors.*without torch.compile"
    refused(text, lambda: torch.compile(layer, backend="eager"))
    refused(text, layer.compile)
    text = r"torch.compile: does not see DTensors, got DTensor\(shape=\(4,\)"
    refused(text, lambda: torch.compile(lambda t: t * 2, backend="eager")(x))
    refused(text, lambda: torch.compile(lambda t: t * x, backend="eager")(gen(4)))
    same(torch.compile(lambda t: t * 2, backend="eager")(gen(4)), 2 * gen(4))


# ---- numpy, DLPack, memory ----------------------------------------------------------
@ranks(2)
def test_s1_numpy_is_of_the_whole_value() -> None:
    """1: __array__, asarray, numpy(), tolist: the global value."""
    x, want = lay(gen(4), Shard(0)), gen(4).numpy()
    for got in (np.asarray(x), x.numpy(), x.__array__(), x.tolist()):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.asarray(addends()), 3.0)
    np.testing.assert_array_equal(np.asarray([addends(), addends()]), [3.0, 3.0])


@ranks(2)
def test_s1_dlpack_is_refused() -> None:
    """1: DLPack would hand out the shard."""
    x = lay(gen(4), Shard(0))
    text = r"dlpack.*this rank's shard.*x\.to_local\(\)"
    for call in (
        x.__dlpack__,
        lambda: torch.utils.dlpack.to_dlpack(x),
        lambda: torch.to_dlpack(x),
        lambda: torch.from_dlpack(x),
        lambda: np.from_dlpack(x),
    ):
        refused(text, call)
    assert torch.from_dlpack(x.to_local()).shape == (2,)


@ranks(2)
def test_s1_memory_accessors_speak_of_the_shard() -> None:
    """1: data_ptr, untyped_storage, element_size: allowed, without communication."""
    x = lay(gen(4), Shard(0))
    with count_collectives() as c:
        assert x.data_ptr() == x.to_local().data_ptr()
        assert x.untyped_storage().size() == 2 * x.element_size()
        assert x.storage_offset() == 0 and x.is_contiguous()
    assert c.calls() == 0


@ranks(2)
def test_s1_dtensor_as_an_index_or_value_of_a_plain_tensor() -> None:
    """1: plain[dt], plain[dt] = v, plain[0] = dt, plain.copy_(dt)."""
    p = gen(4)
    index, mask = lay(torch.tensor([1, 2]), Shard(0)), lay(gen(4) > 0, Shard(0))
    written = r"a plain tensor of shape \(4,\) is written from a DTensor.*full_tensor"
    for i in (index, mask):
        refused(
            r"getitem: got a plain tensor of shape \(4,\).*from_local", lambda i=i: p[i]
        )
        refused(written, lambda i=i: p.__setitem__(i, 1.0))
    refused(written, lambda: p.__setitem__(0, addends()))
    refused(written, lambda: p.copy_(lay(gen(4), Shard(0))))
    refused(written, lambda: p.fill_(addends()))
    refused(written, lambda: p.add_(lay(gen(4), Replicate())))
    assert torch.equal(p, gen(4))
    # An integer table is a constant that all ranks hold; the index may be cut.
    same(torch.tensor([5, 6, 7, 8])[index], torch.tensor([6, 7]))


@ranks(2)
def test_s1_default_collate() -> None:
    """1: default_collate stacks DTensors into a DTensor."""
    x = lay(gen(4), Shard(0))
    batch = default_collate([{"a": x, "b": addends()}, {"a": x, "b": addends()}])
    assert type(batch["a"]) is DTensor
    same(batch["a"], torch.stack([gen(4), gen(4)]))
    same(batch["b"], torch.tensor([3.0, 3.0], dtype=torch.float64))


# ---- the table itself ------------------------------------------------------------------
def test_s1_the_table_of_what_is_replaced() -> None:
    """1: every wrapper is in place, once, with the name and the doc of its original."""
    for owner, name, _ in WRAPPED:
        now = vars(owner)[name]
        now = getattr(now, "__func__", now)
        assert now._by_dtensor, name
        chain = [now]  # torch._dynamo wraps some of them once more
        while hasattr(chain[-1], "__wrapped__"):
            chain.append(chain[-1].__wrapped__)
        ours = [
            f for f in chain if "/dtensor/" in getattr(f, "__code__", OTHER).co_filename
        ]
        assert len(ours) == 1, name
        assert now.__doc__ == chain[-1].__doc__, name
        assert now.__name__ == chain[-1].__name__, name


def test_s1_wrapped_functions_on_plain_tensors() -> None:
    """1: with plain arguments all is torch's: values, scripts, saved files."""
    same(torch.add(gen(3), gen(3), alpha=2), 3 * gen(3))
    assert torch.Tensor(2, 3).shape == (2, 3)
    assert type(torch.nn.Parameter(gen(2))) is torch.nn.Parameter
    file = io.BytesIO()
    torch.save(gen(3), file)
    file.seek(0)
    same(torch.load(file), gen(3))
    same(scripted()(gen(4)), gen(4).relu() + 1)
    with pytest.raises(TypeError):
        torch.arange()
    with pytest.raises(ShardingError):
        torch.Tensor(lay(gen(2), Replicate(), mesh=line(1)))
