"""New DTensors: ``zeros``, ``ones``, ``empty``, ``full``, ``arange``, and random ones.

Each rank makes its own shard. The global value is the same for every mesh and every
placement. The random ones may communicate (eight bytes, to agree on a key; nothing
after ``dtensor.manual_seed``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.boundary import check_dtype
from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.moves import lay_addends
from dtensor.placement import PlacementsLike, Replicate, placements_of
from dtensor.redistribute import transition
from dtensor.rules import distributions
from dtensor.rules.distributions import Draw, part
from dtensor.rules.randomness import key_of
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor, typed

Make = Callable[..., torch.Tensor]


def _size(what: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise TypeError(
            f"{what}: sizes are integers, got {size!r}. Write {what}(4, 8, "
            "placements=[Shard(0)])."
        )
    if any(n < 0 for n in given):
        raise ValueError(f"{what}: sizes are zero or more, got {tuple(given)}.")
    return tuple(given)


def _spec(
    what: str,
    shape: Sequence[int],
    mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
) -> Spec:
    mesh = mesh_or_ambient(what, mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    return spec_of(mesh, placements_of(what, placements, mesh.ndim, len(shape)), shape)


def _finished(what: str, local: torch.Tensor, spec: Spec, needs_grad: bool) -> DTensor:
    """Addends of the value where the placements have addends."""
    check_dtype(what, local.dtype, spec.placements)
    out = typed(lay_addends(local, spec), spec)
    if needs_grad:
        out.requires_grad_(True)
    return out


def _device(spec: Spec, device: Any) -> torch.device:
    return torch.device(spec.mesh.device_type if device is None else device)


def _made(
    what: str,
    make: Make,
    size: tuple[Any, ...],
    mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
    dtype: torch.dtype | None,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    spec = _spec(what, _size(what, size), mesh, placements)
    local = make(spec.local_shape, dtype=dtype, device=_device(spec, device))
    return _finished(what, local, spec, requires_grad)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A DTensor of zeros.

    Args:
        size: Global shape in elements, as numbers or as one sequence.
        dtype: Element type; torch's default by default.
        device: Device of the shards; the mesh's by default. ``"meta"`` holds no data.
        requires_grad: Whether it is a leaf that records gradients.
        device_mesh: The mesh; the ambient one by default.
        placements: One per mesh axis; all ``Replicate`` by default.

    Raises:
        ValueError: No mesh, negative sizes, or placements that do not fit.

    Example:
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> with init_device_mesh("cpu", (1,)):
        ...     zeros(2, 3).shape
        torch.Size([2, 3])
    """
    return _made(
        "zeros",
        torch.zeros,
        size,
        device_mesh,
        placements,
        dtype,
        device,
        requires_grad,
    )


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A DTensor of ones; arguments as in ``zeros``."""
    return _made(
        "ones", torch.ones, size, device_mesh, placements, dtype, device, requires_grad
    )


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A DTensor whose values are not set; arguments as in ``zeros``."""
    return _made(
        "empty",
        torch.empty,
        size,
        device_mesh,
        placements,
        dtype,
        device,
        requires_grad,
    )


def full(
    size: Sequence[int],
    fill_value: float | bool | complex,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A DTensor of one number; other arguments as in ``zeros``."""

    def make(shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **options)

    return _made(
        "full", make, (size,), device_mesh, placements, dtype, device, requires_grad
    )


def _random(
    what: str,
    draw: Callable[[torch.dtype], Draw],
    size: tuple[Any, ...],
    mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
    dtype: torch.dtype,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    spec = _spec(what, _size(what, size), mesh, placements)
    where = _device(spec, device)
    if spec.coordinate is None or where.type == "meta":
        local = torch.empty(spec.local_shape, dtype=dtype, device=where)
    else:
        local = part(spec, key_of(spec), draw(dtype), dtype, where)
    return _finished(what, local, spec, requires_grad)


def _floating(make: Make, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a sample; torch says here where it has none of this type."""
    return make((0,), dtype=dtype).dtype


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """Uniform numbers in [0, 1), one global sample; arguments as in ``zeros``.

    Every rank of the mesh must call. Each makes its own part, of the seed, the number
    of the call and the global index of each element.
    """
    dtype = _floating(torch.rand, dtype)
    draw = distributions.uniform
    return _random(
        "rand", draw, size, device_mesh, placements, dtype, device, requires_grad
    )


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """Normal numbers, one global sample; see ``rand``."""
    dtype = _floating(torch.randn, dtype)
    draw = distributions.normal
    return _random(
        "randn", draw, size, device_mesh, placements, dtype, device, requires_grad
    )


def randint(
    *bounds_and_size: Any,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """``torch.randint(high, size)`` or ``(low, high, size)``, one global sample.

    Args:
        bounds_and_size: The whole numbers, low included and high not, then the shape.
        dtype, device, requires_grad, device_mesh, placements: As in ``zeros``.
    """
    *bounds, size = bounds_and_size if len(bounds_and_size) > 1 else (None, None)
    whole = all(isinstance(b, int) and not isinstance(b, bool) for b in bounds)
    if len(bounds) not in (1, 2) or not whole or not isinstance(size, Sequence):
        raise TypeError(
            f"randint: wants high and a size, or low, high and a size, got "
            f"{bounds_and_size!r}. Write randint(0, 10, (4, 8), placements=[Shard(0)])."
        )
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    torch.randint(low, high, (0,), dtype=dtype)  # torch's own checks

    def draw(_: torch.dtype) -> Draw:
        return distributions.integers(low, high)

    return _random(
        "randint", draw, (size,), device_mesh, placements, dtype, device, requires_grad
    )


def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A random permutation of 0 to n - 1, one global sample.

    Every rank sorts all of it, by 64 random bits each, and keeps its part.

    Args:
        n: How many.
        dtype, device, device_mesh, placements: As in ``zeros``.
    """
    spec = _spec("randperm", _size("randperm", (n,)), device_mesh, placements)
    where = _device(spec, device)
    if spec.coordinate is None or where.type == "meta":
        local = torch.empty(spec.local_shape, dtype=dtype, device=where)
    else:
        word, whole = Draw("word64"), spec.replicated()
        bits = part(whole, key_of(spec), word, torch.int64, where)
        order = torch.argsort(bits, stable=True).to(dtype)
        local = transition(whole, distributions.cut_of(spec))(order)
    return _finished("randperm", local, spec, False)


def arange(
    *bounds: float,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """``torch.arange(end)``, ``(start, end)`` or ``(start, end, step)``, laid out.

    Args:
        bounds: As in ``torch.arange``; numbers.
        dtype, device, requires_grad, device_mesh, placements: As in ``zeros``.
    """
    if any(isinstance(b, torch.Tensor) for b in bounds):
        raise TypeError(
            "arange: bounds are numbers, got a tensor. Call x.item() on every rank."
        )
    length = torch.arange(*bounds, dtype=dtype, device="meta").shape[0]
    spec = _spec("arange", (length,), device_mesh, placements)
    whole = torch.arange(*bounds, dtype=dtype, device=_device(spec, device))
    if spec.coordinate is None:
        return _finished("arange", whole.new_empty(0), spec, requires_grad)
    offset, size = spec.block(0)
    return _finished(
        "arange", whole.narrow(0, offset, size).clone(), spec, requires_grad
    )


__all__ = [
    "arange",
    "empty",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
]
