"""The NCCL backend without a GPU: CuPy's own binding over a double of the library.

The programs run on host memory under mpiexec; see ``nccl_double``. Each fault test
breaks one thing on purpose, and requires that the checks then fail, by name.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi_jobs import run_job
from nccl_double import host_streams

from dtensor import devices
from dtensor.collectives import nccl
from dtensor.collectives.activity import activity
from dtensor.collectives.communicator import Call
from dtensor.collectives.nccl_types import folds
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.collectives.streams import start
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import World, use_world

CHECKS = {
    2: (
        "backend",
        "values",
        "dtypes",
        "same_bits",
        "gradients",
        "large",
        "short",
        "reductions",
        "training",
        "overlap",
        "pairs",
    ),
    4: (
        "backend",
        "values",
        "dtypes",
        "same_bits",
        "gradients",
        "meshes",
        "large",
        "short",
        "reductions",
        "training",
        "overlap",
        "pairs",
    ),
}
PAIRS = {2: 25, 4: 650}

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def double() -> str:
    """Path of the built double; skips where it cannot be built or used."""
    lacks = host_streams.why_not()
    if lacks is not None:
        pytest.skip(lacks)
    return str(host_streams.library())


@cache
def job(ranks: int, double: str, log: str) -> Done:
    """All checks for so many ranks, in one job: starting one takes seconds."""
    args = [double, *CHECKS[ranks]]
    env = {"NCCL_DOUBLE_LOG": log}
    return run_job("nccl_over_double.py", ranks, args, timeout=300, env=env)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the files in which the ranks of the jobs note what they post."""
    return str(tmp_path_factory.mktemp("nccl") / "posts")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks]
)
def test_check(ranks: int, check: str, double: str, log: str) -> None:
    done = job(ranks, double, f"{log}.{ranks}")
    assert f"ok {check}" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", CHECKS)
def test_the_job_ends_by_itself(ranks: int, double: str, log: str) -> None:
    done = job(ranks, double, f"{log}.{ranks}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pairs {PAIRS[ranks]}" in done.stdout.splitlines()


def test_the_double_is_the_library_that_cupy_loads(double: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from nccl_double import host_streams; host_streams.load({double!r})\n"
        "from cupy.cuda import nccl\n"
        "print(nccl.available, nccl.get_version())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert done.stdout.split() == ["True", "22803"], done.stderr


# ------------------------------------------------------- what is broken makes tests fail
def fault(name: str, double: str, log: str, timeout: float = 4) -> Done:
    """Run one of the programs that go wrong, on two ranks."""
    env = {"NCCL_DOUBLE_LOG": log, "NCCL_DOUBLE_TIMEOUT": str(timeout)}
    return run_job("nccl_faults.py", 2, [double, name], timeout=100, env=env)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("break_input_wait", "overlap read [-2.0, -2.0, -2.0, -2.0]"),
        ("break_result_wait", "overlap read [nan, nan, nan, nan]"),
        ("break_count", "allReduce count 23 dtype 8 op 0 root 0"),
        ("break_order", "nccl double: mismatch"),
    ],
)
def test_a_broken_backend_fails_its_checks(
    name: str, shows: str, double: str, log: str
) -> None:
    done = fault(name, double, log)
    assert done.returncode != 0
    assert shows in done.stderr, done.stdout + done.stderr


@pytest.mark.mpi
def test_unlike_calls_raise_on_all_ranks(double: str, log: str) -> None:
    done = fault("unlike", double, log)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, op in ((0, "product"), (1, "sum")):
        for number, called in ((5, op), (6, "sum")):  # nor does it go on
            head = f"rank {rank} got all_reduce: NCCL failed: "
            call = (
                f"(rank {rank}, call {number}, shape (3,), dtype float32, op {called}"
            )
            rows = [r for r in done.stdout.splitlines() if r.startswith(head)]
            assert any(call in row for row in rows), done.stdout


@pytest.mark.mpi
def test_a_rank_that_does_not_come_is_an_error(double: str, log: str) -> None:
    done = fault("absent", double, log, timeout=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2 waited 2 s for its peers" in done.stderr
    assert "rank 0 got all_reduce: NCCL failed: " in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["leaves", "leaves_at_once"])
def test_a_rank_that_ends_early_ends_the_job(name: str, double: str, log: str) -> None:
    done = fault(name, double, log, timeout=60)
    assert done.returncode != 0
    text = (
        "all_reduce: rank 0 waits in vain on axis 'tp' in call 6, got rank 1 that ended"
    )
    assert text in done.stderr, done.stdout + done.stderr


