"""What a module without a style gets in a model whose activations are plain.

Its parameters are DTensors all the same; while the module runs on plain tensors,
``Bridge`` lends it this rank's copies. It is a module hook, so the module's class,
forward and signature stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.styles.crossing import BRIDGE, PIECE, around_of
from dtensor.styles.held import parametrizations_of, refresh_weights
from dtensor.tensor import DTensor

Lent = list[tuple[dict[str, Any], str, Any, Any]]


class Bridge:
    """Lends a module its replicated parameters as plain tensors.

    While the module runs on plain tensors only, its parameters and buffers are this
    rank's copies; their gradients go the way of ``to_local``. A call that gets a
    DTensor is left alone.

    Args:
        name: What messages call the module.
        mesh: The mesh its parameters lie on.
    """

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.name = name
        self.mesh = mesh
        self.warned = False
        self._lent: list[Lent] = []
        self._handles: list[Any] = []

    def install(self, module: nn.Module) -> None:
        """Put the hooks on, last among the pre-hooks and first among the hooks."""
        module.__dict__[BRIDGE] = self
        self._handles = [
            module.register_forward_pre_hook(self.lend, with_kwargs=True),
            module.register_forward_hook(
                self.take_back, prepend=True, always_call=True
            ),
        ]

    def remove(self, module: nn.Module) -> None:
        """Take the hooks off: the module has got a style."""
        for handle in self._handles:
            handle.remove()
        del module.__dict__[BRIDGE]

    def lend(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Pre-hook: plain tensors in the place of DTensors."""
        lent: Lent = []
        self._lent.append(lent)
        given = list(_tensors((args, kwargs)))
        if any(isinstance(x, DTensor) for x in given):
            return
        around = around_of(module)
        grads = [
            Partial() if isinstance(around.get(axis), Shard) else Replicate()
            for axis in range(self.mesh.ndim)
        ]
        tables = [
            table
            for inner in (module, *parametrizations_of(module))
            for table in (inner._parameters, inner._buffers)
        ]
        for table in tables:
            for name, held in table.items():
                if isinstance(held, DTensor) and held.device_mesh is self.mesh:
                    whole = held
                    if not all(p.is_replicate() for p in held.placements):
                        whole = held.redistribute([Replicate()] * self.mesh.ndim)
                    plain = whole.to_local(grad_placements=grads)
                    lent.append((table, name, held, plain))
        for table, name, _, plain in lent:
            table[name] = plain
        refresh_weights(module)
        if not self.warned and any(plain.requires_grad for *_, plain in lent):
            self._warn_of_pieces(given)

    def _warn_of_pieces(self, given: list[Tensor]) -> None:
        """A piece that a style has just handed out is not alike on the ranks."""
        for x in given:
            piece = x.__dict__.get(PIECE)
            if piece is not None:
                self.warned = True
                warnings.warn(
                    f"{self.name}: runs on a plain piece of a tensor ({piece}) but has "
                    f"no style, so it takes the piece for a copy and its parameters "
                    f"would get the gradient of one piece. Give it a style, for example "
                    f"SequenceParallel(sequence_dim=...) with the dim that is split.",
                    stacklevel=2,
                )
                return

    def take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the DTensors again; runs after a failure too."""
        if not self._lent:  # an earlier pre-hook failed before ours ran
            return
        for table, name, held, plain in self._lent.pop():
            now = table.get(name)
            if now is plain:
                table[name] = held
            elif isinstance(now, Tensor) and not isinstance(now, DTensor):
                # The module has put another value there, as running statistics do.
                whole = [Replicate()] * self.mesh.ndim
                table[name] = DTensor.from_local(
                    now.detach(), self.mesh, whole, run_check=False
                )
        refresh_weights(module)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": []}


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments, inside lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
