"""Distributions: how each is made of the counter's samples, and a rank's part of one.

A ``Draw`` is a kind of sample (``kernels/samples.py``) and what is done with each
value; both depend on the type of the elements and on the parameters alone, never on the
layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.custom_placement import CustomPlacement
from dtensor.kernels.load import sample
from dtensor.kernels.philox import Key, Region, region
from dtensor.kernels.samples import exponential_of, fill
from dtensor.placement import Replicate
from dtensor.redistribute import transition
from dtensor.spec import Spec

T = torch.Tensor

# Uniform numbers of these types are multiples of 2**-digits.
UNIFORM = {torch.float16: "uniform11", torch.bfloat16: "uniform8"}
HALF = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """A kind of sample, and what is done with its values."""

    kind: str
    then: Callable[[T], T] | None = None


def _wide(dtype: torch.dtype) -> bool:
    """Whether elements take 64 bits of the stream."""
    return dtype in (torch.float64, torch.complex128) or not (
        dtype.is_floating_point or dtype.is_complex
    )


def _below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of a type that is less than ``bound``."""
    t = torch.tensor(bound, dtype=dtype)
    if float(t) >= bound:
        t = torch.nextafter(t, torch.tensor(-math.inf, dtype=dtype))
    return float(t)


def uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Draw:
    """Uniform in [low, high): rounding never gives ``high``."""
    wide = _wide(dtype)
    kind = "uniform53" if wide else "uniform24"
    if (low, high) == (0, 1):
        return Draw(UNIFORM.get(dtype, kind))
    real = torch.empty((), dtype=dtype).real.dtype
    most = max(_below(high, real), low)

    def then(u: T) -> T:
        return u.mul_(high - low).add_(low).clamp_(max=most)

    return Draw(kind, then)


def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Draw:
    """Normal; both parts of a complex number have half the variance."""
    if dtype.is_complex:
        std = std / math.sqrt(2)
    kind = "normal64" if _wide(dtype) else "normal32"
    if (mean, std) == (0, 1):
        return Draw(kind)
    return Draw(kind, lambda z: z.mul_(std).add_(mean))


def log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Draw:
    """``e`` to a normal number."""
    kind = "normal64" if _wide(dtype) else "normal32"
    return Draw(kind, lambda z: exponential_of(z.mul_(std).add_(mean)))


def cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Draw:
    """Cauchy, or Lorentz."""
    kind = "cauchy64" if _wide(dtype) else "cauchy32"
    return Draw(kind, lambda c: c.mul_(sigma).add_(median))


def exponential(dtype: torch.dtype, lambd: float = 1.0) -> Draw:
    """Exponential, never zero."""
    kind = "exponential64" if _wide(dtype) else "exponential32"
    least = max(2.0**-60 if _wide(dtype) else 2.0**-32, torch.finfo(dtype).tiny)
    return Draw(kind, lambda e: e.mul_(1 / lambd).clamp_(min=least))


def geometric(dtype: torch.dtype, p: float) -> Draw:
    """How often to try until a success of probability ``p``."""
    kind = "exponential64" if _wide(dtype) else "exponential32"
    rate = -1 / math.log1p(-p)
    most = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max

    def then(e: T) -> T:
        return e.mul_(rate).ceil_().clamp_(1, min(most, 2.0**62))

    return Draw(kind, then)


def bernoulli(p: float, scale: float = 1.0) -> Draw:
    """``scale`` with probability ``p``, else zero."""
    # A word, as a signed number, lies below this one with probability p.
    limit = round(p * 2**32) - 2**31

    def then(word: T) -> T:
        hit = word < limit if limit < 2**31 else word == word
        return hit if scale == 1 else hit.to(torch.float64).mul_(scale)

    return Draw("word32", then)


def _upper(word: T) -> T:
    """The upper 32 bits of 64-bit words."""
    return (word >> 32).bitwise_and_(HALF)


