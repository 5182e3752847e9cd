"""The table of sharding rules, by op name.

One entry ``add`` covers ``torch.add``, ``Tensor.add``, ``+``, ``+=``, ``add_`` and
``out=``. A string is index notation (see ``notation.parse``); a function gets the
``Call`` and gives a ``Notation`` or a ``Layout``. Ops that are not here still give the
right answer: their operands are gathered, with a warning.
"""

from __future__ import annotations

from typing import Any, Callable

from dtensor.dispatch import Call, Op, Rule
from dtensor.errors import ShardingError
from dtensor.notation import Notation, parse
from dtensor.rules import indexing, linalg, nn, views
from dtensor.rules.foreach import foreach, fused_optimizer
from dtensor.rules.pointwise import (
    BRANCHES,
    FIRST,
    NONE,
    PRODUCT,
    SUM,
    UNARY,
    cast,
    like,
    no_rounding,
    pointwise,
)
from dtensor.rules.reductions import along_dim, averaged, norm, summed, whole_dims

RULES: dict[str, Rule] = {}
# Ops whose rule does not read integers: they stay out of the cache key.
NUMBERLESS: set[str] = set()


def by_notation(text: str) -> Rule:
    """The rule of a line of index notation."""
    notation = parse(text)

    def rule(call: Call) -> Notation:
        if len(call.operands) != len(notation.ins):
            raise ShardingError(
                f"{call.name}: the rule {text!r} is for {len(notation.ins)} operands, "
                f"got {len(call.operands)}. Register a rule that fits the call."
            )
        for sub, o in zip(notation.ins, call.operands, strict=True):
            if len(sub) != o.ndim:
                raise ShardingError(
                    f"{call.name}: the rule {text!r} does not fit an operand of "
                    f"{o.ndim} dims, expected {len(sub)}. Register a rule that does."
                )
        return notation

    return rule


def register_rule(name: str, rule: str | Rule) -> None:
    """Give an op a sharding rule.

    Args:
        name: The op's name, as in ``torch.NAME`` or ``"namespace::NAME"``.
        rule: Index notation such as ``"bsd,fd->bsf + f"``, or a function from ``Call``
            to ``Notation``.

    Example:
        >>> register_rule("mylib::scale_rows", "md,m->md")
    """
    RULES[name.split("::")[-1]] = by_notation(rule) if isinstance(rule, str) else rule


def _fill(names: str, rule: Rule | str, numberless: bool = False) -> None:
    for name in names.split():
        register_rule(name, rule)
        if numberless:
            NUMBERLESS.add(name)


NONLINEAR_POINTWISE = """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh
deg2rad_ digamma elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide
fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf
isreal ldexp le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lshift
lt masked_fill maximum minimum mish mvlgamma nan_to_num ne nextafter not_equal polar
polygamma pow prelu_ reciprocal relu relu6 remainder round rrelu_ rshift rsqrt selu sgn
sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx
special_expit special_i0e special_i1 special_i1e special_log_ndtr special_ndtr
special_ndtri special_xlog1py special_zeta sqrt square tan tanh threshold trunc xlogy
addcmul addcdiv fill special_expm1 special_logit special_psi special_round sinc_ _square
"""
_fill(NONLINEAR_POINTWISE, pointwise(NONE), numberless=True)
_fill(
    "neg negative positive clone contiguous detach real imag conj resolve_conj "
    "resolve_neg conj_physical deg2rad rad2deg alias view_as_complex_ zero",
    pointwise(UNARY),
    numberless=True,
)
_fill("add sub subtract rsub lerp", pointwise(SUM), numberless=True)
_fill("mul multiply", pointwise(PRODUCT), numberless=True)
_fill("div divide true_divide", pointwise(FIRST, no_rounding), numberless=True)
_fill("where", pointwise(BRANCHES), numberless=True)
_fill("copy", pointwise(SUM), numberless=True)
_fill(
    "to type type_as float double half bfloat16 cfloat cdouble cpu cuda pin_memory",
    cast,
)
_fill("int long short char byte bool", pointwise(NONE))
_fill("zeros_like ones_like empty_like full_like", like, numberless=True)

