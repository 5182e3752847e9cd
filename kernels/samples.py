"""Samples from random words: uniform, normal, exponential and Cauchy numbers.

Everything is made of additions, multiplications, divisions, square roots and integer
operations, each rounded by itself: a value depends on its random bits alone, not on the
device, nor on where in a shard it lies (a library's logarithm may differ in the last
place between the middle and the end of a vector). ``philox.cu`` repeats all this
operation by operation.

Normals are Box and Muller's: a pair of elements shares a radius and an angle, so that
an element can be made without those before it, which a ziggurat cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dtensor.kernels.philox import Key, Region, pieces

T = torch.Tensor
Array = npt.NDArray[Any]
Make = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Floats:
    """What the functions below must know of a floating type.

    Attributes:
        float: The type.
        int: The integer type of the same width.
        mantissa: Bits of the mantissa.
        bias: Of the exponent.
        half: The bits of the square root of one half: mantissas begin there.
        logarithm, circle: Terms of the series of the logarithm, of sine and cosine.
    """

    float: Any
    int: Any
    mantissa: int
    bias: int
    half: int
    logarithm: int
    circle: int


SINGLE = Floats(np.float32, np.int32, 23, 127, 0x3F3504F3, 4, 6)
DOUBLE = Floats(np.float64, np.int64, 52, 1023, 0x3FE6A09E667F3BCD, 10, 10)
# Bits of a uniform number: as many as the type holds below one, evenly spaced.
DIGITS = {
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float32: 24,
    torch.float64: 53,
}


def _floats(lanes: Array) -> Floats:
    return SINGLE if lanes.itemsize == 4 else DOUBLE


def _horner(z: Any, coefficients: list[float]) -> Any:
    """``1 + c[0] z + c[1] z**2 + ...`` of an array or a tensor, each step rounded."""
    total = z * coefficients[-1]
    for c in coefficients[-2::-1]:
        total += c
        total *= z
    total += 1
    return total


def uniform(lanes: Array, digits: int) -> Array:
    """Uniform numbers in [0, 1) from words: multiples of ``2 ** -digits``."""
    f = _floats(lanes)
    whole = np.right_shift(lanes, 8 * lanes.itemsize - digits).view(f.int)
    out: Array = whole.astype(f.float)
    out *= 2.0**-digits
    return out


def minus_log(lanes: Array) -> Array:
    """Exponential numbers of mean 1: minus the logarithm of a number in (0, 1].

    The number is an odd multiple of 2**-31 (in double precision of 2**-53), so the
    largest value is 21.5 (36.7).
    """
    f = _floats(lanes)
    if f is SINGLE:
        below, odd = 31, lanes & 0x7FFFFFFF
    else:
        below, odd = 53, lanes >> 11
    odd |= 1
    bits = odd.view(f.int).astype(f.float).view(f.int)
    exponent = bits - f.half
    exponent >>= f.mantissa
    # What is left is a number of [sqrt(1/2), sqrt(2)).
    bits -= exponent << f.mantissa
    m = bits.view(f.float)
    s = m - 1
    m += 1
    s /= m
    series = _horner(s * s, [1 / (2 * k + 1) for k in range(1, f.logarithm + 1)])
    s *= 2
    series *= s
    exponent -= below
    out: Array = exponent.astype(f.float)
    out *= -math.log(2)
    out -= series
    return out


def _sine_cosine(y: Array) -> tuple[Array, Array]:
    """Sine and cosine of angles between minus and plus half pi."""
    terms = range(1, (SINGLE if y.itemsize == 4 else DOUBLE).circle + 1)
    z = y * y
    sine = _horner(z, [(-1) ** k / math.factorial(2 * k + 1) for k in terms])
    cosine = _horner(z, [(-1) ** k / math.factorial(2 * k) for k in terms])
    sine *= y
    return sine, cosine


def normal(lanes: Array) -> Array:
    """Standard normal numbers; lanes 2k and 2k + 1 make elements 2k and 2k + 1."""
    f = _floats(lanes)
    top = 8 * lanes.itemsize - 1
    radius = minus_log(lanes[0::2])
    radius *= 2
    np.sqrt(radius, out=radius)
    # The first bit is the sign of the point, the others its angle in a half circle.
    angle = lanes[1::2] & (2**top)
    bits = radius.view(lanes.dtype)
    bits ^= angle
    np.bitwise_and(lanes[1::2], 2**top - 1, out=angle)
    centred = angle.view(f.int)
    centred -= 2 ** (top - 1)
    y = centred.astype(f.float)
    y *= math.pi * 2.0**-top
    sine, cosine = _sine_cosine(y)
    out = np.empty(lanes.shape, f.float)
    np.multiply(radius, cosine, out=out[0::2])
    np.multiply(radius, sine, out=out[1::2])
    return out


def cauchy(lanes: Array) -> Array:
    """Standard Cauchy numbers: the tangent of a uniform angle."""
    f = _floats(lanes)
    top = 8 * lanes.itemsize - 1
    # Odd, so neither zero nor a quarter circle.
    t = (lanes & (2**top - 1) | 1).view(f.int)
    t -= 2 ** (top - 1)
    size = np.abs(t)
    steep = size > 2 ** (top - 2)
    y = np.where(steep, 2 ** (top - 1) - size, size).astype(f.float)
    y *= math.pi * 2.0**-top
    sine, cosine = _sine_cosine(y)
    out = np.where(steep, cosine, sine)
    out /= np.where(steep, sine, cosine)
    np.negative(out, where=t < 0, out=out)
    return out


def exponential_of(x: T) -> T:
    """``e ** x`` of a tensor of single or double precision; changes ``x``."""
    single = x.dtype == torch.float32
    f = SINGLE if single else DOUBLE
    x = x.clamp_(-1500, 1500)
    n = (x * (1 / math.log(2))).round_()
    # ln 2 in two parts, beyond what one double holds of it; the product of n and the
    # first, of few bits, is exact.
    high = 355 / 512 if single else round(math.log(2) * 2**32) / 2**32
    x.sub_(n * high).sub_(n * (math.log(2) - high + 2.3190468138462996e-17))
    out: T = _horner(x, [1 / math.factorial(k) for k in range(1, 8 if single else 15)])
    whole = n.to(torch.int32 if single else torch.int64)
    whole.clamp_(4 - 4 * f.bias, 4 * f.bias)
    # In four steps, since a power of two alone may not be a number of the type.
    for part in range(4):
        power = ((whole + part) >> 2) + f.bias
        out.mul_((power << f.mantissa).view(x.dtype))
    return out


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to make values of random lanes.

    Attributes:
        lanes: Elements per block of four words.
        make: From lanes (uint32 or uint64, whole pairs if ``paired``) to values.
        dtype: Type of the values.
        paired: Whether an element needs the lanes of its pair.
    """

    lanes: int
    make: Make
    dtype: torch.dtype
    paired: bool = False


