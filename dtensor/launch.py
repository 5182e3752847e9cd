"""``dtensor-run -n 4 script.py ...``: start a Python program on several ranks.

It finds the MPI launcher, completes the environment of the ranks, and becomes that
launcher: exit codes, signals and standard input are those of ``mpiexec`` itself, and
there is no process in between that could leave others behind. What a rank does for
itself, under any launcher, is in ``lifecycle``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtensor import prefix_output
from dtensor.lifecycle import OWNER
from dtensor.mesh.world import LAUNCHER_VARIABLES
from dtensor.rank_environment import (
    GPU_CHOICE,
    LOCAL_VARIABLES,
    count_cores,
    thread_settings,
    yield_settings,
)

Family = Literal["mpich", "openmpi", "intel"]

# What a launcher told this process, if it is a rank itself, is not for the new ranks.
_TOLD = {name for row in (*LAUNCHER_VARIABLES, *LOCAL_VARIABLES) for name in row}
_TOLD |= {"PMI_FD", "PMI_PORT", "PMI_ID", "HYDI_CONTROL_FD", OWNER}


class LaunchError(RuntimeError):
    """The program could not be started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to start.

    Attributes:
        ranks: Number of ranks.
        program: Arguments of the Python interpreter: a script or ``-m module``, and
            what follows.
        hosts: (name, ranks at most) of each host; empty means this one.
        prefix: Whether lines of output begin with their rank.
        extra: Further arguments of the MPI launcher.
    """

    ranks: int
    program: tuple[str, ...]
    hosts: tuple[tuple[str, int], ...] = ()
    prefix: bool = False
    extra: tuple[str, ...] = ()

    @property
    def ranks_per_host(self) -> int:
        """The most ranks that share a host."""
        if not self.hosts:
            return self.ranks
        return min(self.ranks, max(slots for _, slots in self.hosts))


def find_mpiexec(given: str | None = None) -> str:
    """Path of the MPI launcher.

    Args:
        given: What the user asked for, else ``mpiexec``: first the one beside this
            interpreter, which belongs to the MPI library of its environment, else
            the first in PATH.

    Raises:
        LaunchError: There is none.
    """
    name = given if given is not None else "mpiexec"
    beside = os.path.dirname(sys.executable)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise LaunchError(
            f"find_mpiexec: there is no MPI launcher, got {name!r} neither beside "
            f"{sys.executable} nor in PATH, expected an executable. "
            f"Run `pip install 'dtensor-runtime[mpich]'`, or load your cluster's MPI."
        )
    return found


def tell_family(version: str) -> Family:
    """The MPI that a launcher belongs to, which decides the names of its options.

    Args:
        version: What ``mpiexec --version`` printed.

    Example:
        >>> tell_family("mpiexec (Open MPI) 5.0.11")
        'openmpi'
    """
    text = version.lower()
    if any(name in text for name in ("open mpi", "openmpi", "openrte", "prrte")):
        return "openmpi"
    return "intel" if "intel" in text else "mpich"


def ask_version(mpiexec: str) -> str:
    """What ``mpiexec --version`` prints."""
    done = subprocess.run(
        [mpiexec, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=60,
    )
    return done.stdout


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and their ranks.

    Example:
        >>> parse_hosts("alpha:4,beta")
        (('alpha', 4), ('beta', 1))

    Raises:
        ValueError: An empty name, or a number that is none.
    """
    hosts = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        if not name or (colon and not (slots.isdigit() and int(slots) > 0)):
            raise ValueError(
                f"parse_hosts: not a host, got {item!r}, expected NAME or NAME:RANKS. "
                f"Write for example `--hosts alpha:4,beta:4`."
            )
        hosts.append((name, int(slots) if colon else 1))
    return tuple(hosts)


def build_environment(
    environ: Mapping[str, str], ranks_per_host: int, cores: int
) -> dict[str, str]:
    """What the ranks need beyond the user's environment.

    Args:
        environ: The user's.
        ranks_per_host: The most ranks on one host.
        cores: Cores of a host; taken to be the same everywhere.
    """
    added = thread_settings(environ) | yield_settings(environ, ranks_per_host, cores)
    if GPU_CHOICE not in environ and "CUDA_VISIBLE_DEVICES" not in environ:
        added[GPU_CHOICE] = "local"
    return added


