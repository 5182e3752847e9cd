"""``loss_parallel``: the scope in which logits cut over the classes stay cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_INSISTS: ContextVar[bool] = ContextVar("dtensor_loss_parallel", default=False)


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Insist that no loss gathers logits that are cut over the classes.

    ``cross_entropy`` and ``nll_loss`` of logits in ``Shard`` over the classes never
    gather them, inside of the scope or outside. It is there so that programs written
    for PyTorch run as they are, and it turns into an error what is left: logits cut over
    the classes by a placement of one's own. It may be nested, and an exception leaves it
    as a return does. A backward need not run inside.

    Example:
        >>> from dtensor import Shard, distribute_tensor, init_device_mesh, simulate
        >>> import torch
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> def program():
        ...     logits = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
        ...     with loss_parallel():
        ...         loss = torch.nn.functional.cross_entropy(logits, torch.arange(3))
        ...     return round(loss.item(), 4)
        >>> simulate(program, ranks=2)
        [1.3863, 1.3863]
    """
    token = _INSISTS.set(True)
    try:
        yield
    finally:
        _INSISTS.reset(token)


def insists() -> bool:
    """Whether the caller is inside of ``loss_parallel``."""
    return _INSISTS.get()


__all__ = ["insists", "loss_parallel"]
