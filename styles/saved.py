"""What autograd saves while a unit is open, and what the units of a rank share.

A tensor that lies in a gathered buffer is noted by its place there, and found again in
a buffer that backward has gathered. So nothing that autograd holds keeps whole
parameters alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtensor.mesh.world import World

if TYPE_CHECKING:
    from dtensor.styles.unit import Unit

T = torch.Tensor
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks

# What tells whether a shard is still what it was: its version and its memory.
Marks = tuple[tuple[int, int], ...]


class Saved(NamedTuple):
    """A tensor that autograd saved, as its place in a gathered buffer."""

    unit: Unit
    marks: Marks
    group: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class State:
    """What the units of one rank share while a model runs."""

    def __init__(self) -> None:
        # Buffers of running forwards, by storage.
        self.buffers: dict[int, tuple[Unit, Marks, int]] = {}
        self.depth = 0
        self.plain = False  # whether the activations of the running model are plain
        self.last: Any = None
        self.early: list[Any] = []  # units that were gathered early


def state_of(world: World) -> State:
    """The state of a rank."""
    found = world.memo.get("units")
    if found is None:
        found = world.memo.setdefault("units", State())
    return found  # type: ignore[no-any-return]


def saving(state: State) -> Any:
    """Hooks that keep the place of what lies in a gathered buffer, the rest as it is.

    What is not ours goes to the hooks that were there before (those of
    ``torch.utils.checkpoint``, say), or is kept with its version, which torch does not
    compare where there are hooks.
    """
    outer = _top_hooks(True)

    def pack(x: T) -> Any:
        if x.layout is torch.strided and not (x.is_conj() or x.is_neg()):
            found = state.buffers.get(x.untyped_storage()._cdata)
            if found is not None:
                unit, marks, group = found
                size, stride = tuple(x.shape), x.stride()
                offset = int(x.storage_offset())
                return Saved(unit, marks, group, offset, size, stride, x.dtype)
        if outer is not None:
            return outer[0](x)
        kept = x.detach()
        return kept, kept._version

    def unpack(packed: Any) -> T:
        if type(packed) is Saved:
            with torch.no_grad():
                return packed.unit.again(packed)
        if outer is not None:
            return outer[1](packed)  # type: ignore[no-any-return]
        kept, version = packed
        if kept._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: a tensor of shape "
                f"{tuple(kept.shape)} is at version {kept._version}; expected version "
                f"{version} instead. Clone it before it is written."
            )
        return kept  # type: ignore[no-any-return]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def drop_early(state: State) -> None:
    """Let go of what was gathered early and then not asked for."""
    early, state.early = state.early, []
    for ref in early:
        unit = ref()
        if unit is not None and not unit.visits and not unit.ends and unit.reshard:
            unit.live = None
