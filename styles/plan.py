"""Plans: which style goes to which module, and which axis a style binds to.

A plan is a style, a list of styles (of different axes), or a dict from names to
plans. A name is the path of a module below the one that is laid out; ``*`` stands for
any one part of it, ``**`` for any number of parts, and ``""`` for the module itself.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.styles.style import ParallelStyle

StyleLike = ParallelStyle | type[ParallelStyle]
Plan = StyleLike | Sequence[StyleLike] | Mapping[str, Any]
Entry = tuple[str, ParallelStyle | None]


def is_plan(value: object) -> TypeGuard[Plan]:
    """Whether a value can only be meant as a plan."""
    if isinstance(value, type):
        return issubclass(value, ParallelStyle)
    return isinstance(value, (ParallelStyle, Mapping, list, tuple))


def flatten_plan(plan: Plan, path: str = "") -> list[Entry]:
    """All (name, style) pairs of a plan, in its order; None where one gives no style.

    Args:
        plan: The plan.
        path: Name of the module it is for, as seen from outside.

    Raises:
        TypeError: Something in it is neither a style nor a plan.

    Example:
        >>> from dtensor.styles.tensor_parallel import Colwise, Rowwise
        >>> flatten_plan({"blocks.*": {"up": Colwise, "down": Rowwise(mesh_dim="tp")}})
        [('blocks.*.up', Colwise()), ('blocks.*.down', Rowwise(mesh_dim='tp'))]
    """
    if isinstance(plan, type) and issubclass(plan, ParallelStyle):
        try:
            return [(path, plan())]
        except TypeError as error:
            raise TypeError(
                f"parallelize_module: the style class {plan.__name__} cannot be made "
                f"without arguments ({error}). Give an instance, "
                f"{plan.__name__}(...)."
            ) from error
    if isinstance(plan, ParallelStyle) or plan is None:
        return [(path, plan)]
    if isinstance(plan, Mapping):
        found: list[Entry] = []
        for key, value in plan.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"parallelize_module: a plan key must be a module's name, got "
                    f"{key!r}, expected text. Write for example "
                    f"{{'blocks.*.up': Colwise}}."
                )
            found += flatten_plan(value, ".".join(p for p in (path, key) if p))
        return found
    if isinstance(plan, (list, tuple)):
        return [entry for value in plan for entry in flatten_plan(value, path)]
    raise TypeError(
        f"parallelize_module: not a plan, got {plan!r} for {path or 'the module'!r}, "
        f"expected a ParallelStyle, a list of them, or a dict of names to plans. "
        f"Write for example {{'blocks.*.up': Colwise, 'blocks.*.down': Rowwise}}."
    )


def match_plan(
    entries: Sequence[Entry], names: Sequence[str], strict: bool
) -> dict[str, list[Entry]]:
    """The styles of each module, with the keys they come from.

    Args:
        entries: From ``flatten_plan``.
        names: Paths of all modules, ``""`` for the outermost.
        strict: A key that matches nothing is an error, not a warning.

    Raises:
        ValueError: A key that matches no module.
    """
    matched: dict[str, list[Entry]] = {}
    exact = set(names)
    for key, style in entries:
        if key in exact:
            found = [key]
        else:
            parts = key.split(".")
            found = [n for n in names if n and _fits(parts, n.split("."))]
        if not found:
            _unmatched(key, style, names, strict)
        for name in found:
            matched.setdefault(name, []).append((key, style))
    return {name: matched[name] for name in names if name in matched}


def _fits(key: Sequence[str], name: Sequence[str]) -> bool:
    """Whether a key stands for a name, both cut at the dots."""
    if not key:
        return not name
    if key[0] == "**":
        least = 0 if len(key) > 1 else 1
        return any(_fits(key[1:], name[i:]) for i in range(least, len(name) + 1))
    return (
        bool(name) and fnmatch.fnmatchcase(name[0], key[0]) and _fits(key[1:], name[1:])
    )


def _unmatched(
    key: str, style: ParallelStyle | None, names: Sequence[str], strict: bool
) -> None:
    near = nearest(key, names)
    text = (
        f"parallelize_module: the plan's key {key!r} ({style!r}) matches no module, "
        + (f"the nearest are {near}. " if near else f"got {len(names)} modules. ")
        + "Write the name as named_modules() gives it, with '*' for one part, '**' for "
        "any number and '' for the module itself, or pass strict=False."
    )
    if strict:
        raise ValueError(text)
    warnings.warn(text, stacklevel=4)


def nearest(key: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """The names most like ``key``, best first.

    Example:
        >>> nearest("blocks.*.upp", ["blocks", "blocks.0", "blocks.0.up"])
        ['blocks.*.up', 'blocks.0.up', 'blocks.*']
    """
    plain = [name for name in names if name]
    starred = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in plain]
    pool = list(dict.fromkeys(plain + (starred if "*" in key else [])))
    return difflib.get_close_matches(key, pool, n=limit, cutoff=0.4)


def bound(
    given: Sequence[Entry], name: str, mesh: DeviceMesh, mesh_dim: str | int | None
) -> list[tuple[str, ParallelStyle, int]]:
    """The styles of one module with their keys and axes.

    Along each axis a key without wildcards goes before those with.

    Args:
        given: The module's entries, from ``match_plan``.
        name: Path of the module.
        mesh: The mesh the plan is applied on.
        mesh_dim: The axis that the call names.
    """
    rows = [
        (key, style, axis_of(style, mesh, mesh_dim))
        for key, style in given
        if style is not None
    ]
    exact = {axis for key, _, axis in rows if key == name}
    return [row for row in rows if row[0] == name or row[2] not in exact]


def axis_of(style: ParallelStyle, mesh: DeviceMesh, mesh_dim: str | int | None) -> int:
    """Number of the mesh axis that a style binds to.

    Args:
        style: The style; the axis it names goes first.
        mesh: The mesh it is applied on.
        mesh_dim: The axis that the call names.

    Raises:
        ValueError: There is no such axis, or no way to choose one.
    """
    named = style.mesh_dim if style.mesh_dim is not None else mesh_dim
    if named is not None:
        try:
            return mesh.axis(named)
        except ValueError as error:
            raise ValueError(
                f"parallelize_module: {style!r} binds to an axis that the mesh does not "
                f"have. {error}"
            ) from None
    if mesh.ndim == 1:
        return 0
    if mesh.mesh_dim_names is not None and "tp" in mesh.mesh_dim_names:
        return mesh.axis("tp")
    axes = ", ".join(repr(mesh.axis_name(i)) for i in range(mesh.ndim))
    raise ValueError(
        f"parallelize_module: which axis does {style!r} bind to, got none named on "
        f"{mesh!r}, expected one of {axes}. Write "
        f"{type(style).__name__}(mesh_dim={_example(mesh)}), or pass mesh_dim= to "
        f"parallelize_module."
    )


def _example(mesh: DeviceMesh) -> str:
    last = mesh.ndim - 1
    return repr(mesh.axis_name(last)) if mesh.mesh_dim_names else str(last)
