"""Random ops: one global sample, whatever the mesh and the placement.

Each call takes the next key of its mesh (``dtensor/random.py``); each element takes the
bits of its global index (``kernels/philox.py``), so a rank makes its own part alone.
Ops that are no closed transform of such bits run on whole operands, with torch's
generators set alike on all ranks for the while.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import first_spec
from dtensor.errors import ShardingError
from dtensor.moves import lay_addends
from dtensor.placement import Replicate, Shard, is_linear
from dtensor.random import Key, mixed, next_key
from dtensor.redistribute import plain
from dtensor.registry import Handler
from dtensor.rules import distributions
from dtensor.rules.distributions import Draw, cut_of, filling, part
from dtensor.rules.pointwise import without_partial
from dtensor.running import check_target, into
from dtensor.spec import Spec
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor


def key_of(spec: Spec, generator: torch.Generator | None = None) -> Key:
    """The key of the next call on a spec's mesh."""
    return next_key(spec.mesh, spec.world, generator)


def reduced(x: DTensor) -> DTensor:
    """``x`` without addends."""
    return redistributed(x, x._spec.replace(without_partial(x._spec.placements)))


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the parts of complex numbers, else the same."""
    return torch.empty((), dtype=dtype).real.dtype if dtype.is_complex else dtype


def drawn(spec: Spec, draw: Draw, local: T, generator: Any = None) -> T:
    """This rank's part of a sample for a shard: of its real type, on its device."""
    dtype = real_type(local.dtype)
    return part(spec, key_of(spec, generator), draw, dtype, local.device)


# ---- samples -------------------------------------------------------------------------
def random_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``normal_``, ``uniform_`` and all that fill their target at random."""
    x, rest = args[0], args[1:]
    name = func.__name__
    if not isinstance(x, DTensor):
        raise ShardingError(
            f"{name}: a plain tensor is filled from a DTensor. Use numbers as "
            "parameters."
        )
    kwargs = dict(kwargs)
    generator = kwargs.pop("generator", None)
    given = [*rest, *kwargs.values()]
    if name == "bernoulli_" and len(given) == 1 and isinstance(given[0], DTensor):
        p = torch.broadcast_to(given[0], x.shape)
        return x.copy_(torch.bernoulli(p, generator=generator))
    if any(isinstance(a, T) for a in given):
        raise ShardingError(
            f"{name}: parameters must be numbers, got a tensor. Use the "
            "out-of-place op on DTensors."
        )
    check_target(name, x)
    spec = x._spec
    if spec.coordinate is None:
        return x
    with NoTF():
        local = plain(x).detach()
        # torch's own checks of the parameters, on nothing.
        func(local.new_empty(0), *rest, **kwargs)
        draw = filling(name, local.dtype, *rest, **kwargs)
        key = key_of(spec, generator)
        addends = any(p.is_partial() for p in spec.placements)
        if addends or x.requires_grad and torch.is_grad_enabled():
            # Through an op that autograd knows, for its checks and a zero gradient.
            made = part(spec, key, draw, local.dtype, local.device)
            x.copy_(lay_addends(made, spec))
        else:
            distributions.put(local, spec, key, draw)
    return x


def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rand_like``, ``randn_like``, ``randint_like``: in the layout of the model."""
    x = args[0] if args else kwargs["input"]
    rest = [int(a) if isinstance(a, T) else a for a in args[1:]]
    kwargs = {
        k: int(v) if isinstance(v, T) else v for k, v in kwargs.items() if k != "input"
    }
    spec = cut_of(x._spec)
    needs = kwargs.pop("requires_grad", False)
    generator = kwargs.pop("generator", None)
    with NoTF(), torch.no_grad():
        local = plain(x).detach()
        # torch's own checks and its choice of type, on nothing.
        probe = func(local.new_empty((0,) * max(1, local.ndim)), *rest, **kwargs)
        if spec.coordinate is None:
            return typed(probe.new_empty(spec.local_shape), spec)
        if func.__name__ == "rand_like":
            draw = distributions.uniform(probe.dtype)
        elif func.__name__ == "randn_like":
            draw = distributions.normal(probe.dtype)
        else:
            bounds = [*rest, *(kwargs[k] for k in ("low", "high") if k in kwargs)]
            draw = distributions.integers(*([0] * (len(bounds) == 1) + bounds))
        out = part(spec, key_of(spec, generator), draw, probe.dtype, probe.device)
        form = kwargs.get("memory_format", torch.preserve_format)
        if not local.is_contiguous() or form not in (
            torch.preserve_format,
            torch.contiguous_format,
        ):
            like = torch.empty_like(local, dtype=out.dtype, memory_format=form)
            out = like.to(out.device).copy_(out)
        result = typed(out, spec)
    return result.requires_grad_(True) if needs else result


def bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``bernoulli(p)`` and ``bernoulli(x, p)``, in the layout of the first operand."""
    if kwargs.get("out") is not None:
        return into(bernoulli, func, args, kwargs)
    x, p = args[0], args[1] if len(args) > 1 else kwargs.get("p")
    generator = kwargs.get("generator")
    if isinstance(p, T):
        p = torch.broadcast_to(p, x.shape)
        return bernoulli(func, (p.to(x.dtype),), {"generator": generator})
    x = reduced(x)
    spec = x._spec
    with NoTF(), torch.no_grad():
        local = plain(x).detach()
        func(local.new_empty(0), *([] if p is None else [p]))
        if spec.coordinate is None:
            return typed(torch.empty_like(local), spec)
        if p is not None:
            draw = distributions.bernoulli(p)
            return typed(drawn(spec, draw, local, generator), spec)
        within = ((local >= 0) & (local <= 1)).all()
        torch._assert_async(within, "bernoulli: p is a probability, from 0 to 1")
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        key = key_of(spec, generator)
        u = part(spec, key, distributions.uniform(wide), wide, local.device)
        return typed((u < local).to(local.dtype), spec)


def normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``normal(mean, std)`` of tensors: in the layout that their sum has."""
    if kwargs.get("out") is not None:
        return into(normal, func, args, kwargs)
    named = dict(zip(("mean", "std"), args, strict=False)) | kwargs
    mean: Any = named.get("mean", named.get("input"))
    std: Any = named.get("std", 1.0)
    with torch.no_grad():
        if not isinstance(std, T):
            with NoTF():
                torch.empty(0).normal_(0, std)
        else:
            std = reduced(std) if isinstance(std, DTensor) else std
            local = plain(std) if isinstance(std, DTensor) else std
            torch._assert_async((local >= 0).all(), "normal: std is zero or more")
        model = mean + std if isinstance(std, T) else mean
        noise = torch.randn_like(model, generator=named.get("generator"))
        return noise * std + mean


# ---- dropout and the like ------------------------------------------------------------
def _noise_spec(spec: Spec, features: bool) -> Spec:
    """Layout of the mask: of single elements, or of whole features (N, C, 1, ..)."""
    if not features:
        return spec
    places = tuple(
        Replicate() if isinstance(p, Shard) and p.dim > 1 else p
        for p in spec.placements
    )
    return spec.replace(places, (*spec.shape[:2], *(1 for _ in spec.shape[2:])))


def _affine(p: float) -> tuple[float, float, float]:
    """Of alpha dropout: factor and summand of what is kept, and what is dropped."""
    alpha = 1.7580993408473766  # of SELU: minus its limit to the left
    a = 1 / math.sqrt((alpha**2 * p + 1) * (1 - p))
    return a, alpha * a * p, alpha * a * (p - 1)


def dropping(features: bool = False, alpha: bool = False) -> Handler:
    """The handler of one of the dropouts.

    The mask is a global sample, so it fits every layout. Given the mask, plain dropout
    is linear, and addends stay addends; alpha dropout is not.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
        x, p, train = given["input"], given.get("p", 0.5), given.get("train", True)
        name = func.__name__
        if not 0 <= p <= 1:
            raise ValueError(f"{name}: p is a probability, got {p}, expected 0 to 1.")
        inplace = name.endswith("_")
        if inplace:
            check_target(name, x)
        if not train or p == 0:
            return x if inplace else x.clone()
        if features and x.ndim < 2:
            raise ValueError(
                f"{name}: drops features of dim 1, got {x.ndim} dims, expected two or "
                "more. Call F.dropout."
            )
        if not is_linear(x._spec.placements) or alpha:
            if inplace and any(q.is_partial() for q in x._spec.placements):
                raise ShardingError(
                    f"{name}: addends cannot be dropped one by one, got {x!r}. Call "
                    "x = x.redistribute(Replicate()) first."
                )
            x = reduced(x)
        spec = x._spec
        if spec.coordinate is None:
            return x
        with NoTF():
            scale = 1 / (1 - p) if p < 1 and not alpha else 1.0
            mask = _noise_spec(spec, features)
            keep = drawn(mask, distributions.bernoulli(1 - p, scale), plain(x).detach())
            add: Any = 0
            if alpha and p < 1:
                a, kept, dropped = _affine(p)
                add = keep * (kept - dropped) + dropped
                keep = keep * a
            if inplace:
                return T.add_(T.mul_(x, keep), add) if alpha else T.mul_(x, keep)
            out = plain(x) * keep
            return typed(out + add if alpha else out, spec)

    return run


def native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``native_dropout(x, p, train)``: the result and the mask."""
    given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    x, p = reduced(given["input"]), given["p"]
    if not given["train"] and given["train"] is not None:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = torch.bernoulli(x.detach(), 1 - p).to(torch.bool)
    return x * keep * (1 / (1 - p) if p < 1 else 0), keep


def rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rrelu``: each negative element has a slope of its own."""
    names = ("input", "lower", "upper", "training", "generator")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, inplace = given["input"], func.__name__.endswith("_")
    low, high = given.get("lower", 1 / 8), given.get("upper", 1 / 3)
    if low > high:
        raise ValueError(
            f"{func.__name__}: lower must not be above upper, got {low} and {high}."
        )
    if not given.get("training", False):
        leaky = torch.nn.functional.leaky_relu_ if inplace else None
        return (leaky or torch.nn.functional.leaky_relu)(x, (low + high) / 2)
    if inplace:
        check_target("rrelu_", x)
        if any(p.is_partial() for p in x._spec.placements):
            raise ShardingError(
                f"rrelu_: addends cannot be written one by one, got {x!r}. Call "
                "x = x.redistribute(Replicate()) first."
            )
    x = reduced(x)
    spec = x._spec
    if spec.coordinate is None:
        return x
    with NoTF():
        local = plain(x).detach()
        draw = distributions.uniform(local.dtype, low, high)
        slope = drawn(spec, draw, local, given.get("generator"))
        slope = torch.where(local > 0, torch.ones_like(slope), slope)
        return T.mul_(x, slope) if inplace else typed(plain(x) * slope, spec)


def attention(handler: Handler) -> Handler:
    """Attention: with dropout it is made of ops that have rules, its mask a sample."""
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if not given.get("dropout_p", 0.0):
            if given.get("enable_gqa") and _shares_unevenly(
                given["query"], given["key"]
            ):
                # A rank has fewer heads of keys than one: as many as of queries.
                for name in ("key", "value"):
                    times = given["query"].size(-3) // given[name].size(-3)
                    given[name] = given[name].repeat_interleave(times, -3)
                del given["enable_gqa"]
                return func(**given)
            return handler(func, args, kwargs)
        return _attention(**given)

    return run


def _shares_unevenly(query: Any, key: Any) -> bool:
    """Whether queries are cut by heads over more ranks than there are heads of keys."""
    if not isinstance(query, DTensor) or key.ndim < 3 or query.ndim < 3:
        return False
    heads, of_keys = query.shape[-3], key.shape[-3]
    ranks = query._spec.shards(query.ndim - 3)
    return ranks > 1 and of_keys % ranks != 0 and heads % (of_keys or 1) == 0


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if is_causal and attn_mask is not None:
        raise ValueError(
            "scaled_dot_product_attention: is_causal and attn_mask exclude each other. "
            "Give one of them."
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)  # (.., L, S)
    length, source = query.size(-2), key.size(-2)
    if is_causal:
        ones = torch.ones(length, source, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(ones.tril().logical_not(), -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:  # a row that may see nothing is zero
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1)
        weights = weights.masked_fill(blind, 0)
    return torch.dropout(weights, dropout_p, True) @ value


# ---- on whole operands ---------------------------------------------------------------
def gathered_random(
    handler: Handler, draws: Callable[[Any, Any], bool] | None = None
) -> Handler:
    """Other random ops: on whole operands, with the generators of all ranks alike.

    Args:
        handler: Gathers and runs the op.
        draws: Whether a call draws at all, of its arguments; all do by default.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = first_spec(args, kwargs)
        if spec.coordinate is None or draws is not None and not draws(args, kwargs):
            return handler(func, args, kwargs)
        own = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
        args = tuple(None if isinstance(a, torch.Generator) else a for a in args)
        kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
        seed = mixed(*key_of(spec, own[0] if own else None))
        with torch.random.fork_rng(devices=None if torch.cuda.is_available() else []):
            torch.manual_seed(seed)
            return handler(func, args, kwargs)

    return run


def recurrent_dropout(args: Any, kwargs: Any) -> bool:
    """Whether a call of ``torch.lstm`` or the like drops: its one float is the rate."""
    return any(isinstance(a, float) and a > 0 for a in (*args, *kwargs.values()))


__all__ = [
    "attention",
    "bernoulli",
    "dropping",
    "gathered_random",
    "key_of",
    "native_dropout",
    "normal",
    "random_fill",
    "random_like",
    "recurrent_dropout",
    "rrelu",
]
