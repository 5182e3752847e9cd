"""From a torch call on DTensors to a call on local shards.

``__torch_function__`` lands here through ``registry.HANDLERS``. For an op of the
rule table: look the plan up in the cache, keyed by function, input specs and
non-tensor arguments; move the operands that the plan wants elsewhere; run the same
torch function on the local shards with torch-function handling off; give the result
its type. The plan is made once, from the specs alone, hence alike on all ranks, and
illegal calls are found there, before anything is moved.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.empty import has_empty, tied
from dtensor.errors import ShardingError
from dtensor.notation import Layout, Notation, solve
from dtensor.placement import Placements, Replicate, show
from dtensor.policy import judge
from dtensor.redistribute import Transition, alias, local_elements, plain, transition
from dtensor.registry import HANDLERS, Handler
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor

Path = tuple[Any, ...]


@dataclass(slots=True)
class Operand:
    """A tensor argument as a rule sees it: layout and type, no data."""

    spec: Spec
    dtype: torch.dtype
    path: Path
    distributed: bool

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.spec.shape)

    @property
    def placements(self) -> Placements:
        """One placement per mesh axis."""
        return self.spec.placements


@dataclass(slots=True)
class Call:
    """A call as a rule sees it.

    Attributes:
        name: The op's name, without the marks of in-place and reflected forms.
        func: The torch function.
        args: Positional arguments; tensors are ``Operand`` there.
        kwargs: Keyword arguments, likewise.
        operands: All operands in order of appearance.
        inplace: Whether the first operand is written.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Operand]
    inplace: bool

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if len(self.args) > index:
            return self.args[index]
        return self.kwargs.get(name, default)

    def shapes(self) -> list[Sequence[int]]:
        """Global shapes of the results, found on meta tensors."""
        return meta_shapes(self.func, self.args, self.kwargs)


Rule = Callable[[Call], "Notation | Layout | None"]


@dataclass(slots=True)
class Op:
    """One entry of the rule table.

    Attributes:
        name: Name in messages.
        rule: Gives the notation of a call.
        numbers: Whether the rule reads integers (sizes, dims); where it does not,
            they stay out of the cache key. Floats never enter it.
        inplace: Whether the first operand is written.
    """

    name: str
    rule: Rule
    numbers: bool
    inplace: bool


@dataclass(slots=True)
class Plan:
    """What to do for one kind of call.

    Attributes:
        moves: Operands to redistribute first: (path, transition).
        out: Spec of the result, or one per result tensor.
        run: Runs in place of the function, or None.
        rewrite: Makes the local arguments, or None.
        cost: For the policy: whether any move communicates.
        moved_view: Whether the result is a view of a moved operand.
        inplace: Whether the first operand is written and returned.
    """

    moves: tuple[tuple[Path, Transition], ...]
    out: Any
    run: Callable[..., Any] | None
    rewrite: Callable[..., Any] | None
    communicates: bool
    moved_view: bool
    inplace: bool
    text: str


class NoRule(Exception):
    """A rule's word that this call is none of its own: the fallback takes it."""


# ---- cache keys ------------------------------------------------------------------
class Unhashable(Exception):
    """An argument that cannot be part of a cache key: the call is planned anew."""


def frozen(x: Any, numbers: bool) -> Any:
    """An argument as part of a cache key; values carry their type (1, True, 1.0)."""
    t = type(x)
    if t is DTensor:
        return x._spec
    if t is int or t is bool:
        return (t, x) if numbers or t is bool else t
    if t is float or t is complex:
        return t
    if x is None or t is str or x is Ellipsis:
        return x
    if t is list or t is tuple or t is torch.Size:
        return (t, *[frozen(v, numbers) for v in x])
    if t is slice:
        return (t, frozen((x.start, x.stop, x.step), numbers))
    if isinstance(x, torch.Tensor):
        return (
            torch.Tensor,
            x.shape,
            x.dtype,
            x.requires_grad,
            type(x) in (torch.Tensor, torch.nn.Parameter),
        )
    if t in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        return x
    if t is torch.Generator:
        return t
    if isinstance(x, float):  # numpy's double
        return float
    if isinstance(x, np.integer):
        return (int, int(x)) if numbers else int
    if isinstance(x, dict):
        return (t, *[(k, frozen(v, numbers)) for k, v in x.items()])
    if isinstance(x, tuple):
        return (t, *[frozen(v, numbers) for v in x])
    raise Unhashable