@pytest.mark.mpi
def test_the_end_waits_for_a_rank_for_a_while(double: str, log: str) -> None:
    done = fault("late", double, log, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 gave up 1" in done.stdout
    assert "rank 0 got all_reduce: The communicator is closed." in done.stdout


@pytest.mark.mpi
def test_the_end_waits_for_what_is_under_way(double: str, log: str) -> None:
    done = fault("late_start", double, log, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} gave up 0" in done.stdout
        assert f"rank {rank} has [2.0, 2.0, 2.0]" in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "wrong_device",
            "all_reduce: the tensor is on another device than the rank's communicator, "
            "got meta, expected cpu. Move it with x.to('cpu').",
        ),
        (
            "same_gpu",
            "connect: two ranks share a GPU, got ranks 0 and 1 on GPU-1 of host a, "
            "expected one rank per GPU. Start as many ranks per host as it has GPUs.",
        ),
        ("no_binding", "connect: on rank 1 CuPy cannot be loaded."),
    ],
)
def test_all_ranks_are_told(name: str, text: str, double: str, log: str) -> None:
    done = fault(name, double, log)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} got {text} In " in done.stdout


# -------------------------------------------------------------- what a machine must have
def say(text: str) -> Any:
    return pytest.raises(RuntimeError, match=f"^init_device_mesh: {text}$")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        assert name == "libcuda.so.1"
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_library)
    text = (
        "this machine has no NVIDIA driver, got no libcuda.so.1, expected one. Use a "
        r"machine with a GPU, or init_device_mesh\('cpu', ...\)."
    )
    with say(text):
        init_device_mesh("cuda", (1,))
    assert DeviceMesh("cuda", [0]).size() == 1  # a mesh alone needs no driver


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    with say("torch was built without CUDA, got torch .*, expected a build for CUDA.*"):
        init_device_mesh("cuda", (1,))


def test_no_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with say("no GPU is visible, got CUDA_VISIBLE_DEVICES='', expected at least one.*"):
        init_device_mesh("cuda", (1,))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A rank of four on a host of two GPUs; the devices that it takes."""
    taken: list[int] = []
    monkeypatch.setattr(devices, "missing_gpu", lambda: None)
    monkeypatch.setattr(nccl, "missing_binding", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    return taken


def test_a_rank_takes_the_gpu_of_its_number(gpus: list[int]) -> None:
    with use_world(World(3, 4, "mpi")):
        mesh = init_device_mesh("cuda", (2, 2))
    assert gpus == [1] and mesh.device_type == "cuda"


def test_a_program_that_has_chosen_keeps_its_gpu(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with use_world(World(3, 4, "mpi")):
        init_device_mesh("cuda", (4,))
    assert gpus == []


def test_what_nccl_lacks_is_said_where_ranks_must_talk(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "missing_binding", lambda: "no CuPy.")
    with use_world(World(0, 2, "mpi")):
        with say("no CuPy[.]"):
            init_device_mesh("cuda", (2,))
        init_device_mesh("cuda", (1,))  # alone it needs none


def wheels(*names: str) -> Any:
    return lambda: [SimpleNamespace(metadata={"Name": name}) for name in names]


def test_two_builds_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wheels("torch", "cupy-cuda13x", "cupy-cuda12x")
    monkeypatch.setattr(importlib.metadata, "distributions", found)
    monkeypatch.setattr(nccl._library, "module", None)
    assert nccl.missing_binding() == (
        "two builds of CuPy lie over each other, got cupy-cuda12x and cupy-cuda13x, "
        "expected one. Run `pip uninstall -y cupy-cuda12x cupy-cuda13x`, then install "
        "the one of your CUDA."
    )


def binding(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    def load(name: str) -> object:
        assert name == "cupy.cuda.nccl"
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib.metadata, "distributions", wheels("torch"))
    monkeypatch.setattr(nccl.importlib, "import_module", load)
    monkeypatch.setattr(nccl._library, "module", None)


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "12"), ("13.0", "13")])
def test_no_cupy(cuda: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binding(monkeypatch, ImportError("No module named 'cupy'"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert nccl.missing_binding() == (
        "CuPy cannot be loaded, got No module named 'cupy', expected CuPy 14 or later. "
        f"Run `pip install 'dtensor-runtime[cuda{extra}]'`."
    )


def test_no_nccl_library(monkeypatch: pytest.MonkeyPatch) -> None:
    binding(monkeypatch, SimpleNamespace(available=False))
    found = nccl.missing_binding()
    assert found is not None
    assert found.startswith(
        "the NCCL library is not found, got none from CuPy, expected"
    )


def test_an_old_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    binding(monkeypatch, SimpleNamespace(available=True))
    found = nccl.missing_binding()
    assert found is not None
    assert found.startswith(
        "CuPy is too old, got one without NCCL_AVG, expected CuPy 14"
    )


def test_a_good_binding_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(available=True, NCCL_AVG=4)
    binding(monkeypatch, found)
    assert nccl.missing_binding() is None
    assert nccl._library.module is found


def test_shared_gpus_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl._SHARES:
        monkeypatch.delenv(name, raising=False)
    rows = [(None, "a", "23203"), (None, "b", "23203"), (None, "a", "23203")]
    assert nccl.refuse((4, 5), rows[:2]) is None
    found = nccl.refuse((4, 5, 7), rows)
    assert found is not None and "got ranks 4 and 7 on a, expected" in found
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert nccl.refuse((4, 5, 7), rows) is None
    found = nccl.refuse((4, 5), [(None, "a", "23203"), (None, "b", "22809")])
    assert found is not None and "got versions 22809 and 23203, expected one" in found


# --------------------------------------------------------------------- parts, one by one
def test_what_nccl_folds() -> None:
    def takes(op: str, dtype: torch.dtype) -> tuple[int, int, int] | None:
        return folds(REDUCTIONS[op], dtype)

    assert takes("sum", torch.bfloat16) == (0, 9, 1)
    assert takes("avg", torch.float64) == (4, 8, 1)
    assert takes("product", torch.int64) == (1, 4, 1)
    assert takes("max", torch.uint8) == (2, 1, 1)
    assert takes("sum", torch.complex64) == (0, 7, 2)
    # NCCL drops a NaN, has no 16-bit integers, no bits, no complex product.
    assert takes("max", torch.float32) is None
    assert takes("sum", torch.int16) is None
    assert takes("band", torch.int32) is None
    assert takes("product", torch.complex128) is None


class Recorder:
    """Streams that write down what they are asked, in order."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: list[Any] = []
        self.now = "main"
        self.done: set[Any] = set()

    def current(self) -> str:
        return self.now

    def side(self) -> str:
        return "side"

    def handle(self, stream: str) -> int:
        return len(stream)

    @contextlib.contextmanager
    def use(self, stream: str) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before

    def record(self, stream: str) -> str:
        self.log.append(f"record {stream}")
        return f"event of {stream}"

    def wait(self, stream: str, event: str) -> None:
        self.log.append(f"{stream} waits for {event}")

    def passed(self, event: str) -> bool:
        return event in self.done

    def keep(self, x: torch.Tensor, stream: str) -> None:
        self.log.append(f"{stream} keeps {x.item()}")

    def synchronize(self, stream: str) -> None:
        self.log.append(f"synchronize {stream}")

    @contextlib.contextmanager
    def activate(self) -> Any:
        yield

    def name(self) -> str:
        return "recorder"


