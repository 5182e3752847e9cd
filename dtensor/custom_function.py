"""Users' own ``autograd.Function``s and full backward hooks see DTensors.

``Function.apply`` does not go through ``__torch_function__``: forward would get the
DTensors it was called with, backward the engine's plain local cotangents beside them.
So ``apply`` is wrapped once (``interop`` does it). With no DTensor about, and for the
Functions of this project (which work on plain shards), the wrapper calls what was there
before. Otherwise it applies a subclass of the user's Function, made once per class, that

* notes the specs of inputs, outputs and saved tensors in forward;
* hands backward its cotangents as DTensors in the dual placements of the outputs;
* brings the DTensors that backward returns to the duals of the inputs.

All of it is differentiable, so second derivatives are those of the user's backward.

=================  ==========================  =================================
tensor             what forward has            what backward has or must return
=================  ==========================  =================================
DTensor output     spec s                      cotangent in s.dual()
DTensor input      spec s                      any placements of the same shape
plain in- output   this rank's own tensor      this rank's own plain cotangent
=================  ==========================  =================================
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF
from torch.autograd.function import BackwardCFunction, Function, once_differentiable
from torch.nn.modules._functions import BackwardHookFunction

from dtensor.errors import ShardingError
from dtensor.hooks import cotangent, uncotangent
from dtensor.placement import show
from dtensor.redistribute import alias, plain
from dtensor.spec import Spec
from dtensor.tensor import DTensor, typed

T = torch.Tensor
Specs = tuple["Spec | None", ...]
_ONCE = once_differentiable(lambda ctx: None).__code__


def specs_of(values: Any) -> Specs:
    """Specs of the DTensors among the arguments or results of a Function."""
    if not isinstance(values, (tuple, list)):
        values = (values,)
    return tuple(v._spec if isinstance(v, DTensor) else None for v in values)


class _Calls(threading.local):
    """Per thread: the output specs of the Functions whose forward is running."""

    def __init__(self) -> None:
        self.outputs: list[Specs] = []


_CALLS = _Calls()


class TypedContext(BackwardCFunction):
    """The ``ctx`` of a Function on DTensors."""

    _input_specs: Specs = ()
    _output_specs: Specs = ()
    _saved_specs: Specs = ()

    def save_for_backward(self, *tensors: T) -> None:
        """As torch's; torch gives outputs back as plain tensors, so note the specs."""
        self._saved_specs = specs_of(tensors)
        super().save_for_backward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The saved tensors, each with the spec it was saved with."""
        saved = torch._C._FunctionBase.saved_tensors.__get__(self)  # type: ignore[attr-defined]
        return tuple(
            typed(alias(t), s) if s is not None and type(t) is T else t
            for t, s in zip(saved, self._saved_specs, strict=True)
        )

    def note(self, inputs: Any, output: Any) -> None:
        """Remember how inputs and outputs lie."""
        self._input_specs = specs_of(inputs)
        self._output_specs = specs_of(output)
        _CALLS.outputs[-1] = self._output_specs


def typed_class(cls: Any) -> Any:
    """The subclass of a user's Function that works on DTensors; made once."""
    found = cls.__dict__.get("_dtensor_class")
    if found is not None:
        return found
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    if cls.setup_context != Function.setup_context:
        setup = cls.setup_context

        @functools.wraps(setup)
        def setup_context(ctx: TypedContext, inputs: Any, output: Any) -> Any:
            ctx.note(inputs, output)
            return setup(ctx, inputs, output)

        body["setup_context"] = staticmethod(setup_context)
    else:
        user_forward = cls.forward

        @functools.wraps(user_forward)
        def forward(ctx: TypedContext, *args: Any, **kwargs: Any) -> Any:
            output = user_forward(ctx, *args, **kwargs)
            ctx.note(args, output)
            return output

        body["forward"] = staticmethod(forward)
    for name in ("backward", "vjp"):
        if getattr(cls, name) is not getattr(Function, name):
            body[name] = staticmethod(_backward_of(cls, getattr(cls, name)))
    found = type(cls)(cls.__name__, (cls,), body)
    backward_class: Any = type(
        cls.__name__ + "Backward", (TypedContext,), {"_forward_cls": found}
    )
    backward_class._autograd_function_id = found._backward_cls._autograd_function_id
    found._backward_cls = backward_class
    cls._dtensor_class = found
    return found


