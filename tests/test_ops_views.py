"""Views, reshapes, cuts and joins, with nested, uneven and empty shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, Case, assert_right, eighths, integers

A, C = eighths(5, 3), eighths(2, 5, 3)


def dims() -> list[Case]:
    t = torch
    return [
        Case("t", lambda x: x.t(), [A]),
        Case("T", lambda x: x.T, [A]),
        Case("mT", lambda x: x.mT, [C]),
        Case("H", lambda x: x.H, [A]),
        Case("mH", lambda x: x.mH, [A * 1j]),
        Case("adjoint", lambda x: x.adjoint(), [A]),
        Case("transpose", lambda x: x.transpose(0, -1), [C]),
        Case("swapaxes", lambda x: x.swapaxes(0, 1), [C]),
        Case("swapdims", lambda x: t.swapdims(x, 0, 1), [C]),
        Case("permute", lambda x: x.permute(2, 0, 1), [C]),
        Case("permute tuple", lambda x: t.permute(x, (1, -1, 0)), [C]),
        Case("movedim", lambda x: x.movedim(0, 2), [C]),
        Case("moveaxis", lambda x: t.moveaxis(x, (0, 1), (1, 2)), [C]),
        Case("squeeze", lambda x: x.squeeze(), [eighths(1, 5, 1)]),
        Case("squeeze(0)", lambda x: x.squeeze(0), [eighths(1, 5, 1)]),
        Case("squeeze(1)", lambda x: x.squeeze(1), [eighths(1, 5, 1)]),
        Case("squeeze tuple", lambda x: x.squeeze((0, 1)), [eighths(1, 5, 1)]),
        Case("squeeze ()", lambda x: x.squeeze(()), [eighths(1, 5, 1)]),
        Case("squeeze ones", lambda x: x.squeeze(), [eighths(1, 1)]),
        Case("unsqueeze(0)", lambda x: x.unsqueeze(0), [A]),
        Case("unsqueeze(-1)", lambda x: x.unsqueeze(-1), [A]),
        Case("unsqueeze(1)", lambda x: t.unsqueeze(x, 1), [A]),
        Case("expand", lambda x: x.expand(4, 5, 3), [A]),
        Case("expand -1", lambda x: x.expand(-1, 4), [eighths(5, 1)]),
        Case("expand 0", lambda x: x.expand(0, 5), [eighths(1, 5)]),
        Case("expand_as", lambda x, y: x.expand_as(y), [eighths(1, 3), A]),
        Case("broadcast_to", lambda x: t.broadcast_to(x, (2, 5, 3)), [A]),
        Case("broadcast_tensors", t.broadcast_tensors, [A, eighths(3)]),
        Case("diagonal", lambda x: x.diagonal(), [A]),
        Case("diag", t.diag, [eighths(5)]),
        Case("diag_embed", t.diag_embed, [A]),
        Case("atleast_2d", t.atleast_2d, [eighths(5)]),
        Case("real of complex", lambda x: t.view_as_real(x), [A * 1j]),
        Case("rot90", t.rot90, [A]),
        Case("unfold", lambda x: x.unfold(0, 2, 1), [A]),
        Case("as_strided", lambda x: x.as_strided((2, 2), (1, 2)), [A]),
        Case("repeat", lambda x: x.repeat(2, 1, 2), [A]),
        Case("tile", lambda x: t.tile(x, (2,)), [A]),
        Case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), [A]),
        Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [eighths(1, 4, 2, 2)]),
        Case("narrow_copy", lambda x: t.narrow_copy(x, 0, 1, 2), [A], grad=False),
    ]


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((8, 6), (48,)),
    ((8, 6), (4, 2, 6)),
    ((8, 6), (2, 4, 6)),
    ((8, 6), (8, 2, 3)),
    ((8, 6), (16, 3)),
    ((8, 6), (6, 8)),
    ((4, 2, 6), (8, 6)),
    ((2, 4, 6), (8, 6)),
    ((5, 3), (15,)),
    ((5, 3), (3, 5)),
    ((5, 3), (5, 3, 1)),
    ((5, 3), (1, 5, 3)),
    ((1, 5, 1, 3), (5, 3)),
    ((5, 3), (1, 15)),
    ((15,), (5, 3)),
    ((15,), (3, 5)),
    ((12,), (4, 3)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((2, 3, 4), (24,)),
    ((24,), (2, 3, 4)),
    ((6, 4), (2, 3, 4)),
    ((0, 3), (3, 0)),
    ((0, 3), (0,)),
    ((0,), (0, 5)),
    ((2, 0, 3), (0, 6)),
    ((1,), ()),
    ((), (1, 1)),
    ((1, 1), (1,)),
    ((9, 2), (3, 3, 2)),
    ((3, 3, 2), (9, 2)),
    ((7, 2), (14,)),
    ((2, 7), (14,)),
    ((1, 4), (4,)),
    ((4, 1), (4,)),
    ((4, 1, 2), (8,)),
    ((6, 1, 2), (3, 2, 2)),
]


def shapes() -> list[Case]:
    cases = []
    for before, after in SHAPES:
        x = eighths(*before)
        name = f"{before}->{after}"
        cases.append(Case(f"reshape {name}", lambda x, a=after: x.reshape(a), [x]))
        cases.append(
            Case(
                f"view {name}", lambda x, a=after: x.view(*a) if a else x.view(()), [x]
            )
        )
    x = eighths(8, 6)
    cases += [
        Case("view(-1)", lambda x: x.view(-1), [x]),
        Case("view(2, -1)", lambda x: x.view(2, -1, 3), [x]),
        Case("reshape(-1, 6)", lambda x: torch.reshape(x, (-1, 6)), [x]),
        Case("view of t", lambda x: x.t().reshape(-1), [x]),
        Case("flatten", lambda x: x.flatten(), [C]),
        Case("flatten(1)", lambda x: torch.flatten(x, 1), [C]),
        Case("flatten(0, 1)", lambda x: x.flatten(0, 1), [C]),
        Case("ravel", lambda x: x.ravel(), [A]),
        Case("unflatten", lambda x: x.unflatten(0, (4, 2)), [x]),
        Case("unflatten(-1)", lambda x: torch.unflatten(x, 1, (2, -1)), [x]),
        Case("view_as", lambda x, y: x.view_as(y), [x, eighths(4, 12)], grad=False),
        Case(
            "reshape_as", lambda x, y: x.reshape_as(y), [x, eighths(2, 24)], grad=False
        ),
        Case("view dtype same", lambda x: x.view(torch.int64), [A]),
        Case("view dtype less", lambda x: x.view(torch.int32), [A]),
        Case(
            "heads", lambda x: x.view(2, 5, 3, 4).transpose(1, 2), [eighths(2, 5, 12)]
        ),
        Case(
            "heads back",
            lambda x: x.transpose(1, 2).reshape(2, 5, 12),
            [eighths(2, 3, 5, 4)],
        ),
    ]
    return cases


def cuts() -> list[Case]:
    t = torch
    return [
        *[
            Case(f"{n} along {d}", lambda x, f=f, d=d: f(x, d), [A])
            for d in (0, 1, -1)
            for n, f in {
                "split(2)": lambda x, d: x.split(2, d),
                "split list": lambda x, d: t.split(x, [1, x.shape[d] - 1], d),
                "split_with_sizes": lambda x, d: x.split_with_sizes(
                    [2, x.shape[d] - 2], d
                ),
                "chunk": lambda x, d: x.chunk(2, d),
                "tensor_split": lambda x, d: t.tensor_split(x, 2, d),
                "tensor_split at": lambda x, d: t.tensor_split(x, (1, 2), d),
                "unbind": lambda x, d: x.unbind(d),
                "select": lambda x, d: x.select(d, 1),
                "select -1": lambda x, d: x.select(d, -1),
                "narrow": lambda x, d: x.narrow(d, 1, 2),
                "cat": lambda x, d: t.cat([x, x * 2], d),
                "stack": lambda x, d: t.stack([x, x * 2], d),
            }.items()
        ],
        Case(
            "tensor_split by tensor",
            lambda x: t.tensor_split(x, t.tensor([1, 3])),
            [A],
        ),
        Case("narrow 0", lambda x: x.narrow(0, 2, 0), [A]),
        Case("split kw", lambda x: t.split(x, split_size_or_sections=2, dim=1), [A]),
        Case("chunk kw", lambda x: t.chunk(x, chunks=3, dim=0), [A]),
        Case("unbind kw", lambda x: t.unbind(x, dim=1), [A]),
        Case("split one", lambda x: x.split(5), [A]),
        Case("iterate", lambda x: list(x), [A]),
        Case("cat 2", lambda x, y: t.cat([x, y]), [A, eighths(2, 3)]),
        Case(
            "cat 3",
            lambda x, y, z: t.cat((x, y, z), dim=1),
            [A, eighths(5, 2), eighths(5, 1)],
        ),
        Case("cat empty", lambda x, y: t.cat([x, y]), [A, eighths(0, 3)]),
        Case("cat legacy", lambda x, y: t.cat([x, y]), [A, eighths(0)]),
        Case("cat types", lambda x, y: t.cat([x, y], 1), [A, integers(5, 2)]),
        Case("concat", lambda x, y: t.concat([x, y], 1), [A, A.clone()]),
        Case("concatenate", lambda x, y: t.concatenate([x, y], axis=1), [A, A.clone()]),
        Case("cat tensors=", lambda x: t.cat(tensors=[x, x], dim=1), [A]),
        Case("cat one", lambda x: t.cat([x]), [A]),
        Case("stack 2", lambda x, y: t.stack([x, y], 1), [A, A.clone()]),
        Case("stack -1", lambda x, y: t.stack((x, y), dim=-1), [A, A.clone()]),
        Case("stack 0-d", lambda x, y: t.stack([x, y]), [eighths(), eighths(seed=5)]),
        *[
            Case(n, lambda x, y, n=n: getattr(t, n)([x, y]), [A, A.clone()])
            for n in "hstack vstack dstack column_stack".split()
        ],
        Case("hsplit", lambda x: t.hsplit(x, (1,)), [A]),
        Case("vsplit", lambda x: t.vsplit(x, (1,)), [A]),
        Case("pad", lambda x: F.pad(x, (1, 2)), [A]),
        Case("pad 2", lambda x: F.pad(x, (0, 0, 1, 1), value=3.0), [C]),
        Case("pad reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), [C]),
    ]


FAMILIES = {"dims": dims, "shapes": shapes, "cuts": cuts}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=8 if family == "shapes" else 3)
