"""``cross_entropy`` with a z-loss, on plain tensors and on DTensors."""

from __future__ import annotations

from typing import Any

import torch

from dtensor.dispatch import planned
from dtensor.planning import Op
from dtensor.registry import HANDLERS, handles
from dtensor.rules.cross_entropy import cross_entropy as rule
from dtensor.rules.cross_entropy import insisting
from dtensor.rules.losses import REDUCTIONS
from dtensor.rules.softmax import exact_of
from dtensor.tensor import DTensor

T = torch.Tensor
_torchs: Any = torch._C._nn.cross_entropy_loss


def cross_entropy(
    input: T,
    target: T,
    weight: T | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> T:
    """``F.cross_entropy`` that may also keep the partition function near one.

    To the loss of each sample it adds ``z_loss * log(Z)**2``, where Z is the sum of the
    exponentials of its logits (Chowdhery et al. 2022, PaLM, section 5). The addend is
    weighted as the sample is, and a sample to be ignored has none.

    Of logits cut over n ranks along the classes, each rank sends 2(n-1)/n numbers per
    sample for the maxima and again for each of the sums: those of the exponentials, of
    the targets' logits, of the targets' weights (with ``weight``), of all logits (with
    ``label_smoothing``); backward sends one number per result. The z-loss sends nothing.

    Args:
        input: Logits, (samples, classes, ...) or (classes,).
        target: Class of each sample, or probabilities in the shape of ``input``.
        weight: Weight of each class.
        ignore_index: Target of samples that do not count.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: Share of the target that goes to all classes alike.
        z_loss: Factor of the addend.

    Returns:
        As ``F.cross_entropy``; of DTensors, a DTensor.

    Raises:
        IndexError: A target is neither a class nor ``ignore_index``. Where samples are
            cut, all ranks raise it for a mean; otherwise those that hold the sample.
        ValueError: An unknown reduction.

    Example:
        >>> from dtensor import Shard, distribute_tensor, init_device_mesh, simulate
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> def program():
        ...     logits = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
        ...     loss = cross_entropy(logits, torch.arange(3), z_loss=0.01)
        ...     return round(loss.item(), 4)
        >>> simulate(program, ranks=2)
        [1.4055, 1.4055]
    """
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"cross_entropy: no such reduction, got {reduction!r}, expected one of "
            f"{', '.join(map(repr, REDUCTIONS))}."
        )
    rest = (REDUCTIONS.index(reduction), ignore_index, label_smoothing)
    given: tuple[Any, ...] = (input, target, weight, *rest)
    if not z_loss:
        return _torchs(*given)  # type: ignore[no-any-return]
    if any(isinstance(t, DTensor) for t in given[:3]):
        with_z = cross_entropy_with_z
        return HANDLERS[with_z](with_z, (*given, z_loss), {})  # type: ignore[no-any-return]
    return cross_entropy_with_z(input, target, weight, *rest, z_loss)


def cross_entropy_with_z(
    input: T,
    target: T,
    weight: T | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> T:
    """The loss of plain tensors; ``reduction`` by torch's enum."""
    at = 1 if input.ndim > 1 else 0
    losses: T = _torchs(input, target, weight, 0, ignore_index, label_smoothing)
    square = z_loss * torch.logsumexp(exact_of(input), at).square()
    count: Any = losses.numel() or float("nan")
    if target.shape != input.shape:
        used = target != ignore_index
        count = used.sum()
        if weight is not None:
            its = weight.take(target.masked_fill(~used, 0).long()).masked_fill(~used, 0)
            square, count = square * its, its.sum()
        square = square.masked_fill(~used, 0)
    total = exact_of(losses) + square
    if REDUCTIONS[reduction] != "none":
        total = total.sum()
    if REDUCTIONS[reduction] == "mean":
        total = total / count
    return total.to(losses.dtype)


handles(cross_entropy_with_z)(
    insisting(planned(Op("cross_entropy", rule(logits=True), True, False, dtypes=True)))
)
