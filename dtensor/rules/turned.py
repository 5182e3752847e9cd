"""Views made in place: ``t_``, ``transpose_``, ``squeeze_``, ``unsqueeze_``.

The shard is turned where it is and the DTensor gets the layout that the view has. What
would have to move for it is refused, as are tensors that others know by their layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.errors import ShardingError
from dtensor.planning import Op, make_plan
from dtensor.registry import Handler
from dtensor.tensor import DTensor

TURNS = frozenset("t transpose swapaxes swapdims squeeze unsqueeze".split())


def turned(op: Op) -> Handler:
    """The handler of the in-place form of a view op.

    Args:
        op: The out-of-place op.
    """
    view = getattr(torch.Tensor, op.name)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        plan = make_plan(op, view, args, kwargs)
        if plan.moves:
            raise ShardingError(
                f"{op.name}_: in place, nothing can be moved, got {plan.text} on "
                f"{x._spec.mesh!r}. Use the out-of-place {op.name}, or redistribute "
                "first: x = x.redistribute(...)."
            )
        if x._moved_view or hasattr(x, "_link"):  # a MovedView
            raise ShardingError(
                f"{op.name}_: a view that was made by redistributing its base cannot be "
                f"turned in place, got {x!r}. Use the out-of-place {op.name}."
            )
        if x.is_leaf and x.requires_grad:
            raise RuntimeError(
                f"{op.name}_: a leaf that requires grad cannot be written in place, got "
                f"{x!r}. Use the out-of-place {op.name}."
            )
        with NoTF():
            if x._spec.coordinate is None:
                shape = plan.out.local_shape
                with torch.no_grad():  # not what interop has put in its place
                    torch._C.TensorBase.set_(
                        x, x.untyped_storage(), 0, shape, [1] * len(shape)
                    )
            elif plan.run is not None:
                plan.run(func, args, kwargs)
            else:
                func(*args, **kwargs)
        assert isinstance(x, DTensor), "only DTensors come here"
        x._spec = plan.out
        return x

    return handler


__all__ = ["TURNS", "turned"]
