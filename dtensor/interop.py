"""What goes around ``__torch_function__``, or leaves the world of DTensors.

Some entry points of torch take a DTensor for its local shard without asking. Each is
answered or refused here; ``WRAPPED`` lists all that is replaced in torch, once, at
import. A wrapper looks at the types of its arguments and calls what was there before.

====================================  ==============================================
entry point                           with a DTensor
====================================  ==============================================
torch.tensor(x)                       a DTensor: a detached copy in the same layout
as_tensor(x), asarray(x)              the DTensor, or its cast
a number's place: full(.., x), arange  the whole value, as ``float(x)`` gives it
alpha=, beta=, value= of plain ops    likewise
torch.zeros(x, ..) and its kind       likewise; the result is plain
numpy(), __array__, tolist, item      the whole value (every rank must ask)
torch.Tensor(x), p.new_tensor(x)      refused
x.set_(y)                             the shard, of a DTensor of one shape and mesh
DLPack, sparse constructors           refused
vmap, torch.func, jit, export         refused
torch.compile                         refused where a compiled frame meets a DTensor
data_ptr, untyped_storage             the shard's
====================================  ==============================================

Not reachable, since C++ asks nobody, or asking would cost every call: ``p.data = x``
for a plain ``p``, ``torch.FloatTensor(x)`` and its kind, and ``alpha=x`` in methods of
plain tensors (``p.add_(q, alpha=x)``). They take the shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import _CheckpointFrame

from dtensor import clipping, optimizers, serialization
from dtensor.custom_function import (
    dtensor_apply,
    notes_inputs,
    plain_saved_tensors,
    types_inputs,
)
from dtensor.errors import ShardingError
from dtensor.placement import Replicate
from dtensor.policy import promote_plain
from dtensor.redistribute import plain
from dtensor.registry import HANDLERS, Handler, handles
from dtensor.rules.resolve import whole_value
from dtensor.spec import spec_of
from dtensor.tensor import DTensor, redistributed, typed
from dtensor.transforms import compiles, holds_dtensor, transforms

T = torch.Tensor
Maker = Callable[[Any], Any]


# ---- numbers -----------------------------------------------------------------------------
def number(x: Any) -> Any:
    """The whole value of a DTensor of one element; anything else as it is."""
    if isinstance(x, DTensor):
        return x.item()
    if type(x) in (list, tuple) and any(isinstance(v, DTensor) for v in x):
        return type(x)(number(v) for v in x)
    return x


def takes_numbers(first: int) -> Maker:
    """A maker of wrappers that read DTensors as numbers.

    Args:
        first: Arguments before this position are tensors and left alone.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for a in args[first:]:
                if isinstance(a, DTensor):
                    args = (*args[:first], *[number(v) for v in args[first:]])
                    break
            if kwargs:
                for k, v in kwargs.items():
                    if isinstance(v, DTensor) and k not in ("out", "input"):
                        kwargs[k] = number(v)
            return original(*args, **kwargs)

        return wrapper

    return make


_SCALES = ("alpha", "beta", "value")


def takes_scales(original: Any) -> Any:
    """Read alpha=, beta=, value= as numbers where all operands are plain."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for v in kwargs.values():
            if type(v) is DTensor and not holds_dtensor(args):
                scales = {k: v for k, v in kwargs.items() if k in _SCALES}
                kwargs |= {k: number(v) for k, v in scales.items()}
                break
        return original(*args, **kwargs)

    return wrapper


def creates(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of functions that make tensors: a DTensor there is a size or a bound."""
    if isinstance(kwargs.get("out"), DTensor):
        return _made_into(func, args, dict(kwargs))
    return func(*[number(a) for a in args], **{k: number(v) for k, v in kwargs.items()})


def _made_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=`` a DTensor: the whole value is made on every rank, each keeps its part."""
    out = kwargs.pop("out")
    if func.__name__ in ("rand", "randint", "randn", "randperm"):
        raise ShardingError(
            f"{func.__name__}: out= cannot be a DTensor, got {out!r}. Fill it in place, "
            "with x.uniform_(), x.normal_() or x.random_(low, high)."
        )
    kwargs |= {"dtype": out.dtype, "device": out.device, "requires_grad": False}
    made = func(*[number(a) for a in args], **{k: number(v) for k, v in kwargs.items()})
    if made.shape != out.shape:
        raise ShardingError(
            f"{func.__name__}: out= does not fit the result, got shape "
            f"{tuple(out.shape)}, expected {tuple(made.shape)}. Leave out= away."
        )
    with torch.no_grad():
        return out.copy_(typed(made, out._spec.replicated()))


for _name in (
    "arange bartlett_window blackman_window empty empty_permuted empty_strided eye full "
    "hamming_window hann_window kaiser_window linspace logspace ones rand randint randn "
    "randperm range tril_indices triu_indices zeros"
).split():
    handles(getattr(torch, _name))(creates)


@handles(T.numpy)
def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole value as an array; every rank of the mesh must ask."""
    x = args[0]
    if x.requires_grad and not kwargs.get("force", False):
        raise RuntimeError(
            "numpy: the array would have no gradient, got a DTensor that requires grad. "
            "Call x.detach().numpy()."
        )
    return whole_value(func, args, kwargs)


