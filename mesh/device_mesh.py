"""DeviceMesh: ranks laid out on an n-dimensional grid with named axes.

A mesh is a value: immutable, and interned, so that equal meshes are one object and
comparing them is a pointer comparison. It describes a layout and needs no devices and
no world; it may even name ranks that the present world does not have. Only questions
about *this* rank (``coordinate``, ``axis_ranks``, slicing) look at the current world.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, final

import numpy as np
import torch

from dtensor.mesh import ambient, grid
from dtensor.mesh.world import current_world

_Key = tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...] | None]


# By kind of device: called by ``init_device_mesh`` with the number of ranks, to raise
# where this rank has no such device. Layers above, which know the devices, enter it.
device_checks: dict[str, Callable[[int], None]] = {}


class _Interned:
    """Every mesh that was made, by value."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table: dict[_Key, DeviceMesh] = {}


_interned = _Interned()


@final
class DeviceMesh:
    """Ranks on an n-dimensional grid.

    Args:
        device_type: Kind of the ranks' devices, ``"cpu"`` or ``"cuda"``.
        mesh: World ranks: a nested list, an integer tensor or an integer array of one
            or more dims. Any order, any subset, each rank once.
        mesh_dim_names: One name per axis, or None.

    Raises:
        ValueError, TypeError: The grid or the names are not sound.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh
        DeviceMesh('cpu', (dp=2, tp=2))
        >>> mesh is init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        True
    """

    __slots__ = (
        "__weakref__",
        "_axis_of",
        "_axis_ranks",
        "_coordinates",
        "_submeshes",
        "device_type",
        "mesh_dim_names",
        "ndim",
        "ranks",
        "shape",
    )

    device_type: str
    shape: tuple[int, ...]
    ndim: int
    ranks: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    _axis_of: dict[str, int]
    _coordinates: dict[int, tuple[int, ...]]
    _axis_ranks: dict[tuple[int, int], tuple[int, ...]]
    _submeshes: dict[tuple[tuple[str, ...], int], DeviceMesh]

    def __new__(
        cls,
        device_type: str,
        mesh: Any,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        shape, ranks = grid.read_grid(mesh)
        return _intern(device_type, shape, ranks, mesh_dim_names, "DeviceMesh")

    # ------------------------------------------------------------------ the value
    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"DeviceMesh: a mesh cannot be changed, got an assignment to {name!r}. "
            f"Make another one with DeviceMesh(...) or init_device_mesh(...)."
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore, (
            self.device_type,
            self.shape,
            self.ranks,
            self.mesh_dim_names,
        )

    def __repr__(self) -> str:
        if self.mesh_dim_names is None:
            sizes = ", ".join(str(n) for n in self.shape)
        else:
            pairs = zip(self.mesh_dim_names, self.shape, strict=True)
            sizes = ", ".join(f"{name}={n}" for name, n in pairs)
        if self.ranks == tuple(range(len(self.ranks))):
            return f"DeviceMesh({self.device_type!r}, ({sizes}))"
        return f"DeviceMesh({self.device_type!r}, ({sizes}), ranks={self.ranks})"

    @property
    def mesh(self) -> torch.Tensor:
        """The world ranks as an int64 tensor on the CPU, a new one at each call."""
        flat = torch.tensor(self.ranks, dtype=torch.int64, device="cpu")
        return flat.view(self.shape)

    def size(self, mesh_dim: str | int | None = None) -> int:
        """Number of ranks along the axis ``mesh_dim``, or of the whole mesh."""
        if mesh_dim is None:
            return len(self.ranks)
        return self.shape[self.axis(mesh_dim)]

    def axis(self, axis: str | int) -> int:
        """Number of an axis given by name or number (negative ones count back).

        Raises:
            ValueError: The mesh has no such axis.
        """
        if isinstance(axis, str):
            found = self._axis_of.get(axis)
            if found is not None:
                return found
        elif type(axis) is int and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise ValueError(
            f"DeviceMesh.axis: no such axis, got {axis!r}, expected one of "
            f"{self._axes_text()} of {self!r}. "
            + (
                "Name the axes with mesh_dim_names= where the mesh is made."
                if self.mesh_dim_names is None
                else "Give one of these names, or the number of the axis."
            )
        )

    def axis_name(self, axis: str | int) -> str:
        """Name of an axis, or its number as text where the axes have no names."""
        index = self.axis(axis)
        return str(index) if self.mesh_dim_names is None else self.mesh_dim_names[index]

    def _axes_text(self) -> str:
        numbers = ", ".join(str(i) for i in range(self.ndim))
        if self.mesh_dim_names is None:
            return f"the axes {numbers} (they have no names)"
        names = ", ".join(repr(name) for name in self.mesh_dim_names)
        return f"the axes {names} (or {numbers})"

    # ------------------------------------------------------------------ this rank
    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """Where this rank sits on the grid, or None where it is not on it."""
        return self.coordinate_of(current_world().rank)

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Where a world rank sits on the grid, or None where it is not on it."""
        found = self._coordinates.get(rank)
        if found is None:
            flat = self._position_of(rank)
            if flat is None:
                return None
            place = []
            for length in reversed(self.shape):
                flat, at = divmod(flat, length)
                place.append(at)
            found = self._coordinates[rank] = tuple(reversed(place))
        return found

    def _position_of(self, rank: int) -> int | None:
        """Place of a world rank among ``ranks``; no object per rank is made for it."""
        ranks = self.ranks
        if 0 <= rank < len(ranks) and ranks[rank] == rank:
            return rank
        try:
            return ranks.index(rank)
        except ValueError:
            return None

    def get_coordinate(self) -> list[int] | None:
        """Where this rank sits on the grid, or None where it is not on it."""
        found = self.coordinate
        return None if found is None else list(found)

    def get_rank(self) -> int:
        """Number of this rank in the world."""
        return current_world().rank

    def get_local_rank(self, mesh_dim: str | int | None = None) -> int:
        """Coordinate of this rank along one axis.

        Args:
            mesh_dim: Name or number; may be left out where the mesh has one axis.

        Raises:
            ValueError: No axis was named on a mesh of several, or this rank is not
                on the mesh.
        """
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(
                    f"DeviceMesh.get_local_rank: which axis is meant, got none, "
                    f"expected one of {self._axes_text()} of {self!r}. "
                    f"Call get_local_rank(axis)."
                )
            mesh_dim = 0
        return self._member("get_local_rank")[self.axis(mesh_dim)]

    def axis_ranks(self, axis: str | int) -> tuple[int, ...]:
        """World ranks of this rank's row along ``axis``, in mesh order.

        Raises:
            ValueError: No such axis, or this rank is not on the mesh.
        """
        index = self.axis(axis)
        key = (index, current_world().rank)
        found = self._axis_ranks.get(key)
        if found is None:
            here = list(self._member("axis_ranks"))
            here[index] = 0
            step, length = math.prod(self.shape[index + 1 :]), self.shape[index]
            first = self._flat(here)
            line = self.ranks[first : first + step * length : step]
            found = self._axis_ranks[key] = line
        return found

    def _member(self, asked: str) -> tuple[int, ...]:
        found = self.coordinate
        if found is None:
            raise ValueError(
                f"DeviceMesh.{asked}: this rank is not on the mesh, got rank "
                f"{current_world().rank}, expected one of {self.ranks} of {self!r}. "
                f"Ask `mesh.coordinate is not None` first."
            )
        return found

    def _flat(self, coordinate: Sequence[int]) -> int:
        flat = 0
        for position, length in zip(coordinate, self.shape, strict=True):
            flat = flat * length + position
        return flat

    # ------------------------------------------------------------ slices of a mesh
    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The submesh over the named axes, in the order given, that this rank is in.

        A rank outside the mesh gets the submesh at coordinate zero of the other axes,
        where it has no coordinate either.

        Raises:
            ValueError: Unknown or repeated names, or a mesh without names.

        Example:
            >>> names = ("dp", "tp")
            >>> mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=names)
            >>> mesh["tp"].ranks, mesh["tp", "dp"].ranks
            ((0, 1, 2), (0, 3, 1, 4, 2, 5))
        """
        chosen = tuple(names) if isinstance(names, (tuple, list)) else (names,)
        rank = current_world().rank
        found = self._submeshes.get((chosen, rank))
        if found is None:
            found = self._submeshes[chosen, rank] = self._slice(chosen, rank)
        return found

    def _slice(self, chosen: tuple[str, ...], rank: int) -> DeviceMesh:
        sound = bool(chosen) and all(isinstance(name, str) for name in chosen)
        if not sound or len(set(chosen)) != len(chosen):
            raise ValueError(
                f"DeviceMesh[...]: not a choice of axes, got {chosen!r}, expected "
                f"different names out of {self._axes_text()} of {self!r}. "
                f"Write mesh['name'] or mesh['name', 'other']."
            )
        axes = [self.axis(name) for name in chosen]
        here = list(self.coordinate_of(rank) or (0,) * self.ndim)
        shape = tuple(self.shape[i] for i in axes)
        for i in axes:
            here[i] = 0
        flat = np.array(self._flat(here))
        for i in axes:
            steps = np.arange(self.shape[i]) * math.prod(self.shape[i + 1 :])
            flat = flat[..., None] + steps
        ranks = [self.ranks[i] for i in flat.ravel().tolist()]
        return _intern(self.device_type, shape, tuple(ranks), chosen, "DeviceMesh")

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """All ranks of the mesh, in mesh order, on one axis.

        Args:
            name: Name of the axis; by default the names joined by ``"_"``, or none
                where the axes have none.

        Example:
            >>> names = ("dp", "tp")
            >>> init_device_mesh("cpu", (2, 3), mesh_dim_names=names).flatten()
            DeviceMesh('cpu', (dp_tp=6))
        """
        if name is None and self.mesh_dim_names is not None:
            name = "_".join(self.mesh_dim_names)
        names = None if name is None else (name,)
        shape = (len(self.ranks),)
        return _intern(self.device_type, shape, self.ranks, names, "flatten")

    _flatten = flatten  # as PyTorch's programs call it

    # ---------------------------------------------------------------- ambient mesh
    def __enter__(self) -> DeviceMesh:
        ambient.push(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ambient.pop(self)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
) -> DeviceMesh:
    """A mesh over the ranks 0, 1, 2, ... in row-major order.

    For ``"cuda"`` the rank takes the GPU of its number on its host, unless the program
    has used one already; ``DeviceMesh`` makes the mesh alone, and needs no GPU.

    Args:
        device_type: Kind of the ranks' devices, ``"cpu"`` or ``"cuda"``.
        mesh_shape: Number of ranks along each axis.
        mesh_dim_names: One name per axis, or None.

    Raises:
        ValueError, TypeError: The shape or the names are not sound.
        RuntimeError: This rank has no such device, or lacks what drives it.

    Example:
        >>> init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).size("tp")
        4
    """
    sizes = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(
                f"init_device_mesh: not a shape, got {mesh_shape!r}, expected one whole "
                f"number of one or more per axis. Write for example (2, 4)."
            )
    if not sizes:
        raise ValueError(
            f"init_device_mesh: a mesh needs an axis, got {mesh_shape!r}, expected one "
            f"number or more. Write (1,) for a mesh of one rank."
        )
    shape = tuple(int(n) for n in sizes)
    ranks = tuple(range(math.prod(shape)))
    mesh = _intern(device_type, shape, ranks, mesh_dim_names, "init_device_mesh")
    check = device_checks.get(device_type)
    if check is not None:
        check(len(ranks))
    return mesh


def _restore(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    names: tuple[str, ...] | None,
) -> DeviceMesh:
    """Find or make the mesh of a pickle or a copy."""
    return _intern(device_type, tuple(shape), tuple(ranks), names, "DeviceMesh")


def _intern(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    mesh_dim_names: Sequence[str] | None,
    asked: str,
) -> DeviceMesh:
    """The one mesh of this value; everything is checked before it is made."""
    names = grid.read_names(mesh_dim_names, len(shape), asked)
    key: _Key = (device_type, shape, ranks, names)
    if isinstance(device_type, str):
        found = _interned.table.get(key)
        if found is not None:
            return found
    grid.check_device_type(device_type, asked)
    grid.check_ranks(ranks, asked)
    mesh = object.__new__(DeviceMesh)
    put = object.__setattr__
    put(mesh, "device_type", device_type)
    put(mesh, "shape", shape)
    put(mesh, "ndim", len(shape))
    put(mesh, "ranks", ranks)
    put(mesh, "mesh_dim_names", names)
    put(mesh, "_axis_of", {name: i for i, name in enumerate(names or ())})
    put(mesh, "_coordinates", {})  # of the ranks that were asked for
    put(mesh, "_axis_ranks", {})
    put(mesh, "_submeshes", {})
    with _interned.lock:
        return _interned.table.setdefault(key, mesh)
