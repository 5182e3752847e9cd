"""Gradients of DTensors: seeds, leaves, hooks; the engine itself is torch's.

Backward runs in C++ on the local shards. What is left to do in Python:

* Seed it. A replicated output gets its cotangent on coordinate 0 and zero elsewhere
  (the dual of Replicate is Partial), a Partial one gets it everywhere.
* Reduce what leaves received. The cotangent of a replicated leaf is a sum over the
  ranks. A hook on the leaf sets an older ``.grad`` aside and notes the leaf in the
  ``Bucket`` of the running backward; at its end the bucket reduces all of them, one
  collective per axis and dtype, and adds the older gradients back. A bucket whose
  backward failed is dropped by the engine and puts the older gradients back.
* Give hooks and ``autograd.grad`` typed cotangents.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives import functional
from dtensor.errors import ShardingError
from dtensor.placement import Partial, Replicate, show
from dtensor.redistribute import Mask, alias, plain, transition
from dtensor.registry import handles
from dtensor.spec import Spec, communicator_in
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor
RAW: Any = torch.Tensor
_SYNC: ContextVar[bool] = ContextVar("dtensor_grad_sync", default=True)
_ENGINE: Any = torch.autograd.Variable._execution_engine


@contextlib.contextmanager
def no_grad_sync() -> Iterator[None]:
    """Leave the gradients of replicated leaves Partial while micro-batches add up.

    Backward passes inside add this rank's addends to ``.grad`` (which then reads as
    Partial) and reduce nothing; the first backward outside reduces the whole sum.

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
            out[i] = functional.all_reduce(out[i], comm)
            continue
        flat = functional.all_reduce(
            torch.cat([out[i].reshape(-1) for i in members]), comm
        )
        pieces = torch.split(flat, [out[i].numel() for i in members])
        for i, piece in zip(members, pieces, strict=True):
            out[i] = piece.view(out[i].shape)
    return out


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
            p.is_shard() or n == 1
            for p, n in zip(spec.placements, spec.mesh.shape, strict=True)
        )
    return bool(found)


def watch_leaf(leaf: DTensor) -> None:
    """Attach the hook that brings this leaf's gradients to its placements."""
    state = leaf.__dict__
    if "_leaf_number" in state:
        return
    memo = leaf._spec.world.memo
    state["_leaf_number"] = memo["leaves"] = memo.get("leaves", 0) + 1
    state["_in_bucket"] = None
    ref = weakref.ref(leaf)

    def reached(grad: T) -> None:
        leaf = ref()
        if leaf is None or leaf.__dict__.get("_capturing") or _is_settled(leaf._spec):
            return
        if not _SYNC.get():
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


# ---- backward and grad ---------------------------------------------------------
def _listed(x: Any) -> list[Any]:
    if x is None:
        return []
    return [x] if isinstance(x, T) or not isinstance(x, Iterable) else list(x)


def _seed(out: Any, given: T | None, what: str) -> T | None:
    """The local cotangent to start from, for one output."""
    if not isinstance(out, DTensor):
        return given
    spec = out._spec
    if isinstance(given, DTensor):
        if given._spec.mesh is not spec.mesh or given._spec.shape != spec.shape:
            raise ShardingError(
                f"{what}: the gradient does not fit the tensor, got {given!r}, "
                f"expected shape {tuple(spec.shape)} on {spec.mesh!r}. Make it with "
                "torch.ones_like(x) or distribute_tensor(g, mesh, placements)."
            )
        return _divided(plain(redistributed(given, spec.dual())), spec)
    if given is not None:
        if spec.coordinate is not None and given.shape != spec.local_shape:
            raise ShardingError(
                f"{what}: a plain gradient is this rank's cotangent, got shape "
                f"{tuple(given.shape)}, expected {tuple(spec.local_shape)}. Give a "
                "DTensor: distribute_tensor(g, x.device_mesh, x.placements)."
            )
        return given
    if spec.shape.numel() != 1:
        raise RuntimeError(
            f"{what}: grad can be implicitly created only for scalar outputs, got "
            f"shape {tuple(spec.shape)}. Give the gradient, for example "
            "x.backward(torch.ones_like(x))."
        )
    with torch.no_grad():
        one = torch.ones_like(plain(out)) / average(spec)
        if not lead(spec):
            one.zero_()
        return one


