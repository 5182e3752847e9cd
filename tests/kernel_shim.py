"""CUDA C++ kernels on the CPU, for tests: ``build(path)``, then call them by name.

    kernels = build(SOURCE)
    kernels.scale((blocks,), (threads,), x, 2.0, x.numel(), seed=3)

Tensors go in as pointers, numbers as the type that the kernel declares. The threads of
a block run as fibers in an order that ``seed`` shuffles; see ``cpusim.h`` for what that
can show and what it cannot.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

HEADER = Path(__file__).with_name("cpusim.h")
FLAGS = "-O1 -std=c++17 -shared -fPIC -ffp-contract=off -w".split()
# Both are set by what runs these tests anew: see ``test_kernels_compile.py``.
SANITIZED = os.environ.get("DTENSOR_SHIM_SANITIZE") == "1"
JOURNAL = os.environ.get("DTENSOR_SHIM_JOURNAL")  # a file, a line for each kernel run
NO_BARRIERS = os.environ.get("DTENSOR_SHIM_NO_BARRIERS") == "1"
if SANITIZED:
    FLAGS += "-g -fsanitize=address,undefined -fno-sanitize-recover=all".split()
FAULTS = {
    1: "a barrier that some threads do not reach, since they have ended",
    2: "threads that wait at unlike barriers",
}
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(')
C_TYPES = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "char": ctypes.c_byte,
    "unsigned char": ctypes.c_ubyte,
    "short": ctypes.c_short,
    "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
}


class KernelFault(RuntimeError):
    """A kernel did what would be undefined, or a deadlock, on a GPU."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; ``kind`` is None for a pointer."""

    text: str
    kind: Any


class Module:
    """The kernels of one source file, as attributes.

    Each is called as ``kernel(grid, block, *args, seed=0, shared=0)``: up to three
    sizes of the grid and of a block, the kernel's arguments, the seed of the order of
    the threads (0 keeps their own), and the bytes of dynamic shared memory. Raises
    ``KernelFault`` where barriers do not fit.
    """

    def __init__(
        self, source: str, library: ctypes.CDLL, kernels: dict[str, list[Parameter]]
    ):
        self._source = source
        self._library = library
        self._kernels = kernels
        self._lock = threading.Lock()  # a library runs one launch at a time

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in self._kernels:
            raise AttributeError(
                f"no kernel {name!r}, expected one of {sorted(self._kernels)}"
            )
        launcher = self._library[f"launch_{name}"]
        parameters = self._kernels[name]

        def kernel(
            grid: Sequence[int],
            block: Sequence[int],
            *args: Any,
            seed: int = 0,
            shared: int = 0,
        ) -> None:
            if len(args) != len(parameters):
                wanted = ", ".join(p.text for p in parameters)
                raise TypeError(f"{name}: got {len(args)} arguments, expected {wanted}")
            shape = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
            given = [_passed(name, p, a) for p, a in zip(parameters, args, strict=True)]
            with self._lock:
                faults = launcher(
                    (ctypes.c_uint * 6)(*shape),
                    ctypes.c_size_t(shared),
                    ctypes.c_uint(seed),
                    *given,
                )
            _note(f"ran {self._source} {name} {'shuffled' if seed else ''}")
            if faults:
                texts = [text for bit, text in FAULTS.items() if faults & bit]
                raise KernelFault(f"{name}: {'; '.join(texts)}")

        return kernel


def _passed(name: str, parameter: Parameter, value: Any) -> Any:
    if isinstance(value, torch.Tensor) != (parameter.kind is None):
        raise TypeError(f"{name}: got {type(value).__name__} for {parameter.text!r}")
    if not isinstance(value, torch.Tensor):
        return parameter.kind(value)
    if value.device.type != "cpu" or not value.is_contiguous():
        raise ValueError(f"{name}: {parameter.text!r} must be contiguous, on the CPU")
    return ctypes.c_void_p(value.data_ptr())


def _parameters(text: str) -> list[Parameter]:
    found = []
    for one in text.split(","):
        words = one.replace("*", " * ").split()
        kind = None
        if "*" not in words:
            kind = C_TYPES[" ".join(w for w in words[:-1] if w != "const")]
        found.append(Parameter(" ".join(words), kind))
    return found


def _launcher(name: str, parameters: list[Parameter]) -> str:
    declared = "".join(f", {p.text}" for p in parameters)
    names = ", ".join(p.text.split()[-1] for p in parameters)
    return (
        f'extern "C" int launch_{name}(const unsigned* shape_, size_t shared_, '
        f"unsigned seed_{declared}) {{\n"
        f"  return sim::launch(shape_, shared_, seed_, [=] {{ {name}({names}); }});\n"
        "}\n"
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}:\n{done.stderr}")
    return done.stdout


@cache
def build(path: Path, defines: tuple[str, ...] = ()) -> Module:
    """Compile a file of CUDA C++ for the CPU; skips the test where there is no g++.

    Args:
        path: The source. Its kernels are declared ``extern "C" __global__ void name(``.
        defines: Macros, as in ``-D``.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        flags = [*FLAGS, *(f"-D{d}" for d in defines)]
        # Kernels that macros declare show only after the preprocessor.
        if NO_BARRIERS:
            path = _without_barriers(path, out)
        own = out / "own.cpp"
        own.write_text(f'#define __global__ __global__\n#include "{path}"\n')
        text = " ".join(_run([compiler, "-E", "-P", *flags, str(own)]).split())
        # A parameter written with a typedef of the source has a type of C in the end.
        for new, old in _typedefs(text).items():
            text = re.sub(rf"\b{new}\b", old, text)
        kernels = {
            m[1]: _parameters(text[m.end() : text.index(")", m.end())])
            for m in KERNEL.finditer(text)
        }
        for name in kernels:
            _note(f"built {path.stem} {name}")
        source = out / "kernels.cpp"
        launchers = "".join(_launcher(n, p) for n, p in kernels.items())
        source.write_text(f'#include "{HEADER}"\n#include "{path}"\n{launchers}')
        library = out / "kernels.so"
        _run([compiler, *flags, "-o", str(library), str(source)])
        return Module(path.stem, ctypes.CDLL(str(library)), kernels)


def _without_barriers(path: Path, folder: Path) -> Path:
    planted = folder / path.name
    planted.write_text(path.read_text().replace("__syncthreads()", "(void)0"))
    return planted


@cache
def _note(line: str) -> None:
    """Write a line into the journal, once."""
    if JOURNAL:
        with open(JOURNAL, "a") as journal:
            journal.write(f"{line.strip()}\n")


def _typedefs(text: str) -> dict[str, str]:
    found = re.findall(r"typedef ([\w ]+?) (\w+);", text)
    return {new: old for old, new in found}
