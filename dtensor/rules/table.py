"""The table of sharding rules, by op name.

One entry ``add`` covers ``torch.add``, ``Tensor.add``, ``+``, ``+=``, ``add_`` and
``out=``. A string is index notation (see ``notation.parse``); a function gets the
``Call`` and gives a ``Notation`` or a ``Layout``. Ops that are not here still give the
right answer: their operands are gathered, with a warning.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch

from dtensor.calls import Call, Rule, name_of
from dtensor.errors import ShardingError
from dtensor.mesh.world import current_world
from dtensor.notation import Notation, parse
from dtensor.planning import Op
from dtensor.registry import HANDLERS
from dtensor.rules import (
    cuts,
    extrema,
    fft,
    indexing,
    linalg,
    losses,
    matrices,
    nn,
    normalization,
    order,
    parts,
    scans,
    scatter,
    views,
    vision,
    writing,
)
from dtensor.rules.convolution import convolution, padded, spatial
from dtensor.rules.cross_entropy import cross_entropy
from dtensor.rules.foreach import foreach, fused_optimizer
from dtensor.rules.moments import spread
from dtensor.rules.norms import dist, norm
from dtensor.rules.partition import empty_shards
from dtensor.rules.pointwise import (
    BRANCHES,
    CASTS,
    FIRST,
    NONE,
    PRODUCT,
    SUM,
    UNARY,
    cast,
    isin,
    keeps_kind,
    like,
    no_rounding,
    pointwise,
    prelu,
    several,
)
from dtensor.rules.reductions import (
    along_dim,
    averaged,
    counted,
    nanaveraged,
    nansummed,
    prod,
    summed,
    truth,
    whole_dims,
)
from dtensor.rules.softmax import logsumexp, softmax

RULES: dict[str, Rule] = {}
# Ops whose rule does not read integers: they stay out of the cache key.
NUMBERLESS: set[str] = set()
# Ops whose rule reads dtypes: a sum that rounds to whole numbers, a cast, is not linear.
TYPED = {"copy", "_foreach_copy", "nansum", "sum", "to", "type", "type_as", *CASTS}
# ... and those that pick: addends of booleans are none.
TYPED |= set("gather getitem index_select take take_along_dim".split())
TYPED |= set("embedding index_add scatter scatter_add scatter_reduce".split())
# ... and those that refuse some.
TYPED |= set("cross_entropy_loss nll_loss_nd".split())
# ... and those along a cut dim whose small results travel, for some dtypes.
TYPED |= set(
    """
    addbmm addmm addmv addr all amax amin aminmax any argmax argmin baddbmm cummax
    cummin cumprod cumsum dist histc
    linalg_vector_norm log_softmax logsumexp max min prod softmax std
    std_mean topk var var_mean
    """.split()
)


def by_notation(text: str, linear: bool = False) -> Rule:
    """The rule of a line of index notation."""
    notation = parse(text, linear)

    def rule(call: Call) -> Notation:
        if len(call.operands) != len(notation.ins):
            raise ShardingError(
                f"{call.name}: the rule {text!r} is for {len(notation.ins)} operands, "
                f"got {len(call.operands)}. Register a rule that fits the call."
            )
        sizes: dict[object, int] = {}
        for sub, o in zip(notation.ins, call.operands, strict=True):
            fits = len(sub) == o.ndim
            for letter, size in zip(sub, o.shape, strict=False):
                fits = fits and sizes.setdefault(letter, size) == size
            if not fits:
                shapes = [tuple(o.shape) for o in call.operands]
                raise ShardingError(
                    f"{call.name}: the rule {text!r} does not fit operands of shapes "
                    f"{shapes}, expected one size per letter. Register a rule that does."
                )
        results = [tuple(sizes[x] for x in sub) for sub in notation.outs]
        return dataclasses.replace(notation, shapes=[*results])

    return rule


def register_rule(
    name: str, rule: str | Rule | None = None, *, linear: bool = False
) -> Any:
    """Give an op a sharding rule.

    Args:
        name: The op's name: ``"namespace::name"`` for one of ``torch.ops``, its bare
            name for one of torch's own.
        rule: Index notation such as ``"bsd,fd->bsf + f"``, or a function from ``Call``
            to ``Notation`` or ``Layout``; left away, this is a decorator of such a
            function. Letters that no result has are summed over.
        linear: Whether the op is linear in each operand before ``+`` (a product of
            matrices is, ``exp`` is not). Then Partial operands stay Partial.

    Raises:
        ValueError: There is no such op, or the notation makes no sense.

    Example:
        >>> @torch.library.custom_op("mylib::scale_rows", mutates_args=())
        ... def scale_rows(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ...     return x * by[:, None]
        >>> register_rule("mylib::scale_rows", "md,m->md", linear=True)
    """
    name = name.removeprefix("aten::")
    if rule is None:

        def decorate(function: Rule) -> Rule:
            register_rule(name, function)
            return function

        return decorate
    if not exists(name):
        near = difflib.get_close_matches(name, RULES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"register_rule: torch has no op of this name, got {name!r}, expected "
            "'namespace::name' of an op of torch.ops, defined before, or the bare name "
            f"of one of torch's own.{hint}"
        )
    RULES[name] = by_notation(rule, linear) if isinstance(rule, str) else rule
    # What was found for the op before no longer holds.
    for func in [f for f in HANDLERS if name_of(f).strip("_") == name.strip("_")]:
        del HANDLERS[func]
    current_world().memo.get("plans", {}).clear()
    return None


def exists(name: str) -> bool:
    """Whether torch has an op of this name."""
    if "::" in name:
        space, _, bare = name.partition("::")
        return hasattr(getattr(torch.ops, space), bare)
    places: tuple[Any, ...] = (torch, torch.Tensor, torch._C._nn, torch.ops.aten)
    return any(hasattr(p, n) for p in places for n in (name, f"{name}_", f"__{name}__"))


def _fill(names: str, rule: Rule | str, numberless: bool = False) -> None:
    for name in names.split():
        RULES[name] = by_notation(rule, True) if isinstance(rule, str) else rule
        if numberless:
            NUMBERLESS.add(name)


# ---- pointwise: broadcast letters ------------------------------------------------
_fill(
    """
    abs absolute acos acosh addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
    clamp_min clip complex copysign cos cosh digamma elu eq erf erfc erfinv exp exp2
    expm1 fill fix float_power floor floor_divide fmax fmin fmod frac ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma
    igammac isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu
    less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum
    mish mvlgamma nan_to_num ne nextafter not_equal polar polygamma pow reciprocal relu
    relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
    softshrink special_digamma special_entr special_erf special_erfc special_erfcx
    special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0
    special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
    special_ndtr special_ndtri special_psi special_round special_sinc special_xlog1py
    special_xlogy special_zeta special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_gammainc special_gammaincc
    special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_polygamma
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 sqrt square tan tanh threshold trunc xlogy
    """,
    pointwise(NONE),
    numberless=True,
)
_fill(
    """
    conj conj_physical deg2rad imag neg negative positive rad2deg real resolve_conj
    resolve_neg zero
    """,
    pointwise(UNARY),
    numberless=True,
)
_fill(
    "clone contiguous detach alias_copy", pointwise(UNARY, copies=True), numberless=True
)
_fill("add sub subtract rsub lerp", pointwise(SUM), numberless=True)
_fill("mul multiply", pointwise(PRODUCT), numberless=True)
_fill("div divide true_divide", pointwise(FIRST, no_rounding), numberless=True)
_fill("where", pointwise(BRANCHES), numberless=True)
_fill("copy", pointwise(SUM, keeps_kind), numberless=True)
_fill("prelu", prelu)
_fill("frexp", several(2))
_fill("isin", isin)
_fill("to type type_as float double half bfloat16 cfloat cdouble chalf cpu cuda", cast)
_fill("int long short char byte bool", pointwise(NONE))
_fill("zeros_like ones_like empty_like full_like", like, numberless=True)
_fill("new_zeros new_ones new_full new_empty", views.created)

# ---- reductions and ops along dims -----------------------------------------------
_fill("sum", summed)
_fill("nansum", nansummed)
_fill("mean", averaged)
_fill("nanmean", nanaveraged)
_fill("count_nonzero", counted)
_fill("any", truth("max"))
_fill("all", truth("min"))
_fill("prod", prod)
_fill("logsumexp", logsumexp)
_fill("amax", extrema.amax(True))
_fill("amin", extrema.amax(False))
_fill("max", extrema.with_index(True))
_fill("min", extrema.with_index(False))
_fill("argmax", extrema.arg(True))
_fill("argmin", extrema.arg(False))
_fill("aminmax", extrema.aminmax)
_fill("var", spread(deviation=False, with_mean=False))
_fill("std", spread(deviation=True, with_mean=False))
_fill("var_mean", spread(deviation=False, with_mean=True))
_fill("std_mean", spread(deviation=True, with_mean=True))
_fill("median nanmedian", whole_dims(1, 2, outs=2, needs_dim=True))
_fill("mode", whole_dims(1, 2, outs=2, default=-1))
_fill("linalg_vector_norm", norm)
_fill("softmax", softmax(log=False))
_fill("log_softmax", softmax(log=True))
_fill("_safe_softmax", along_dim(1))
_fill("cumsum", scans.cumsum)
_fill("cumprod", scans.cumprod)
_fill("logcumsumexp", along_dim(1))
_fill("cummax", scans.cummax)
_fill("cummin", scans.cummin)
_fill("glu", along_dim(1, -1))
_fill("sort", order.sort(outs=2))
_fill("argsort", order.sort(outs=1))
_fill("msort", order.msort)
_fill("topk", order.topk)
_fill("kthvalue", empty_shards(order.kthvalue))
_fill("quantile nanquantile", empty_shards(order.quantile))
_fill("searchsorted", empty_shards(order.searchsorted))
_fill("bucketize", order.bucketize)
_fill("histc", order.histc)
_fill("dist", dist)

# ---- products: contracted letters ------------------------------------------------
_fill("matmul", linalg.matmul)
_fill("linear", linalg.linear)
_fill("mm", "mk,kn->mn")
_fill("bmm", "bmk,bkn->bmn")
_fill("mv", "mk,k->m")
_fill("dot vdot", "k,k->")
_fill("outer ger", "m,n->mn")
_fill("addmm addmv baddbmm", linalg.addmm)
_fill("einsum", linalg.einsum)
_fill("linalg_matmul", linalg.matmul)
_fill("tensordot", matrices.tensordot)
_fill("inner", matrices.inner)
_fill("linalg_vecdot", matrices.vecdot)
_fill("chain_matmul linalg_multi_dot", matrices.chained)
_fill("addr", matrices.added_product("m", "n", "mn", ""))
_fill("addbmm", matrices.added_product("bmk", "bkn", "mn", "bk"))
_fill("kron", empty_shards(matrices.kron))
_fill("trace", matrices.trace)
_fill("cross linalg_cross", empty_shards(matrices.cross))
_fill("conv1d conv2d conv3d", convolution(transposed=False))
_fill(
    "conv_transpose1d conv_transpose2d conv_transpose3d", convolution(transposed=True)
)

# ---- linear algebra and transforms: matrices, or the transformed dims, whole ------
_fill(
    """
    cholesky cholesky_inverse det inverse linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_lu
    linalg_lu_factor linalg_lu_factor_ex linalg_matrix_exp linalg_matrix_power linalg_qr
    linalg_slogdet linalg_svd linalg_svdvals logdet _lu_with_info matrix_exp matrix_power
    pinverse qr slogdet svd
    """,
    empty_shards(matrices.batched((2,))),
)
_fill("linalg_matrix_rank linalg_pinv", empty_shards(matrices.batched((2, 0))))
_fill(
    "linalg_householder_product lu_unpack orgqr", empty_shards(matrices.batched((2, 1)))
)
_fill("cholesky_solve triangular_solve", empty_shards(matrices.batched((2,))))
_fill("linalg_solve_triangular", empty_shards(matrices.batched((2,), linear=(1,))))
_fill("linalg_solve linalg_solve_ex", empty_shards(matrices.solve))
_fill("linalg_lstsq", empty_shards(matrices.batched((2,), flat=True)))
_fill(
    "linalg_ldl_solve linalg_lu_solve ormqr", empty_shards(matrices.batched((2, 1, 2)))
)
_fill("lu_solve", empty_shards(matrices.batched((2, 2, 1))))
_fill("linalg_vander", empty_shards(matrices.batched((1,))))
_fill("linalg_matrix_norm linalg_norm", empty_shards(matrices.matrix_norm))
_fill("frobenius_norm nuclear_norm", whole_dims(1, 2))
_fill("linalg_tensorinv linalg_tensorsolve pdist", linalg.everything_whole)
_fill("cov corrcoef", matrices.covariance)
_fill("geqrf", matrices.geqrf)
_fill("trapezoid trapz cumulative_trapezoid", empty_shards(matrices.difference))
_fill("gradient", empty_shards(matrices.gradient))
_fill("renorm", empty_shards(matrices.renorm))
_fill("cosine_similarity", empty_shards(matrices.along_last(keeps=False)))
_fill("pairwise_distance", empty_shards(matrices.along_last(keeps=True)))
_fill("cdist", empty_shards(matrices.cdist))
_fill(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
    empty_shards(fft.transform(fft.ONE)),
)
_fill("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", empty_shards(fft.transform(fft.PLANE)))
_fill("fft_hfft2 fft_ihfft2", empty_shards(fft.transform(fft.PLANE)))
_fill("fft_fftn fft_ifftn fft_rfftn fft_irfftn", empty_shards(fft.transform(None)))
_fill("fft_hfftn fft_ihfftn", empty_shards(fft.transform(None)))
_fill("fft_fftshift fft_ifftshift", fft.shift)
_fill("stft istft", empty_shards(fft.windows))

# ---- views, cuts and joins: where each dim goes ----------------------------------
_fill("view", views.view)
_fill("reshape view_as reshape_as unflatten", views.reshaped(True))
_fill("flatten ravel", views.reshaped(False))
_fill("transpose permute movedim moveaxis swapaxes swapdims t", views.permuted)
_fill("T mT adjoint", views.permuted)
_fill("squeeze", views.squeeze)
_fill("unsqueeze", views.unsqueeze)
_fill("view_as_complex view_as_real", views.pairs)
_fill("expand expand_as broadcast_to", views.expand)
_fill("broadcast_tensors", views.broadcast_tensors)
_fill("repeat tile", views.repeated)
_fill("diagonal", views.diagonal)
_fill("narrow", cuts.narrow)
_fill("select", cuts.select)
_fill("unbind", cuts.unbind)
_fill("split split_with_sizes chunk tensor_split unsafe_split", cuts.split)
_fill("unsafe_chunk unsafe_split_with_sizes", cuts.split)
_fill("flip fliplr flipud", cuts.flip)
_fill("roll", cuts.roll)
_fill("diff", cuts.diff)
_fill("cat concat concatenate", views.joined(new_dim=False))
_fill("stack", views.joined(new_dim=True))
_fill("tril triu", views.matrix_whole)
_fill("pad constant_pad_nd", padded)
_fill("diag_embed", parts.diag_embed)
_fill("linalg_diagonal", views.diagonal)
_fill("diagonal_scatter", parts.diagonal_scatter)
_fill("unfold", parts.windows)
for _name in (
    "expand permute transpose t squeeze unsqueeze view diagonal unfold"
).split():
    _fill(f"{_name}_copy", parts.copied(RULES[_name]))  # type: ignore[arg-type]
_fill("getitem", indexing.getitem)
_fill("setitem", writing.setitem)
_fill("index_put", writing.index_put)
_fill("scatter scatter_add scatter_reduce", scatter.scatter)
_fill("index_add index_copy index_fill index_reduce", scatter.index_write)
_fill("put", scatter.put)
_fill("masked_scatter", scatter.masked_scatter)
_fill("select_scatter", writing.select_scatter)
_fill("slice_scatter", writing.slice_scatter)
_fill("index_select", indexing.index_select)
_fill("gather", indexing.gather)
_fill("take", indexing.take)
_fill("take_along_dim", indexing.take_along_dim)

# ---- neural networks -------------------------------------------------------------
_fill("layer_norm rms_norm", normalization.normalized)
_fill("group_norm", normalization.group_norm)
_fill("batch_norm", normalization.batch_norm)
_fill("instance_norm", normalization.instance_norm)
_fill("embedding", nn.embedding)
_fill("scaled_dot_product_attention", nn.attention)
_fill("cross_entropy_loss", cross_entropy(logits=True))
_fill("nll_loss_nd", cross_entropy(logits=False))
_fill("mse_loss l1_loss smooth_l1_loss huber_loss", losses.elementwise_loss(2))
_fill("kl_div soft_margin_loss", losses.elementwise_loss(2))
_fill("binary_cross_entropy", losses.elementwise_loss(3))
_fill(
    "binary_cross_entropy_with_logits margin_ranking_loss", losses.elementwise_loss(4)
)
_fill("poisson_nll_loss", losses.elementwise_loss(5))
_fill("multi_margin_loss", losses.row_loss(5))
_fill("multilabel_margin_loss", losses.row_loss(2))
_fill("bilinear", vision.bilinear)
_fill("embedding_bag", vision.bag)
_fill("grid_sampler grid_sampler_2d grid_sampler_3d", vision.grid_sampler)
_fill("im2col col2im", vision.samples_free(1, linear=True))
_fill("max_unpool2d max_unpool3d", vision.samples_free(2))
_fill("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", spatial(2, linear=True))
for _n in (1, 2, 3):
    _fill(f"max_pool{_n}d max_pool{_n}d_with_indices", spatial(_n))
    _fill(f"avg_pool{_n}d adaptive_avg_pool{_n}d", spatial(_n, linear=True))
    _fill(f"adaptive_max_pool{_n}d", spatial(_n))
    _fill(f"upsample_nearest{_n}d _upsample_nearest_exact{_n}d", spatial(_n, True))
_fill("upsample_linear1d", spatial(1, linear=True))
_fill("upsample_bilinear2d upsample_bicubic2d", spatial(2, linear=True))
_fill("upsample_trilinear3d", spatial(3, linear=True))

# ---- lists of tensors: optimizers ------------------------------------------------
for _name in (
    "abs acos add addcdiv addcmul ceil clamp_max clamp_min copy cos div erf exp expm1 "
    "floor frac lerp log log10 log1p log2 maximum minimum mul neg pow reciprocal "
    "round rsqrt sigmoid sign sin sqrt sub tan tanh trunc zero"
).split():
    RULES[f"_foreach_{_name}"] = foreach(RULES[_name])
    NUMBERLESS.add(f"_foreach_{_name}")
_fill("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", fused_optimizer, True)


def rule_of(name: str, inplace: bool) -> Op | None:
    """The table entry of an op, or None."""
    rule = RULES.get(name)
    if rule is None:
        return None
    ours = getattr(rule, "__module__", "").partition(".")[0] == "dtensor"
    typed = name in TYPED or not ours  # a user's rule may read anything
    floats = "upsample" in name or "pad" in name or not ours  # scale factors, fills
    return Op(name, rule, name not in NUMBERLESS, inplace, typed, floats)


# ---- random ops: see randomness.py -----------------------------------------------
RANDOM_FILL = """
normal_ uniform_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
"""
RANDOM_LIKE = "rand_like randn_like randint_like"
# On whole operands, torch's generators alike on all ranks.
RANDOM_OTHER = """
multinomial poisson binomial _standard_gamma _sample_dirichlet rrelu_with_noise
rrelu_with_noise_
"""
# Python-level functions that draw plain numbers of their own.
RANDOM_BODIES = """
svd_lowrank pca_lowrank get_approximate_basis lobpcg fractional_max_pool2d
fractional_max_pool3d fractional_max_pool2d_with_indices
fractional_max_pool3d_with_indices
"""
# With dropout they are random ops.
RANDOM_RECURRENT = "lstm gru rnn_tanh rnn_relu"
