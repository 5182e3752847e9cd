"""Every op of torch's own test database, on DTensors against plain torch.

``op_db`` lists torch's ops with sample inputs. Each sample is laid out in several ways
over simulated ranks, run, and compared with the plain result in value, shape and dtype,
and in its gradients; the collectives of the forward are counted, and whether an op
without a rule was met. ``tests/test_op_db.py`` runs a slice, ``make sweep`` runs it all.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import dtensor.fallback
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    init_device_mesh,
    redistribution,
    simulate,
)
from dtensor.calls import PlainOperand
from dtensor.collectives.communicator import CollectiveError
from dtensor.collectives.counter import count_collectives
from dtensor.placement import Placement, Placements
from dtensor.spec import spec_of
from dtensor.tensor import local_of

T = torch.Tensor
torch.set_num_threads(1)


def _entries() -> list[Any]:
    # torch's tests profile scripted functions, and replace their call for it.
    call = vars(torch._C.ScriptFunction)["__call__"]
    from torch.testing._internal.common_methods_invocations import op_db

    torch._C.ScriptFunction.__call__ = call  # type: ignore[method-assign]
    return list(op_db)


op_db = _entries()

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
# A layout of a whole sample: the mesh, and per axis what its tensors get.
LAYOUTS: dict[str, tuple[DeviceMesh, str]] = {
    "R": (LINE, "R"),
    "S(0)": (LINE, "0"),
    "S(-1)": (LINE, "-"),
    "P(sum)": (LINE, "P"),
}
MIXED: dict[str, tuple[DeviceMesh, str]] = {
    "S(0), S(-1)": (GRID, "0-"),
    "S(0), S(0)": (GRID, "00"),
    "S(-1), P": (GRID, "-P"),
    "P, S(0)": (GRID, "P0"),
    "drawn": (GRID, "??"),
}
# Drawn values: all layouts are compared with the replicated one, not with torch.
RANDOM = frozenset(
    """
    bernoulli cauchy exponential geometric log_normal multinomial
    nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d nn.functional.feature_alpha_dropout
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward nn.functional.rrelu
    nn.functional.scaled_dot_product_attention normal normal pca_lowrank
    rand_like randint_like randn_like svd_lowrank uniform
    """.split()
)
# Memory nobody wrote: only shape and dtype are compared.
UNWRITTEN = frozenset(
    "empty_like empty_strided new_empty new_empty_strided empty empty_permuted".split()
)
# A DTensor is a bound there, a number: the result is plain.
BOUNDS = frozenset({"linspace", "logspace"})
# Ops that DTensors refuse, and why.
REFUSED = {
    "resize_": "a DTensor keeps its shape: other ranks and views count on it",
    "resize_as_": "likewise",
    "to_sparse": "the layout of a sparse tensor depends on its values",
}
# Torch itself leaves out= as it was there, where it transforms one dim.
OUT_UNWRITTEN = frozenset({"fft.ihfftn"})
# Entries of op_db without a sample that runs on dense CPU tensors.
UNRUNNABLE = frozenset(
    """
    jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary
    jiterator_binary_return_by_ref jiterator_unary sparse.mm.reduce
    sparse.sampled_addmm
    """.split()
)


@dataclass
class Found:
    """What running one sample in one layout showed.

    Attributes:
        op: Name of the op, with its variant.
        layout: Name of the layout.
        sample: Number of the sample.
        problem: What is wrong, or an empty text.
        calls: Collectives of the forward on this rank.
        without_rule: Ops met that have no rule.
        refused: Whether the op was refused by a ShardingError.
    """

    op: str
    layout: str
    sample: int
    problem: str = ""
    calls: int = 0
    without_rule: tuple[str, ...] = ()
    refused: bool = False
    tensors: bool = True
    text: str = field(default="", repr=False)


def title(op: Any) -> str:
    """Name of an entry."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def entries(dtype: torch.dtype = torch.float32) -> list[Any]:
    """The entries of op_db that have samples of a dtype."""
    return [op for op in op_db if dtype in op.supported_dtypes("cpu")]


def mapped(f: Callable[[T], Any], x: Any) -> Any:
    """A nested argument with every tensor replaced."""
    if isinstance(x, T):
        return f(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[mapped(f, v) for v in x])
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)(mapped(f, v) for v in x)
    if isinstance(x, dict):
        return {k: mapped(f, v) for k, v in x.items()}
    return x