def integers(low: int, high: int) -> Draw:
    """Whole numbers of [low, high), at most 2**64 of them."""
    count = high - low
    if count <= 2**31:

        def small(word: T) -> T:
            wide = word.to(torch.int64).bitwise_and_(HALF)
            return (wide.mul_(count) >> 32).add_(low)

        return Draw("word32", small)

    def large(word: T) -> T:
        # The high word of the product with the count, by halves, unsigned.
        if count == 2**64:
            return word + low
        high, rest = _upper(word), word & HALF
        middle = high * (count & HALF) + _upper(rest * (count & HALF))
        other = rest * (count >> 32) + (middle & HALF)
        return high * (count >> 32) + _upper(middle) + _upper(other) + low

    return Draw("word64", large)


def any_integer(dtype: torch.dtype, low: int | None = None) -> Draw:
    """What ``random_()`` draws: all that the type holds, from zero or ``low`` on."""
    if dtype.is_floating_point:
        top = 2 ** {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(
            dtype, 24
        )
    else:
        top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    return integers(low or 0, top + 1)


# In-place fills: the op's parameters with torch's defaults.
FILLS: dict[str, Callable[..., Draw]] = {
    "uniform_": lambda dtype, low=0.0, high=1.0, **k: uniform(
        dtype, k.get("from", low), k.get("to", high)
    ),
    "normal_": normal,
    "log_normal_": log_normal,
    "cauchy_": cauchy,
    "exponential_": exponential,
    "geometric_": geometric,
    "bernoulli_": lambda dtype, p=0.5: bernoulli(p),
}


def filling(name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Draw:
    """The draw of an in-place op, whose arguments torch has checked."""
    if name != "random_":
        return FILLS[name](dtype, *args, **kwargs)
    named = dict(zip(("from", "to") if len(args) == 2 else ("to",), args, strict=False))
    named |= kwargs
    low, high = named.get("from", 0), named.get("to")
    return any_integer(dtype, low) if high is None else integers(int(low), int(high))


# ---- this rank's part ----------------------------------------------------------------
def cut_of(spec: Spec) -> Spec:
    """The layout of a sample in the layout of ``spec``: no addends."""
    places = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    return spec.replace(places)


def region_of(spec: Spec, pairs: bool = False) -> Region:
    """The region that this rank holds; of pairs of numbers for complex elements."""
    found: Region | None = spec.memo.get(("region", pairs))
    if found is None:
        blocks = [spec.block(d) for d in range(spec.ndim)]
        shape, last = tuple(spec.shape), (2,) if pairs else ()
        offsets = tuple(b[0] for b in blocks) + (0,) * pairs
        found = region(shape + last, offsets, tuple(b[1] for b in blocks) + last)
        spec.memo[("region", pairs)] = found
    return found


def part(
    spec: Spec, key: Key, draw: Draw, dtype: torch.dtype, device: torch.device
) -> T:
    """This rank's part of a global sample, a plain tensor.

    Args:
        spec: Its layout; Partial axes are taken as Replicate.
        key: Seed and call number.
        draw: The distribution.
        dtype: Type of the elements.
        device: Device of the shard.
    """
    cut = cut_of(spec)
    if any(isinstance(p, CustomPlacement) for p in cut.placements):
        whole = part(spec.replicated(), key, draw, dtype, device)
        return transition(spec.replicated(), cut)(whole)
    shape, real = cut.local_shape, dtype
    if dtype.is_complex and draw.kind == "word32":
        return part(spec, key, draw, torch.float32, device).to(dtype)
    if dtype.is_complex:
        shape, real = torch.Size((*shape, 2)), torch.empty((), dtype=dtype).real.dtype
    where = region_of(cut, dtype.is_complex)
    out = sample(shape, real, device, draw.kind, key, where, draw.then)
    return torch.view_as_complex(out) if dtype.is_complex else out


def put(target: T, spec: Spec, key: Key, draw: Draw) -> None:
    """Fill this rank's shard, a plain tensor without autograd, in place."""
    plain_cpu = target.device.type == "cpu" and not target.dtype.is_complex
    custom = any(isinstance(p, CustomPlacement) for p in spec.placements)
    if plain_cpu and target.is_contiguous() and not custom and target.numel():
        fill(target, draw.kind, key, region_of(spec), draw.then)
        torch.autograd.graph.increment_version(target)
    else:
        target.copy_(part(spec, key, draw, target.dtype, target.device))