def test_start_makes_both_waits() -> None:
    streams = Recorder()

    def work(pair: list[torch.Tensor], k: int) -> tuple[torch.Tensor, ...]:
        streams.log.append(f"work on {streams.current()}")
        return (pair[0] + k, pair[1] + k)

    pending = start(streams, work, [torch.tensor(1), torch.tensor(2)], 10)
    assert streams.log == [
        "record main",
        "side waits for event of main",
        "work on side",
        "side keeps 1",
        "side keeps 2",
        "record side",
    ]
    assert streams.current() == "main" and not pending.ready()
    streams.log.clear()
    assert [x.item() for x in pending.wait()] == [11, 12]
    expected = ["main waits for event of side", "main keeps 11", "main keeps 12"]
    assert streams.log == expected
    streams.done.add("event of side")
    assert pending.ready()


class Stub:
    """A communicator of CuPy's that does nothing, or stands still."""

    def __init__(self, log: list[str], name: str = "", error: bool = False) -> None:
        self.log, self.name, self.error = log, name, error

    def rank_id(self) -> int:
        return 0

    def check_async_error(self) -> None:
        if self.error:
            raise NcclError("NCCL_ERROR_REMOTE_ERROR")

    def destroy(self) -> None:
        self.log.append(f"destroy {self.name}")
        if self.name == "still":
            raise NcclError("stands still")

    def abort(self) -> None:
        self.log.append(f"abort {self.name}")


class NcclError(RuntimeError):
    """As CuPy's."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl._library, "module", SimpleNamespace(NcclError=NcclError))


def channel(comm: Stub, ranks: tuple[int, ...]) -> nccl.NCCLChannel:
    host: Any = None
    return nccl.NCCLChannel(comm, ranks, host, Recorder())


def test_all_close_in_one_order(module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    named = {"last": (1, 3), "still": (0, 2), "first": (0, 1)}
    open_ = [channel(Stub(log, name), ranks) for name, ranks in named.items()]
    monkeypatch.setattr(nccl._library, "open", open_)
    assert nccl.close_all(2.0) == 1
    assert log == ["destroy first", "destroy still", "abort still", "destroy last"]
    assert nccl.close_all(2.0) == 0  # once


def test_the_watch_sees_errors_and_long_calls(module: None) -> None:
    log: list[str] = []
    good, bad = (
        channel(Stub(log, "good"), (0, 1)),
        channel(Stub(log, "bad", True), (0, 2)),
    )
    watch = nccl.Watch(list)
    watch.stop()
    call = Call("all_reduce", "tp", 0, 7, (), None)
    good.last = call, "event", 100.0
    watch.look([good, bad], 100.1)
    assert (
        log == ["abort bad"] and bad.failure == "NCCL failed: NCCL_ERROR_REMOTE_ERROR."
    )
    assert activity.verb is None
    watch.look([good, bad], 101.0)
    seen = activity
    assert (seen.verb, seen.sequence, seen.ranks, seen.entered) == (
        *("all_reduce", 7, (0, 1)),
        100.0,
    )
    assert isinstance(good.streams, Recorder)
    good.streams.done.add("event")
    watch.look([good, bad], 102.0)
    assert activity.verb is None and good.last is None
    with pytest.raises(nccl.CollectiveError, match="NCCL_ERROR_REMOTE_ERROR"):
        bad.check(call)
