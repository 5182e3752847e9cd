"""Ops that are made of others: each is spelled out in ops that have rules.

The parts come back to ``__torch_function__`` one by one, so what each needs is moved
and no more, and autograd follows the parts. The formulas are torch's own, with its
conventions at zero and at ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.calls import NoRule, meta_run
from dtensor.registry import Handler
from dtensor.running import into

T = torch.Tensor
_norm: Callable[..., T] = torch.linalg.vector_norm
Tensors = Sequence[T]


def composed(name: str, otherwise: Handler) -> Handler:
    """A handler that runs the op's body on the DTensors themselves.

    The call is first tried on meta tensors: what torch refuses is refused here, on
    every rank alike, before anything moves.

    Args:
        name: The op, one of ``COMPOSED``.
        otherwise: Answers the calls that the body cannot.
    """
    body = COMPOSED[name]

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if kwargs.get("out") is not None:
                return into(handler, func, args, kwargs)
            if name not in UNTRIED:
                meta_run(func, args, kwargs)
            return body(*args, **kwargs)
        except NoRule:
            return otherwise(func, args, kwargs)

    return handler


# ---- joins -----------------------------------------------------------------------
def _each(one: Callable[[T], T], given: Any) -> Any:
    return [one(t) for t in given] if isinstance(given, (list, tuple)) else one(given)


def _at_least(ndim: int) -> Callable[..., Any]:
    def one(x: T) -> T:
        if x.ndim >= ndim:
            return x.view(x.shape)
        if x.ndim == 0:
            return x.reshape((1,) * ndim)
        if x.ndim == 1:
            x = x.unsqueeze(0)
        return x.unsqueeze(-1) if ndim == 3 else x

    def at_least(*given: Any) -> Any:
        out = _each(one, given[0] if len(given) == 1 else given)
        return tuple(out) if isinstance(out, list) else out

    return at_least


def hstack(tensors: Tensors) -> T:
    """``hstack``: along dim 1, of vectors along dim 0."""
    parts = [_at_least(1)(t) for t in tensors]
    return torch.cat(parts, 0 if parts[0].ndim == 1 else 1)


def vstack(tensors: Tensors) -> T:
    """``vstack``: along dim 0, of matrices at least."""
    return torch.cat([_at_least(2)(t) for t in tensors], 0)


def dstack(tensors: Tensors) -> T:
    """``dstack``: along dim 2."""
    return torch.cat([_at_least(3)(t) for t in tensors], 2)


def column_stack(tensors: Tensors) -> T:
    """``column_stack``: vectors become columns."""
    return torch.cat([t.reshape(t.numel(), 1) if t.ndim < 2 else t for t in tensors], 1)


def block_diag(tensors: Tensors) -> T:
    """``block_diag``: zeros beside each block, then one below the other."""
    blocks = [t if t.ndim == 2 else t.reshape(1, -1) for t in tensors]
    width = sum(b.shape[1] for b in blocks)
    rows, at = [], 0
    for b in blocks:
        rows.append(torch.nn.functional.pad(b, (at, width - at - b.shape[1])))
        at += b.shape[1]
    return torch.cat(rows, 0)


def meshgrid(tensors: Tensors, indexing: str = "ij") -> list[T]:
    """``meshgrid``: each along a dim of its own, expanded over the others."""
    count = len(tensors)
    swap = indexing == "xy" and count > 1
    at = [1, 0, *range(2, count)] if swap else list(range(count))
    sizes = [0] * count
    for t, d in zip(tensors, at):
        sizes[d] = t.numel()
    out = []
    for t, d in zip(tensors, at):
        shape = [1] * count
        shape[d] = sizes[d]
        out.append(t.reshape(shape).expand(sizes))
    return out


def cartesian_prod(tensors: Tensors) -> T:
    """``cartesian_prod``: the points of the grid as rows."""
    if len(tensors) == 1:
        return tensors[0].view(tensors[0].shape)
    return torch.stack([g.reshape(-1) for g in meshgrid(tensors)], 1)


def combinations(input: T, r: int = 2, with_replacement: bool = False) -> T:
    """``combinations``: the choices of positions, read off the vector."""
    positions = torch.arange(input.numel(), device=input.device)
    return input[torch.combinations(positions, r, with_replacement)]


# ---- splits, flips and shuffles ----------------------------------------------------
def _split(of_vector: int, otherwise: int) -> Callable[..., Any]:
    def split(input: T, sizes: Any = None, **named: Any) -> Any:
        how = sizes if sizes is not None else next(iter(named.values()))
        dim = of_vector if input.ndim == 1 else otherwise
        return torch.tensor_split(input, how, dim)

    return split


def rot90(input: T, k: int = 1, dims: Sequence[int] = (0, 1)) -> T:
    """``rot90``: a flip and a transpose."""
    a, b = dims
    match k % 4:
        case 1:
            return input.flip(b).transpose(a, b)
        case 2:
            return input.flip((a, b))
        case 3:
            return input.flip(a).transpose(a, b)
    return input.clone()


def channel_shuffle(input: T, groups: int) -> T:
    """``channel_shuffle``: the channels of the groups take turns."""
    n, c, *space = input.shape
    grouped = input.reshape(n, groups, c // groups, *space)
    return grouped.transpose(1, 2).reshape(input.shape)


def pixel_shuffle(input: T, upscale_factor: int) -> T:
    """``pixel_shuffle``: from channels to space."""
    r = upscale_factor
    *lead, c, h, w = input.shape
    x = input.reshape(*lead, c // r**2, r, r, h, w)
    n = len(lead)
    x = x.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*lead, c // r**2, h * r, w * r)


def pixel_unshuffle(input: T, downscale_factor: int) -> T:
    """``pixel_unshuffle``: from space to channels."""
    r = downscale_factor
    *lead, c, h, w = input.shape
    x = input.reshape(*lead, c, h // r, r, w // r, r)
    n = len(lead)
    x = x.permute(*range(n + 1), n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*lead, c * r**2, h // r, w // r)


def diag(input: T, diagonal: int = 0) -> T:
    """``diag``: a matrix from its diagonal, or the diagonal of a matrix."""
    if input.ndim == 1:
        return torch.diag_embed(input, diagonal)
    return torch.diagonal(input, diagonal).clone()


def diagflat(input: T, offset: int = 0) -> T:
    """``diagflat``: all elements on the diagonal."""
    return torch.diag_embed(input.reshape(-1), offset)


def sum_to_size(input: T, *size: Any) -> T:
    """``sum_to_size``: the adjoint of expand."""
    wanted = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(wanted)
    dims = list(range(lead))
    dims += [d + lead for d, n in enumerate(wanted) if n == 1 != input.shape[d + lead]]
    out = input.sum(dims, keepdim=True) if dims else input.view(input.shape)
    return out.reshape(tuple(wanted))


def repeat_interleave(
    input: T,
    repeats: Any = None,
    dim: int | None = None,
    output_size: int | None = None,
) -> T:
    """``repeat_interleave`` by one number: a new dim, expanded and merged."""
    if not isinstance(repeats, int):
        raise NoRule("the shape of the result depends on data")
    if dim is None:
        input, dim = input.reshape(-1), 0
    dim %= max(1, input.ndim)
    if input.ndim == 0:
        input = input.reshape(1)
    shape = list(input.shape)
    wide = input.unsqueeze(dim + 1).expand(
        *shape[: dim + 1], repeats, *shape[dim + 1 :]
    )
    shape[dim] *= repeats
    return wide.reshape(shape)


# ---- distances and losses -----------------------------------------------------------
def dist(input: T, other: T, p: float = 2) -> T:
    """``dist``: the norm of the difference."""
    return _norm(input - other, p)


def pairwise_distance(
    x1: T, x2: T, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> T:
    """``pairwise_distance``: norms of the rows' differences."""
    return _norm(x1 - x2 + eps, p, -1, keepdim)


