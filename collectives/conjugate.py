"""Megatron's f and g: the collectives at the edges of a parallel region.

Outside of the region a value is alike on all ranks and counts once: every rank computes
the same from it and calls backward. So ``identity_all_reduce``, which enters the region,
and ``all_reduce_identity``, which leaves it, are each other's adjoint (Shoeybi et al.
2019, Megatron-LM, section 3, there f and g).
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor.collectives import arguments
from dtensor.collectives.arguments import Group
from dtensor.collectives.communicator import Communicator
from dtensor.collectives.functional import applied, bare


def identity_all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Megatron's f: enter a parallel region with a value that is alike on all ranks.

    forward   both: a                       ->  both: a         (no communication)
    adjoint   rank 0: c        rank 1: d    ->  both: c+d

    Each rank then uses the value for its share of the work. The cotangents that come
    back are shares; summed, they are the gradient that a rank alone would have found.

    Args:
        x: The same values on every rank.
        group: Communicator, or mesh of one axis; every rank of it must call, and run
            the backward.

    Returns:
        A view of ``x``.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> from dtensor.mesh.world import get_rank
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> def program():
        ...     x = torch.ones((), requires_grad=True)
        ...     (identity_all_reduce(x, mesh) * (1 + get_rank())).backward()
        ...     return x.grad.item()
        >>> simulate(program, ranks=2)
        [3.0, 3.0]
    """
    x, comm = arguments.plain(x), arguments.resolve(group, "identity_all_reduce")
    if bare(x):
        return x.view_as(x)
    return applied(_IdentityAllReduce, x, comm)


def all_reduce_identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Megatron's g: leave a parallel region with the sum, alike on all ranks.

    forward   rank 0: a        rank 1: b    ->  both: a+b
    adjoint   both: c                       ->  both: c         (no communication)

    Every rank then computes the same from the sum, and the cotangent that comes back
    is the same on every rank: it counts once.

    Args:
        x: This rank's addend.
        group: Communicator, or mesh of one axis; every rank of it must call.

    Returns:
        A new tensor. Sends 2(n-1)/n of its bytes.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> def program():
        ...     x = torch.ones((), requires_grad=True)
        ...     all_reduce_identity(x, mesh).backward()
        ...     return x.grad.item()
        >>> simulate(program, ranks=2)
        [1.0, 1.0]
    """
    x, comm = arguments.plain(x), arguments.resolve(group, "all_reduce_identity")
    if bare(x):
        return comm.all_reduce(x)
    return applied(_AllReduceIdentity, x, comm)


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce_identity(grads[0], ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return identity_all_reduce(grads[0], ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return all_reduce_identity(tangents[0], ctx.comm)
