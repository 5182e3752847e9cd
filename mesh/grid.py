"""Reading and checking what a mesh is made of: the grid of ranks and its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def read_grid(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and flat ranks of what the user gave as a grid."""
    if isinstance(mesh, torch.Tensor):
        mesh = mesh.detach().cpu().numpy()
    if isinstance(mesh, np.ndarray):
        if mesh.dtype.kind not in "iu":
            raise _bad_grid(mesh.dtype, "whole numbers")
        mesh = mesh.tolist()
    if not isinstance(mesh, (list, tuple, range)):
        raise _bad_grid(mesh, "at least one axis")
    shape: list[int] = []
    level: list[Any] = [mesh]
    while all(isinstance(item, (list, tuple, range)) for item in level):
        lengths = {len(item) for item in level}
        if len(lengths) != 1:
            raise _bad_grid(mesh, "rows of one length")
        shape.append(lengths.pop())
        level = [entry for item in level for entry in item]
        if not level:
            raise _bad_grid(mesh, "at least one rank")
    for entry in level:
        if isinstance(entry, (bool, np.bool_)) or not isinstance(
            entry, (int, np.integer)
        ):
            raise _bad_grid(entry, "whole numbers, nested evenly")
    return tuple(shape), tuple(int(entry) for entry in level)


def _bad_grid(got: object, expected: str) -> ValueError:
    return ValueError(
        f"DeviceMesh: not a grid of ranks, got {got!r}, expected {expected}. "
        f"Write for example [[0, 1], [2, 3]]."
    )


def check_ranks(ranks: tuple[int, ...], asked: str) -> None:
    if min(ranks) < 0:
        raise ValueError(
            f"{asked}: a rank is below zero, got {min(ranks)}, expected numbers from "
            f"zero. Count the ranks as the world does."
        )
    if len(set(ranks)) != len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(
            f"{asked}: a rank sits at several places, got {twice} more than once in "
            f"{ranks}, expected each rank once. Remove the repeats."
        )


def check_device_type(device_type: object, asked: str) -> None:
    if isinstance(device_type, str):
        try:
            if torch.device(device_type).type == device_type:
                return
        except RuntimeError:
            pass
    raise ValueError(
        f"{asked}: not a kind of device, got {device_type!r}, expected 'cpu' or 'cuda' "
        f"without an index. Each rank picks its own device of that kind."
    )


def read_names(
    names: Sequence[str] | None, ndim: int, asked: str
) -> tuple[str, ...] | None:
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) and name for name in given):
        raise ValueError(
            f"{asked}: not names of axes, got {names!r}, expected one text per axis. "
            f"Write for example mesh_dim_names=('dp', 'tp')."
        )
    if len(given) != ndim:
        raise ValueError(
            f"{asked}: names and axes do not match, got {len(given)} names {given} for "
            f"{ndim} axes, expected {ndim}. Give mesh_dim_names one name per axis."
        )
    if len(set(given)) != len(given):
        raise ValueError(
            f"{asked}: two axes share a name, got {given}, expected different names. "
            f"Rename one of them in mesh_dim_names."
        )
    return given
