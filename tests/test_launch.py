"""dtensor-run, and how jobs end under it and under a plain mpiexec."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_jobs import PROGRAMS, Done, MpiRun, job_environment, launch_command

from dtensor import launch
from dtensor import rank_environment as settings
from dtensor.lifecycle import Notice, blame, checksum, explain_wait

LIMIT = 10.0  # seconds from the fault to the end of the job
LAUNCHERS = ("dtensor-run", "mpiexec")


def check_end(done: Done, ended: float) -> None:
    """The job failed, and soon after rank 1 went wrong."""
    assert done.returncode != 0, done.stdout + done.stderr
    began = re.search(r"^at (\d+\.\d+)$", done.stderr, re.MULTILINE)
    assert began is not None, done.stderr
    assert ended - float(began[1]) < LIMIT


# ------------------------------------------------------------------ how a job ends
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("early", "ValueError: out of nowhere"),
        ("forward", "ValueError: out of forward"),
        ("backward", "ValueError: out of backward"),
    ],
)
def test_exception_ends_the_job(
    launcher: str, way: str, text: str, mpi_run: MpiRun
) -> None:
    done = mpi_run("ending.py", 4, [way], launcher=launcher)
    check_end(done, time.time())
    assert "rank 1 of 4 ends the job: uncaught ValueError" in done.stderr
    assert text in done.stderr
    assert "ending.py" in done.stderr  # the traceback, not only its last line
    assert "is done" not in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("way", ["exit early", "exit late"])
def test_exit_while_others_wait(launcher: str, way: str, mpi_run: MpiRun) -> None:
    done = mpi_run("ending.py", 4, [way], launcher=launcher)
    check_end(done, time.time())
    assert "waits in vain on axis" in done.stderr
    assert "got rank 1 that ended with sys.exit(0)" in done.stderr
    assert "is done" not in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "code", "text"),
    [
        ("exit code", 3, "rank 1 that ended with sys.exit(3)"),
        ("exit by name", 1, "rank 1 that ended normally"),
        ("other hook", 1, "ValueError: past the hook"),
    ],
)
def test_codes_of_early_ends(way: str, code: int, text: str, mpi_run: MpiRun) -> None:
    done = mpi_run("ending.py", 2, [way])
    check_end(done, time.time())
    assert done.returncode == code
    assert text in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "ranks"),
    [("none", 2), ("no collective", 2), ("slow", 2), ("leave first", 3), ("child", 2)],
)
def test_good_ends(way: str, ranks: int, mpi_run: MpiRun) -> None:
    done = mpi_run("ending.py", ranks, [way])
    assert (done.returncode, done.stderr) == (0, "")
    lines = [f"rank {rank} is done" for rank in range(ranks)]
    if way == "child":
        lines = [*(f"child of {rank}" for rank in range(ranks)), *lines]
    assert sorted(done.stdout.splitlines()) == lines


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    # Rank 0 waits in a collective, where no Python code can run.
    script = str(PROGRAMS / "ending.py")
    mark = f"--mark={tmp_path.name}-{os.getpid()}-{number}"
    with subprocess.Popen(
        [*launch_command("dtensor-run", 2), script, "apart", mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=job_environment(),
    ) as process:
        assert process.stdout is not None
        waiting = 0
        for line in process.stdout:
            waiting += line == "waiting\n"
            if waiting == 2:
                break
        time.sleep(0.5)
        process.send_signal(number)
        began = time.monotonic()
        output = process.stdout.read()
        assert process.wait(LIMIT) != 0, output
        assert time.monotonic() - began < LIMIT
    time.sleep(0.2)
    ranks = [p for p in Path("/proc").glob("[0-9]*") if has_argument(p, mark)]
    assert ranks == []


def has_argument(process: Path, argument: str) -> bool:
    """Whether a process of /proc was started with this argument."""
    try:
        return argument.encode() in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


# ------------------------------------------------------------------ dtensor-run
@pytest.mark.mpi
def test_prefix_code_and_threads(mpi_run: MpiRun) -> None:
    done = mpi_run(
        "printing.py",
        2,
        ["6", "-n", "9"],
        launcher="dtensor-run",
        options=["--prefix"],
        env={"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 6
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {line} of {rank}"
        for rank in (0, 1)
        for line in ("first", "last", "second")
    ]
    told = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert sorted(told) == [
        f"[{rank}] {line}"
        for rank in (0, 1)
        for line in ("2 6 -n 9", f"error of {rank}")
    ]


@pytest.mark.mpi
def test_all_ranks_exit_alike(mpi_run: MpiRun) -> None:
    done = mpi_run("ending.py", 2, ["all exit"], launcher="dtensor-run")
    assert done.returncode == 5
    assert "in vain" not in done.stderr


@pytest.mark.mpi
def test_module() -> None:
    done = subprocess.run(
        [*launch_command("dtensor-run", 2), "-m", "platform"],
        capture_output=True,
        text=True,
        check=False,
        env=job_environment(),
        timeout=60,
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2


def test_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(launch.LaunchError) as caught:
        launch.find_mpiexec()
    text = f"got 'mpiexec' neither beside {tmp_path / 'python'} nor in PATH"
    assert text in str(caught.value)
    assert "pip install 'dtensor-runtime[mpich]'" in str(caught.value)


def test_launcher_beside_python_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for name in ("venv", "system"):
        (tmp_path / name).mkdir()
        found.append(tmp_path / name / "mpiexec")
        found[-1].write_text("#!/bin/sh\n")
        found[-1].chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    assert launch.find_mpiexec() == str(found[0])
    found[0].unlink()
    assert launch.find_mpiexec() == str(found[1])


def test_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["-n", "2", "absent.py"]) == 2
    assert "there is no such script, got 'absent.py'" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_rank_counts(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.parse_arguments(["-n", count, "a.py"])
    assert "no number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", ["", "a:", "a:0", "a:x", ":2", "a,,b"])
def test_bad_hosts(hosts: str) -> None:
    with pytest.raises(ValueError, match="parse_hosts: not a host, got"):
        launch.parse_hosts(hosts)


def test_ranks_fill_the_hosts() -> None:
    job, _ = launch.parse_arguments(["--hosts", "a:4,b:2", "x.py"])
    assert (job.ranks, job.ranks_per_host) == (6, 4)
    job, _ = launch.parse_arguments(["-n", "3", "--hosts", "a:4,b:2", "x.py"])
    assert (job.ranks, job.ranks_per_host) == (3, 3)
    job, _ = launch.parse_arguments(["x.py", "--hosts", "a:4"])
    assert (job.ranks, job.hosts) == (1, ())


def test_commands() -> None:
    job = launch.Job(8, ("a.py",), hosts=(("a", 4), ("b", 4)), extra=("-x1",))
    end = ["-x1", sys.executable, "a.py"]

    def command(family: launch.Family) -> list[str]:
        return launch.build_command(job, "/mpiexec", family, {"A": "1"}, cores=2)

    start = ["/mpiexec", "-n", "8"]
    assert command("mpich") == [*start, "-hosts", "a:4,b:4", *end]
    assert command("intel") == [*start, "-ppn", "4", "-hosts", "a,b", *end]
    wide = ["--oversubscribe", "--bind-to", "none", "-x", "A"]
    assert command("openmpi") == [*start, *wide, "--host", "a:4,b:4", *end]


def test_intel_takes_equal_hosts() -> None:
    job = launch.Job(3, ("a.py",), hosts=(("a", 2), ("b", 1)))
    with pytest.raises(launch.LaunchError, match="one number of ranks for all hosts"):
        launch.build_command(job, "mpiexec", "intel", {}, cores=2)


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "mpich"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("mpirun (OpenRTE) 4.1.4", "openmpi"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18", "intel"),
    ],
)
def test_families(version: str, family: str) -> None:
    assert launch.tell_family(version) == family


# ------------------------------------------------------------------ the environment
def test_threads_and_yielding() -> None:
    added = launch.build_environment({}, ranks_per_host=4, cores=2)
    assert {added[name] for name in settings.THREAD_VARIABLES} == {"1"}
    assert added.items() >= settings.YIELD_VARIABLES.items()
    assert added[settings.GPU_CHOICE] == "local"
    quiet = launch.build_environment({}, ranks_per_host=2, cores=2)
    assert not quiet.keys() & settings.YIELD_VARIABLES.keys()


def test_the_user_wins() -> None:
    mine = {
        "OMP_NUM_THREADS": "8",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0",
        "CUDA_VISIBLE_DEVICES": "2",
    }
    added = launch.build_environment(mine, ranks_per_host=4, cores=2)
    assert not added.keys() & mine.keys()
    assert not added.keys() & {*settings.THREAD_VARIABLES, settings.GPU_CHOICE}


def test_gpu_by_local_rank(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    gpus = settings.count_gpus(tmp_path)
    assert gpus == 2
    rank = {"DTENSOR_GPU": "local", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert settings.gpu_settings(rank, gpus) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert settings.gpu_settings(rank, 0) == {}
    assert settings.gpu_settings({"MPI_LOCALRANKID": "3"}, gpus) == {}
    assert settings.gpu_settings({"DTENSOR_GPU": "local"}, gpus) == {}
    mine = rank | {"CUDA_VISIBLE_DEVICES": ""}
    assert settings.gpu_settings(mine, gpus) == {}


# ------------------------------------------------------------------ who is to blame
CALL = ("all_reduce", "tp", 5, (0, 2, 3), 0.0)
NAME = checksum((0, 2, 3))


@pytest.mark.parametrize(
    ("notices", "rank"),
    [
        ({}, None),
        ({1: Notice(0, {})}, None),  # takes no part
        ({2: Notice(-1, {NAME: 5})}, None),  # has done its part
        ({2: Notice(-1, {NAME: 4})}, 2),
        ({3: Notice(0, {}), 1: Notice(0, {})}, 3),  # never even connected
    ],
)
def test_blame(notices: dict[int, Notice], rank: int | None) -> None:
    assert blame(CALL, notices) == rank


def test_connecting_counts_as_call_zero() -> None:
    call = ("connect", "tp", 0, (0, 2, 3), 0.0)
    assert blame(call, {2: Notice(-1, {NAME: 0})}) is None
    assert blame(call, {2: Notice(-1, {})}) == 2


def test_notices_travel_as_bytes() -> None:
    notice = Notice(-1, {NAME: 2**40, checksum((0, 1)): 0})
    assert Notice.unpack(notice.pack()) == notice


def test_explanation() -> None:
    assert explain_wait(CALL, 0, 2, Notice(3, {NAME: 4})) == (
        "all_reduce: rank 0 waits in vain on axis 'tp' in call 5, got rank 2 that ended "
        "with sys.exit(3) after 4 calls, expected all ranks 0, 2, 3. Let every rank of "
        "an axis make the same calls before it ends."
    )
