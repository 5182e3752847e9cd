"""``GradScaler``: whether a gradient is infinite is asked of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.clipping import Rows, check_members, shares_of, whole_number
from dtensor.redistribute import plain
from dtensor.registry import handles
from dtensor.tensor import DTensor


@handles(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale shards in place; one infinite element is for all ranks to know.

    The gradients may lie on several meshes. One all-reduce of a number per axis, over
    the axes of all of them; every rank of them must call.
    """
    grads, found, scale = (*args, *kwargs.values())[:3]
    check_members("GradScaler.unscale_", grads)
    found, scale = plain(found), whole_number(scale)
    with NoTF(), torch.no_grad():
        # A sum of finite addends may overflow: look at the sums as well.
        addends = [g for g in grads if any(p.is_partial() for p in _places(g))]
        if addends:
            func([s.local.clone() for s in shares_of(addends)], found, scale)
        func([plain(g) for g in grads], found, scale)
        rows = Rows(g._spec for g in grads if isinstance(g, DTensor))
        found.copy_(rows.all_reduce(found, "max"))


def _places(x: torch.Tensor) -> tuple[Any, ...]:
    return x._spec.placements if isinstance(x, DTensor) else ()
