"""Pointwise ops and casts: every name of the table, and how operands mix."""

from __future__ import annotations

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

A, B = eighths(5, 3), eighths(5, 3, seed=1)
P, U, N, M = positive(5, 3), unit(5, 3), integers(5, 3, low=1), booleans(5, 3)

UNARY = """
abs absolute angle arctan arcsinh asinh atan ceil cos cosh deg2rad rad2deg erf erfc exp
exp2 expm1 fix floor frac isfinite isinf isnan isneginf isposinf isreal nan_to_num neg
negative positive real relu resolve_conj resolve_neg conj conj_physical round selu sgn
sigmoid sign signbit sin sinc sinh square tan tanh trunc clone detach digamma i0 logit
logical_not rsqrt reciprocal
"""
POSITIVE = "acosh arccosh lgamma log log10 log1p log2 sqrt"
UNIT = "acos arccos arcsin asin arctanh atanh erfinv"
SPECIAL = """
entr erfcx expit i0e i1 i1e log_ndtr ndtr expm1 psi digamma erf erfc gammaln sinc round
exp2 i0
"""
BINARY = """
add sub subtract rsub mul multiply div divide true_divide arctan2 atan2 copysign fmax fmin
fmod hypot ldexp logaddexp logaddexp2 maximum minimum nextafter remainder xlogy
floor_divide float_power eq ne lt le gt ge greater greater_equal less less_equal not_equal
logical_and logical_or logical_xor heaviside isclose
"""
FUNCTIONAL = """
celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu
silu softplus softsign tanhshrink hardshrink softshrink
"""
BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"


def no_grad_needed(name: str) -> bool:
    return name in ("nextafter", "heaviside", "isreal", "gammaln")


