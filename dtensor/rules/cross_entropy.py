"""Cross-entropy of logits that may be cut over the classes; they are never gathered.

On the axes that cut the classes each rank finds the maximum of its logits, the sum of
their exponentials, and the logit of the target where it has it. One all-reduce finds
the maximum, one the sums; both move a few numbers per sample, whatever the number of
classes. From there on every rank of these axes computes the same; what comes back in
backward is one number per result. (Shoeybi et al. 2019, Megatron-LM, section 3, fuse
the loss with the projection before it in the same way.)

On the axes that cut the samples each rank has its share of the sum. A mean divides by
the count, or weight, of all samples: one all-reduce of two numbers, the other of which
says whether some rank has met a target that is no class.

``nll_loss`` adds: the picked numbers are addends, and nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.calls import Call, Operand, Rule, name_of
from dtensor.collectives import conjugate, functional
from dtensor.errors import ShardingError
from dtensor.loss_parallel import insists
from dtensor.notation import Layout, Letters, Notation, letter_row
from dtensor.placement import Placement, Placements, Shard, normal
from dtensor.planning import settled
from dtensor.redistribute import plain
from dtensor.registry import Handler
from dtensor.rules.extrema import extremum
from dtensor.rules.losses import REDUCTIONS
from dtensor.rules.partition import Partition
from dtensor.rules.softmax import exact_of
from dtensor.spec import Spec
from dtensor.tensor import DTensor

T = torch.Tensor
NAMES = ("weight", "reduction", "ignore_index", "label_smoothing", "z_loss")
SUM = REDUCTIONS.index("sum")


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of one call after the logits and the target.

    Attributes:
        name: The function's name in messages.
        classes: Number of classes, of the whole tensor.
        by_class: Whether the target names classes, rather than giving probabilities.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        weight: This rank's share of the classes' weights.
        ignore: Target of the samples that do not count.
        smoothing: Share of the target that goes to all classes alike.
        z_loss: Factor of the squared logarithm of the partition function.
    """

    name: str
    classes: int
    by_class: bool
    reduction: str
    weight: T | None = None
    ignore: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0