# ---- the hot path ------------------------------------------------------------------
def planned(op: Op) -> Handler:
    """The handler of an op that has a rule."""
    numbers = op.numbers

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = [func]
        spec = None
        try:
            for x in args:
                t = type(x)
                if t is DTensor:
                    spec = x._spec
                    key.append(spec)
                elif t is float:
                    key.append(t)
                else:
                    key.append(frozen(x, numbers))
            if kwargs:
                if kwargs.get("out") is not None:
                    return into(handler, func, args, kwargs)
                for k, x in kwargs.items():
                    key.append(k)
                    key.append(frozen(x, numbers))
            if spec is None:
                spec = first_spec(args, kwargs)
            plans, whole = spec.plans, tuple(key)
            plan = plans.get(whole)
        except Unhashable:
            plan, plans, whole = None, {}, ()
        if plan is None:
            try:
                plan = plans[whole] = make_plan(op, func, args, kwargs)
            except NoRule:
                return fallback(op.name, op.inplace)(func, args, kwargs)
        if plan.moves:
            if plan.communicates:
                judge(op.name, plan.text, 0, MEND, False)
            args, kwargs = moved(plan, args, kwargs)
        if plan.rewrite is not None:
            args, kwargs = plan.rewrite(args, kwargs)
        if plan.inplace:
            check_target(op.name, args[0])
        with NoTF():
            out = (
                func(*args, **kwargs)
                if plan.run is None
                else plan.run(func, args, kwargs)
            )
        if type(out) is torch.Tensor:
            out.__class__ = DTensor
            out._spec = plan.out  # type: ignore[attr-defined]
            if plan.moved_view:
                out._moved_view = True  # type: ignore[attr-defined]
            return out
        return retyped(out, plan)

    return handler


MEND = "Call x.redistribute(placements) on the operands first."


def retyped(out: Any, plan: Plan) -> Any:
    """Type a result that is not one fresh plain tensor."""
    if isinstance(out, DTensor):
        if plan.inplace or out._spec is plan.out:
            return out
        return retyped(alias(out), plan)
    if isinstance(out, torch.Tensor):
        out.__class__ = DTensor
        out._spec = plan.out  # type: ignore[attr-defined]
        if plan.moved_view:
            out._moved_view = True  # type: ignore[attr-defined]
        return out
    if isinstance(out, (tuple, list)):
        specs = plan.out if isinstance(plan.out, list) else [plan.out] * len(out)
        if all(isinstance(o, torch.Tensor) and type(o) is not DTensor for o in out):
            for o, s in zip(out, specs, strict=True):
                o.__class__ = DTensor
                o._spec = s
                if plan.moved_view:
                    o._moved_view = True
            return out
        items = []
        for o, s in zip(out, specs, strict=True):
            if isinstance(o, DTensor) and o._spec is not s and not plan.inplace:
                o = alias(o)
            if isinstance(o, torch.Tensor) and type(o) is not DTensor:
                o.__class__ = DTensor
                o._spec = s  # type: ignore[attr-defined]
            items.append(o)
        return type(out)(items)
    return out


