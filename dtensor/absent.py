"""Ranks outside of a mesh: what stands for a tensor there holds no data.

It is known to autograd all the same. A gradient that crosses to another mesh is moved by
the ranks of both (see ``across``), so a backward must come by on a rank that has only one
end of the way: a placeholder hangs on the placeholders it was made of, and what flows
through them is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dtensor.moves import plain

Like = tuple[tuple[int, ...], torch.dtype]


class Absent(torch.autograd.Function):
    """Placeholders made of placeholders; so are the cotangents."""

    @staticmethod
    def forward(
        ctx: Any, likes: Sequence[Like], *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Fresh placeholders of some shapes and dtypes."""
        ctx.save_for_backward(*sources)
        found = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in likes)
        ctx.mark_non_differentiable(*[t for t in found if not _flows(t)])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Placeholders of the cotangents; they depend on what the op might save."""
        sources = ctx.saved_tensors
        likes = [(tuple(x.shape), x.dtype) for x in sources]
        return None, *absent(likes, [*grads, *sources])


def absent(likes: Sequence[Like], sources: Iterable[torch.Tensor]) -> list[Any]:
    """Placeholders that hang on those sources that require a gradient.

    Args:
        likes: Shape and dtype of each; the shapes have no elements.
        sources: Placeholders, or other tensors of this rank.
    """
    if torch.is_grad_enabled():
        used = [x for x in map(plain, sources) if x.requires_grad]
        if used and any(_flows(torch.empty(0, dtype=d)) for _, d in likes):
            return list(Absent.apply(likes, *used))  # type: ignore[no-untyped-call]
    return [torch.empty(shape, dtype=dtype) for shape, dtype in likes]


def _flows(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def written(target: torch.Tensor, sources: Iterable[torch.Tensor]) -> None:
    """Let a placeholder that is written in place hang on what is written, too."""
    if not torch.is_grad_enabled() or not _flows(target):
        return
    used = [x for x in map(plain, sources) if x.requires_grad and x is not target]
    local = plain(target)
    if used and not (local.is_leaf and local.requires_grad):
        (more,) = absent([(tuple(local.shape), local.dtype)], used)
        local.add_(more)