def _backward_of(cls: Any, user: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that takes and gives local cotangents, around the user's."""
    name = cls.__name__
    boxed = getattr(cls, "boxed_grads_call", False)

    @functools.wraps(user)
    def backward(ctx: TypedContext, *grads: Any) -> Any:
        plains: Any = grads[0] if boxed else grads
        given = [
            cotangent(plain(g), s) if s is not None and isinstance(g, T) else g
            for g, s in zip(plains, ctx._output_specs, strict=True)
        ]
        once = getattr(user, "__code__", None) is _ONCE and torch.is_grad_enabled()
        twice = once and any(isinstance(g, T) and g.requires_grad for g in given)
        args: tuple[Any, ...] = tuple(given)
        if boxed:
            plains[:] = given
            args = (plains,)
        if once:
            with torch.no_grad():
                outs = user.__wrapped__(ctx, *args)  # type: ignore[attr-defined]
        else:
            outs = user(ctx, *args)
        if not isinstance(outs, tuple):
            outs = (outs,)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not once):
            outs = tuple(_returned(ctx, name, i, g) for i, g in enumerate(outs))
        return _undifferentiable(outs) if twice else outs

    return backward


def _returned(ctx: TypedContext, name: str, i: int, g: Any) -> Any:
    """A returned gradient of input ``i`` as the local cotangent of that input."""
    if g is None:
        return None
    specs = ctx._input_specs
    spec = specs[i] if i < len(specs) else None
    if spec is None:
        if isinstance(g, DTensor):
            raise ShardingError(
                f"{name}.backward: input {i} is no DTensor, got the gradient {g!r}, "
                "expected this rank's own plain gradient. Return g.to_local() or "
                "g.full_tensor()."
            )
        return g
    if not ctx.needs_input_grad[i]:
        return None
    if not isinstance(g, DTensor):
        got = f"plain shape {tuple(g.shape)}" if isinstance(g, T) else repr(type(g))
        raise ShardingError(
            f"{name}.backward: input {i} is a DTensor, got a {got} as its gradient, "
            f"expected a DTensor of shape {tuple(spec.shape)}. Compute with the "
            "DTensors that backward is given, or return DTensor.from_local(g, mesh, "
            f"{show(spec.dual().placements)})."
        )
    if g._spec.shape != spec.shape and g._spec.mesh is spec.mesh:
        g = _summed_to(g, spec)
    return uncotangent(g, spec, f"{name}.backward")


def _summed_to(g: DTensor, spec: Spec) -> DTensor:
    """A gradient of a broadcast shape, summed to the input's, as torch does."""
    lead = g.ndim - spec.ndim
    fits = lead >= 0 and all(
        n in (1, m) for n, m in zip(spec.shape, g.shape[lead:], strict=True)
    )
    if not fits:
        return g  # uncotangent says what is wrong
    kept = [d + lead for d, n in enumerate(spec.shape) if n == 1 != g.shape[d + lead]]
    out: Any = g
    if kept:
        out = out.sum(kept, keepdim=True)
    if lead:
        out = out.sum(list(range(lead)))
    return out  # type: ignore[no-any-return]


def _undifferentiable(grads: tuple[Any, ...]) -> Any:
    """The gradients, with torch's error for who differentiates them once more."""
    error = torch._C._functions.DelayedError(
        b"trying to differentiate twice a function that was marked "
        b"with @once_differentiable",
        len(grads),
    )
    fresh: list[Any] = [
        None if g is None else g.detach().requires_grad_(True) for g in grads
    ]
    return error(*fresh)