def flat(x: Any) -> list[Any]:
    """Tensors and other leaves of a nested value, in order."""
    if isinstance(x, dict):
        return [y for v in x.values() for y in flat(v)]
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return [y for v in x for y in flat(v)]
    return [x]


def placements_for(t: T, kinds: str, rng: random.Random) -> Placements:
    """Placements of one tensor, by the letters of a layout."""
    out: list[Placement] = []
    for kind in kinds:
        if kind == "?":
            kind = rng.choice("R0-PR")
        if kind == "P" and (t.dtype == torch.bool or not t.is_floating_point()):
            kind = "R"
        if kind in "0-" and t.ndim == 0:
            kind = "R"
        if kind == "P":
            out.append(Partial())
        elif kind == "R":
            out.append(Replicate())
        else:
            out.append(Shard(0 if kind == "0" else t.ndim - 1))
    return tuple(out)


def place(t: T, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Lay a tensor out. Addends are t, t, -t and 0: their sum is exact in any order."""
    spec = spec_of(mesh, placements, t.shape)
    assert spec.coordinate is not None
    factor = 1
    with torch.no_grad():
        finite = bool(t.isfinite().all())
        for axis, p in enumerate(placements):
            if not p.is_partial():
                continue
            n, c = mesh.shape[axis], spec.coordinate[axis]
            signs = ((1, 1, -1, 0) if n == 4 else (2, -1))[:n]
            factor *= signs[c] if finite else int(c == 0)
        part = t.detach()
        if factor != 1:
            part = part * factor if factor else torch.zeros_like(part)
        for d in range(t.ndim):
            part = part.narrow(d, *spec.block(d, mesh.ndim))
        part = part.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=t.shape)


def cotangent(t: T) -> T:
    """A seed for the gradient of a result: no two neighbours alike."""
    n = torch.arange(math.prod(t.shape), dtype=torch.float64)
    return (torch.cos(n) + 0.25).reshape(t.shape).to(t.dtype)


def near(got: T, want: T) -> bool:
    """Equal up to rounding in the order of the sums."""
    got, want = got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()
    if want.dtype == torch.bool or not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    if want.numel() == 0:
        return True
    # float8 and the like have neither isfinite nor allclose
    exact = torch.complex128 if want.is_complex() else torch.float64
    eps = torch.finfo(want.dtype).eps
    got, want = got.to(exact), want.to(exact)
    sizes = want[want.isfinite()].abs()
    scale = float(sizes.max()) if sizes.numel() else 0.0
    return torch.allclose(
        got, want, rtol=1000 * eps, atol=100 * eps * max(1.0, scale), equal_nan=True
    )


Result = tuple[list[Any], "list[T | None]"]


def run(
    op: Any, sample: Any, put: Callable[[T], T], grad: bool, form: str = "call"
) -> Result:
    """Run a sample on tensors made by ``put``; results and gradients of its leaves.

    Args:
        op: The entry.
        sample: One of its samples.
        put: Makes each tensor.
        grad: Whether gradients are taken.
        form: The function itself, or ``"inplace"`` or ``"out"``.
    """
    leaves: list[T] = []

    def leaf(t: T) -> T:
        new = put(t)
        if t.requires_grad and grad:
            new.requires_grad_()
            leaves.append(new)
        return new

    given = mapped(leaf, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    if form == "inplace":
        out = op.inplace_variant(given[0], *given[1], **given[2])
        return [out, given[0]], []
    if form == "out":
        with torch.no_grad():
            like = op.op(given[0], *given[1], **given[2])
        if not isinstance(like, T):
            raise NotImplementedError("several results")
        target = torch.zeros_like(like)
        out = op.op(given[0], *given[1], **given[2], out=target)
        return [out, target], []
    out = op.op(given[0], *given[1], **given[2])
    outs = flat(out)
    if not grad or not leaves:
        return outs, []
    kept = flat(sample.output_process_fn_grad(out))
    ends = [o for o in kept if isinstance(o, T) and o.requires_grad]
    if not ends:
        return outs, []
    seeds = []
    for o in ends:
        seed = cotangent(o)
        if isinstance(o, DTensor):
            whole = (Replicate(),) * o.device_mesh.ndim
            seed = DTensor.from_local(seed, o.device_mesh, whole, run_check=False)
        seeds.append(seed)
    return outs, list(torch.autograd.grad(ends, leaves, seeds, allow_unused=True))


def difference(what: str, got: Any, want: Any, values: bool = True) -> str:
    """What is wrong with one result, or an empty text."""
    if not isinstance(want, T):
        same = got == want or (got != got and want != want)
        return "" if same else f"{what}: got {got!r}, expected {want!r}"
    if not isinstance(got, DTensor):
        return f"{what}: got a {type(got).__name__}, expected a DTensor"
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        return (
            f"{what}: got {tuple(got.shape)} {got.dtype}, expected "
            f"{tuple(want.shape)} {want.dtype}"
        )
    local = local_of(got)
    if local.shape != got._spec.local_shape:
        return f"{what}: a shard of {tuple(local.shape)} does not fit {got._spec}"
    full = got.detach().full_tensor()
    want = want.detach()
    if isinstance(want, DTensor):
        want = want.full_tensor()
    if not values or near(full, want):
        return ""
    return (
        f"{what} placed {got.placements}: values differ, got "
        f"{full.flatten()[:5].tolist()}, expected {want.flatten()[:5].tolist()}"
    )


def compared(got: Result, want: Result, values: bool) -> str:
    """What is wrong with results and gradients, or an empty text."""
    if len(got[0]) != len(want[0]):
        return f"got {len(got[0])} results, expected {len(want[0])}"
    for k, (g, w) in enumerate(zip(got[0], want[0])):
        wrong = difference(f"result {k}", g, w, values)
        if wrong:
            return wrong
    if len(got[1]) != len(want[1]):
        return f"got {len(got[1])} gradients, expected {len(want[1])}"
    for k, (g, w) in enumerate(zip(got[1], want[1])):
        if g is None and w is None:
            continue
        if g is None or w is None:
            rest = g if g is not None else w
            whole = rest.full_tensor() if isinstance(rest, DTensor) else rest
            if whole is not None and bool(whole.any()):
                return f"gradient {k}: got {g}, expected {w}"
            continue
        wrong = difference(f"gradient {k}", g, w)
        if wrong:
            return wrong
    return ""


def _typed(t: Any, mesh: DeviceMesh) -> Any:
    if isinstance(t, DTensor) or not isinstance(t, T):
        return t
    whole = (Replicate(),) * mesh.ndim
    return DTensor.from_local(t, mesh, whole, run_check=False)


_met: dict[int, set[str]] = {}
_operands_of = dtensor.fallback.operands_of


def _recorded(name: str, *args: Any, **kwargs: Any) -> Any:
    found = _operands_of(name, *args, **kwargs)
    _met.setdefault(threading.get_ident(), set()).add(name)
    return found


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Notice which ops take the way of those without a rule."""
    dtensor.fallback.operands_of = _recorded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dtensor.fallback.operands_of = _operands_of  # type: ignore[attr-defined]


def samples_of(op: Any, dtype: torch.dtype, limit: int | None) -> list[Any]:
    """Sample inputs of an entry; evenly picked where there is a limit."""
    torch.manual_seed(0)
    random.seed(0)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    if limit is not None and len(found) > limit:
        step = len(found) / limit
        found = [found[int(i * step)] for i in range(limit)]
    return found


def dense(sample: Any) -> bool:
    """Whether all tensors of a sample are strided ones."""
    given = flat([sample.input, list(sample.args), sample.kwargs])
    return all(t.layout == torch.strided for t in given if isinstance(t, T))


def check_entry(
    op: Any,
    layouts: dict[str, tuple[DeviceMesh, str]],
    dtype: torch.dtype = torch.float32,
    limit: int | None = None,
    form: str = "call",
) -> list[Found]:
    """Run one entry of op_db in all layouts.

    Args:
        op: The entry.
        layouts: Name -> mesh and one letter per axis.
        dtype: Dtype of the samples.
        limit: Samples at most; None: all of them.
        form: As in ``run``. A write in place may be refused, by a ShardingError.
    """
    if form == "inplace" and op.inplace_variant is None:
        return []
    if form == "out" and (not op.supports_out or op.name in RANDOM | OUT_UNWRITTEN):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jobs = []
        for number, sample in enumerate(samples_of(op, dtype, limit)):
            if not dense(sample):
                continue
            grad = op.supports_autograd and form == "call"
            try:
                plain = run(op, sample, lambda t: t.detach().clone(), grad, form)
            except Exception:  # noqa: BLE001 - torch has no such derivative
                try:
                    grad = False
                    plain = run(op, sample, lambda t: t.detach().clone(), grad, form)
                except Exception:  # noqa: BLE001 - nor such a call
                    continue
            jobs.append((number, sample, grad, plain))
        return run_jobs(op, jobs, layouts, form)


def run_jobs(
    op: Any,
    jobs: Sequence[Any],
    layouts: dict[str, tuple[DeviceMesh, str]],
    form: str = "call",
) -> list[Found]:
    """All samples in one run; each alone where ranks fell out of step."""
    if not jobs:
        return []

    def program(some: Sequence[Any], names: Sequence[str]) -> list[Found]:
        found = []
        for number, sample, grad, plain in some:
            for name in names:
                found.append(
                    one(op, number, sample, grad, plain, name, layouts[name], form)
                )
        return found

    def attempt(some: Sequence[Any], names: Sequence[str]) -> list[Found] | None:
        try:
            ranks = simulate(program, 4, (some, names), timeout=600)
        except Exception as e:  # noqa: BLE001 - reported
            if len(some) == 1 and len(names) == 1:
                text = f"{type(e).__name__}: {str(e)[:300]}"
                return [Found(title(op), names[0], some[0][0], text)]
            return None
        merged = []
        for row in zip(*ranks):
            worst = next((f for f in row if f.problem), row[0])
            worst.calls = max(f.calls for f in row)
            merged.append(worst)
        if any("CollectiveError" in f.problem for f in merged) and len(merged) > 1:
            return None
        return merged

    names = list(layouts)
    whole = attempt(jobs, names)
    if whole is not None:
        return whole
    return [f for job in jobs for n in names for f in attempt([job], [n]) or []]


def one(
    op: Any,
    number: int,
    sample: Any,
    grad: bool,
    plain: Result,
    name: str,
    layout: tuple[DeviceMesh, str],
    form: str = "call",
) -> Found:
    """Run one sample in one layout on this rank."""
    mesh, kinds = layout
    found = Found(title(op), name, number)
    met = _met[threading.get_ident()] = set()
    given = flat([sample.input, list(sample.args), sample.kwargs])
    found.tensors = any(isinstance(t, T) for t in given)
    rng = random.Random(f"{title(op)} {number}")

    def put(t: T) -> T:
        return place(t, mesh, placements_for(t, kinds, rng))

    def whole(t: T) -> T:
        return place(t, mesh, (Replicate(),) * mesh.ndim)

    try:
        with redistribution("allow"):
            if not found.tensors:
                return found
            if op.name in RANDOM:
                torch.manual_seed(1)
                plain = run(op, sample, whole, grad, form)
                torch.manual_seed(1)
            with count_collectives() as count:
                if grad:
                    run(op, sample, put, False)
            found.calls = count.calls()
            if op.name in RANDOM:
                torch.manual_seed(1)
            rng.seed(f"{title(op)} {number}")
            with count_collectives() as count:
                got = run(op, sample, put, grad, form)
            if not grad:
                found.calls = count.calls()
            if op.name in BOUNDS:
                got = [_typed(o, mesh) for o in got[0]], []
            found.problem = compared(got, plain, op.name not in UNWRITTEN)
    except ShardingError as e:
        found.refused = True
        if form == "call" or isinstance(e, PlainOperand):
            found.problem = f"refused: {str(e)[:300]}"
    except Exception as e:  # noqa: BLE001 - reported
        where = traceback.extract_tb(e.__traceback__)[-1]
        found.problem = (
            f"{type(e).__name__}: {str(e)[:300]} "
            f"({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        )
        if isinstance(e, CollectiveError):
            found.problem = "CollectiveError " + found.problem
    found.without_rule = tuple(sorted(met))
    if found.problem:
        shapes = mapped(lambda t: (str(t.dtype)[6:], *t.shape), [given, sample.kwargs])
        found.text = str(shapes)[:200]
    return found