_fill("sum nansum", summed)
RULES["nansum"] = whole_dims(1, 2)
_fill("mean", averaged)
_fill("amax amin argmax argmin prod logsumexp nanmean std var any all", whole_dims(1, 2))
_fill("std var", whole_dims(1, 3))
_fill("var_mean std_mean", whole_dims(1, 3, outs=2))
_fill("max min median nanmedian mode", whole_dims(1, 2, outs=2, needs_dim=True))
_fill("linalg_vector_norm", norm)
_fill("softmax log_softmax", along_dim(1))
_fill("cumsum", along_dim(1, linear=True))
_fill("cumprod logcumsumexp", along_dim(1))
_fill("cummax cummin", along_dim(1, outs=2))
_fill("sort", along_dim(1, -1, outs=2))
_fill("argsort", along_dim(1, -1))
_fill("topk", along_dim(2, -1, outs=2))

_fill("matmul", linalg.matmul)
_fill("linear", linalg.linear)
_fill("mm", "mk,kn->mn")
_fill("bmm", "bmk,bkn->bmn")
_fill("mv", "mk,k->m")
_fill("dot vdot", "k,k->")
_fill("outer ger", "m,n->mn")
_fill("addmm addmv baddbmm", linalg.addmm)
_fill("einsum", linalg.einsum)

_fill("view", views.view)
_fill("reshape view_as reshape_as unflatten", views.reshaped(True))
_fill("flatten ravel", views.reshaped(False))
_fill(
    "transpose permute movedim moveaxis swapaxes swapdims t T mT numpy_T adjoint",
    views.permuted,
)
_fill("squeeze", views.squeeze)
_fill("unsqueeze", views.unsqueeze)
_fill("expand expand_as broadcast_to", views.expand)
_fill("narrow", views.cut_dim(1, drop=False, many=False))
_fill("select", views.cut_dim(1, drop=True, many=False))
_fill("unbind", views.cut_dim(1, drop=True, many=True))
_fill("split split_with_sizes chunk tensor_split", views.cut_dim(2, False, True))
_fill("cat concat concatenate", views.joined(new_dim=False))
_fill("stack", views.joined(new_dim=True))
_fill("tril triu", views.matrix_whole)
_fill("flip", views.dims_whole(1))
_fill("roll", views.dims_whole(2))
_fill("getitem", indexing.getitem)
_fill("setitem", indexing.setitem)

_fill("layer_norm rms_norm native_layer_norm_", nn.normalized)
_fill("group_norm", nn.group_norm)
_fill("embedding", nn.embedding)
_fill("scaled_dot_product_attention", nn.attention)
_fill("cross_entropy_loss", nn.cross_entropy)
_fill("mse_loss l1_loss smooth_l1_loss huber_loss", nn.elementwise_loss)

for _name in (
    "add sub mul div abs neg sqrt pow exp log sign reciprocal clamp_min clamp_max lerp "
    "addcmul addcdiv maximum minimum copy zero rsqrt sigmoid tanh"
).split():
    RULES[f"_foreach_{_name}"] = foreach(RULES[_name])
    NUMBERLESS.add(f"_foreach_{_name}")
_fill("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", fused_optimizer, True)


def rule_of(name: str, inplace: bool) -> Op | None:
    """The table entry of an op, or None."""
    rule = RULES.get(name)
    if rule is None:
        return None
    return Op(name, rule, name not in NUMBERLESS, inplace)


RANDOM_FILL = """
normal_ uniform_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
"""
RANDOM_LIKE = "rand_like randn_like randint_like"
RANDOM_OTHER = """
bernoulli multinomial poisson normal binomial rrelu rrelu_ alpha_dropout alpha_dropout_
feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_
fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention_dropout
"""

Table = dict[str, Callable[..., Any]]