# ---- copies that ask nobody ------------------------------------------------------------------
def copies(original: Any) -> Any:
    """``torch.tensor``: of a DTensor, a detached copy in its own layout."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data")
        if not isinstance(data, DTensor):
            return original(*args, **kwargs)
        out = _converted(data.detach().clone(), kwargs)
        return out.requires_grad_(True) if kwargs.get("requires_grad") else out

    return wrapper


def converts(first: str) -> Maker:
    """``torch.as_tensor``, ``asarray``: a DTensor is a tensor already.

    Args:
        first: Name of the first argument.
    """

    def make(original: Any) -> Any:
        names = (first, "dtype", "device")

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get(first)
            if not isinstance(data, DTensor):
                return original(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            if first == "obj" and data.requires_grad and not given.get("requires_grad"):
                data = data.detach()
            out = _converted(data, given)
            return out.clone() if given.get("copy") and out is data else out

        return wrapper

    return make


def _converted(x: Any, given: dict[str, Any]) -> Any:
    kept = {k: given[k] for k in ("dtype", "device") if given.get(k) is not None}
    return x.to(**kept) if kept else x


@handles(T.new_tensor)
def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Data that every rank has: Replicate, of the tensor's dtype."""
    x, data = args[0], args[1] if len(args) > 1 else kwargs["data"]
    if isinstance(data, DTensor):
        return torch.tensor(data, **{"dtype": x.dtype, **kwargs})
    kwargs = dict(kwargs)
    needs = kwargs.pop("requires_grad", False)
    with NoTF():
        local = func(plain(x), *args[1:], **kwargs)
    whole = (Replicate(),) * x.device_mesh.ndim
    out = typed(local, spec_of(x.device_mesh, whole, local.shape, x._spec.world))
    return out.requires_grad_(True) if needs else out


def makes_leaves(handler: Handler) -> Handler:
    """``requires_grad=True`` of a function that makes a DTensor: a watched leaf."""

    def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("requires_grad"):
            return handler(func, args, kwargs)
        rest = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        return handler(func, args, rest).requires_grad_(True)

    return watched


for _name in "empty_like full_like ones_like zeros_like".split():
    handles(getattr(torch, _name))(makes_leaves(HANDLERS[getattr(torch, _name)]))
for _name in "new_empty new_full new_ones new_zeros".split():
    handles(getattr(T, _name))(makes_leaves(HANDLERS[getattr(T, _name)]))


def refuses(what: str, mend: str, own: bool = True) -> Maker:
    """A maker of wrappers that refuse DTensors.

    Args:
        what: The call's name, for the message.
        mend: The call that mends it.
        own: Whether the first argument (self) counts as well.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for a in (*args, *kwargs.values()):
                if holds_dtensor(a) and (own or not isinstance(args[0], DTensor)):
                    got = repr(a) if isinstance(a, DTensor) else f"a {type(a).__name__}"
                    raise ShardingError(
                        f"{what}: would take this rank's shard for the whole, got "
                        f"{got}, expected plain tensors. {mend}"
                    )
            return original(*args, **kwargs)

        return wrapper

    return make


def takes_storage(original: Any) -> Any:
    """``x.set_(y)`` of two DTensors of one shape: ``x`` holds the shard of ``y``."""
    refused = refuses("set_", "Use x.copy_(y), or x.data = y of one layout.")(original)

    @functools.wraps(original)
    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, DTensor) and len(args) == 1 and isinstance(args[0], DTensor):
            y, spec = args[0], x._spec
            if y._spec.mesh is spec.mesh and y._spec.shape == spec.shape:
                with NoTF():
                    original(x, redistributed(y, spec))
                return x
        return refused(x, *args, **kwargs)

    return wrapper


def constructs(original: Any) -> Any:
    """``torch.Tensor.__new__``: ``torch.Tensor(x)`` would copy the shard."""

    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], DTensor):
            raise ShardingError(
                f"torch.{cls.__name__}: would take this rank's shard for the whole, "
                f"got {args[0]!r}, expected numbers or a size. Call "
                "x.detach().clone() for a copy, x.full_tensor() for the whole value."
            )
        return original(cls, *args, **kwargs)

    return staticmethod(new)


LEAVE = "Call x.to_local() for the shard or x.full_tensor() for the whole value."


@handles(T.__dlpack__)
def _no_dlpack(func: Any, args: Any, kwargs: Any) -> Any:
    raise ShardingError(
        f"__dlpack__: DLPack would hand out this rank's shard alone, got {args[0]!r}, "
        f"expected a plain tensor. {LEAVE}"
    )


def fills_parameters(original: Any) -> Any:
    """``vector_to_parameters``: each parameter takes its slice in its own layout."""

    @functools.wraps(original)
    def wrapper(vec: Any, parameters: Any) -> None:
        if not isinstance(vec, DTensor):
            return original(vec, parameters)  # type: ignore[no-any-return]
        vec = redistributed(vec, vec._spec.replicated())
        at = 0
        with torch.no_grad():
            for p in parameters:
                piece = vec[at : at + p.numel()].view(p.shape)
                at += p.numel()
                if isinstance(p, DTensor):
                    p.data = redistributed(piece, p._spec).clone()
                else:
                    p.data = plain(piece).clone()
        return None

    return wrapper


def with_plain_constants(original: Any) -> Any:
    """``torch.masked.var``: it mixes in a count of its own, alike on all ranks."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not holds_dtensor([*args, *kwargs.values()]):
            return original(*args, **kwargs)
        with promote_plain("replicate"):
            return original(*args, **kwargs)

    return wrapper


