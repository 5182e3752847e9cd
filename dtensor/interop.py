"""What goes around ``__torch_function__``, or leaves the world of DTensors."""

from __future__ import annotations

from typing import Any, Callable

import torch

from dtensor import serialization
from dtensor.custom_function import dtensor_apply, plain_saved_tensors

# All that is replaced in torch: (owner, name, what makes the wrapper).
WRAPPED: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.autograd.Function, "apply", dtensor_apply),
    (torch.autograd.graph.saved_tensors_hooks, "__init__", plain_saved_tensors),
)


def install() -> None:
    """Wrap the entry points of ``WRAPPED``; a second call does nothing."""
    serialization.install()
    for owner, name, make in WRAPPED:
        original = vars(owner)[name]
        original = getattr(original, "__func__", original)
        if getattr(original, "_by_dtensor", False):
            continue
        wrapper = make(original)
        getattr(wrapper, "__func__", wrapper)._by_dtensor = True
        setattr(owner, name, wrapper)
