"""What the differentiable verbs take: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.collectives.communicator import Communicator
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.collectives.registry import communicator
from dtensor.mesh.device_mesh import DeviceMesh

Group = Communicator | DeviceMesh


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its Python subclass, still connected to its graph.

    Raises:
        TypeError: It is inside a torch.func transform, where its values are not at
            hand.
    """
    if type(x) is not torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"collective: not a tensor, got {type(x).__name__}, expected a "
                f"torch.Tensor. Convert it with torch.as_tensor(x)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            x = x.as_subclass(torch.Tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TypeError(
            "collective: no values to send inside torch.func or vmap, got a wrapped "
            "tensor, expected one of the plain program. Call the collective outside "
            "of the transform, or use torch.autograd.grad."
        )
    return x


def resolve(group: Group, verb: str) -> Communicator:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"{verb}: a collective runs over one axis, got {group!r}, expected a mesh "
            f"of one. Pass mesh['name'], or mesh.flatten() for all ranks."
        )
    return communicator(group, 0)


def exchange(length: int, comm: Communicator) -> tuple[int, ...]:
    """The lengths of all ranks."""
    mine = torch.tensor([length], dtype=torch.int64, device="cpu")
    return tuple(comm.all_gather(mine, (1,) * comm.size).tolist())


def dim(verb: str, x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        mend = "Use x.reshape(1) first" if x.ndim == 0 else "Name one of its dims"
        raise ValueError(
            f"{verb}: no such dim, got {dim} for shape {tuple(x.shape)}, expected "
            f"{-x.ndim} to {x.ndim - 1}. {mend}."
        )
    return dim % x.ndim


def lengths(
    verb: str, name: str, sizes: Sequence[int], comm: Communicator
) -> tuple[int, ...]:
    lengths = tuple(int(n) for n in sizes)
    if len(lengths) != comm.size or min(lengths) < 0:
        raise ValueError(
            f"{verb}: {name} do not fit the axis, got {lengths} on axis "
            f"{comm.axis!r}, expected {comm.size} lengths of zero or more. "
            f"Give one length per rank."
        )
    return lengths


def fits(verb: str, name: str, got: int, expected: int, dim: int) -> None:
    if got != expected:
        raise ValueError(
            f"{verb}: {name} does not fit dim {dim}, got {got}, expected {expected}. "
            f"Give the lengths of all ranks in rank order."
        )


def check_linear(verb: str, x: torch.Tensor, op: str) -> None:
    row = REDUCTIONS.get(op)
    if row is not None and not row.linear and x.requires_grad:
        raise ValueError(
            f"{verb}: the reduction has no adjoint, got {op!r} for a tensor that "
            f"requires grad, expected sum or avg. Pass x.detach()."
        )
