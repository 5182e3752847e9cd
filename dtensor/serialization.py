"""Copies, files and loads of DTensors.

A copy or a pickle is the shard, the mesh, the placements and the global shape; specs
are interned anew where it is made. Each rank writes and reads a file of its own. What
belongs to one object alone (its leaf hook, the users' hooks on it) stays behind, and a
leaf is watched anew. As with torch, a deep copy keeps ``.grad``, a pickle does not.

A module's state loads from DTensors, or from whole plain tensors, which are cut.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor import boundary
from dtensor.block_cyclic import BlockCyclic
from dtensor.dispatch import planned
from dtensor.errors import ShardingError
from dtensor.leaves import watch_leaf
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placements, Replicate, Shard
from dtensor.ragged import RaggedShard
from dtensor.registry import Handler, handles
from dtensor.rules.table import rule_of
from dtensor.sections import Sections
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor, typed

T = torch.Tensor

# What describes one object and is never copied.
OWN = frozenset(
    """
    _spec _leaf_number _in_bucket _capturing _user_post_hooks _post_runner
    _grad_is_dual _moved_view _link
    """.split()
)


def attributes_of(x: DTensor) -> dict[str, Any]:
    """Attributes that a user (or ``nn.Parameter``) has put on a DTensor."""
    return {k: v for k, v in x.__dict__.items() if k not in OWN}


def revived(
    local: T, spec: Spec, needs_grad: bool, attributes: dict[str, Any]
) -> DTensor:
    """A DTensor on a fresh shard, watched as a leaf where it requires grad."""
    out = typed(local, spec)
    out.__dict__.update(attributes)
    if needs_grad:
        with NoTF():
            T.requires_grad_(out, True)
        watch_leaf(out)
    return out


# ---- deepcopy --------------------------------------------------------------------------
@handles(T.__deepcopy__)
def _deepcopy(func: Any, args: Any, kwargs: dict[str, Any]) -> DTensor:
    x, memo = args
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    with NoTF():
        if not T.is_leaf.__get__(x):  # type: ignore[attr-defined]
            raise RuntimeError(
                "deepcopy: only leaves of autograd can be copied, got a result of an "
                f"op, {x!r}. Call x.detach() first."
            )
        shard = T.detach(x)
        local = T.__deepcopy__(shard, memo)  # type: ignore[no-untyped-call]
        # torch noted the alias, whose id may name another object in a moment.
        memo.pop(id(shard), None)
        needs = T.requires_grad.__get__(x)  # type: ignore[attr-defined]
    out = revived(local, x._spec, needs, {})
    memo[id(x)] = out
    out.__dict__.update(copy.deepcopy(attributes_of(x), memo))
    grad = x.grad
    if grad is not None:
        out.grad = copy.deepcopy(grad, memo)
        out._grad_is_dual = x._grad_is_dual
    return out


# ---- pickle ----------------------------------------------------------------------------
def rebuild(
    local: T,
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    needs_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    """Make a DTensor of what ``pickle`` or ``torch.load`` read.

    Args:
        local: The shard.
        mesh: The mesh.
        placements: One per mesh axis.
        shape: Global shape in elements.
        coordinate: Where in the mesh the rank was that wrote it.
        needs_grad: Whether it requires grad.
        attributes: The users' attributes.

    Raises:
        ShardingError: The rank that reads holds another shard than was written.
    """
    spec = spec_of(mesh, placements, shape)
    now = spec.coordinate
    same = (now is None) == (coordinate is None)
    for axis, p in enumerate(placements):
        if same and now is not None and coordinate is not None:
            same = p.is_replicate() or now[axis] == coordinate[axis]
    if not same:
        raise ShardingError(
            f"load: this is the shard of another rank, written at coordinate "
            f"{coordinate} of {mesh!r}, read at {now}. Let each rank write and read a "
            "file of its own, or save x.full_tensor() and load that."
        )
    return revived(local, spec, needs_grad, attributes)


@handles(T.__reduce_ex__)
def _reduce(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    x = args[0]
    spec = x._spec
    with NoTF():
        local = T.detach(x)
        needs = T.requires_grad.__get__(x)  # type: ignore[attr-defined]
    return rebuild, (
        local,
        spec.mesh,
        spec.placements,
        tuple(spec.shape),
        spec.coordinate,
        needs,
        attributes_of(x),
    )


def safe_globals() -> list[Any]:
    """What ``torch.load(weights_only=True)`` meets in a file with DTensors."""
    mesh = DeviceMesh("cpu", [0])
    found = [rebuild, DeviceMesh, Shard, Replicate, Partial]
    found += [BlockCyclic, RaggedShard, Sections]
    maker = mesh.__reduce__()[0]
    if callable(maker) and maker not in found:
        found.append(maker)
    return found


# ---- loading whole values ----------------------------------------------------------------
def loading(copy_: Handler) -> Handler:
    """``copy_``: from a whole plain tensor, each rank takes its own shard.

    The source has the global shape and needs no gradient, as in ``load_state_dict``;
    all else goes to the rule, which refuses plain sources.
    """

    def handler(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target, source, *rest = args if len(args) > 1 else (*args, kwargs.get("src"))
        whole = (
            isinstance(target, DTensor)
            and type(source) in (T, torch.nn.Parameter)
            and source.shape == target._spec.shape
            and not (source.requires_grad and torch.is_grad_enabled())
        )
        if whole:
            spec = target._spec
            with torch.no_grad(), NoTF():
                shard = boundary.scatter(T.detach(source), spec, None)
            source = typed(shard, spec)
            return copy_(
                func,
                (target, source, *rest),
                {k: v for k, v in kwargs.items() if k != "src"},
            )
        return copy_(func, args, kwargs)

    return handler


def install() -> None:
    """Register the handlers that stand around rules, and torch's safe globals."""
    op = rule_of("copy", True)
    assert op is not None, "copy has a rule"
    handles(T.copy_)(loading(planned(op)))
    torch.serialization.add_safe_globals(safe_globals())
