"""The ambient mesh: what ``with mesh:`` sets and ``current_mesh()`` reads.

The variable holds a chain of frames, innermost first, that is never changed in place.
So a thread or an asyncio task, which starts with a copy of its creator's context, sees
the meshes that were open there and can open and close its own without a trace
elsewhere. No token is kept on the mesh: one mesh object may be entered many times.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from dtensor.mesh.world import current_world

if TYPE_CHECKING:
    from dtensor.mesh.device_mesh import DeviceMesh


class _Frame(NamedTuple):
    mesh: DeviceMesh
    outer: _Frame | None


_frames: ContextVar[_Frame | None] = ContextVar("dtensor_mesh", default=None)


def push(mesh: DeviceMesh) -> None:
    """Open a frame for ``mesh`` in this context."""
    _frames.set(_Frame(mesh, _frames.get()))


def pop(mesh: DeviceMesh) -> None:
    """Close the innermost frame of ``mesh`` in this context.

    Usually it is the innermost of all. It is not where generators that are suspended
    inside a ``with`` block finish in another order. A generator that is finalised in
    a context other than its own finds no frame, and there is then nothing to close.
    """
    frame, above = _frames.get(), list[_Frame]()
    while frame is not None and frame.mesh is not mesh:
        above.append(frame)
        frame = frame.outer
    if frame is None:
        return
    rest = frame.outer
    for kept in reversed(above):
        rest = _Frame(kept.mesh, rest)
    _frames.set(rest)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost open ``with mesh:`` block, or None.

    Example:
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> with mesh:
        ...     current_mesh()
        DeviceMesh('cpu', (tp=2))
        >>> print(current_mesh())
        None
    """
    frame = _frames.get()
    return None if frame is None else frame.mesh


class use_mesh:
    """Make ``mesh`` the ambient one until the block ends; the same as ``with mesh:``.

    Args:
        mesh: The mesh that calls without a mesh of their own shall use.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
    """

    __slots__ = ("_mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        from dtensor.mesh.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"use_mesh: not a mesh, got {mesh!r}, expected a DeviceMesh. "
                f"Make one with init_device_mesh(device_type, shape)."
            )
        self._mesh = mesh

    def __enter__(self) -> DeviceMesh:
        push(self._mesh)
        return self._mesh

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pop(self._mesh)


def mesh_or_ambient(what: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """The given mesh, or the one of ``with mesh:``."""
    from dtensor.mesh.device_mesh import DeviceMesh

    if mesh is None:
        mesh = current_mesh()
    if mesh is None:
        text = (
            f"{what}: No active device mesh. Give one ({what}(..., device_mesh=mesh)) "
            "or call inside `with mesh:`."
        )
        thread = threading.current_thread()
        if thread is not threading.main_thread() and current_world().kind != "threads":
            text += (
                " A new thread starts without the ambient mesh of its creator; hand it "
                "on with Thread(target=contextvars.copy_context().run, args=(fn,))."
            )
        raise ValueError(text)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{what}: expected a DeviceMesh, got {mesh!r}.")
    return mesh