def tables() -> list[Case]:
    t, s = torch, torch.special
    cases = [Case(n, getattr(t, n), [A], n != "nextafter") for n in UNARY.split()]
    cases += [Case(n, getattr(t, n), [P + 1]) for n in POSITIVE.split()]
    cases += [Case(n, getattr(t, n), [U]) for n in UNIT.split()]
    cases += [Case(f"special.{n}", getattr(s, n), [P]) for n in SPECIAL.split()]
    cases += [
        Case(f"special.{n}", getattr(s, n), [U.abs()])
        for n in "ndtri erfinv log1p logit".split()
    ]
    cases.append(Case("special.xlogy", s.xlogy, [A, P]))
    cases += [
        Case(n, getattr(t, n), [A, B], not no_grad_needed(n)) for n in BINARY.split()
    ]
    cases += [Case(f"F.{n}", getattr(F, n), [A]) for n in FUNCTIONAL.split()]
    cases += [Case(n, getattr(t, n), [N, N.clone()]) for n in BITS.split()]
    cases += [
        Case("pow", t.pow, [P, B]),
        Case("igamma", t.igamma, [P, P], grad=False),
        Case("igammac", t.igammac, [P, P], grad=False),
        Case("xlog1py", s.xlog1py, [A, P]),
        Case("zeta", s.zeta, [P + 1, P], grad=False),
        Case("polygamma", lambda x: t.polygamma(1, x), [P]),
        Case("mvlgamma", lambda x: t.mvlgamma(x, 2), [P + 2]),
        Case("polar", t.polar, [P, A]),
        Case("complex", t.complex, [A, B]),
        Case("bitwise_not", lambda x: ~x, [N]),
        Case("bool_and", lambda x, y: x & ~y, [M, booleans(5, 3, seed=3)]),
        Case("lerp", t.lerp, [A, B, U]),
        Case("lerp_number", lambda x, y: t.lerp(x, y, 0.25), [A, B]),
        Case("addcmul", lambda x, y, z: t.addcmul(x, y, z, value=2), [A, B, U]),
        Case("addcdiv", lambda x, y, z: t.addcdiv(x, y, z, value=2), [A, B, P]),
        Case("where", t.where, [M, A, B]),
        Case("where_number", lambda m, x: t.where(m, x, 0.0), [M, A]),
        Case("where_number_2", lambda m, x: t.where(m, 1.0, x), [M, A]),
        Case("where_row", t.where, [M, A, eighths(3)]),
        Case("masked_fill", lambda x, m: x.masked_fill(m, -1.0), [A, M]),
        Case("masked_fill_row", lambda x, m: x.masked_fill(m, 2.0), [A, booleans(3)]),
        Case("masked_fill_0d", lambda x, m, v: x.masked_fill(m, v), [A, M, eighths()]),
        Case("clamp", lambda x: t.clamp(x, -1, 1), [A]),
        Case("clamp_tensor", t.clamp, [A, B - 1, B + 1]),
        Case("clamp_min", lambda x: x.clamp_min(0.5), [A]),
        Case("clamp_max_tensor", t.clamp_max, [A, B]),
        Case("clip", lambda x: x.clip(max=0.0), [A]),
        Case("threshold", lambda x: F.threshold(x, 0.1, 20.0), [A]),
        Case("hardtanh", lambda x: F.hardtanh(x, -0.5, 0.5), [A]),
        Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), [A]),
        Case("prelu", F.prelu, [A, unit(3)]),
        Case("prelu_one", F.prelu, [A, unit(1)]),
        Case("prelu_4d", F.prelu, [eighths(2, 5, 2, 2), unit(5)]),
        Case("glu", lambda x: F.glu(x, 0), [eighths(4, 5)]),
        Case("nan_to_num", lambda x: t.nan_to_num(x.abs() / 0), [A], grad=False),
        Case("round_decimals", lambda x: t.round(x, decimals=1), [A]),
        Case("div_floor", lambda x, y: t.div(x, y, rounding_mode="floor"), [A, B]),
        Case("div_number", lambda x: x / 3, [A]),
        Case("div_number_trunc", lambda x: t.div(x, 3, rounding_mode="trunc"), [A]),
        Case("number_div", lambda x: 3 / x, [A]),
        Case("number_sub", lambda x: 3 - x, [A]),
        Case("number_add", lambda x: 3 + x, [A]),
        Case("number_mul", lambda x: 3 * x, [A]),
        Case("number_pow", lambda x: 2**x, [A]),
        Case("number_mod", lambda x: 7 % x, [P]),
        Case("number_floordiv", lambda x: 7 // x, [P]),
        Case("pow_number", lambda x: x**3, [A]),
        Case("mod", lambda x: x % 2, [A]),
        Case("floordiv", lambda x: x // 2, [A]),
        Case("neg", lambda x: -x, [A]),
        Case("pos", lambda x: +x, [A]),
        Case("abs", lambda x: abs(x), [A]),
        Case("number_eq", lambda x: x == 0.5, [A]),
        Case("number_gt", lambda x: 0.5 < x, [A]),
        Case("add_alpha", lambda x, y: t.add(x, y, alpha=3), [A, B]),
        Case("sub_alpha", lambda x, y: t.sub(x, y, alpha=3), [A, B]),
        Case("rsub", lambda x: t.rsub(x, 2, alpha=3), [A]),
        Case("shift", lambda x: (x << 2) >> 1, [N]),
        Case("number_shift", lambda x: 2 << x, [N]),
        Case("number_and", lambda x: (1 & x) | (2 ^ x), [N]),
        # broadcasting
        Case("row", lambda x, y: x + y, [A, eighths(3)]),
        Case("column", lambda x, y: x * y, [A, eighths(5, 1)]),
        Case("outer", lambda x, y: x - y, [eighths(5, 1), eighths(1, 3)]),
        Case("batch", lambda x, y: x * y, [eighths(2, 5, 3), eighths(5, 1)]),
        Case("0d", lambda x, y: x * y, [A, eighths()]),
        Case("0d_left", lambda x, y: x + y, [eighths(), A]),
        Case("0d_0d", lambda x, y: x / y, [eighths(), eighths(seed=4)]),
        Case("empty", lambda x, y: x + y, [eighths(0, 3), eighths(3)]),
        Case("one_empty", lambda x, y: x + y, [eighths(1, 3), eighths(0, 3)]),
        Case("ones", lambda x, y: x + y, [eighths(1, 1), eighths(1)]),
        Case("two", lambda x, y: x * y, [eighths(2, 1), eighths(2, 2)]),
        # type promotion
        Case("int_float", lambda x, y: x + y, [N, A]),
        Case("float_int", lambda x, y: x * y, [A, N]),
        Case("bool_float", lambda x, y: x * y, [M, A]),
        Case("int_div", lambda x, y: x / y, [N, N.clone()]),
        Case("f32_f64", lambda x, y: x + y, [A.float(), B]),
        Case("f32_0d64", lambda x, y: x * y, [A.float(), eighths()]),
        Case("int_number", lambda x: x * 1.5, [N]),
        Case("bool_sum", lambda x, y: x + y, [M, booleans(5, 3, seed=9)]),
        Case("complex", lambda x, y: x * y, [A, B.to(t.complex128) * 1j]),
        Case("imag", lambda x: (x * 1j).imag, [A]),
        Case("conj", lambda x: (x * (1 + 1j)).conj() * 2j, [A]),
        Case("plain_0d", lambda x, y: x * y, [A, eighths()], False, fixed={1}),
        Case("plain_mask", lambda x, m: x.masked_fill(m, 0), [A, M], fixed={1}),
        Case("plain_int", lambda x, y: x + y, [A, N], fixed={1}),
    ]
    return cases


def casts() -> list[Case]:
    t = torch
    return [
        Case("to_f32", lambda x: x.to(t.float32), [A]),
        Case("to_int", lambda x: x.to(t.int64), [A]),
        Case("to_like", lambda x, y: x.to(y), [A, N], grad=False),
        Case("to_like_grad", lambda x, y: x.to(y), [A, B]),
        Case("detach_mul", lambda x, y: x.detach() * y, [A, B]),
        Case("ones_like_mul", lambda x, y: t.ones_like(x) * y, [A, B]),
        Case("to_device", lambda x: x.to("cpu"), [A]),
        Case("to_device_dtype", lambda x: x.to("cpu", t.float32), [A]),
        Case("to_same", lambda x: x.to(t.float64), [A]),
        Case("type", lambda x: x.type(t.float32), [A]),
        Case("type_name", lambda x: x.type("torch.IntTensor"), [A]),
        Case("type_as", lambda x, y: x.type_as(y), [A, N], grad=False),
        Case("type_as_f", lambda x, y: x.type_as(y), [A, B.float()], grad=False),
        Case("cpu", lambda x: x.cpu(), [A]),
        Case("contiguous", lambda x: x.contiguous(), [A]),
        *[
            Case(n, lambda x, n=n: getattr(x, n)(), [A])
            for n in "float double half bfloat16 cfloat cdouble int long short".split()
        ],
        Case("bool", lambda x: x.bool(), [A]),
        Case("byte", lambda x: x.byte(), [P]),
        Case("char", lambda x: x.char(), [A]),
        Case("int_to_float", lambda x: x.float(), [N]),
        *[
            Case(n, lambda x, n=n: getattr(t, n)(x), [A])
            for n in ("zeros_like", "ones_like")
        ],
        Case("full_like", lambda x: t.full_like(x, 3), [A]),
        Case("full_like_int", lambda x: t.full_like(x, 3, dtype=t.int64), [A]),
        Case("zeros_like_int", lambda x: t.zeros_like(x, dtype=t.int32), [A]),
        Case("new_zeros", lambda x: x.new_zeros(2, 3), [A]),
        Case("new_ones", lambda x: x.new_ones((5, 3), dtype=t.int64), [A]),
        Case("new_full", lambda x: x.new_full((4,), 2.5), [A]),
    ]


def inplace(name: str, fn: Any, args: list[T], grad: bool = True) -> Case:
    def program(x: T, *rest: T) -> T:
        y = x * 1 if x.dtype != torch.bool else x.clone()
        result = fn(y, *rest)
        assert result is y
        return y

    return Case(name, program, args, grad, may_refuse=True)


def writes() -> list[Case]:
    def iadd(x: T, y: Any) -> T:
        x += y
        return x

    def isub(x: T, y: Any) -> T:
        x -= y
        return x

    def imul(x: T, y: Any) -> T:
        x *= y
        return x

    def idiv(x: T, y: Any) -> T:
        x /= y
        return x

    def ipow(x: T, y: Any) -> T:
        x **= y
        return x

    return [
        *[inplace(f"{n}_", getattr(T, f"{n}_"), [A, B]) for n in "add sub mul".split()],
        inplace("iadd", iadd, [A, B]),
        inplace("isub", isub, [A, eighths(3)]),
        inplace("imul", imul, [A, eighths(5, 1)]),
        inplace("idiv", idiv, [A, eighths()]),
        inplace("ipow", ipow, [P, B]),
        inplace("iadd_number", lambda x: iadd(x, 2), [A]),
        inplace("imul_number", lambda x: imul(x, 2), [A]),
        inplace("iadd_0d", iadd, [A, eighths()]),
        inplace("add_alpha", lambda x, y: x.add_(y, alpha=3), [A, B]),
        inplace("add_number", lambda x: x.add_(3), [A]),
        inplace("mul_number", lambda x: x.mul_(3), [A]),
        inplace("div_", lambda x, y: x.div_(y), [A, B]),
        inplace("relu_", lambda x: x.relu_(), [A]),
        inplace("F.relu", lambda x: F.relu(x, inplace=True), [A]),
        inplace("zero_", lambda x: x.zero_(), [A]),
        inplace("fill_", lambda x: x.fill_(2), [A]),
        inplace("fill_0d", lambda x, y: x.fill_(y), [A, eighths()]),
        inplace("copy_", lambda x, y: x.copy_(y), [A, B]),
        inplace("copy_row", lambda x, y: x.copy_(y), [A, eighths(3)]),
        inplace("copy_int", lambda x, y: x.copy_(y), [N, A], False),
        inplace("copy_from_int", lambda x, y: x.copy_(y), [A, N]),
        inplace("clamp_", lambda x: x.clamp_(-1, 1), [A]),
        inplace("sqrt_", lambda x: x.sqrt_(), [P]),
        inplace("masked_fill_", lambda x, m: x.masked_fill_(m, 2.0), [A, M]),
        inplace("lerp_", lambda x, y: x.lerp_(y, 0.5), [A, B]),
        inplace("addcmul_", lambda x, y, z: x.addcmul_(y, z, value=2), [A, B, U]),
        inplace("addcdiv_", lambda x, y, z: x.addcdiv_(y, z, value=2), [A, B, P]),
        inplace("logical_and_", lambda x, y: x.logical_and_(y), [M, M.clone()]),
        inplace("float_int", lambda x, y: x.mul_(y), [A, N]),
    ]


def outs() -> list[Case]:
    def into(fn: Any, *, shape: tuple[int, ...] = (5, 3)) -> Any:
        def program(out: T, *args: T) -> T:
            o = out.clone()
            result = fn(*args, out=o)
            assert result is o
            return o

        return program

    t = torch
    return [
        Case("add_out", into(t.add), [A, A, B], False, may_refuse=True),
        Case("exp_out", into(t.exp), [A, A], False, may_refuse=True),
        Case("mul_out", into(t.mul), [A, A, eighths(3)], False, may_refuse=True),
        Case("mm_out", into(t.mm), [A, eighths(5, 4), eighths(4, 3)], False, True),
        Case(
            "sum_out",
            into(lambda x, out: t.sum(x, 1, out=out)),
            [eighths(5), A],
            False,
            True,
        ),
        Case("add_out_f32", into(t.add), [A.float(), A.float(), N], False, True),
    ]


FAMILIES = {"pointwise": tables, "casts": casts, "writes": writes, "outs": outs}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=3)
