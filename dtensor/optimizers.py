"""Optimizers that take tensors as wholes: LBFGS makes one vector of all, Muon rounds.

All others write element by element, hence in the shards as they lie; see
``rules.foreach`` for parameters on several meshes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dtensor.redistribute import plain
from dtensor.tensor import DTensor, distribute_tensor, redistributed

T = torch.Tensor


def whole(x: T) -> T:
    """All of a tensor, plain."""
    if isinstance(x, DTensor):
        return plain(redistributed(x, x._spec.replicated()))
    return x


def laid_like(x: T, like: T) -> T:
    """A plain whole tensor in the layout of another; sends nothing."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def several_meshes(params: list[T]) -> bool:
    """Whether parameters lie on several meshes, or plain ones are among them."""
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in params}
    return len(meshes) > 1


def flattens_together(original: Any) -> Any:
    """``LBFGS._gather_flat_grad``: of several meshes, one plain vector on every rank."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        if not several_meshes(self._params):
            return original(self)
        pieces = []
        for p in self._params:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            pieces.append(whole(g).detach().reshape(-1))
        return torch.cat(pieces)

    return wrapper


def adds_pieces(original: Any) -> Any:
    """``LBFGS._add_grad``: each parameter takes its stretch in its own layout."""

    @functools.wraps(original)
    def wrapper(self: Any, step_size: Any, update: Any) -> None:
        if not several_meshes(self._params):
            return original(self, step_size, update)  # type: ignore[no-any-return]
        at = 0
        for p in self._params:
            piece = update[at : at + p.numel()].view(p.shape)
            at += p.numel()
            p.add_(laid_like(piece, p), alpha=step_size)
        return None

    return wrapper


def orthogonalizes_wholes(original: Any) -> Any:
    """Muon's iteration: it rounds to bfloat16 after each product, so sums must not differ.

    Each matrix is gathered, once, and every rank does the same; parts would have to be
    summed over the ranks in each of its steps.
    """

    @functools.wraps(original)
    def wrapper(grad: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(grad, DTensor):
            return original(grad, *args, **kwargs)
        return laid_like(original(whole(grad), *args, **kwargs), grad)

    return wrapper


# What interop replaces in torch.
WRAPPED: list[tuple[Any, str, Any]] = [
    (torch.optim.LBFGS, "_gather_flat_grad", flattens_together),
    (torch.optim.LBFGS, "_add_grad", adds_pieces),
]
if hasattr(torch.optim, "_muon"):
    WRAPPED.append(
        (torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalizes_wholes)
    )