# ---- the table ---------------------------------------------------------------------------------
_EAGER = torch._functorch.eager_transforms
_SCALED = "add sub addcmul addcdiv addmm addmv addr addbmm baddbmm"
_MAKERS = "arange range linspace logspace eye randperm randint"
_SPARSE = (
    "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
    "sparse_bsc_tensor sparse_compressed_tensor"
)
_JIT = "Call torch.jit on a module of plain tensors, or run without it."

# All that is replaced in torch: (owner, name, maker of the wrapper).
WRAPPED: list[tuple[Any, str, Maker]] = [
    (torch.autograd.Function, "apply", dtensor_apply),
    (torch.autograd.graph.saved_tensors_hooks, "__init__", plain_saved_tensors),
    (torch, "tensor", copies),
    (torch, "as_tensor", converts("data")),
    (torch, "asarray", converts("obj")),
    (torch, "full", takes_numbers(1)),
    (torch, "full_like", takes_numbers(1)),
    *[(torch, n, takes_numbers(0)) for n in _MAKERS.split()],
    (T, "new_full", takes_numbers(1)),
    *[(torch, n, takes_scales) for n in _SCALED.split()],
    (T, "__new__", constructs),
    (T, "new_tensor", refuses("new_tensor", LEAVE, own=False)),
    (T, "new", refuses("new", LEAVE, own=False)),
    (T, "set_", takes_storage),
    *[(torch, n, refuses(n, LEAVE)) for n in _SPARSE.split()],
    (torch, "to_dlpack", refuses("to_dlpack", LEAVE)),
    (torch.utils.dlpack, "to_dlpack", refuses("to_dlpack", LEAVE)),
    (torch._functorch.vmap, "vmap_impl", transforms),
    (torch._functorch.apis, "vmap_impl", transforms),
    (_EAGER, "grad_and_value_impl", transforms),
    (_EAGER, "_vjp_with_argnums", transforms),
    (_EAGER, "_jvp_with_argnums", transforms),
    (torch.func, "linearize", transforms),
    (torch._C.ScriptFunction, "__call__", refuses("a scripted function", _JIT)),
    (torch.jit, "trace", refuses("torch.jit.trace", _JIT)),
    (torch.jit, "trace_module", refuses("torch.jit.trace_module", _JIT)),
    (torch.jit, "script", refuses("torch.jit.script", _JIT)),
    (torch.export, "export", refuses("torch.export.export", _JIT)),
    (torch, "compile", compiles),
    (torch.masked._ops, "_std_var", with_plain_constants),
    (torch.nn.utils, "vector_to_parameters", fills_parameters),
    (torch.nn.utils.convert_parameters, "vector_to_parameters", fills_parameters),
    *clipping.WRAPPED,
    *optimizers.WRAPPED,
]

if hasattr(_CheckpointFrame, "save_inputs"):  # older torch saves them by a Function
    WRAPPED += [
        (_CheckpointFrame, "save_inputs", notes_inputs),
        (_CheckpointFrame, "get_inputs", types_inputs),
    ]


def install() -> None:
    """Wrap the entry points of ``WRAPPED``; a second call does nothing."""
    serialization.install()
    # `with torch.device(..):` knows the constructors by identity; it looks them up once
    # and must have met torch's own.
    _device_constructors()
    for owner, name, make in WRAPPED:
        original = vars(owner).get(name, getattr(owner, name))
        original = getattr(original, "__func__", original)
        if getattr(original, "_by_dtensor", False):
            continue
        wrapper = make(original)
        inner: Any = getattr(wrapper, "__func__", wrapper)
        inner._by_dtensor = True
        setattr(owner, name, wrapper)
        if owner is T:  # torch names a method by what the class has now
            HANDLERS[inner] = _forwards(original)
        _tell_script(owner, name, original, wrapper)


def _forwards(original: Any) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return HANDLERS[original](original, args, kwargs)

    return handler


def _tell_script(owner: Any, name: str, original: Any, wrapper: Any) -> None:
    """TorchScript knows builtins by identity: the wrapper is the same one."""
    if owner is torch:
        op = torch.jit._builtins._find_builtin(original)  # type: ignore[no-untyped-call]
        if op is not None:
            torch.jit._builtins._register_builtin(wrapper, op)


__all__ = ["WRAPPED", "holds_dtensor", "install"]
