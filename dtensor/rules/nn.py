"""Ops of neural networks: embedding and attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dtensor.calls import Call, Operand
from dtensor.errors import ShardingError
from dtensor.notation import Letters, Notation
from dtensor.redistribute import plain
from dtensor.rules.pointwise import broadcast_letters, whole_ones
from dtensor.spec import Spec


def embedding(call: Call) -> Notation:
    """``embedding(weight, indices)``: cut by width, by index, or by vocabulary.

    Sharded by vocabulary, each rank looks up the rows it has and puts zeros for the
    others: addends.
    """
    weight, indices = call.operands[:2]
    lead: Letters = tuple(range(indices.ndim))
    padding = call.arg(2, "padding_idx", -1)
    sparse = bool(call.arg(4, "sparse", False))
    scale = bool(call.arg(3, "scale_grad_by_freq", False))

    def run(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
        spec = ins[0]
        offset, rows = spec.block(0)
        if sparse:
            return dense_only
        if rows == spec.shape[0]:
            return lambda func, args, kwargs: func(*args, **kwargs)

        def masked(func: Any, args: Any, kwargs: Any) -> Any:
            weight, indices = plain(args[0]), plain(args[1])
            check_range(indices, spec.shape[0])
            local = indices - offset
            missing = (local < 0) | (local >= rows)
            if rows == 0:
                weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
            pad = padding - offset if 0 <= padding - offset < rows else -1
            found = torch.embedding(weight, local.masked_fill(missing, 0), pad)
            return found.masked_fill(missing.unsqueeze(-1), 0)

        return masked

    gathers = sparse or scale or weight.dtype == torch.bool
    whole: set[Hashable] = {"v"} if gathers else set()
    if scale:
        whole |= set(lead)
    return Notation(
        [("v", "w"), lead],
        [(*lead, "w")],
        whole=whole,
        contracted={"v"},
        linear=[{0}],
        run=run,
    )


def dense_only(func: Any, args: Any, kwargs: Any) -> Any:
    """A sparse gradient is no shard: it cannot be reduced, cut or stepped by."""
    if plain(args[0]).requires_grad and torch.is_grad_enabled():
        raise ShardingError(
            "embedding: a DTensor has no sparse gradient, got sparse=True and a weight "
            "that requires grad. Give sparse=False, and an optimizer of dense "
            "gradients: Adam in place of SparseAdam."
        )
    return func(*args, **kwargs)


def check_range(indices: torch.Tensor, rows: int) -> None:
    """An index outside the vocabulary is an error, not a row of zeros."""
    if indices.is_meta or indices.numel() == 0:
        return
    bad = (indices < 0) | (indices >= rows)
    if indices.is_cuda:
        torch._assert_async(~bad.any())
    elif bool(bad.any()):
        raise IndexError(
            f"embedding: index out of range, got {int(indices[bad][0])}, expected 0 to "
            f"{rows - 1} (the rows of the whole table)."
        )


def attention(call: Call) -> Notation:
    """``scaled_dot_product_attention``: batch, heads and (not causal) queries free."""
    q, k, v = call.operands[:3]
    mask = call.operands[3] if len(call.operands) > 3 else None
    whole: set[Hashable] = {"s", "e"}
    if call.arg(5, "is_causal", False):
        whole.add("l")
    grouped = bool(call.kwargs.get("enable_gqa", False)) and q.ndim > 2
    heads = ("h",) if grouped and q.shape[-3] != k.shape[-3] else ()
    batches = [o.shape[: max(0, o.ndim - 2 - len(heads))] for o in call.operands]
    subs, batch, _ = broadcast_letters(batches, call.name)
    whole |= whole_ones(subs)
    if heads and not shares_heads(q, k, v):
        whole.add("h")
    ins: list[Letters] = [
        (*subs[0], *heads, "l", "e"),
        (*subs[1], *heads, "s", "e"),
        (*subs[2], *heads, "s", "f"),
    ]
    if mask is not None:
        tail: list[Hashable] = []
        shape = mask.shape[len(batches[3]) :]
        for d, n in enumerate(shape):
            letter = (*heads, "l", "s")[d - len(shape)]
            stretched = n == 1 and (q.shape[-2] != 1 or letter != "l")
            tail.append(("one", "mask", d) if stretched else letter)
        whole |= {x for x in tail if isinstance(x, tuple)}
        ins.append((*subs[3], *tail))
    return Notation(
        ins,
        [(*batch, *heads, "l", "f")],
        whole=whole,
        linear=[{2}],
        run=attend_to_nothing,
    )


def attend_to_nothing(ins: list[Spec], outs: list[Spec]) -> Callable[..., Any]:
    """On a shard without elements torch's attention forgets that it had a mask.

    Then this rank would not run the collectives of the mask's backward, and the other
    ranks would wait for it. Exact zeros tie all operands to the result; they are
    differentiable, so second derivatives are tied as well.
    """

    def tied(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if out.requires_grad:
            for x in (*args, *kwargs.values()):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    out = out + plain(x).reshape(-1)[:0].sum().to(out.dtype)
        return out

    if all(s.local_shape.numel() for s in (*ins, *outs)):
        return lambda func, args, kwargs: func(*args, **kwargs)
    return tied


def shares_heads(q: Operand, k: Operand, v: Operand) -> bool:
    """Whether a cut of the heads gives every rank its own queries' keys and values."""
    parts = 1
    for axis, n in enumerate(q.spec.mesh.shape):
        if any(o.placements[axis].is_shard(o.ndim - 3) for o in (q, k, v)):
            parts *= n
    return k.shape[-3] % parts == 0 and q.shape[-3] % parts == 0
