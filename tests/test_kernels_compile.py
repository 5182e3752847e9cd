"""Each .cu file of the package: compiled for GPUs, and run under sanitizers.

A new file of kernels is picked up by itself. It needs a ``tests/test_kernels_<name>.py``
that runs every kernel of it by ``kernel_shim.build``, with a seed at least once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_shim
import pytest

from dtensor.kernels import cuda

TESTS = Path(__file__).parent
NAMES = sorted(path.stem for path in cuda.FOLDER.glob("*.cu"))
WITH_BARRIERS = [
    n for n in NAMES if "__syncthreads()" in (cuda.FOLDER / f"{n}.cu").read_text()
]
# Compilers do not run with a sanitizer loaded before them; the other is slow, and
# runs no kernel.
LEFT_OUT = "not nvcc and not nvrtc and not however_it_is_made"

pytestmark = pytest.mark.skipif(
    kernel_shim.SANITIZED or kernel_shim.NO_BARRIERS,
    reason="this run is one of its own",
)


def shim_tests(name: str) -> Path:
    return TESTS / f"test_kernels_{name}.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_kernels_has_tests_on_the_shim(name: str) -> None:
    path = shim_tests(name)
    assert path.is_file() and "kernel_shim" in path.read_text(), (
        f"{name}.cu has no test on the CPU, expected {path.name} to run its kernels "
        "by kernel_shim.build"
    )


# ---- for GPUs ------------------------------------------------------------------------
def compiled(source: str, name: str, architecture: str) -> bytes:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy")
    try:
        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"needs NVRTC, such as nvidia-cuda-nvrtc-cu12: {error!r:.80}")
    program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    flags = (f"-arch={architecture}", *cuda.options(name))
    try:
        nvrtc.compileProgram(program, flags)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        if "invalid value for --gpu-architecture" in log:
            pytest.skip(f"this NVRTC does not know {architecture}")
        raise AssertionError(f"{architecture}: {log}") from error
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", NAMES)
def test_nvrtc_compiles(name: str, architecture: str) -> None:
    source = (cuda.FOLDER / f"{name}.cu").read_text()
    assert compiled(source, name, architecture)[:4] == b"\x7fELF"


def test_what_does_not_compile_is_told() -> None:
    with pytest.raises(AssertionError, match='sm_90: wrong.cu.*"missing" is undefined'):
        compiled("__global__ void f(int* x) { *x = missing; }", "wrong", "sm_90")


# ---- on the CPU, in a process with other flags ---------------------------------------
def again(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=TESTS.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def sanitized(arguments: list[str], journal: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        if not os.path.isabs(found):
            pytest.skip(f"needs g++'s {name}")
        libraries.append(found)
    return again(
        arguments,
        LD_PRELOAD=" ".join(libraries),
        ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0",
        DTENSOR_SHIM_SANITIZE="1",
        DTENSOR_SHIM_JOURNAL=str(journal),
    )


def pytest_of(name: str) -> list[str]:
    options = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    return [*options, str(shim_tests(name))]


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_runs_under_the_sanitizers(name: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    done = sanitized(pytest_of(name), journal)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = {*journal.read_text().splitlines()}
    source = (cuda.FOLDER / f"{name}.cu").read_text()
    built = {line.split()[2] for line in lines if line.startswith(f"built {name} ")}
    ran = {kernel for kernel in built if f"ran {name} {kernel} shuffled" in lines}
    own = {kernel for kernel in built if kernel != "take_widths" or kernel in source}
    assert own and own == ran & own, f"not run with a seed: {sorted(own - ran)}"


BEYOND = """
import sys, torch
from pathlib import Path
from kernel_shim import build
x = torch.zeros(64)
build(Path(sys.argv[1])).fill((1,), (32,), x, int(sys.argv[2]), seed=1)
print("filled", x.sum().item())
"""


def test_a_write_beyond_a_tensor_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "beyond.cu"
    source.write_text(
        'extern "C" __global__ void fill(float* x, int n) {\n'
        "  for (int i = threadIdx.x; i < n; i += 32)\n"
        "    x[i] = 1;\n"
        "}\n"
    )
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{BEYOND}"
    journal = tmp_path / "journal"
    fine = sanitized(["-c", program, str(source), "64"], journal)
    assert fine.returncode == 0 and fine.stdout == "filled 64.0\n", fine.stderr
    bad = sanitized(["-c", program, str(source), "65"], journal)
    assert bad.returncode != 0 and "filled" not in bad.stdout
    assert "heap-buffer-overflow" in bad.stderr


@pytest.mark.parametrize("name", WITH_BARRIERS)
def test_missing_barriers_are_caught(name: str) -> None:
    """Without its ``__syncthreads`` a file of kernels fails its own tests."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    done = again(pytest_of(name), DTENSOR_SHIM_NO_BARRIERS="1")
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout[-3000:]