def lead(spec: Spec) -> bool:
    """Whether this rank speaks for its copies: coordinate 0 on replicated axes."""
    at = spec.coordinate or (1,) * spec.mesh.ndim
    return all(
        c == 0 or not p.is_replicate() for c, p in zip(at, spec.placements, strict=True)
    )


def average(spec: Spec) -> int:
    """What a cotangent is divided by: the sizes of the averaging axes."""
    n = 1
    for p, parts in zip(spec.placements, spec.mesh.shape, strict=True):
        n *= parts if p == Partial("avg") else 1
    return n


def _run(outputs: list[Any], seeds: list[Any], *options: Any, **more: Any) -> Any:
    # Torch functions stay on: hooks and users' Functions run in this very thread.
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(seeds), *options, **more
    )


def _prepared(outputs: Any, seeds: Any, what: str) -> tuple[list[Any], list[Any]]:
    outs = _listed(outputs)
    given = _listed(seeds) or [None] * len(outs)
    if len(given) != len(outs):
        raise RuntimeError(
            f"{what}: got {len(outs)} tensors and {len(given)} gradients, expected "
            "one gradient (or None) per tensor."
        )
    keep = [
        i
        for i, o in enumerate(outs)
        if not (isinstance(o, DTensor) and o._spec.coordinate is None)
    ]
    made = []
    for i in keep:
        seed = _seed(outs[i], given[i], what)
        if seed is None and isinstance(outs[i], T) and outs[i].requires_grad:
            if outs[i].numel() != 1:
                raise RuntimeError(
                    f"{what}: grad can be implicitly created only for scalar outputs"
                )
            seed = torch.ones_like(outs[i])
        made.append(seed)
    return [outs[i] for i in keep], made


@handles(torch.autograd.backward)
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = (
        "tensors",
        "grad_tensors",
        "retain_graph",
        "create_graph",
        "grad_variables",
        "inputs",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    create = bool(given.get("create_graph", False))
    retain = given.get("retain_graph")
    inputs = given.get("inputs")
    if inputs is not None and len(_listed(inputs)) == 0:
        raise RuntimeError("backward: `inputs` must not be empty")
    outs, seeds = _prepared(given["tensors"], given.get("grad_tensors"), "backward")
    if outs:
        _run(
            outs,
            seeds,
            create if retain is None else retain,
            create,
            tuple(_listed(inputs)),
            allow_unreachable=True,
            accumulate_grad=True,
        )


@handles(T.backward)
def _tensor_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    _backward(
        func,
        (given["self"],),
        {
            "grad_tensors": None
            if given.get("gradient") is None
            else [given["gradient"]],
            "retain_graph": given.get("retain_graph"),
            "create_graph": given.get("create_graph", False),
            "inputs": given.get("inputs"),
        },
    )


@handles(torch.autograd.grad)
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
        "is_grads_batched",
        "materialize_grads",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("is_grads_batched"):
        raise ShardingError(
            "grad: is_grads_batched (vmap) does not run over DTensors. Call "
            "torch.autograd.grad once per vector."
        )
    create = bool(given.get("create_graph", False))
    retain = given.get("retain_graph")
    inputs = given["inputs"]
    keys = list(inputs) if isinstance(inputs, dict) else None
    wanted = list(inputs.values()) if isinstance(inputs, dict) else _listed(inputs)
    outs, seeds = _prepared(given["outputs"], given.get("grad_outputs"), "grad")
    materialize = bool(given.get("materialize_grads", False))
    captured = [x for x in wanted if isinstance(x, DTensor)]
    for x in captured:
        x.__dict__["_capturing"] = x.__dict__.get("_capturing", 0) + 1
    try:
        found = (
            _run(
                outs,
                seeds,
                create if retain is None else retain,
                create,
                tuple(wanted),
                allow_unreachable=bool(given.get("allow_unused") or materialize),
                accumulate_grad=False,
            )
            if outs
            else (None,) * len(wanted)
        )
    finally:
        for x in captured:
            x.__dict__["_capturing"] -= 1
    results: list[Any] = list(found)
    with NoTF():
        at = [
            i
            for i, x in enumerate(wanted)
            if isinstance(x, DTensor) and results[i] is not None
        ]
        with torch.set_grad_enabled(create):
            done = settle([results[i] for i in at], [wanted[i]._spec for i in at])
        for i, g in zip(at, done, strict=True):
            results[i] = typed(alias(g) if g is results[i] else g, wanted[i]._spec)
    if materialize:
        results = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(wanted, results, strict=True)
        ]
    return dict(zip(keys, results, strict=True)) if keys is not None else tuple(results)


