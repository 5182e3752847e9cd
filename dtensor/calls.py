"""A torch call as a rule sees it: operands with layouts instead of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.errors import ShardingError
from dtensor.notation import Layout, Notation
from dtensor.placement import Placements, Replicate
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


class PlainOperand(ShardingError):
    """A plain tensor that could be a whole value or a shard; a scope may promote it."""


class NoRule(Exception):
    """A rule's word that this call is none of its own: the fallback takes it."""


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
        if type(t) is torch.nn.Parameter:
            raise PlainOperand(
                f"{name}: got a plain parameter of shape {tuple(t.shape)} mixed with "
                f"DTensors on {spec.mesh!r}. Lay its module out first: "
                "parallelize_module(model, mesh, plan), with {} as the plan where every "
                "rank holds all of it, or `with promote_plain('replicate'):` where all "
                "plain tensors are whole values."
            )
        raise PlainOperand(
            f"{name}: got a plain tensor of shape {tuple(t.shape)} ({t.dtype}) mixed "
            f"with DTensors on {spec.mesh!r}; it could be a whole value or a shard. "
            "Say which: DTensor.from_local(t, mesh, [Replicate()]) where every rank "
            "holds the whole value, distribute_tensor(t, mesh, placements) to cut it, "
            "x.to_local() to compute on plain shards, or `with "
            "promote_plain('replicate'):` where all plain tensors are whole values."
        )


def promoted(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with plain floating tensors as replicated DTensors, gradients right."""
    mesh = first_spec(args, kwargs).mesh
    whole = (Replicate(),) * mesh.ndim

    def walk(x: Any) -> Any:
        if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta:
            if x.is_floating_point() or x.is_complex():
                return DTensor.from_local(x, mesh, whole, run_check=False)
        if type(x) in (list, tuple):
            return type(x)(walk(v) for v in x)
        return x

    return tuple(walk(a) for a in args), {k: walk(v) for k, v in kwargs.items()}


def described(args: Any, by_path: dict[Path, Operand], path: Path = ()) -> Any:
    """Arguments with each tensor replaced by its ``Operand``."""
    if isinstance(args, torch.Tensor):
        return by_path[path]
    if isinstance(args, (list, tuple)):
        items = [described(v, by_path, (*path, i)) for i, v in enumerate(args)]
        return tuple(items) if isinstance(args, tuple) else items
    return args


def meta_of(x: Any) -> Any:
    """An argument with every tensor replaced by a meta tensor of its global shape."""
    if isinstance(x, (torch.Tensor, Operand)):
        shape = x._spec.shape if isinstance(x, DTensor) else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")
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
