"""Ops of neural networks: norms, embedding, attention, convolutions and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import (
    GRID,
    LINE,
    Case,
    T,
    assert_right,
    booleans,
    eighths,
    integers,
    positive,
    unit,
)

X, C = eighths(5, 6), eighths(2, 5, 4)
b = eighths


def norms() -> list[Case]:
    return [
        Case("layer_norm", lambda x: F.layer_norm(x, (4,)), [C]),
        Case("layer_norm w", lambda x, w: F.layer_norm(x, (4,), w), [C, b(4)]),
        Case(
            "layer_norm w b",
            lambda x, w, c: F.layer_norm(x, (4,), w, c),
            [C, b(4), b(4)],
        ),
        Case(
            "layer_norm 2",
            lambda x, w, c: F.layer_norm(x, (5, 4), w, c),
            [C, b(5, 4), b(5, 4)],
        ),
        Case("layer_norm b", lambda x, c: F.layer_norm(x, (4,), None, c), [C, b(4)]),
        Case("rms_norm", lambda x: F.rms_norm(x, (4,)), [C]),
        Case("rms_norm w", lambda x, w: F.rms_norm(x, (4,), w, 1e-5), [C, b(4)]),
        Case(
            "group_norm",
            lambda x, w, c: F.group_norm(x, 2, w, c),
            [b(5, 4, 3), b(4), b(4)],
        ),
        Case("group_norm plain", lambda x: F.group_norm(x, 2), [b(5, 4, 3)]),
        Case("instance_norm", lambda x: F.instance_norm(x), [b(5, 4, 3)]),
        Case(
            "batch_norm",
            lambda x, w, c: F.batch_norm(x, None, None, w, c, training=True),
            [b(5, 4, 3), b(4), b(4)],
        ),
        Case(
            "batch_norm eval",
            lambda x, m, v: F.batch_norm(x, m, v),
            [b(5, 4, 3), b(4), positive(4)],
            False,
        ),
        Case(
            "local_response_norm", lambda x: F.local_response_norm(x, 2), [b(5, 4, 3)]
        ),
        Case("normalize", lambda x: F.normalize(x), [X]),
    ]


def embeddings() -> list[Case]:
    W, i = b(7, 3), integers(4, 2, high=7)
    return [
        Case("embedding", lambda w, i: F.embedding(i, w), [W, i]),
        Case("embedding 1-d", lambda w, i: F.embedding(i, w), [W, i.flatten()]),
        Case("embedding 0-d", lambda w, i: F.embedding(i, w), [W, torch.tensor(6)]),
        Case("embedding empty", lambda w, i: F.embedding(i, w), [W, integers(0, 2)]),
        Case("embedding plain", lambda w, i: F.embedding(i, w), [W, i], fixed={1}),
        Case("padding", lambda w, i: F.embedding(i, w, padding_idx=2), [W, i]),
        Case("padding -1", lambda w, i: F.embedding(i, w, padding_idx=-1), [W, i]),
        Case("scaled", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), [W, i]),
        Case("small", lambda w, i: F.embedding(i, w), [b(2, 5), integers(4, high=2)]),
        Case("one_hot", lambda i: F.one_hot(i, 7), [i]),
        Case("bag", lambda w, i: F.embedding_bag(i, w, mode="sum"), [W, i]),
    ]


def attentions() -> list[Case]:
    q, k, v = b(2, 4, 3, 2), b(2, 4, 5, 2), b(2, 4, 5, 3)
    qs = b(2, 4, 5, 2)
    sdpa: Callable[..., T] = F.scaled_dot_product_attention
    mask = booleans(3, 5) | torch.eye(3, 5).bool()
    return [
        Case("attention", sdpa, [q, k, v]),
        Case("causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), [qs, k, v]),
        Case("scale", lambda q, k, v: sdpa(q, k, v, scale=0.5), [q, k, v]),
        Case("mask", sdpa, [q, k, v, mask]),
        Case("plain mask", sdpa, [q, k, v, mask], fixed={3}),
        Case("mask 4-d", sdpa, [q, k, v, mask.expand(2, 4, 3, 5).clone()]),
        Case("mask heads", sdpa, [q, k, v, mask.expand(2, 1, 3, 5).clone()]),
        Case(
            "mask keys",
            sdpa,
            [q, k, v, torch.tensor([True] * 4 + [False]).expand(2, 1, 1, 5).clone()],
        ),
        Case("float mask", sdpa, [q, k, v, b(3, 5)]),
        Case("3-d", sdpa, [b(5, 3, 2), b(5, 4, 2), b(5, 4, 2)]),
        Case("2-d", sdpa, [b(3, 2), b(4, 2), b(4, 2)]),
        Case("one head", sdpa, [b(2, 1, 3, 2), b(2, 1, 5, 2), b(2, 1, 5, 2)]),
        Case("heads of 5", sdpa, [b(2, 5, 3, 2), b(2, 5, 4, 2), b(2, 5, 4, 2)]),
        Case("broadcast", sdpa, [b(2, 4, 3, 2), b(1, 4, 5, 2), b(1, 4, 5, 2)]),
        *[
            Case(
                f"grouped {h}/{g}",
                lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
                [b(2, h, 3, 2), b(2, g, 5, 2), b(2, g, 5, 2)],
            )
            for h, g in ((4, 2), (8, 4), (4, 1), (6, 3), (4, 4))
        ],
        Case(
            "grouped causal",
            lambda q, k, v: sdpa(q, k, v, None, 0.0, True, enable_gqa=True),
            [b(2, 8, 5, 2), b(2, 4, 5, 2), b(2, 4, 5, 2)],
        ),
        Case("dropout 0", lambda q, k, v: sdpa(q, k, v, dropout_p=0.0), [q, k, v]),
    ]


def convolutions() -> list[Case]:
    x1, x2, x3 = b(5, 4, 6), b(2, 4, 5, 5), b(5, 3, 4, 4, 4)
    return [
        Case("conv1d", F.conv1d, [x1, b(3, 4, 2), b(3)]),
        Case("conv1d no bias", F.conv1d, [x1, b(3, 4, 2)]),
        Case("conv1d unbatched", F.conv1d, [b(4, 6), b(3, 4, 2), b(3)]),
        Case(
            "conv1d groups",
            lambda x, w, c: F.conv1d(x, w, c, groups=2),
            [x1, b(6, 2, 2), b(6)],
        ),
        Case(
            "conv1d depthwise", lambda x, w: F.conv1d(x, w, groups=4), [x1, b(4, 1, 2)]
        ),
        Case(
            "conv1d same", lambda x, w: F.conv1d(x, w, padding="same"), [x1, b(3, 4, 3)]
        ),
        Case(
            "conv2d", lambda x, w, c: F.conv2d(x, w, c, 2, 1), [x2, b(3, 4, 3, 3), b(3)]
        ),
        Case(
            "conv2d kw",
            lambda x, w, c: F.conv2d(x, w, bias=c, padding=1),
            [x2, b(5, 4, 3, 3), b(5)],
        ),
        Case("conv3d", F.conv3d, [b(2, 3, 3, 3, 3), b(2, 3, 2, 2, 2), b(2)]),
        Case("conv_transpose1d", F.conv_transpose1d, [x1, b(4, 3, 2), b(3)]),
        Case(
            "conv_transpose2d",
            lambda x, w: F.conv_transpose2d(x, w, stride=2),
            [x2, b(4, 3, 2, 2)],
        ),
        Case(
            "conv_transpose groups",
            lambda x, w: F.conv_transpose1d(x, w, groups=2),
            [x1, b(4, 3, 2)],
        ),
        Case("max_pool1d", lambda x: F.max_pool1d(x, 2), [x1]),
        Case("max_pool2d", lambda x: F.max_pool2d(x, 2), [x2]),
        Case(
            "max_pool2d indices",
            lambda x: F.max_pool2d(x, 2, return_indices=True),
            [x2],
        ),
        Case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), [x1]),
        Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), [x2]),
        Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), [x1]),
        Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), [x2]),
        Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), [x2]),
        Case("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), [x2.abs()]),
        Case("interpolate", lambda x: F.interpolate(x, scale_factor=2), [x2]),
        Case(
            "interpolate bilinear",
            lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
            [x2],
        ),
        Case(
            "max_pool1d indices",
            lambda x: F.max_pool1d(x, 2, return_indices=True),
            [x1],
        ),
        Case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2), [x1]),
        *[
            Case(n, lambda x, n=n: getattr(F, n)(x, 2), [x3])
            for n in (
                "max_pool3d",
                "avg_pool3d",
                "adaptive_avg_pool3d",
                "adaptive_max_pool3d",
            )
        ],
        Case("conv_transpose3d", F.conv_transpose3d, [x3, b(3, 2, 2, 2, 2), b(2)]),
        *[
            Case(
                f"interpolate {m}",
                lambda x, m=m: F.interpolate(x, scale_factor=2, mode=m),
                [x],
            )
            for m, x in (
                ("nearest", x1),
                ("nearest", x3),
                ("nearest-exact", x1),
                ("nearest-exact", x2),
                ("nearest-exact", x3),
                ("linear", x1),
                ("bicubic", x2),
                ("trilinear", x3),
            )
        ],
        Case("unfold", lambda x: F.unfold(x, 2), [x2]),
        Case("fold", lambda x: F.fold(x, (3, 3), 2), [b(2, 8, 4)]),
        Case(
            "grid_sample",
            lambda x, g: F.grid_sample(x, g, align_corners=False),
            [x2, unit(2, 3, 3, 2)],
        ),
        Case("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), [x2]),
        Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), [b(2, 3, 4, 4)]),
    ]


REDUCTIONS = ("none", "mean", "sum")


def cross_entropies() -> list[Case]:
    logits, target = X, integers(5, high=6)
    some = torch.where(target == 2, -100, target)
    w = positive(6)
    probs = unit(5, 6).abs()
    wide, wide_target = b(2, 6, 5), integers(2, 5, high=6)
    cases = []
    for r in REDUCTIONS:

        def ce(r: str = r, **kw: Any) -> Callable[..., T]:
            return lambda x, t, *w: F.cross_entropy(
                x, t, *(w or (None,)), reduction=r, **kw
            )

        def nll(r: str = r, **kw: Any) -> Callable[..., T]:
            return lambda x, t, *w: F.nll_loss(x, t, *(w or (None,)), reduction=r, **kw)

        cases += [
            Case(f"ce {r}", ce(), [logits, target]),
            Case(f"ce {r} plain target", ce(), [logits, target], fixed={1}),
            Case(f"ce {r} ignore", ce(), [logits, some]),
            Case(f"ce {r} ignore_index", ce(ignore_index=3), [logits, target]),
            Case(f"ce {r} weight", ce(), [logits, target, w]),
            Case(f"ce {r} weight ignore", ce(), [logits, some, w]),
            Case(f"ce {r} smoothing", ce(label_smoothing=0.1), [logits, target]),
            Case(f"ce {r} smoothing ignore", ce(label_smoothing=0.1), [logits, some]),
            Case(
                f"ce {r} smoothing weight", ce(label_smoothing=0.1), [logits, some, w]
            ),
            Case(f"ce {r} probabilities", ce(), [logits, probs]),
            Case(f"ce {r} probabilities weight", ce(), [logits, probs, w]),
            Case(
                f"ce {r} probabilities smoothing",
                ce(label_smoothing=0.1),
                [logits, probs],
            ),
            Case(f"ce {r} 3-d", ce(), [wide, wide_target]),
            Case(f"ce {r} 3-d weight", ce(), [wide, wide_target, w]),
            Case(f"ce {r} 3-d probabilities", ce(), [wide, unit(2, 6, 5).abs()]),
            Case(f"ce {r} one sample", ce(), [b(6), torch.tensor(2)]),
            Case(f"ce {r} no sample", ce(), [b(0, 6), integers(0)]),
            Case(f"ce {r} all ignored", ce(), [logits, torch.full((5,), -100)]),
            Case(f"nll {r}", nll(), [logits, target]),
            Case(f"nll {r} weight ignore", nll(), [logits, some, w]),
            Case(f"nll {r} 3-d", nll(), [wide, wide_target]),
            Case(f"nll {r} 4-d", nll(), [b(2, 6, 2, 2), integers(2, 2, 2, high=6)]),
        ]
    return cases


def losses() -> list[Case]:
    y, sign = b(5, 6, seed=3), torch.where(b(5, 6, seed=5) > 0, 1.0, -1.0).double()
    p, q = unit(5, 6).abs(), unit(5, 6, seed=1).abs()
    cases = []
    for r in REDUCTIONS:

        def of(f: Callable[..., T], r: str = r, **kw: Any) -> Callable[..., T]:
            return lambda *a: f(*a, reduction=r, **kw)

        cases += [
            Case(f"mse {r}", of(F.mse_loss), [X, y]),
            Case(f"mse {r} 0-d", of(F.mse_loss), [b(), b(seed=3)]),
            Case(f"mse {r} none", of(F.mse_loss), [b(0, 3), b(0, 3)]),
            Case(f"l1 {r}", of(F.l1_loss), [X, y]),
            Case(f"smooth_l1 {r}", of(F.smooth_l1_loss, beta=0.5), [X, y]),
            Case(f"huber {r}", of(F.huber_loss, delta=0.5), [X, y]),
            Case(f"bce {r}", of(F.binary_cross_entropy), [p, q]),
            Case(
                f"bce {r} weight",
                lambda a, t, w, r=r: F.binary_cross_entropy(a, t, w, reduction=r),
                [p, q, positive(5, 6)],
            ),
            Case(f"bce_logits {r}", of(F.binary_cross_entropy_with_logits), [X, q]),
            Case(
                f"bce_logits {r} pos_weight",
                lambda a, t, w, r=r: F.binary_cross_entropy_with_logits(
                    a, t, pos_weight=w, reduction=r
                ),
                [X, q, positive(6)],
            ),
            Case(
                f"bce_logits {r} weight",
                lambda a, t, w, r=r: F.binary_cross_entropy_with_logits(
                    a, t, w, reduction=r
                ),
                [X, q, positive(5, 6)],
            ),
            Case(f"kl {r}", of(F.kl_div), [X, p]),
            Case(f"kl {r} log", of(F.kl_div, log_target=True), [X, y]),
            Case(f"poisson {r}", of(F.poisson_nll_loss), [X, p]),
            Case(f"gaussian {r}", of(F.gaussian_nll_loss), [X, y, positive(5, 6)]),
            Case(f"soft_margin {r}", of(F.soft_margin_loss), [X, sign]),
            Case(f"hinge {r}", of(F.hinge_embedding_loss), [X, sign]),
            Case(f"margin_ranking {r}", of(F.margin_ranking_loss), [X, y, sign]),
            Case(
                f"cosine {r}", of(F.cosine_embedding_loss), [X, y, sign[:, 0].clone()]
            ),
            Case(f"triplet {r}", of(F.triplet_margin_loss), [X, y, b(5, 6, seed=9)]),
            Case(
                f"multi_margin {r}", of(F.multi_margin_loss), [X, integers(5, high=6)]
            ),
            Case(
                f"multilabel_soft {r}",
                of(F.multilabel_soft_margin_loss),
                [X, q.round()],
            ),
        ]
    cases += [
        Case(
            "kl batchmean", lambda x, y: F.kl_div(x, y, reduction="batchmean"), [X, p]
        ),
        Case(
            "mse weight",
            lambda x, y, w: F.mse_loss(x, y, weight=w),
            [X, y, positive(5, 6)],
        ),
        Case("mse row", lambda x, y: (x - y).square().mean(), [X, b(6)]),
    ]
    return cases


def modules() -> list[Case]:
    def mha(x: T, w: T, c: T, o: T, d: T) -> Any:
        return F.multi_head_attention_forward(
            x, x, x, 4, 2, w, c, None, None, False, 0.0, o, d, need_weights=True
        )

    return [
        Case("multi_head_attention", mha, [b(3, 5, 4), b(12, 4), b(12), b(4, 4), b(4)]),
        Case("pairwise_distance", F.pairwise_distance, [X, b(5, 6, seed=1)]),
        Case("pdist", F.pdist, [X]),
        Case("dropout eval", lambda x: F.dropout(x, 0.5, False), [X]),
        Case("alpha_dropout eval", lambda x: F.alpha_dropout(x, 0.5, False), [X]),
        Case(
            "stft",
            lambda x, w: torch.stft(x, 4, return_complex=True, window=w),
            [b(16), positive(4)],
            False,
        ),
        Case("fft", torch.fft.fft, [X]),
        Case("rfft", lambda x: torch.fft.rfft(x, dim=0), [X]),
        Case("cartesian_prod", torch.cartesian_prod, [b(2), b(3)]),
        Case(
            "meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), [b(2), b(3)]
        ),
        Case("block_diag", torch.block_diag, [b(2, 2), b(1, 3)]),
        Case("cov", torch.cov, [X]),
        Case("corrcoef", torch.corrcoef, [X]),
        Case("logdet", torch.logdet, [torch.eye(3).double() * 2]),
    ]


FAMILIES = {
    "norms": norms,
    "embeddings": embeddings,
    "attentions": attentions,
    "convolutions": convolutions,
    "cross_entropies": cross_entropies,
    "losses": losses,
    "modules": modules,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)