def moved(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the operands of ``plan.moves`` redistributed."""
    new_args: list[Any] = list(args)
    new_kwargs = dict(kwargs)
    with NoTF():
        for path, move in plan.moves:
            top = path[0]
            holder: Any = new_args if isinstance(top, int) else new_kwargs
            if len(path) == 1:
                holder[top] = move(holder[top])
            else:
                holder[top] = _put(holder[top], path[1:], move)
    return tuple(new_args), new_kwargs


def _put(x: Any, path: Path, move: Transition) -> Any:
    """A copy of a nested argument with the tensor at ``path`` moved."""
    if not path:
        return move(x)
    items = list(x)
    items[path[0]] = _put(items[path[0]], path[1:], move)
    return tuple(items) if isinstance(x, tuple) else items


def into(handler: Handler, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, then copy into the given DTensor."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    out = kwargs["out"]
    name = getattr(func, "__name__", str(func))
    if not isinstance(out, DTensor):
        raise ShardingError(
            f"{name}: out= must be a DTensor where the operands are, got "
            f"{type(out).__name__}. Leave out= away, or give a DTensor of the result's "
            "shape."
        )
    result = handler(func, args, rest) if args or rest else None
    if not isinstance(result, DTensor) or result._spec.mesh is not out._spec.mesh:
        raise ShardingError(
            f"{name}: out= needs DTensor operands on the mesh of out. Distribute them "
            "with distribute_tensor(t, mesh, placements)."
        )
    if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
        raise ShardingError(
            f"{name}: out= does not fit the result, got shape {tuple(out.shape)} and "
            f"{out.dtype}, expected {tuple(result.shape)} and {result.dtype}. Leave "
            "out= away."
        )
    with torch.no_grad():
        out.copy_(result)
    return out


# Ops whose result may lie in the memory of their operand, besides the views.
SHARING = frozenset(
    """
    alias conj contiguous cpu cuda detach double flatten float half imag positive ravel
    real reshape resolve_conj resolve_neg to type type_as view_as
    """.split()
)


def sticky(run: Callable[..., Any] | None) -> Callable[..., Any]:
    """Run, and mark views of a moved view as moved, too."""

    def marked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs) if run is None else run(func, args, kwargs)
        if args and getattr(args[0], "_moved_view", False):
            memory = args[0].untyped_storage().data_ptr()
            for o in out if isinstance(out, (tuple, list)) else (out,):
                if o.untyped_storage().data_ptr() == memory:
                    o._moved_view = True
        return out

    return marked


def check_target(name: str, target: Any) -> None:
    """Refuse a write into a view that had to be gathered: it would be lost."""
    for t in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(t, DTensor) and t._moved_view:
            raise ShardingError(
                f"{name}: a write in place cannot reach the base, since this view was "
                "made by redistributing its base. Redistribute the base first "
                "(x.redistribute(...)), then take the view, or use the out-of-place op."
            )


def check_shape_kept(name: str, target: DTensor) -> None:
    """An op without a rule that resized its target is found out on every rank."""
    local = torch.Tensor.shape.__get__(target)  # type: ignore[attr-defined]
    if local != target._spec.local_shape:
        raise ShardingError(
            f"{name}: a DTensor keeps its shape, got a shard of {tuple(local)}, expected "
            f"{tuple(target._spec.local_shape)}. Its values are lost; make a new tensor."
        )


# ---- making a plan -----------------------------------------------------------------
def tensors_in(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensor arguments with their paths, lists and tuples looked into."""

    def walk(x: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
        if isinstance(x, torch.Tensor):
            yield path, x
        elif isinstance(x, (list, tuple)):
            for i, v in enumerate(x):
                yield from walk(v, (*path, i))

    for i, x in enumerate(args):
        yield from walk(x, (i,))
    for k, v in kwargs.items():
        yield from walk(v, (k,))


def first_spec(args: Sequence[Any], kwargs: dict[str, Any]) -> Spec:
    """Spec of the first DTensor among the arguments."""
    for _, t in tensors_in(args, kwargs):
        if isinstance(t, DTensor):
            return t._spec
    raise ShardingError("dispatch: no DTensor among the arguments")


def operands_of(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], inplace: bool
) -> list[Operand]:
    """Check the tensor arguments of one call and describe them.

    Raises:
        ShardingError: Two meshes, two ranks, or a plain tensor that could be
            mistaken for a shard.
    """
    spec = first_spec(args, kwargs)
    found = []
    for path, t in tensors_in(args, kwargs):
        if isinstance(t, DTensor):
            if t._spec.mesh is not spec.mesh:
                raise ShardingError(
                    f"{name}: the operands lie on different meshes, got {spec.mesh!r} "
                    f"and {t._spec.mesh!r}. Bring them to one mesh: "
                    "distribute_tensor(x.full_tensor(), mesh, placements)."
                )
            if t._spec.world is not spec.world:
                raise ShardingError(
                    f"{name}: the operands belong to different ranks, got rank "
                    f"{spec.world.rank} and rank {t._spec.world.rank}. Make each "
                    "DTensor on the rank that uses it."
                )
            found.append(Operand(t._spec, t.dtype, path, True))
            continue
        check_plain(name, t, path, inplace, spec)
        whole = spec_of(spec.mesh, (Replicate(),) * spec.mesh.ndim, t.shape, spec.world)
        found.append(Operand(whole, t.dtype, path, False))
    return found


def check_plain(
    name: str, t: torch.Tensor, path: Path, inplace: bool, spec: Spec
) -> None:
    """Refuse a plain tensor that is not a constant, an index or a mask."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        raise ShardingError(
            f"{name}: a {type(t).__name__} cannot be mixed with DTensors. Pass a plain "
            "tensor's DTensor: distribute_tensor(t, mesh, placements)."
        )
    target = inplace and (path == (0,) or path[:1] == (0,))
    floating = t.is_floating_point() or t.is_complex()
    if target:
        raise ShardingError(
            f"{name}: a plain tensor of shape {tuple(t.shape)} is written from a "
            "DTensor. Use x.full_tensor() or x.to_local() as the source."
        )
    if floating and (t.ndim > 0 or t.requires_grad):
        raise ShardingError(
            f"{name}: got a plain tensor of shape {tuple(t.shape)} ({t.dtype}) mixed "
            f"with DTensors on {spec.mesh!r}; it could be a whole value or a shard. "
            "Say which: DTensor.from_local(t, mesh, [Replicate()]) where every rank "
            "holds the whole value, distribute_tensor(t, mesh, placements) to cut it, "
            "or x.to_local() to compute on plain shards."
        )


def described(args: Any, by_path: dict[Path, Operand], path: Path = ()) -> Any:
    """Arguments with each tensor replaced by its ``Operand``."""
    if isinstance(args, torch.Tensor):
        return by_path[path]
    if isinstance(args, (list, tuple)):
        items = [described(v, by_path, (*path, i)) for i, v in enumerate(args)]
        return tuple(items) if isinstance(args, tuple) else items
    return args


def make_plan(op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Plan one kind of call from the layouts of its operands; communicates nothing."""
    operands = operands_of(op.name, args, kwargs, op.inplace)
    by_path = {o.path: o for o in operands}
    call = Call(
        op.name,
        func,
        tuple(described(a, by_path, (i,)) for i, a in enumerate(args)),
        {k: described(v, by_path, (k,)) for k, v in kwargs.items()},
        operands,
        op.inplace,
    )
    spec = first_spec(args, kwargs)
    mesh = spec.mesh
    text = ", ".join(f"{tuple(o.shape)}{show(o.placements)}" for o in operands)
    n = op.rule(call)
    if isinstance(n, Notation):
        shapes = n.shapes if n.shapes is not None else meta_shapes(func, args, kwargs)
        n = settled(n, operands, shapes, 0 if op.inplace else None)
    if n is None:
        raise ShardingError(
            f"{op.name}_: in place, the result would need other placements than the "
            f"target has, got operands {text} on {mesh!r}. Use the out-of-place "
            f"{op.name}, or redistribute the target first: x = x.redistribute(...)."
        )
    if op.inplace and not n.many and tuple(n.shapes[0]) != tuple(operands[0].shape):
        raise ShardingError(
            f"{op.name}_: a DTensor keeps its shape, got {tuple(operands[0].shape)}, "
            f"which would become {tuple(n.shapes[0])}. Use the out-of-place {op.name}."
        )
    moves = []
    for o, places in zip(operands, n.ins, strict=True):
        if places != o.placements:
            moves.append((o.path, transition(o.spec, o.spec.replace(places))))
    outs = [spec.replace(p, tuple(s)) for p, s in zip(n.outs, n.shapes, strict=True)]
    ins = [o.spec.replace(w) for o, w in zip(operands, n.ins, strict=True)]
    run, rewrite = n.run, n.rewrite
    if spec.coordinate is None:
        run, rewrite, moves = outsider(outs, op.inplace), None, []
    else:
        run = run(ins, outs) if run is not None else None
        rewrite = rewrite(ins, outs) if rewrite is not None else None
        if not op.inplace and not n.view and has_empty([*ins, *outs]):
            run = tied(run)
        if not op.inplace and (n.view or op.name in SHARING):
            run = sticky(run)
    return Plan(
        moves=tuple(moves),
        out=outs if n.many or len(outs) != 1 else outs[0],
        run=run,
        rewrite=rewrite,
        communicates=any(t.communicates for _, t in moves),
        moved_view=n.view and any(p == operands[0].path for p, _ in moves),
        inplace=op.inplace,
        text=text,
    )


def settled(
    n: Notation,
    operands: Sequence[Operand],
    shapes: Sequence[Sequence[int]],
    keep: int | None,
) -> Layout | None:
    """The layout that ``solve`` chooses for a notation, or None (see ``solve``)."""
    mesh = operands[0].spec.mesh
    nbytes = [
        local_elements(mesh, o.placements, tuple(o.shape)) * o.dtype.itemsize
        for o in operands
    ]
    found = solve(n, mesh, [o.placements for o in operands], nbytes, keep)
    if found is None:
        return None
    ins, outs = found
    return Layout(ins, outs, shapes, n.run, n.rewrite, n.view, n.many)


def meta_of(x: Any) -> Any:
    """An argument with every tensor replaced by a meta tensor of its global shape."""
    if isinstance(x, (torch.Tensor, Operand)):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)([meta_of(v) for v in x])
    return x