# ---- full backward hooks of modules ---------------------------------------------------
class Untyped(Function):
    """The step before a module hook: hooks there see DTensors, the engine does not.

    Forward is the identity on a shard. Backward takes what hooks left, in whatever
    placements, to the dual of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: T, spec: Spec) -> T:
        """A view of ``x``."""
        ctx.spec = spec
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[T | None, None]:
        """The local cotangent in ``spec.dual()``."""
        return uncotangent(grads[0], ctx.spec, "full_backward_hook"), None


def _hooked(original: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """``BackwardHookFunction.apply`` whose node hooks get and give DTensors."""
    specs = specs_of(args)
    inner = []
    for x, s in zip(args, specs, strict=True):
        if s is not None:
            needs, x = x.requires_grad, plain(x)
            x = original(Untyped, x, s) if needs else x
        inner.append(x)
    outs = original(BackwardHookFunction, *inner)
    node = next((o.grad_fn for o in outs if o.grad_fn is not None), None)
    for out, s in zip(outs, specs, strict=True):
        if s is not None:
            typed(out, s)
    if node is not None:
        node.register_prehook(_types(specs))
    return tuple(outs)


def _types(specs: Specs) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A node prehook that types the incoming cotangents."""

    def prehook(grads: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            cotangent(plain(g), s) if s is not None and isinstance(g, T) else g
            for g, s in zip(grads, specs, strict=True)
        )

    return prehook


# ---- the wrapper ------------------------------------------------------------------------
def _is_ours(cls: Any) -> bool:
    return cls.__module__.partition(".")[0] == "dtensor"  # type: ignore[no-any-return]


def _apply_on_dtensors(original: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    if cls is BackwardHookFunction:
        return _hooked(original, args)
    calls = _CALLS.outputs
    calls.append(())
    try:
        out = original(typed_class(cls), *args, **kwargs)
    finally:
        specs = calls.pop()
    # Older torch gives an input that forward returned back as a fresh plain view.
    for o, s in zip(out if isinstance(out, tuple) else (out,), specs, strict=False):
        if s is not None and type(o) is T:
            typed(o, s)
    return out


def dtensor_apply(original: Any) -> Any:
    """``Function.apply`` that knows DTensors, around torch's.

    Args:
        original: The function under torch's classmethod.
    """

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for a in args:
            if isinstance(a, DTensor) and not _is_ours(cls):
                return _apply_on_dtensors(original, cls, args, kwargs)
        out = original(cls, *args, **kwargs)
        for o in out if type(out) is tuple else (out,):
            if type(o) is DTensor and o.grad_fn is not None and not _is_ours(cls):
                o.grad_fn.register_prehook(_types(specs_of(out)))
                break
        return out

    return classmethod(apply)


def plain_saved_tensors(original: Any) -> Any:
    """``saved_tensors_hooks.__init__`` whose pack hook gets plain shards.

    Torch calls a pack hook inside the op that saves, where torch-function handling is
    off: a DTensor there would answer ``shape`` for the whole and compute on the shard.
    """

    @functools.wraps(original)
    def init(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        def pack(x: T) -> Any:
            if isinstance(x, DTensor):
                with NoTF():
                    x = T.detach(x)
            return pack_hook(x)

        original(self, pack, unpack_hook)

    return init


# ---- the inputs of torch.utils.checkpoint ----------------------------------------------
def notes_inputs(original: Any) -> Any:
    """``_CheckpointFrame.save_inputs``: under a pack hook the types would be lost."""

    @functools.wraps(original)
    def save_inputs(self: Any, *args: Any) -> None:
        original(self, *args)
        self._dtensor_specs = specs_of(args)

    return save_inputs


def types_inputs(original: Any) -> Any:
    """``_CheckpointFrame.get_inputs``: each input with the spec it was saved with."""

    @functools.wraps(original)
    def get_inputs(self: Any) -> list[Any]:
        found = original(self)
        specs = getattr(self, "_dtensor_specs", (None,) * len(found))
        return [
            typed(alias(x), s) if s is not None and type(x) is T else x
            for x, s in zip(found, specs, strict=True)
        ]

    return get_inputs


__all__ = [
    "TypedContext",
    "Untyped",
    "dtensor_apply",
    "notes_inputs",
    "plain_saved_tensors",
    "types_inputs",
]