def _same(lanes: Array) -> Array:
    return lanes.view(_floats(lanes).int)


def _uniform(digits: int) -> Make:
    return lambda lanes: uniform(lanes, digits)


def _kinds() -> dict[str, Kind]:
    found = {f"uniform{n}": Kind(8, _uniform(n), torch.float32) for n in (8, 11, 24)}
    found["uniform53"] = Kind(4, _uniform(53), torch.float64)
    for width, lanes in ((32, 8), (64, 4)):
        word, real = getattr(torch, f"int{width}"), getattr(torch, f"float{width}")
        found[f"word{width}"] = Kind(lanes, _same, word)
        found[f"normal{width}"] = Kind(lanes, normal, real, True)
        found[f"exponential{width}"] = Kind(lanes, minus_log, real)
        found[f"cauchy{width}"] = Kind(lanes, cauchy, real)
    return found


# The CUDA kernel of a kind is called philox_ and its name.
KINDS = _kinds()


def fill(
    out: T, kind: str, key: Key, where: Region, then: Callable[[T], T] | None = None
) -> T:
    """Fill a tensor with the sample of a region.

    Args:
        out: A contiguous tensor on the CPU with as many elements as the region; values
            are converted to its type.
        kind: A name of ``KINDS``.
        key: Seed and call.
        where: Which elements of the global sample.
        then: What to do with the values, element by element; may change them.

    Returns:
        ``out``.
    """
    k = KINDS[kind]
    flat = out.view(-1)
    width = np.uint32 if k.lanes == 8 else np.uint64
    after = k.paired and not where.keeps_pairs
    for piece in pieces(key, where, k.lanes):
        lanes = piece.words.view(width)
        made = piece.cut(k.make(lanes)) if after else k.make(piece.cut(lanes))
        part = torch.from_numpy(made)
        if then is not None:
            part = then(part)
        flat[piece.at : piece.at + piece.count].copy_(part)
    return out


__all__ = ["DIGITS", "KINDS", "Kind", "cauchy", "exponential_of", "fill", "minus_log"]
