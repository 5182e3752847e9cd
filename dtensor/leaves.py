"""Leaves: what they received in a backward is brought to their own placements.

The cotangent of a replicated leaf is a sum over the ranks. A hook on the leaf sets an
older ``.grad`` aside and notes the leaf in the ``Bucket`` of the running backward; at its
end the bucket reduces all of them, one collective per axis and dtype, and adds the older
gradients back. A bucket whose backward failed is dropped by the engine and puts the older
gradients back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives import functional
from dtensor.placement import Partial, Replicate
from dtensor.redistribute import Mask, plain, transition
from dtensor.registry import handles
from dtensor.spec import Spec, communicator_in
from dtensor.tensor import DTensor, typed

T = torch.Tensor


RAW: Any = torch.Tensor


_SYNC: ContextVar[bool] = ContextVar("dtensor_grad_sync", default=True)


_ENGINE: Any = torch.autograd.Variable._execution_engine


@contextlib.contextmanager
def no_grad_sync() -> Iterator[None]:
    """Leave the gradients of replicated leaves Partial while micro-batches add up.

    Backward passes inside add this rank's addends to ``.grad`` (which then reads as
    Partial) and reduce nothing; the first backward outside reduces the whole sum. Leaves
    placed ``Partial("avg")`` are reduced each time: their addends have no placement.

    Example:
        >>> with no_grad_sync():
        ...     pass  # loss(batch).backward() for all micro-batches but the last
    """
    token = _SYNC.set(False)
    try:
        yield
    finally:
        _SYNC.reset(token)


def settle(grads: Sequence[T], specs: Sequence[Spec]) -> list[T]:
    """Bring local cotangents of tensors to the placements of the tensors.

    All that must be summed over one axis goes in one all-reduce per dtype. The
    result is differentiable where the cotangents are.

    Args:
        grads: Local cotangents, each in the dual of its spec.
        specs: Specs of the tensors they belong to.

    Returns:
        Local shards in the placements of ``specs``.
    """
    # Gradients known to be zero may come as ZeroTensors, which have no memory.
    out = [plain(g).clone() if g._is_zerotensor() else plain(g) for g in grads]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (g, spec) in enumerate(zip(out, specs, strict=True)):
        if spec.coordinate is None:
            continue
        for axis, p in enumerate(spec.placements):
            if isinstance(p, Replicate) and spec.mesh.shape[axis] > 1:
                row = spec.mesh.axis_ranks(axis)
                key = (row, spec.mesh.axis_name(axis), g.dtype, g.device)
                groups.setdefault(key, []).append(i)
            elif p == Partial():
                out[i] = Mask.apply(out[i], spec.coordinate[axis] == 0)  # type: ignore[no-untyped-call]
            elif p == Partial("avg"):
                out[i] = out[i] * spec.mesh.shape[axis]
    for (_, name, *_), members in groups.items():
        spec = specs[members[0]]
        axis = spec.mesh.axis(name) if spec.mesh.mesh_dim_names else int(name)
        comm = communicator_in(spec.world, spec.mesh, axis)
        if len(members) == 1:
            i = members[0]
            out[i] = unviewed(functional.all_reduce(out[i], comm))
            continue
        flat = functional.all_reduce(
            torch.cat([out[i].reshape(-1) for i in members]), comm
        )
        pieces = torch.split(flat, [out[i].numel() for i in members])
        for i, piece in zip(members, pieces, strict=True):
            out[i] = unviewed(piece, out[i].shape)
    return out


def unviewed(fresh: T, shape: Sequence[int] | None = None) -> T:
    """A fresh tensor, no view to autograd: ``p.grad.detach_()`` is legal."""
    shape = fresh.shape if shape is None else shape
    return torch.ops.aten._unsafe_view(fresh, shape)  # type: ignore[no-any-return]


class Bucket:
    """The leaves that one backward pass has reached.

    Only the engine's callback holds it: when the pass fails, the engine drops the
    callback and ``__del__`` puts the gradients that were set aside back.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.leaves: dict[int, tuple[DTensor, T | None]] = {}
        self.done = False

    def add(self, leaf: DTensor) -> None:
        """Set the leaf's older gradient aside; what comes now is unreduced."""
        with NoTF():
            old = RAW.grad.__get__(leaf)
            if old is not None and leaf._grad_is_dual:
                old = None  # unreduced as well: let the engine add to it
            elif old is not None:
                RAW.grad.__set__(leaf, None)
        leaf._grad_is_dual = True
        self.leaves[leaf._leaf_number] = (leaf, old)  # type: ignore[attr-defined]

    def flush(self) -> None:
        """Reduce, add the older gradients back, run the users' hooks."""
        self.done = True
        ordered = [self.leaves[n] for n in sorted(self.leaves)]
        self.leaves = {}
        fresh: list[T] = []
        reached = []
        with NoTF():
            for leaf, old in ordered:
                g = RAW.grad.__get__(leaf)
                leaf._grad_is_dual = False
                leaf._in_bucket = None  # type: ignore[attr-defined]
                if g is None:  # the leaf got no gradient after all
                    RAW.grad.__set__(leaf, old)
                    continue
                fresh.append(g)
                reached.append((leaf, old))
            with torch.set_grad_enabled(any(g.requires_grad for g in fresh)):
                reduced = settle(fresh, [leaf._spec for leaf, _ in reached])
                for (leaf, old), g in zip(reached, reduced, strict=True):
                    if old is not None:
                        if isinstance(old, DTensor) and old._spec is not leaf._spec:
                            old = transition(old._spec, leaf._spec)(old)
                        if g.requires_grad or old.requires_grad:
                            g = plain(old) + g
                        else:
                            g = old.add_(g)
                    RAW.grad.__set__(leaf, g)
        for leaf, _ in reached:
            for hook in list(leaf.__dict__.get("_user_post_hooks", {}).values()):
                hook(leaf)

    def __del__(self) -> None:
        if not self.done:
            for leaf, old in self.leaves.values():
                leaf._grad_is_dual = False
                leaf._in_bucket = None  # type: ignore[attr-defined]
                with NoTF():
                    RAW.grad.__set__(leaf, old)