# ---- hooks -----------------------------------------------------------------------
def cotangent(g: T, spec: Spec) -> DTensor:
    """A local cotangent of a tensor of this spec, typed with the dual placements."""
    n = average(spec)
    with NoTF():
        return typed(g.view_as(g) if n == 1 else g * n, spec.dual())


def _divided(g: T, spec: Spec) -> T:
    n = average(spec)
    return g if n == 1 else g / n


def uncotangent(g: Any, spec: Spec, what: str) -> T | None:
    """What a hook gave back, as the local cotangent the engine goes on with."""
    if g is None:
        return None
    if isinstance(g, DTensor):
        if g._spec.mesh is not spec.mesh or g._spec.shape != spec.shape:
            raise ShardingError(
                f"{what}: the returned gradient does not fit, got {g!r}, expected "
                f"shape {tuple(spec.shape)} placed {show(spec.dual().placements)}. "
                "Return a gradient of the tensor's own shape and mesh."
            )
        return _divided(plain(redistributed(g, spec.dual())), spec)
    if isinstance(g, T):
        return g
    raise TypeError(f"{what}: a hook returns a tensor or None, got {type(g)}.")


@handles(T.register_hook)
def _register_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, hook = tuple(args) + tuple(kwargs.values())
    if not isinstance(x, DTensor):
        raise TypeError("register_hook: expected a DTensor")
    spec = x._spec

    def typed_hook(g: T) -> T | None:
        return uncotangent(hook(cotangent(g, spec)), spec, "register_hook")

    with NoTF():
        return RAW.register_hook(x, typed_hook)


class HookHandle:
    """Takes a post-accumulate hook off again."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Forget the hook; a second call does nothing."""
        self._hooks.pop(self._number, None)


@handles(T.register_post_accumulate_grad_hook)
def _post_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, hook = tuple(args) + tuple(kwargs.values())
    if not plain(x).requires_grad or not x.is_leaf:
        raise RuntimeError(
            "register_post_accumulate_grad_hook: only a leaf that requires grad has "
            "a gradient to accumulate. Call x.requires_grad_() first."
        )
    hooks = x.__dict__.setdefault("_user_post_hooks", {})
    number = max(hooks, default=-1) + 1
    hooks[number] = hook

    if "_post_runner" not in x.__dict__:
        x.__dict__["_post_runner"] = True
        ref = weakref.ref(x)

        def settled(_: Any) -> None:
            leaf = ref()
            bucket = leaf.__dict__.get("_in_bucket") if leaf is not None else None
            if leaf is None or bucket is not None and bucket() is not None:
                return  # the bucket runs them after the reduction
            for h in list(hooks.values()):
                h(leaf)

        with NoTF():
            RAW.register_post_accumulate_grad_hook(x, settled)
    return HookHandle(hooks, number)


@handles(T.retain_grad)
def _retain_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if average(args[0]._spec) != 1:
        raise ShardingError(
            f"retain_grad: the gradient of an average cannot be kept, got {args[0]!r}. "
            "Call x.redistribute(Replicate()) and retain the gradient of the result."
        )
    with NoTF():
        func(*args, **kwargs)


# ---- becoming a leaf ---------------------------------------------------------------
@handles(T.requires_grad_)
def _requires_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with NoTF():
        func(*args, **kwargs)
    x = args[0]
    _watch_if_leaf(x)
    return x


@handles(RAW.requires_grad.__set__)
def _set_requires_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
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
