"""``local_map``: run a function of plain tensors on the shards of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor import boundary
from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.moves import alias, plain
from dtensor.placement import Placement, PlacementsLike, placements_of, show
from dtensor.tensor import DTensor, redistributed, typed

Many = PlacementsLike | None | tuple[PlacementsLike | None, ...]


def local_map(
    func: Callable[..., Any],
    out_placements: Many,
    in_placements: tuple[PlacementsLike | None, ...] | None = None,
    in_grad_placements: tuple[PlacementsLike | None, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    run_check: bool = True,
) -> Callable[..., Any]:
    """Make a function of plain tensors one of DTensors: it runs on this rank's shards.

    What the function returns is taken as shards placed as ``out_placements`` says.
    Cotangents pass as they do through any op on shards: that of a replicated input is
    a sum over the ranks, which nobody needs to write.

    Args:
        func: Takes plain shards, and other arguments as they are.
        out_placements: Placements of every result, or a tuple with those of each (None
            for a result that is no tensor).
        in_placements: For each positional argument its placements, or None to take
            what comes.
        in_grad_placements: For each positional argument the placements of its local
            cotangent, where the function reduces it itself: ``Replicate()`` on an axis
            says that it is whole already.
        device_mesh: The mesh; that of the first DTensor by default.
        redistribute_inputs: Move an input that lies elsewhere, instead of an error.
        run_check: Compare the shapes of the results over the mesh (a small gather);
            without it, equal shards are taken for granted.

    Returns:
        A function of DTensors; every rank of the mesh must call it.

    Raises:
        ShardingError: When called: an input or result that is not as was said.

    Example:
        >>> from dtensor import Shard, distribute_tensor, init_device_mesh, simulate
        >>> double = local_map(lambda x: 2 * x, [Shard(0)], ([Shard(0)],))
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.arange(3), mesh, [Shard(0)])
        ...     return double(x).full_tensor().tolist()
        >>> simulate(program, ranks=2)
        [[0, 2, 4], [0, 2, 4]]
    """

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mesh = device_mesh
        for a in (*args, *kwargs.values()):
            if mesh is None and isinstance(a, DTensor):
                mesh = a.device_mesh
        if mesh is None:
            raise ShardingError(
                "local_map: no mesh, got no DTensor among the arguments, expected one. "
                "Pass a DTensor, or device_mesh=."
            )
        _check_entries("in_placements", in_placements, len(args))
        _check_entries("in_grad_placements", in_grad_placements, len(args))
        given = [
            _entering(
                i, a, mesh, in_placements, in_grad_placements, redistribute_inputs
            )
            for i, a in enumerate(args)
        ]
        named = {
            k: plain(v) if isinstance(v, DTensor) else v for k, v in kwargs.items()
        }
        out = func(*given, **named)
        several = isinstance(out, (tuple, list))
        results = list(out) if several else [out]
        places = _for_each(out_placements, len(results))
        made = [
            _leaving(r, p, mesh, run_check)
            for r, p in zip(results, places, strict=True)
        ]
        return type(out)(made) if several else made[0]

    return mapped


def _check_entries(name: str, given: Any, count: int) -> None:
    """Refuse what is no sequence of entries, and entries that would be dropped."""
    if given is not None and not isinstance(given, (tuple, list)):
        raise TypeError(
            f"local_map: {name} must be a tuple, got {given!r}. Give one entry per "
            "positional argument, None for those that are no DTensors."
        )
    if given is not None and len(given) > count:
        raise ShardingError(
            f"local_map: {name} has entries without an argument, got {len(given)} for "
            f"{count} positional arguments. Give one per positional argument."
        )


def _at(given: tuple[Any, ...] | None, i: int, name: str) -> Any:
    if given is None:
        return None
    if i >= len(given):
        raise ShardingError(
            f"local_map: {name} has no entry for argument {i}, got {len(given)}. Give "
            "one per positional argument, None for those that are no DTensors."
        )
    return given[i]


def _entering(
    i: int,
    x: Any,
    mesh: DeviceMesh,
    in_placements: tuple[Any, ...] | None,
    in_grad_placements: tuple[Any, ...] | None,
    move: bool,
) -> Any:
    """An argument as the function gets it."""
    wanted = _at(in_placements, i, "in_placements")
    if not isinstance(x, DTensor):
        if wanted is not None and isinstance(x, torch.Tensor):
            raise ShardingError(
                f"local_map: argument {i} is a plain tensor, expected a DTensor placed "
                f"{wanted}. Call distribute_tensor(t, mesh, placements)."
            )
        return x
    if x.device_mesh is not mesh:
        raise ShardingError(
            f"local_map: argument {i} lies on another mesh, got {x.device_mesh!r}, "
            f"expected {mesh!r}. Call x.redistribute(mesh, placements)."
        )
    if wanted is not None:
        places = placements_of("local_map", wanted, mesh.ndim, len(x.shape))
        if places != x.placements:
            if not move:
                raise ShardingError(
                    f"local_map: argument {i} lies elsewhere, got {show(x.placements)}, "
                    f"expected {show(places)}. Redistribute it, or pass "
                    "redistribute_inputs=True."
                )
            x = redistributed(x, x._spec.replace(places))
    grads = _at(in_grad_placements, i, "in_grad_placements")
    if grads is None:
        return alias(plain(x))
    return boundary.local_out(x, x._spec, grads)


def _for_each(given: Many, count: int) -> Sequence[Any]:
    """Placements of each result."""
    one = given is None or isinstance(given, Placement)
    if one or all(isinstance(p, Placement) for p in given):  # type: ignore[union-attr]
        return [given] * count
    if len(given) != count:  # type: ignore[arg-type]
        raise ShardingError(
            f"local_map: out_placements are not one per result, got "
            f"{len(given)} for {count} results. Give one per result."  # type: ignore[arg-type]
        )
    return given  # type: ignore[return-value]


def _leaving(x: Any, places: Any, mesh: DeviceMesh, run_check: bool) -> Any:
    """A result as a DTensor."""
    if places is None:
        return x
    if not isinstance(x, torch.Tensor):
        raise ShardingError(
            f"local_map: a result is no tensor, got {type(x).__name__}, expected one "
            f"placed {places}. Give None in its place."
        )
    local = plain(x)
    found = placements_of("local_map", places, mesh.ndim, local.ndim)
    spec = boundary.spec_of_local(local, mesh, found, None, run_check)
    return typed(alias(local), spec)