# Buckets of running backward passes, by the engine's number of the pass.
_BUCKETS: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()


def _is_settled(spec: Spec) -> bool:
    """Whether a leaf's cotangent lies as the leaf does, with nothing to reduce."""
    found = spec.memo.get("settled")
    if found is None:
        found = spec.memo["settled"] = all(
            p.is_cut() or n == 1
            for p, n in zip(spec.placements, spec.mesh.shape, strict=True)
        )
    return bool(found)


def watch_leaf(leaf: DTensor) -> None:
    """Attach the hook that brings this leaf's gradients to its placements."""
    state = leaf.__dict__
    if "_leaf_number" in state:
        return
    leaf._spec.dual()  # refuses what has no gradient of its own
    if _is_settled(leaf._spec):  # what it receives lies as it does
        return
    memo = leaf._spec.world.memo
    state["_leaf_number"] = memo["leaves"] = memo.get("leaves", 0) + 1
    state["_in_bucket"] = None
    ref = weakref.ref(leaf)

    def reached(grad: T) -> None:
        leaf = ref()
        if leaf is None or leaf.__dict__.get("_capturing"):
            return
        if not _SYNC.get() and Partial("avg") not in leaf._spec.placements:
            _make_dual(leaf)
            return
        task = torch._C._current_graph_task_id()
        held = leaf.__dict__["_in_bucket"]
        if held is not None and held() is not None:
            return  # an outer pass (reentrant checkpoint) reduces it at its end
        bucket = _BUCKETS.get(task)
        if bucket is None:
            bucket = _BUCKETS[task] = Bucket(task)
            _ENGINE.queue_callback(bucket.flush)
        bucket.add(leaf)
        leaf.__dict__["_in_bucket"] = weakref.ref(bucket)

    with NoTF():
        RAW.register_hook(leaf, reached)


def _make_dual(leaf: DTensor) -> None:
    """Turn a reduced ``.grad`` into addends, so that unreduced ones can be added."""
    if leaf._grad_is_dual:
        return
    spec = leaf._spec
    dual = spec.dual()
    with NoTF(), torch.no_grad():
        old = RAW.grad.__get__(leaf)
        if old is not None and not (isinstance(old, DTensor) and old._spec is dual):
            source = old._spec if isinstance(old, DTensor) else spec
            RAW.grad.__set__(leaf, typed(transition(source, dual)(old), dual))
    leaf._grad_is_dual = True


@handles(T.requires_grad_)
def _requires_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if (*args[1:], *kwargs.values(), True)[0]:
        args[0]._spec.dual()  # refuses what has no gradient of its own
    with NoTF():
        func(*args, **kwargs)
    x = args[0]
    _watch_if_leaf(x)
    return x


@handles(RAW.requires_grad.__set__)
def _set_requires_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if args[1] and isinstance(args[0], DTensor):
        args[0]._spec.dual()  # refuses what has no gradient of its own
    with NoTF():
        func(*args, **kwargs)
    _watch_if_leaf(args[0])


def _watch_if_leaf(x: Any) -> None:
    if isinstance(x, DTensor) and plain_requires_grad(x):
        with NoTF():
            leaf = RAW.is_leaf.__get__(x)
        if leaf:
            watch_leaf(x)


def plain_requires_grad(x: T) -> bool:
    """``requires_grad`` without a dispatch."""
    with NoTF():
        return RAW.requires_grad.__get__(x)  # type: ignore[no-any-return]