def named(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the target, by name."""
    return dict(zip(NAMES, args[2:], strict=False)) | kwargs


def cross_entropy(logits: bool) -> Rule:
    """The rule of ``cross_entropy_loss`` and ``nll_loss_nd``.

    Args:
        logits: Whether the operand is logits, or logarithms of probabilities.
    """

    def rule(call: Call) -> Notation | Layout | None:
        x, target = call.operands[:2]
        weight = call.arg(2, "weight")
        reduction = REDUCTIONS[call.arg(3, "reduction", 1)]
        at = 1 if x.ndim > 1 else 0
        letters: Letters = tuple(range(x.ndim))
        batch: Letters = tuple(d for d in letters if d != at)
        by_class = tuple(target.shape) != tuple(x.shape)
        check_target(call.name, x, target, by_class)
        if isinstance(weight, Operand):
            check_weight_shape(call.name, x.shape[at] if x.ndim else 1, weight)
        # torch's own error for what else does not fit, with the global shapes
        shapes = call.shapes()
        ins: list[Letters] = [letters, batch if by_class else letters]
        if isinstance(weight, Operand):
            ins.append((at,))
        name = "cross_entropy" if logits else "nll_loss"

        def options(args: Sequence[Any], kwargs: dict[str, Any]) -> Options:
            given = named(args, kwargs)
            w = given.get("weight")
            if given.get("label_smoothing", 0.0) > 1:
                raise RuntimeError(
                    f"{name}: label_smoothing is a share, got "
                    f"{given['label_smoothing']}, expected 0 to 1. Divide by 100 where "
                    "it is in percent."
                )
            return Options(
                name,
                x.shape[at] if x.ndim else 1,
                by_class,
                reduction,
                None if w is None else plain(w),
                given.get("ignore_index", -100),
                given.get("label_smoothing", 0.0),
                given.get("z_loss", 0.0),
            )

        def run(specs: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
            part = Partition(specs[0], [at] if x.ndim else [])
            axes = sample_axes(specs[0], at)
            samples = x.shape.numel() // max(1, x.shape[at] if x.ndim else 1)

            def program(func: Any, args: Any, kwargs: Any) -> Any:
                given = options(args, kwargs)
                local, wanted = plain(args[0]), plain(args[1])
                tally = Tally(given, specs[0], axes, samples)
                if not tally.joint:
                    tally.check(wanted)
                if part.axes:
                    find = over_classes if logits else picked_addends
                    return find(part, local, wanted, given, tally)
                if not tally.joint:
                    return func(*args, **kwargs)
                count = tally.count(wanted, given.weight)
                rest = named(args, kwargs) | {"reduction": SUM}
                total = func(*args[:2], **rest)
                return total / count.to(total.dtype)

            return program

        n = Notation(
            ins,
            [batch if reduction == "none" else ()],
            whole={at},
            contracted=set() if reduction == "none" else set(batch),
            shapes=shapes,
            run=run,
        )
        return cut_classes(call, n, at, not logits)

    return rule


def check_weight_shape(name: str, classes: int, weight: Operand) -> None:
    """As torch's kernels, which not all ranks reach."""
    if tuple(weight.shape) != (classes,):
        raise RuntimeError(
            f"{name}: there is one weight per class, got weights of shape "
            f"{tuple(weight.shape)}, expected ({classes},). Give 1 to classes that have "
            "none."
        )


def check_target(name: str, x: Operand, target: Operand, by_class: bool) -> None:
    """torch's kernels would say so, but not on a rank whose shard is empty."""
    if by_class and target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(
            f"{name}: targets that name classes are int64, got {target.dtype} of shape "
            f"{tuple(target.shape)} for scores of shape {tuple(x.shape)}. Call "
            "target.long(), or give probabilities in the shape of the scores."
        )


def cut_classes(call: Call, n: Notation, at: int, addends: bool) -> Layout | None:
    """The layout in which axes that cut the classes go on to cut them.

    Args:
        call: The call.
        n: What it is on the other axes.
        at: Dim of the classes, and their letter.
        addends: Whether the result is left as addends there.
    """
    x = call.operands[0]
    found = settled(n, call.operands, n.shapes or (), None)
    assert found is not None, "without keep there is a row for everything"
    free = Notation(n.ins, n.outs, contracted={at} if addends else set())
    ins = [list(p) for p in found.ins]
    outs = [list(p) for p in found.outs]
    for axis, p in enumerate(x.placements):
        if isinstance(p, Shard) and p.dim == at:
            row = letter_row(free, at, p.at_dim(0))
            places: list[list[Placement]] = [*ins, *outs]
            for some, q in zip(places, (*row.ins, *row.outs), strict=True):
                some[axis] = q
    return Layout(
        [normal(tuple(p)) for p in ins],
        [normal(tuple(p)) for p in outs],
        found.shapes,
        run=n.run,
    )


def insisting(handler: Handler) -> Handler:
    """A handler of losses that refuses to gather logits under ``loss_parallel``."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if insists() and isinstance(x, DTensor):
            for axis, p in enumerate(x.placements):
                if p.is_cut() and not p.is_shard():
                    raise ShardingError(
                        f"{name_of(func)}: under loss_parallel logits of shape "
                        f"{tuple(x.shape)} would be gathered, got {p} on axis "
                        f"{x.device_mesh.axis_name(axis)!r}, expected Shard of the "
                        "classes. Call logits.redistribute(...) first, or leave the "
                        "scope."
                    )
        return handler(func, args, kwargs)

    return run


def sample_axes(spec: Spec, at: int) -> list[int]:
    """The axes that cut the samples into more than one piece."""
    places: Placements = spec.placements
    return [
        a
        for a, p in enumerate(places)
        if isinstance(p, Shard) and p.dim != at and spec.mesh.shape[a] > 1
    ]


class Tally:
    """How many samples count, and whether all targets are classes.

    Attributes:
        joint: Whether ranks with other samples must be asked for a mean.
    """

    def __init__(
        self, given: Options, spec: Spec, axes: Sequence[int], samples: int
    ) -> None:
        self.given = given
        self.spec = spec
        self.axes = axes
        self.samples = samples
        self.joint = given.reduction == "mean" and bool(axes)

    def strange(self, target: T) -> T:
        """Which targets are neither a class nor to be ignored."""
        outside = (target < 0) | (target >= self.given.classes)
        return outside & (target != self.given.ignore)

    def check(self, target: T) -> None:
        """Raise where this rank has a target that is no class."""
        if not self.given.by_class or target.is_meta or target.numel() == 0:
            return
        if target.is_cpu:
            least, most = target.aminmax()
            if 0 <= int(least) and int(most) < self.given.classes:
                return  # the common case, in one pass
        bad = self.strange(target)
        if target.is_cuda:
            torch._assert_async(~bad.any())
        elif bool(bad.any()):
            self.refuse(str(int(target[bad][0])))

    def refuse(self, got: str) -> None:
        """Raise: a target is no class."""
        raise IndexError(
            f"{self.given.name}: target out of range, got {got}, expected 0 to "
            f"{self.given.classes - 1} (the classes of the whole tensor) or "
            f"ignore_index={self.given.ignore}. Map such targets to ignore_index."
        )

    def count(self, target: T, weight: T | None) -> T:
        """What a mean over the samples of all ranks divides by; they all must ask.

        Args:
            target: This rank's targets.
            weight: Weight of each class.
        """
        with torch.no_grad():
            if not self.given.by_class:
                return self.number(target)
            used = target != self.given.ignore
            if weight is None:
                mine = used.sum()
            else:
                safe = target.masked_fill(~used | self.strange(target), 0)
                mine = torch.where(used, weight.take(safe.long()), 0).sum()
            return self.total(target, mine)

    def number(self, target: T) -> T:
        """How many samples there are, on all ranks together."""
        number = float(self.samples)
        return torch.tensor(number, dtype=torch.float64, device=target.device)

    def total(self, target: T, mine: T) -> T:
        """The sum of what each rank has counted; an error where any is at fault."""
        if not self.joint:
            return mine
        bad = self.strange(target)
        both = torch.stack([mine.double(), bad.any().double()])
        for axis in self.axes:
            both = functional.all_reduce(both, self.spec.comm(axis))
        if target.is_cuda:
            torch._assert_async(both[1] == 0)
        elif not target.is_meta and bool(both[1]):
            here = target[bad]
            got = str(int(here[0])) if here.numel() else "such a target on another rank"
            self.refuse(got)
        return both[0]


def result_dtype(x: T) -> torch.dtype:
    """The dtype of the loss of such logits: autocast takes it in float32."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half and torch.is_autocast_enabled(x.device.type):
        return torch.float32
    return x.dtype


class Pick:
    """What this rank has of the target's classes.

    Attributes:
        used: Which samples count.
        mine: Of which the target's class is here.
    """

    def __init__(self, part: Partition, target: T, ignore: int) -> None:
        self.dim = part.dims[0]
        (offset,), (self.length,) = part.mine.offsets, part.mine.lengths
        self.used = target != ignore
        local = target.long() - offset
        self.mine = self.used & (local >= 0) & (local < self.length)
        self.index = local.masked_fill(~self.mine, 0)

    def scores(self, x: T) -> T:
        """Of each sample the number of its target's class; zero where it is not here."""
        if self.length == 0:
            return x.sum(self.dim)
        found = x.gather(self.dim, self.index.unsqueeze(self.dim)).squeeze(self.dim)
        return found.masked_fill(~self.mine, 0)

    def weights(self, weight: T) -> T:
        """Of each sample the weight of its target's class; zero where it is not here."""
        if self.length == 0:
            return weight.new_zeros(self.index.shape)
        return weight.take(self.index).masked_fill(~self.mine, 0)


def check_weight(x: T, weight: T | None, name: str) -> None:
    """As torch: weights have the dtype of the scores and no gradient."""
    if weight is None:
        return
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise RuntimeError(
            f"{name}: weights have the dtype of the scores, got {weight.dtype}, "
            f"expected {x.dtype}. Call weight.to(scores.dtype)."
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: the derivative for weights of classes is not there, got weights "
            "that require grad. Call weight.detach()."
        )


def per_class(weight: T, x: T, dim: int) -> T:
    """Weights of classes, to be multiplied with scores."""
    return weight.view([-1 if d == dim else 1 for d in range(x.ndim)])


def over_classes(part: Partition, x: T, target: T, given: Options, tally: Tally) -> T:
    """The loss of logits whose classes are cut: two all-reduces of numbers per sample.

    Returns:
        This rank's share of the loss: alike on all ranks that share its samples.
    """
    dim, result = part.dims[0], result_dtype(x)
    exact = exact_of(x)
    weight = given.weight
    if given.by_class:
        check_weight(x, weight, given.name)
    largest = extremum(part, exact, True)
    shifted = exact - largest
    rows = [shifted.exp().sum(dim)]
    used = None
    if given.by_class:
        pick = Pick(part, target, given.ignore)
        used = pick.used
        rows.append(pick.scores(shifted))
        if weight is not None:
            rows.append(pick.weights(weight))
        if given.smoothing > 0:
            every = shifted if weight is None else shifted * per_class(weight, x, dim)
            rows.append(every.sum(dim))
            if weight is not None:
                rows.append(weight.sum())
    else:
        aim = target
        if given.smoothing > 0:
            aim = aim * (1 - given.smoothing) + given.smoothing / given.classes
        if weight is not None:
            aim = aim * per_class(weight, x, dim)
        rows += [(shifted * aim).sum(dim), aim.sum(dim)]
        for t in (target, *(() if weight is None else (weight,))):
            result = torch.promote_types(result, t.dtype)
    rest = summed(part, rows)
    # From here on the ranks of these axes compute alike, until `shared`.
    log_sum = rest.pop(0).log()
    if used is not None:
        gain = rest.pop(0) - log_sum
        its_weight = rest.pop(0) if weight is not None else None
        if its_weight is not None:
            gain = gain * its_weight
        gain = gain.masked_fill(~used, 0)
        if given.smoothing > 0:
            every = rest.pop(0)
            mass = rest.pop(0) if weight is not None else given.classes
            every = (every - mass * log_sum).masked_fill(~used, 0)
            gain = (
                1 - given.smoothing
            ) * gain + given.smoothing / given.classes * every
    else:
        its_weight = None
        gain = rest[0] - rest[1] * log_sum
    if given.z_loss:
        square = (log_sum + largest.squeeze(dim)).square() * given.z_loss
        if its_weight is not None:
            square = square * its_weight
        gain = gain - (square if used is None else square.masked_fill(~used, 0))
    if given.reduction != "none":
        gain = gain.sum()
    gain = shared(part, gain)
    if given.reduction == "mean":
        gain = gain / denominator(tally, target, used, its_weight).to(gain.dtype)
    return (0 - gain).to(result)


def denominator(tally: Tally, target: T, used: T | None, weight: T | None) -> T:
    """What the mean divides by, from the weight of each of this rank's samples."""
    with torch.no_grad():
        if used is None:
            return tally.number(target)
        return tally.total(target, used.sum() if weight is None else weight.sum())


def summed(part: Partition, rows: list[T]) -> list[T]:
    """Sums over all pieces of the classes, of several tensors in one all-reduce."""
    dtype = rows[0].dtype
    for r in rows:
        dtype = torch.promote_types(dtype, r.dtype)
    flat = torch.cat([r.to(dtype).reshape(-1) for r in rows])
    for axis in reversed(part.axes):
        flat = conjugate.all_reduce_identity(flat, part.spec.comm(axis))
    pieces = torch.split(flat, [r.numel() for r in rows])
    return [p.view(r.shape) for p, r in zip(pieces, rows, strict=True)]


def shared(part: Partition, x: T) -> T:
    """A value that all pieces have computed alike from ``summed``: it counts once."""
    for axis in part.axes:
        x = conjugate.identity_all_reduce(x, part.spec.comm(axis))
    return x


def picked_addends(part: Partition, x: T, target: T, given: Options, tally: Tally) -> T:
    """The loss of logarithms of probabilities whose classes are cut: addends."""
    check_weight(x, given.weight, given.name)
    pick = Pick(part, target, given.ignore)
    found = pick.scores(x)
    weight = None
    if given.weight is not None:
        weight = pick.weights(given.weight)
        found = found * weight
    if given.reduction != "none":
        found = exact_of(found).sum()
    if given.reduction == "mean":
        with torch.no_grad():
            mine = pick.used.sum()
            if weight is not None:
                (mine,) = summed(part, [weight.sum()])
            count = tally.total(target, mine)
        found = found / count.to(found.dtype)
    return (0 - found).to(result_dtype(x))
