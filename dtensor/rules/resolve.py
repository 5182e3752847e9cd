"""Which handler answers a torch function: found once, when it is first met."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import first_spec, name_of
from dtensor.dispatch import planned
from dtensor.errors import ShardingError
from dtensor.fallback import fallback
from dtensor.keywords import by_signature
from dtensor.opened import opened
from dtensor.placement import Replicate
from dtensor.redistribute import plain
from dtensor.registry import HANDLERS, Handler
from dtensor.rules import randomness
from dtensor.rules.composed import COMPOSED, composed
from dtensor.rules.cross_entropy import insisting
from dtensor.rules.foreach import by_mesh, foreach_norm
from dtensor.rules.pointwise import without_partial
from dtensor.rules.table import (
    RANDOM_BODIES,
    RANDOM_FILL,
    RANDOM_LIKE,
    RANDOM_OTHER,
    RANDOM_RECURRENT,
    rule_of,
)
from dtensor.rules.turned import TURNS, turned
from dtensor.tensor import DTensor, redistributed

T = torch.Tensor

# Python's operator methods, by the name of their table entry.
OPERATORS = {
    "add": "add radd iadd",
    "sub": "sub isub",
    "mul": "mul rmul imul",
    "div": "truediv itruediv div idiv",
    "floor_divide": "floordiv ifloordiv",
    "remainder": "mod imod",
    "pow": "pow ipow",
    "matmul": "matmul imatmul",
    "bitwise_and": "and rand iand",
    "bitwise_or": "or ror ior",
    "bitwise_xor": "xor rxor ixor",
    "bitwise_left_shift": "lshift ilshift",
    "bitwise_right_shift": "rshift irshift",
    "bitwise_not": "invert",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "neg": "neg",
    "positive": "pos",
    "abs": "abs",
    "getitem": "getitem",
    "setitem": "setitem",
}
DUNDERS = {f"__{d}__": op for op, ds in OPERATORS.items() for d in ds.split()}
INPLACE_DUNDERS = {
    f"__{d}__"
    for ds in OPERATORS.values()
    for d in ds.split()
    if d.startswith("i") and d != "invert"
} | {"__setitem__"}

# Answers that are the same for the shard and for the whole, or speak of the shard's
# memory.
LOCAL_ANSWERS = set(
    """
    dim ndimension is_complex is_floating_point is_signed is_conj is_neg is_inference
    element_size get_device is_contiguous is_pinned is_shared data_ptr storage_offset
    untyped_storage storage _typed_storage _is_view result_type can_cast is_nonzero_
    _has_compatible_shallow_copy_type is_set_to has_names _version is_coalesced
    retains_grad_ share_memory_ is_distributed _use_count
    """.split()
)
LOCAL_GETTERS = set(
    """
    dtype device layout requires_grad is_leaf grad_fn _version ndim is_cuda is_cpu
    is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_mps is_xpu is_xla is_ipu
    is_vulkan is_ort is_mtia is_maia is_hpu is_nested names itemsize output_nr
    retains_grad _backward_hooks _post_accumulate_grad_hooks name volatile grad_dtype
    _cdata is_vulkan
    """.split()
)
# Python-level methods whose bodies call the builtin method of the same name.
RE_ENTERING = {"unflatten"}
# Python-level functions that write into copies of their arguments.
WITHOUT_ADDENDS = {"gaussian_nll_loss"}
VIEW_GETTERS = {"T", "mT", "H", "mH", "real", "imag"}
# Questions about the values: asked of the whole tensor.
VALUES = set(
    """
    item tolist __bool__ __float__ __int__ __index__ __complex__ is_nonzero equal
    allclose __contains__ numel_ __nonzero__ __long__
    """.split()
)
# Those of them that give one number.
NUMBERS = set(
    "item __bool__ __float__ __int__ __index__ __complex__ is_nonzero".split()
)
# Single steps of recurrent layers.
CELLS = set("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())


RANDOM_OPS: dict[str, Handler] = {
    "bernoulli": randomness.bernoulli,
    "normal": randomness.normal,
    "dropout": randomness.dropping(),
    "feature_dropout": randomness.dropping(features=True),
    "alpha_dropout": randomness.dropping(alpha=True),
    "feature_alpha_dropout": randomness.dropping(True, True),
    "native_dropout": randomness.native_dropout,
    "rrelu": randomness.rrelu,
}


def in_order(handler: Handler) -> Handler:
    """A handler that gets named arguments in the order of the op's signature."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            args, kwargs = by_signature(func, args, kwargs)
        return handler(func, args, kwargs)

    return run