def cosine_similarity(x1: T, x2: T, dim: int = 1, eps: float = 1e-8) -> T:
    """``cosine_similarity``: norms are clamped in value, not in their gradient."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)  # type: ignore[no-untyped-call]
    x1, x2 = x1.expand(shape), x2.expand(shape)
    kind = torch.promote_types(x1.dtype, x2.dtype)
    if not (kind.is_floating_point or kind.is_complex):
        kind = torch.get_default_dtype()
    x1, x2 = x1.to(kind), x2.to(kind)

    def direction(x: T) -> T:
        size = _norm(x, 2, dim, True)
        return x / (size + (size.clamp_min(eps) - size).detach())

    return (direction(x1) * direction(x2)).sum(dim)


def _reduced(loss: T, reduction: int) -> T:
    return (loss, loss.mean() if reduction == 1 else loss, loss.sum())[reduction]


def cosine_embedding_loss(
    input1: T, input2: T, target: T, margin: float = 0.0, reduction: int = 1
) -> T:
    """``cosine_embedding_loss``: 1 - cos for pairs alike, the excess for the others."""
    dim = target.ndim
    tiny = 1e-12
    product = (input1 * input2).sum(dim)
    sizes = ((input1 * input1).sum(dim) + tiny) * ((input2 * input2).sum(dim) + tiny)
    cos = product / sizes.sqrt()
    zero = torch.zeros_like(cos)
    alike = torch.where(target == 1, 1 - cos, zero)
    unlike = torch.where(target == -1, (cos - margin).clamp_min(0), zero)
    return _reduced(alike + unlike, reduction)


def hinge_embedding_loss(
    input: T, target: T, margin: float = 1.0, reduction: int = 1
) -> T:
    """``hinge_embedding_loss``: the value for 1, what lacks to the margin for -1."""
    short = (margin - input).clamp_min(0)
    short = torch.where(target != 1, short, torch.zeros_like(short))
    own = torch.where(target != -1, input, torch.zeros_like(input))
    return _reduced(short + own, reduction)


def triplet_margin_loss(
    anchor: T,
    positive: T,
    negative: T,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> T:
    """``triplet_margin_loss``: near to the positive, by a margin, than the negative."""
    near = torch.pairwise_distance(anchor, positive, p, eps)
    far = torch.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, torch.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


# The table: op -> the function that spells it out.
COMPOSED: dict[str, Callable[..., Any]] = {
    "atleast_1d": _at_least(1),
    "atleast_2d": _at_least(2),
    "atleast_3d": _at_least(3),
    "block_diag": block_diag,
    "cartesian_prod": cartesian_prod,
    "channel_shuffle": channel_shuffle,
    "column_stack": column_stack,
    "combinations": combinations,
    "cosine_embedding_loss": cosine_embedding_loss,
    "cosine_similarity": cosine_similarity,
    "diag": diag,
    "diagflat": diagflat,
    "dist": dist,
    "dsplit": _split(2, 2),
    "dstack": dstack,
    "fliplr": lambda input: input.flip(1),
    "flipud": lambda input: input.flip(0),
    "hinge_embedding_loss": hinge_embedding_loss,
    "hsplit": _split(0, 1),
    "hstack": hstack,
    "meshgrid": meshgrid,
    "pairwise_distance": pairwise_distance,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "repeat_interleave": repeat_interleave,
    "rot90": rot90,
    "row_stack": vstack,
    "sum_to_size": sum_to_size,
    "triplet_margin_loss": triplet_margin_loss,
    "vsplit": _split(0, 0),
    "vstack": vstack,
}
# Torch has no meta kernels for these.
UNTRIED = frozenset({"combinations", "repeat_interleave"})
