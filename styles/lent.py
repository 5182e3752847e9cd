"""What a unit holds, and what is put in the place of it while it is open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.placement import Replicate
from dtensor.styles.held import refresh_weights
from dtensor.tensor import DTensor

T = torch.Tensor
RAW: Any = torch.Tensor


class Slot:
    """One tensor of a unit, and all places where modules hold it.

    Args:
        full: Its name.
        places: (module, name of the table, name there).
        dim: The dim that the unit's axes cut; None for what it does not gather.
        dynamic: Whether it is plain in a model whose activations are plain: no style
            sees to that.
    """

    def __init__(
        self,
        full: str,
        places: list[tuple[nn.Module, str, str]],
        dim: int | None,
        dynamic: bool,
    ) -> None:
        self.full, self.places = full, places
        self.dim, self.dynamic = dim, dynamic

    @property
    def sharded(self) -> bool:
        """Whether the unit gathers it."""
        return self.dim is not None

    def tensor(self) -> Any:
        """What the module holds now."""
        module, table, name = self.places[0]
        return getattr(module, table).get(name)


class Visit:
    """One opening of a unit: what was put where, and the sharded tensors."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        self.lent: list[tuple[nn.Module, str, str, Any, Any]] = []
        self.storages: list[int] = []
        self.hooks: Any = None

    def put(self, slot: Slot, new: Any) -> None:
        """Hold ``new`` in all places of a slot."""
        for module, table, name in slot.places:
            held = getattr(module, table)
            self.lent.append((module, table, name, held.get(name), new))
            held[name] = new
            refresh_weights(module)

    def take_back(self) -> None:
        """The tensors that were there before."""
        for module, table, name, old, new in reversed(self.lent):
            held = getattr(module, table)
            now = held.get(name)
            if now is new:
                held[name] = old
            elif type(now) is T and isinstance(old, DTensor):
                # The module has put another value there, as running statistics do.
                whole = [Replicate()] * old.device_mesh.ndim
                held[name] = DTensor.from_local(
                    now.detach(), old.device_mesh, whole, run_check=False
                )
            refresh_weights(module)
        self.lent = []


def tensors_in(value: Any) -> Iterator[T]:
    """All tensors in arguments or results, inside lists, tuples and dicts too."""
    if isinstance(value, T):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """The same value with all floating tensors in ``dtype``."""
    if isinstance(value, T):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[converted(item, dtype) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([converted(item, dtype) for item in value])
    if isinstance(value, dict):
        return {key: converted(item, dtype) for key, item in value.items()}
    return value


def needs_grad(x: Any) -> bool:
    if not isinstance(x, T):
        return False
    with NoTF():
        return RAW.requires_grad.__get__(x)  # type: ignore[no-any-return]
