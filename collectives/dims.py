"""The verbs along a dim of a tensor, without autograd.

A communicator moves flat stretches of elements. Along the first dim these are the
tensor's own memory, and nothing is copied here; along another dim the pieces are laid
one after another before they are sent, or joined after they have come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtensor.collectives.communicator import Communicator
from dtensor.kernels import pack


def gather(
    x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    inner = _inner(x, dim)
    flat = comm.all_gather(x, [n * inner for n in sizes])
    return _join(flat, list(x.shape), dim, sizes)


def scatter(
    x: torch.Tensor, comm: Communicator, dim: int, sizes: tuple[int, ...], op: str
) -> torch.Tensor:
    inner = _inner(x, dim)
    counts = [n * inner for n in sizes]
    flat = comm.reduce_scatter(_cut(x, dim, sizes), counts, op)
    return shaped(flat, _shape(x, dim, sizes[comm.rank]))


def transpose(
    x: torch.Tensor,
    comm: Communicator,
    split_dim: int,
    concat_dim: int,
    sent: tuple[int, ...],
    received: tuple[int, ...],
) -> torch.Tensor:
    send_counts = [n * _inner(x, split_dim) for n in sent]
    shape = _shape(x, split_dim, sent[comm.rank])
    shape[concat_dim] = 1
    inner = math.prod(shape)
    recv_counts = [n * inner for n in received]
    flat = comm.all_to_all(_cut(x, split_dim, sent), send_counts, recv_counts)
    return _join(flat, shape, concat_dim, received)


def shift(x: torch.Tensor, comm: Communicator, shift: int) -> torch.Tensor:
    n = comm.size
    dest, source = (comm.rank + shift) % n, (comm.rank - shift) % n
    return shaped(comm.permute(x, dest, source, x.numel()), x.shape)


def shaped(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A fresh buffer in its shape; no view to autograd.

    What a Function returns as a view must not be written in place, and whether a
    gathered tensor is one would depend on the length of this rank's shard.
    """
    return torch.ops.aten._unsafe_view(flat, list(shape))  # type: ignore[no-any-return]


def _cut(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The pieces of ``x`` along ``dim``, one after another; no copy along dim 0."""
    if math.prod(x.shape[:dim]) == 1:
        return x
    return pack.cut(x, dim, sizes)


def _join(
    flat: torch.Tensor, shape: list[int], dim: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Pieces of ``shape`` but for ``dim``, laid one after another, as one tensor."""
    if math.prod(shape[:dim]) == 1:
        return shaped(flat, [*shape[:dim], sum(sizes), *shape[dim + 1 :]])
    return pack.join(flat, shape, dim, sizes)


def _inner(x: torch.Tensor, dim: int) -> int:
    return math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])


def _shape(x: torch.Tensor, dim: int, length: int) -> list[int]:
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]
