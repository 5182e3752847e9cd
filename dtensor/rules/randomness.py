"""Random ops: one global sample, whatever the mesh and the placement.

Each call draws a seed from torch's default CPU generator of the mesh's first rank
(so ``torch.manual_seed`` and saved generator states count, and a checkpoint's
recomputation repeats it) and tells it to the others; from it every rank makes the same
global sample and takes its own part. Unlike seeds on the ranks cannot make replicas
differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import first_spec
from dtensor.collectives.registry import communicator_of
from dtensor.errors import ShardingError
from dtensor.placement import Replicate, is_linear
from dtensor.redistribute import plain, transition
from dtensor.registry import Handler
from dtensor.rules.pointwise import without_partial
from dtensor.running import check_target
from dtensor.spec import Spec
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor


def agreed_seed(spec: Spec, generator: torch.Generator | None = None) -> int:
    """A seed that all ranks of the mesh share; every rank of the mesh calls.

    Bytes sent per rank: 8.
    """
    if generator is not None and generator.device.type != "cpu":
        generator = None
    seed = torch.randint(2**62, (1,), generator=generator)
    if spec.mesh.size() > 1:
        seed = communicator_of(spec.mesh.ranks, "mesh").broadcast(seed, 0)
    return int(seed)


def sampled(spec: Spec, draw: Any, like: T, generator: Any = None) -> T:
    """This rank's part of a global sample.

    Args:
        spec: Layout of the sample; Partial axes are taken as Replicate.
        draw: Fills a whole tensor in place, given the generator.
        like: A tensor of the wanted dtype and device.
        generator: Where the seed is drawn, the default generator if None.
    """
    source = torch.Generator(device=like.device)
    source.manual_seed(agreed_seed(spec, generator))
    whole = torch.empty(spec.shape, dtype=like.dtype, device=like.device)
    draw(whole, source)
    places = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    return transition(spec.replicated(), spec.replace(places))(whole)


def random_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``normal_``, ``uniform_`` and all that fill their target at random."""
    x, rest = args[0], args[1:]
    if not isinstance(x, DTensor):
        raise ShardingError(
            f"{func.__name__}: a plain tensor is filled from a DTensor. Use numbers as "
            "parameters."
        )
    if any(isinstance(a, T) for a in (*rest, *kwargs.values())):
        raise ShardingError(
            f"{func.__name__}: parameters must be numbers, got a tensor. Use the "
            "out-of-place op on DTensors."
        )
    check_target(func.__name__, x)
    spec = x._spec
    if spec.coordinate is None:
        return x
    if any(p.is_partial() for p in spec.placements):
        raise ShardingError(
            f"{func.__name__}: cannot fill addends, got {x!r}. Call "
            "x = x.redistribute(Replicate()) first."
        )
    kwargs = dict(kwargs)
    generator = kwargs.pop("generator", None)
    with NoTF():
        part = sampled(
            spec,
            lambda t, g: func(t, *rest, **kwargs, generator=g),
            plain(x).detach(),
            generator,
        )
        # Through the op itself, for its checks and its effect on autograd.
        func(x, *rest, **kwargs, generator=torch.Generator(device=x.device))
        with torch.no_grad():
            plain(x).detach().copy_(part)
    return x


def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rand_like``, ``randn_like``, ``randint_like``: a sample in the model's layout."""
    x = args[0] if args else kwargs["input"]
    kwargs = {k: v for k, v in kwargs.items() if k != "input"}
    spec = x._spec
    places = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    spec = spec.replace(places)
    needs = kwargs.pop("requires_grad", False)
    generator = kwargs.pop("generator", None)
    with NoTF(), torch.no_grad():
        local = plain(x).detach()
        if spec.coordinate is None:
            return typed(local.clone(), spec)
        source = torch.Generator(device=local.device)
        source.manual_seed(agreed_seed(spec, generator))
        model = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
        whole = func(model, *args[1:], **kwargs, generator=source)
        out = typed(transition(spec.replicated(), spec)(whole), spec)
    return out.requires_grad_(True) if needs else out


def dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``dropout``: the mask is a global sample, so it fits every layout of ``x``.

    Given the mask, the op is linear, so addends stay addends.
    """
    given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    x, p, train = given["input"], given.get("p", 0.5), given.get("train", True)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is a probability, got {p}, expected 0 to 1.")
    inplace = func.__name__.endswith("_")
    if inplace:
        check_target("dropout_", x)
    if not train or p == 0:
        return x if inplace else x.clone()
    spec = x._spec
    if not is_linear(spec.placements):
        if inplace:
            raise ShardingError(
                f"dropout_: addends cannot be dropped one by one, got {x!r}. Call "
                "x = x.redistribute(Replicate()) first."
            )
        x = redistributed(x, spec.replace(without_partial(spec.placements)))
        spec = x._spec
    if spec.coordinate is None:
        return x
    with NoTF():
        local = plain(x).detach()
        keep = sampled(spec, lambda t, g: t.bernoulli_(1 - p, generator=g), local)
        if p < 1:
            keep = keep / (1 - p)
        if inplace:
            return T.mul_(x, keep)
        return typed(plain(x) * keep, spec)


def gathered_random(handler: Handler) -> Handler:
    """Other random ops: on whole operands, with the generators of all ranks alike."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = first_spec(args, kwargs)
        if kwargs.get("generator") is not None or spec.coordinate is None:
            return handler(func, args, kwargs)
        seed = agreed_seed(spec)
        with torch.random.fork_rng(devices=None if torch.cuda.is_available() else []):
            torch.manual_seed(seed)
            return handler(func, args, kwargs)

    return run


def attention(handler: Handler, random: Handler) -> Handler:
    """Attention: with dropout it is a random op, on whole operands."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return (random if dropout else handler)(func, args, kwargs)

    return run
