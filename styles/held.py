"""The tensors that modules hold, and their successors on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as NoTF
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dtensor.errors import ShardingError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement
from dtensor.serialization import attributes_of
from dtensor.tensor import DTensor, distribute_tensor

# Hooks that compute a weight before each call and keep it where no table lists it.
_COMPUTED = {
    WeightNorm: "torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove(module, name) first",
}


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in the place where a module holds it."""

    owner: nn.Module
    table: str
    name: str
    full: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Hold another one in its place."""
        if isinstance(self.tensor, nn.Parameter) and tensor is not self.tensor:
            self.tensor._dtensor_replaced = True  # type: ignore[attr-defined]
        getattr(self.owner, self.table)[self.name] = tensor
        refresh_weights(self.owner)


def held_in(module: nn.Module) -> list[Held]:
    """All parameters and buffers of a module, each place of a tied one by itself."""
    return [
        Held(owner, table, name, f"{path}.{name}" if path else name, tensor)
        for path, owner in module.named_modules()
        for table in ("_parameters", "_buffers")
        for name, tensor in getattr(owner, table).items()
        if tensor is not None
    ]


def parametrizations_of(module: nn.Module) -> list[nn.Module]:
    """The modules whose tensors a module's own call uses, without calling them.

    They hold what its parametrized weights are computed from; ``nn.MultiheadAttention``
    reads the weights of its output projection, too.
    """
    found: list[nn.Module] = []
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.Module)
        found += module.parametrizations.modules()
    if isinstance(module, nn.MultiheadAttention):
        found.append(module.out_proj)
    return found


def refresh_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the table."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [
            getattr(module, name, None) for name in module._flat_weights_names
        ]


def laid_out(
    what: str,
    full: str,
    old: Tensor,
    mesh: DeviceMesh,
    places: Sequence[Placement],
    src: int | None,
) -> Tensor:
    """The successor of a plain tensor: frozen as it is, with its gradient and hooks.

    Args:
        what: The caller's name, for messages.
        full: The tensor's name.
        old: The tensor; it is left as it is.
        mesh: The mesh.
        places: One placement per axis.
        src: As ``src_data_rank``.
    """
    try:
        new = distribute_tensor(old, mesh, places, src_data_rank=src)
        if old.grad is not None:
            new.grad = distribute_tensor(old.grad, mesh, places, src_data_rank=src)
    except ShardingError as error:
        raise ShardingError(f"{what}: {full!r}: {error}") from error
    for name, value in old.__dict__.items():  # marks that a user has put on it
        new.__dict__.setdefault(name, value)
    for hook in _hooks(old, "_backward_hooks"):
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in _hooks(old, "_post_accumulate_grad_hooks"):
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return new


def _hooks(x: Tensor, table: str) -> list[Any]:
    with NoTF():
        return list((getattr(x, table) or {}).values())


def check_no_hooks(what: str, full: str, x: DTensor) -> None:
    """Refuse to replace a DTensor whose hooks could not go over to another layout."""
    with NoTF():
        users = len(_hooks(x, "_backward_hooks")) - int("_leaf_number" in x.__dict__)
    if users or x.__dict__.get("_user_post_hooks"):
        raise ValueError(
            f"{what}: {full!r} is laid out already and has hooks on its gradient, got "
            f"a style that lays it out anew. Register the hooks after the last call."
        )


def check_weights(what: str, module: nn.Module) -> None:
    """Refuse weights that a hook computes from parameters before each call.

    Raises:
        ValueError: The old ``weight_norm`` and ``spectral_norm``, or pruning.
    """
    for path, owner in module.named_modules():
        for hook in owner._forward_pre_hooks.values():
            for kind, instead in _COMPUTED.items():
                if isinstance(hook, kind):
                    shown = path or type(owner).__name__
                    raise ValueError(
                        f"{what}: {shown!r} computes a weight in a hook "
                        f"({type(hook).__name__}), got a tensor that no table lists, "
                        f"expected parameters. Use {instead}."
                    )


def lazy_names(held: Sequence[Held]) -> Iterator[str]:
    """Names of parameters that have no shape yet."""
    for one in held:
        if nn.parameter.is_lazy(one.tensor):
            yield one.full


@torch.no_grad()
def moved(what: str, full: str, old: DTensor, places: Sequence[Placement]) -> Tensor:
    """The successor of a DTensor in other placements; ``old`` itself if they are its."""
    if tuple(places) == old.placements:
        return old
    check_no_hooks(what, full, old)
    new = old.redistribute(places).detach().clone()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        new.requires_grad_(old.requires_grad)
    for name, value in attributes_of(old).items():
        new.__dict__.setdefault(name, value)
    if old.grad is not None:
        assert isinstance(old.grad, DTensor), "the gradient of a DTensor is one"
        new.grad = old.grad.redistribute(places).clone()
    return new


def refuse_replaced(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Before a step: an optimizer that was made too early would train nothing."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    lost = [p for p in held if p.grad is None and hasattr(p, "_dtensor_replaced")]
    if lost:
        raise ValueError(
            f"{type(optimizer).__name__}.step: holds parameters that were replaced when "
            f"their module was laid out, got {len(lost)} of {len(held)}, expected those "
            "of the module as it is now. Make the optimizer after parallelize_module."
        )


register_optimizer_step_pre_hook(refuse_replaced)