def build_command(
    job: Job, mpiexec: str, family: Family, added: Mapping[str, str], cores: int
) -> list[str]:
    """The command line that starts ``job``.

    Args:
        job: What to start.
        mpiexec: Path of the MPI launcher.
        family: The MPI that it belongs to.
        added: Variables that ``build_environment`` added: Open MPI passes only its own
            to other hosts.
        cores: Cores of a host.

    Raises:
        LaunchError: Intel MPI cannot place different numbers of ranks on hosts.
    """
    command = [mpiexec, "-n", str(job.ranks)]
    if family == "openmpi":
        if job.ranks_per_host > cores:
            command += ["--oversubscribe", "--bind-to", "none"]
        for name in added:
            command += ["-x", name]
    if job.hosts:
        listed = ",".join(f"{name}:{slots}" for name, slots in job.hosts)
        if family == "openmpi":
            command += ["--host", listed]
        elif family == "mpich":
            command += ["-hosts", listed]
        else:
            slots = {slots for _, slots in job.hosts}
            if len(slots) > 1:
                raise LaunchError(
                    f"build_command: Intel MPI takes one number of ranks for all "
                    f"hosts, got {listed}, expected equal numbers. Give a machine file "
                    f"with `--mpi-args '-machinefile FILE'` instead of `--hosts`."
                )
            names = ",".join(name for name, _ in job.hosts)
            command += ["-ppn", str(slots.pop()), "-hosts", names]
    command += job.extra
    if job.prefix:
        names = ",".join(dict.fromkeys(rank for rank, _ in LAUNCHER_VARIABLES))
        command += [sys.executable, "-I", "-S", prefix_output.__file__, names]
    return [*command, sys.executable, *job.program]


def _rank_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def _hosts(text: str) -> tuple[tuple[str, int], ...]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_arguments(
    arguments: Sequence[str] | None = None,
) -> tuple[Job, argparse.Namespace]:
    """Read the command line; all that follows the program is the program's.

    Example:
        >>> parse_arguments(["-n", "2", "train.py", "-n", "9"])[0].program
        ('train.py', '-n', '9')
    """
    parser = argparse.ArgumentParser(
        prog="dtensor-run",
        description="Start a Python program on several ranks.",
        epilog="Each rank gets one thread for torch, OpenMP and BLAS unless "
        "OMP_NUM_THREADS is set, and the GPU of its local rank unless "
        "CUDA_VISIBLE_DEVICES is set.",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        "-np",
        type=_rank_count,
        help="number of ranks; without it, as many as --hosts has room for, else one",
    )
    parser.add_argument(
        "--hosts",
        type=_hosts,
        default=(),
        metavar="A:4,B:4",
        help="hosts and the number of ranks on each; without it, this host",
    )
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="begin each line of output with the rank that wrote it",
    )
    parser.add_argument(
        "--mpiexec",
        metavar="PATH",
        help="MPI launcher; without it, the one beside this Python, else in PATH",
    )
    parser.add_argument(
        "--mpi-args",
        type=shlex.split,
        default=[],
        metavar="'...'",
        help="further arguments for the MPI launcher",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the command and the variables that it adds, and start nothing",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is the name of a module",
    )
    parser.add_argument("program", help="script, or name of a module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    job = Job(
        ranks=options.ranks or sum(slots for _, slots in options.hosts) or 1,
        program=(
            *(["-m"] if options.module else []),
            options.program,
            *options.arguments,
        ),
        hosts=options.hosts,
        prefix=options.prefix,
        extra=tuple(options.mpi_args),
    )
    return job, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the MPI launcher that runs the program.

    Args:
        arguments: The command line, without the name of the command.

    Returns:
        An exit code, where the program could not be started.
    """
    job, options = parse_arguments(arguments)
    here = not (options.module or options.hosts)
    if here and not Path(options.program).exists():
        print(
            f"dtensor-run: there is no such script, got {options.program!r}, expected "
            f"a file. For a module write `dtensor-run -n {job.ranks} -m NAME`.",
            file=sys.stderr,
        )
        return 2
    cores = count_cores()
    environ = {k: v for k, v in os.environ.items() if k not in _TOLD}
    added = build_environment(environ, job.ranks_per_host, cores)
    try:
        mpiexec = find_mpiexec(options.mpiexec)
        family = tell_family(ask_version(mpiexec))
        command = build_command(job, mpiexec, family, added, cores)
    except (LaunchError, OSError, subprocess.SubprocessError) as error:
        print(f"dtensor-run: {error}", file=sys.stderr)
        return 127
    if family == "openmpi" and os.geteuid() == 0:  # as in a container
        environ["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if options.show:
        variables = [f"{name}={value}" for name, value in added.items()]
        print(shlex.join(["env", *variables, *command]))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, environ | added)
    except OSError as error:
        print(f"dtensor-run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main())