def meta_run(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Results of the call on meta tensors of the global shapes.

    An illegal call raises torch's own error here, with the global shapes and on every
    rank alike.
    """
    try:
        with torch.no_grad():
            out = func(
                *[meta_of(a) for a in args],
                **{k: meta_of(v) for k, v in kwargs.items()},
            )
    except NotImplementedError as e:
        raise NoRule(str(e)) from None
    if isinstance(out, torch.Tensor):
        return [out]
    return [o for o in out if isinstance(o, torch.Tensor)]


def meta_shapes(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Sequence[int]]:
    """Global shapes of the results; see ``meta_run``."""
    return [o.shape for o in meta_run(func, args, kwargs)]


def outsider(outs: list[Spec], inplace: bool) -> Callable[..., Any]:
    """What a rank outside the mesh runs: nothing; its results hold no data."""

    def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if inplace:
            return args[0]
        metas = meta_run(func, args, kwargs)
        made = [
            torch.empty(s.local_shape, dtype=m.dtype)
            for s, m in zip(outs, metas, strict=True)
        ]
        return made[0] if len(made) == 1 else made

    return run


# ---- ops without a rule ----------------------------------------------------------------
def fallback(name: str, inplace: bool) -> Handler:
    """Gather every operand, run the function on the whole values: right, not fast."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            return into(handler, func, args, kwargs)
        operands = operands_of(name, args, kwargs, inplace)
        spec = first_spec(args, kwargs)
        if spec.coordinate is None:
            made = [
                _retype_whole(torch.empty(0, dtype=m.dtype), spec, m.shape)
                for m in meta_run(func, args, kwargs)
            ]
            return made[0] if len(made) == 1 else tuple(made)
        moves = []
        stuck = any(isinstance(a, DTensor) and a._moved_view for a in args)
        for o in operands:
            if o.spec is not o.spec.replicated():
                moves.append((o.path, transition(o.spec, o.spec.replicated())))
        text = ", ".join(f"{tuple(o.shape)}{show(o.placements)}" for o in operands)
        if moves:
            if inplace and any(p[0] == 0 for p, _ in moves):
                raise ShardingError(
                    f"{name}: has no rule for writing in place into a sharded tensor, "
                    f"got operands {text} on {spec.mesh!r}. Call "
                    "x = x.redistribute(Replicate()) first, or use the out-of-place op."
                )
            size = sum(
                t.elements * o.dtype.itemsize
                for o in operands
                for p, t in moves
                if p == o.path
            )
            judge(name, text, size, MEND, True)
            plan = Plan(tuple(moves), None, None, None, True, False, inplace, text)
            args, kwargs = moved(plan, args, kwargs)
        elif inplace:
            check_target(name, args[0])
        if isinstance(func, types.FunctionType):  # would see global shapes: plain ones
            args, kwargs = _plain_arguments(args), _plain_arguments(kwargs)
        with NoTF():
            out = func(*args, **kwargs)
            if inplace and isinstance(args[0], DTensor):
                check_shape_kept(name, args[0])
        given = {id(t) for _, t in tensors_in(args, kwargs)}

        def whole(o: Any) -> Any:
            if isinstance(o, torch.Tensor):
                if isinstance(o, DTensor):
                    return o
                if id(o) in given and not moves:
                    o = alias(o)
                if (moves or stuck) and o._is_view():
                    o._moved_view = True
                return _retype_whole(o, spec, o.shape)
            if (
                isinstance(o, tuple)
                and hasattr(o, "_fields")
                or isinstance(o, torch.Size)
            ):
                return o
            if type(o) in (list, tuple):
                return type(o)(whole(v) for v in o)
            if isinstance(o, tuple):  # torch.return_types: type the elements in place
                for v in o:
                    whole(v)
            return o

        return whole(out)

    return handler


def _plain_arguments(x: Any) -> Any:
    """Arguments with every DTensor as a plain alias of its shard."""
    if isinstance(x, DTensor):
        return plain(x)
    if isinstance(x, dict):
        return {k: _plain_arguments(v) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_plain_arguments(v) for v in x)
    return x


def _retype_whole(t: torch.Tensor, spec: Spec, shape: Sequence[int]) -> DTensor:
    t.__class__ = DTensor
    t._spec = spec_of(  # type: ignore[attr-defined]
        spec.mesh, (Replicate(),) * spec.mesh.ndim, shape, spec.world
    )
    return t  # type: ignore[return-value]


# ---- Python-level torch functions --------------------------------------------------------
# Functions whose bodies are running, the innermost last.
_OPEN: ContextVar[tuple[Any, ...]] = ContextVar("dtensor_open", default=())
_NEVER: dict[str, Any] = {
    "has_torch_function": lambda *_: False,
    "has_torch_function_unary": lambda *_: False,
    "has_torch_function_variadic": lambda *_: False,
}


def opened(func: Any, again: Handler) -> Handler:
    """Run the body of a Python-level torch function on the DTensors themselves.

    Such a function only calls other torch functions; its first lines ask whether to
    hand over to ``__torch_function__``. A copy whose globals answer no runs the body
    with global shapes, and every torch function inside comes back here.

    Args:
        func: The function.
        again: Answers where the body hands the same function over once more, from a
            helper of its own.
    """
    inner = _asking_nobody(func)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = _OPEN.get()
        if func in running:
            return again(func, args, kwargs)
        token = _OPEN.set((*running, func))
        try:
            return inner(*args, **kwargs)
        finally:
            _OPEN.reset(token)

    return handler


class _Instead:
    """A module with some of its attributes replaced."""

    def __init__(self, module: types.ModuleType, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _never_by_module(func: types.FunctionType) -> dict[str, Any]:
    """``torch.nn.init`` asks through ``torch.overrides``, not by a global of its own."""
    if func.__module__ != "torch.nn.init":
        return {}
    return {"torch": _Instead(torch, overrides=_Instead(torch.overrides, **_NEVER))}


def _asking_nobody(
    func: types.FunctionType, outer: tuple[Any, ...] = ()
) -> types.FunctionType:
    """A copy of a function, and of those in its closure, that hands nothing over."""
    outer = (*outer, func)  # a function may refer to itself
    cells = tuple(
        types.CellType(_asking_nobody(c.cell_contents, outer))
        if isinstance(c.cell_contents, types.FunctionType)
        and c.cell_contents not in outer
        else c
        for c in func.__closure__ or ()
    )
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **_NEVER, **_never_by_module(func)},
        func.__name__,
        func.__defaults__,
        cells or None,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def name_of(func: Any) -> str:
    """Name of a torch function in messages and in the rule table.

    An op of ``torch.ops`` is called ``namespace::name``, one of torch's own by its bare
    name.
    """
    if isinstance(func, torch._ops.OpOverload):
        return str(func._schema.name).removeprefix("aten::")
    if isinstance(func, torch._ops.OpOverloadPacket):
        return str(func._qualified_op_name).removeprefix("aten::")
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__", "__delete__"):
        return f"{func.__self__.__name__}.{name}"
    return str(name)


__all__ = ["HANDLERS", "Call", "Notation", "Op", "Operand", "Plan", "planned", "plain"]