def resolve(func: Any) -> Handler:
    """Find the handler of a torch function; the order of the tests matters."""
    name = name_of(func)
    if name.endswith(".__get__"):
        return getter(name[: -len(".__get__")])
    if name.endswith((".__set__", ".__delete__")):
        return setter(name)
    if name in VALUES:
        return whole_value
    if name in LOCAL_ANSWERS:
        return local_answer
    if name in DUNDERS:
        base, inplace = DUNDERS[name], name in INPLACE_DUNDERS
    else:
        inplace = name.endswith("_") and not name.endswith("__")
        base = name[:-1] if inplace else name
    if inplace and base in TURNS:
        op = rule_of(base, False)
        assert op is not None, "every one has a table entry"
        return in_order(turned(op))
    op = rule_of(base, inplace)
    gathered = in_order(fallback(name, inplace))
    if name in RANDOM_BODIES.split():
        return randomness.gathered_random(gathered)
    if isinstance(func, types.FunctionType):
        again = planned(op) if op is not None and name in RE_ENTERING else gathered
        if name in WITHOUT_ADDENDS:
            return addends_first(opened(func, again))
        if name == "multi_head_attention_forward":
            return with_whole_masks(opened(func, again))
        return opened(func, again)
    if name in RANDOM_FILL.split():
        return in_order(randomness.random_fill)
    if base in RANDOM_LIKE.split():
        return randomness.random_like
    if base in RANDOM_OPS:
        return in_order(RANDOM_OPS[base])
    if base == "_weight_norm":
        return in_order(weight_norm)
    if name in RANDOM_OTHER.split():
        return randomness.gathered_random(gathered)
    if base == "_foreach_norm":
        return by_mesh(in_order(foreach_norm(gathered)))
    if base.startswith(("_foreach_", "_fused_")) and op is not None:
        return by_mesh(planned(op))
    if base in ("cross_entropy_loss", "nll_loss_nd") and op is not None:
        return insisting(planned(op))
    if base == "scaled_dot_product_attention" and op is not None:
        return randomness.attention(planned(op))
    if name in RANDOM_RECURRENT.split():
        again = gathered if op is None else planned(op)
        drops = randomness.recurrent_dropout
        return from_zero(randomness.gathered_random(again, drops))
    if name in CELLS:
        return from_zero(gathered if op is None else planned(op))
    if op is not None and base in ("to", "type_as"):
        return lent_dtype(planned(op))
    if op is not None:
        return planned(op)
    if name in COMPOSED:
        return in_order(composed(name, gathered))
    return gathered


def weight_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_weight_norm(v, g, dim)``, by ops that have rules: norms travel, weights stay."""
    v, g, dim = (*args, kwargs.get("dim", 0))[:3]
    others = None if dim == -1 else [d for d in range(v.ndim) if d != dim % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=dim != -1))


def from_zero(handler: Handler) -> Handler:
    """Take the plain zeros that a recurrent module starts from as whole states."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def whole(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(whole(v) for v in x)
            if type(x) is not T or x.requires_grad or x.is_meta or x.any():
                return x
            places = (Replicate(),) * spec.mesh.ndim
            return DTensor.from_local(x, spec.mesh, places, run_check=False)

        if len(args) > 1 and isinstance(args[0], DTensor):
            spec = args[0]._spec
            args = (args[0], whole(args[1]), *args[2:])
        return handler(func, args, kwargs)

    return run


def lent_dtype(handler: Handler) -> Handler:
    """``x.to(other)``, ``x.type_as(other)``: of a plain tensor the type alone counts."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        typed = isinstance(args[0], DTensor)
        if not isinstance(other, T) or typed and isinstance(other, DTensor):
            return handler(func, args, kwargs)
        named = {k: v for k, v in kwargs.items() if k != "other"}
        rest = (other.device, other.dtype, *args[2:])
        if typed:
            return handler(T.to, (args[0], *rest), named)
        with NoTF():
            return args[0].to(*rest, **named)

    return run


def with_whole_masks(handler: Handler) -> Handler:
    """Plain masks of ``multi_head_attention_forward`` are whole values.

    Its callers turn masks of bools into numbers, and its body compares their shapes
    with those of the whole attention, so no shard can be meant.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = first_spec(args, kwargs)
        whole = {
            name: DTensor.from_local(
                mask, spec.mesh, spec.replicated().placements, run_check=False
            )
            for name in ("attn_mask", "key_padding_mask")
            if isinstance(mask := kwargs.get(name), T) and not isinstance(mask, DTensor)
        }
        return handler(func, args, kwargs | whole)

    return run


def addends_first(handler: Handler) -> Handler:
    """Reduce Partial arguments, for a body that writes into copies of them in place."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def reduced(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            return redistributed(x, x._spec.replace(without_partial(x.placements)))

        named = {k: reduced(v) for k, v in kwargs.items()}
        return handler(func, tuple(reduced(a) for a in args), named)

    return run


def local_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask the local shard."""
    with NoTF():
        out = func(*args, **kwargs)
    if type(out) is T:
        raise ShardingError(f"{name_of(func)}: gave a tensor where none was expected.")
    return out


def whole_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask the whole value; every rank of the mesh must ask (it may communicate)."""
    plains = []
    name = name_of(func)
    for a in args:
        if isinstance(a, DTensor):
            if a._spec.coordinate is None and name in NUMBERS:
                raise ShardingError(
                    f"{name}: this rank is outside of {a._spec.mesh!r} and has no value "
                    "of it. Ask on the ranks of the mesh: `if mesh.get_coordinate() is "
                    "not None:`."
                )
            a = plain(redistributed(a, a._spec.replicated())).detach()
        plains.append(a)
    kwargs = {
        k: plain(redistributed(v, v._spec.replicated()))
        if isinstance(v, DTensor)
        else v
        for k, v in kwargs.items()
    }
    with NoTF():
        return func(*plains, **kwargs)


def getter(name: str) -> Handler:
    """An attribute of the C++ tensor."""
    if name in VIEW_GETTERS:
        base = {"H": "adjoint", "mH": "adjoint"}.get(name, name)
        op = rule_of(base, False)
        assert op is not None, "every view getter has a table entry"
        return planned(op)
    if name in LOCAL_GETTERS:
        return local_answer

    def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise ShardingError(
            f"{name}: a DTensor does not have this attribute. Ask x.to_local() for the "
            "shard's, or x.full_tensor() for the whole tensor's."
        )

    return refuse


def setter(name: str) -> Handler:
    """An attribute of the C++ tensor that is written."""
    attribute = name.split(".")[0]

    def write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if attribute in ("_backward_hooks", "requires_grad", "names", "_fw_grad"):
            with NoTF():
                return func(*args, **kwargs)
        raise ShardingError(
            f"{attribute}: this attribute of a DTensor cannot be assigned. Use "
            "x.copy_(value), or x.data = a DTensor of the same layout."
        )

    return write


HANDLERS.resolver = staticmethod(resolve)
