"""What a training run shows: its layout, its progress, its curve."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, final

from corpus import Corpus
from torch import nn

from dtensor import DeviceMesh
from dtensor.styles import layout_of


def describe(model: nn.Module, mesh: DeviceMesh | None, corpus: Corpus) -> str:
    """Sizes of the text and the model, and which parameter lies how."""
    rows: dict[str, tuple[str, int]] = {}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, places in layout_of(model).items():
        shown = re.sub(r"\.\d+\.", ".*.", name)
        where = "one process" if places is None else ", ".join(map(str, places))
        rows[shown] = (
            f"{shapes.get(name, '')!s:<14} {where}",
            rows.get(shown, ("", 0))[1] + 1,
        )
    wide = max(map(len, rows))
    lines = [
        f"text: {len(corpus.text):,} characters of {len(corpus.alphabet)} kinds, "
        + f"{sum(map(len, corpus.held_out)):,} held out",
        f"model: {sum(p.numel() for p in model.parameters()):,} parameters",
        f"mesh: {mesh if mesh is not None else 'none'}",
        "",
        f"{'parameter':<{wide}}  {'shape':<14} placements along "
        + (", ".join(mesh.axis_name(i) for i in range(mesh.ndim)) if mesh else "-"),
    ]
    lines += [f"{name:<{wide}}  {text}" for name, (text, _) in rows.items()]
    return "\n".join(lines) + "\n"


@final
class Progress:
    """A bar on a terminal, a line now and then elsewhere; nothing if not shown.

    Args:
        steps: Number of steps.
        shown: Whether this rank speaks.
        every: Steps between two lines where there is no terminal.
    """

    def __init__(self, steps: int, shown: bool, every: int = 50) -> None:
        self.steps, self.shown, self.every = steps, shown, every
        self.bar: Any = None
        if shown and sys.stdout.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TextColumn("{task.fields[speed]:,.0f} tokens/s"),
                TimeRemainingColumn(),
            )
            self.task = self.bar.add_task("", total=steps, loss=0.0, speed=0.0)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, step: int, loss: float, speed: float) -> None:
        """Tell of a finished step.

        Args:
            step: Its number, from 1.
            loss: Its loss in nats.
            speed: Tokens (here characters) per second, over all ranks.
        """
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=loss, speed=speed)
        elif self.shown and (step % self.every == 0 or step in (1, self.steps)):
            line = f"step {step:>5}/{self.steps}  loss {loss:.3f}"
            print(f"{line}  {speed:,.0f} tokens/s", flush=True)


def draw(losses: list[float], held_out: float, entropy: float, path: Path) -> None:
    """The loss curve as a picture.

    Args:
        losses: Loss of every step in nats.
        held_out: Held-out loss at the end.
        entropy: Entropy of a single character of the text.
        path: Where the PNG goes; its folder is made.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, lw=0.5, alpha=0.4, color="tab:blue")
    smooth, mean = [], losses[0]
    for i, loss in enumerate(losses):
        mean += (loss - mean) * max(0.05, 1 / (i + 1))
        smooth.append(mean)
    axes.plot(range(1, len(losses) + 1), smooth, color="tab:blue", label="training")
    axes.axhline(entropy, color="grey", ls=":", label="entropy of a character")
    axes.axhline(held_out, color="tab:orange", ls="--", label="held out, at the end")
    axes.set(xlabel="step", ylabel="loss (nats per character)", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
