"""Train a small character-level GPT, laid out over a mesh by a plan.

    dtensor-run -n 4 examples/train_lm.py --mesh dp=2,tp=2
    python examples/train_lm.py                             # one process, no mesh

The model is a plain module (gpt.py). A plan says which linears are cut over the axis
"tp"; the batch is split over the axis "dp". Activations are DTensors, or plain local
tensors with ``--local-activations``; the numbers are the same. docs/training.md says
when to use which flag.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
from corpus import Corpus, known_share, read_text
from gpt import GPT, Config, loss_of
from torch import Tensor

from dtensor import (
    DeviceMesh,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    get_rank,
    get_world_size,
    init_device_mesh,
    no_grad_sync,
)
from dtensor.collectives.functional import all_reduce
from dtensor.styles import (
    Colwise,
    ColwiseParallel,
    DataParallel,
    MixedPrecision,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)


@dataclass(frozen=True)
class Options:
    """What a run is made of; the flags of the command line, see ``parse``."""

    mesh: str = ""
    data: str | None = None
    steps: int = 700
    batch: int = 16
    context: int = 64
    dim: int = 128
    layers: int = 4
    heads: int = 4
    rate: float = 4e-3
    dtype: str = "float32"
    seed: int = 0
    local_activations: bool = False
    fsdp: bool = False
    sp: bool = False
    bf16: bool = False
    accumulate: int = 1
    clip: float | None = None
    dropout: float = 0.0
    compare_serial: bool = False
    passages: int = 4
    characters: int = 250
    temperature: float = 0.5
    out: str = "out"


def make_mesh(text: str) -> DeviceMesh | None:
    """The mesh of ``"dp=2,tp=2"``; None for no text in a world of one.

    Raises:
        ValueError: Not such a text, or a number of ranks that the world has not.
    """
    world = get_world_size()
    if not text:
        if world == 1:
            return None
        text = f"tp={world}"
    try:
        axes = {
            name: int(n) for name, n in (part.split("=") for part in text.split(","))
        }
    except ValueError:
        axes = {}
    if not axes or axes.keys() - {"dp", "tp"}:
        raise ValueError(
            f"--mesh: not a mesh, got {text!r}, expected sizes of dp and tp. Write for "
            f"example --mesh dp=2,tp=2."
        )
    ranks = math.prod(axes.values())
    if ranks != world:
        raise ValueError(
            f"--mesh: the mesh does not fit the world, got {text!r} ({ranks} ranks) in a "
            f"world of {world}. Start with `dtensor-run -n {ranks} examples/train_lm.py "
            f"--mesh {text}`."
        )
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def plan_for(mesh: DeviceMesh, local: bool, sp: bool = False) -> dict[str, Any]:
    """Which module lies how; what is not named is replicated.

    In every block the first linear of a pair is cut by its outputs and the second by
    its inputs, so that a pair costs one all-reduce forward and one backward. With
    ``sp`` the stream between the pairs is cut along the sequence, and each all-reduce
    becomes a reduce-scatter and an all-gather.
    """
    axes = mesh.mesh_dim_names or ()
    plan: dict[str, Any] = {}
    if "tp" in axes:
        first = ColwiseParallel() if local else Colwise()
        if sp:
            cut = Shard(1)
            second = RowwiseParallel(output_layouts=cut, use_local_output=False)
            plan["blocks.0"] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=cut
            )
            plan["blocks.*.norm*"] = plan["norm"] = SequenceParallel()
        else:
            second = RowwiseParallel(use_local_output=local)
        plan["blocks.*.attention"] = {"qkv": first, "out": second}
        plan["blocks.*.mlp"] = {"up": first, "down": second}
    if "dp" in axes and local:
        plan[""] = DataParallel(mesh_dim="dp")
    return plan


def check(options: Options, mesh: DeviceMesh | None) -> None:
    """Refuse flags that do not fit the mesh, or each other.

    Raises:
        ValueError: They do not.
    """
    axes = mesh.mesh_dim_names or () if mesh is not None else ()
    if options.fsdp and "dp" not in axes:
        raise ValueError(
            f"--fsdp: shards over the axis dp, got a mesh with the axes {list(axes)}. "
            f"Write for example --mesh dp=4 --fsdp."
        )
    if options.sp and ("tp" not in axes or options.local_activations):
        raise ValueError(
            f"--sp: cuts DTensors over the axis tp, got a mesh with the axes "
            f"{list(axes)} and --local-activations {options.local_activations}. Write "
            f"for example --mesh tp=4 --sp."
        )
    if options.accumulate < 1 or options.batch % options.accumulate:
        raise ValueError(
            f"--accumulate: must divide the batch, got {options.accumulate} and a batch "
            f"of {options.batch}. Write for example --batch 16 --accumulate 2."
        )


class Trainer:
    """A model with its optimizer, on a mesh or in one process.

    Args:
        options: The run.
        corpus: The text.
        mesh: The mesh; None for one process.
    """

    def __init__(
        self, options: Options, corpus: Corpus, mesh: DeviceMesh | None
    ) -> None:
        check(options, mesh)
        self.options, self.corpus, self.mesh = options, corpus, mesh
        self.local = options.local_activations
        torch.manual_seed(options.seed)
        model = GPT(
            Config(
                vocab=len(corpus.alphabet),
                context=options.context,
                dim=options.dim,
                layers=options.layers,
                heads=options.heads,
                dropout=options.dropout,
            )
        ).to(getattr(torch, options.dtype))
        if mesh is not None:
            parallelize_module(model, mesh, plan_for(mesh, self.local, options.sp))
            if options.fsdp:
                precision = MixedPrecision(torch.bfloat16) if options.bf16 else None
                for unit in (*model.blocks, model):
                    fully_shard(unit, mesh, "dp", mixed_precision=precision)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.rate, betas=(0.9, 0.99), weight_decay=0.1
        )
        self.generator = torch.Generator().manual_seed(options.seed + 1)
        self.done = 0

    @property
    def data_ranks(self) -> int:
        """Number of pieces the batch is cut into."""
        names = self.mesh.mesh_dim_names or () if self.mesh is not None else ()
        return self.mesh.size("dp") if self.mesh is not None and "dp" in names else 1

    def place(self, x: Tensor, split: bool = True) -> Tensor:
        """A batch that every rank holds whole, as the model takes it.

        Args:
            x: Codes, the batch first.
            split: Cut the batch over dp, else give every rank all of it.
        """
        if self.mesh is None:
            return x
        if self.local:
            if not split or self.data_ranks == 1:
                return x
            return x.chunk(self.data_ranks)[self.mesh.get_local_rank("dp")]
        cut = [
            Shard(0) if split and self.mesh.axis_name(axis) == "dp" else Replicate()
            for axis in range(self.mesh.ndim)
        ]
        # All ranks drew the same batch: nothing has to be sent.
        return distribute_tensor(x, self.mesh, cut, src_data_rank=None)

    def value(self, loss: Tensor) -> float:
        """A loss as a number, the mean over the whole batch."""
        loss = loss.detach()
        if self.local and self.mesh is not None and self.data_ranks > 1:
            loss = all_reduce(loss, self.mesh["dp"], "avg")
        return loss.item()

    def rate(self) -> float:
        """The learning rate of the step to come: warm-up, then half a cosine."""
        options = self.options
        warm = min(1.0, (self.done + 1) / min(40, 1 + options.steps // 10))
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.done / options.steps)
        return options.rate * warm * max(0.02, cosine)

    def step(self) -> float:
        """One batch forward, backward and into the parameters.

        Returns:
            The loss before the update, in nats. Gradients stay in the parameters.
        """
        tokens, targets = self.corpus.batch(
            self.options.batch, self.options.context, self.generator
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.zero_grad()
        total, parts = 0.0, self.options.accumulate
        for part in range(parts):
            # Only the last micro-batch reduces the gradients, those of all of them.
            last = part == parts - 1
            with contextlib.nullcontext() if last else no_grad_sync():
                loss = self.loss(tokens.chunk(parts)[part], targets.chunk(parts)[part])
                # Each rank averages over its own piece of a batch of plain tensors;
                # gradients add up over the ranks.
                share = parts * (self.data_ranks if self.local else 1)
                (loss / share).backward()  # type: ignore[no-untyped-call]
            total += self.value(loss) / parts
        if self.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.done += 1
        return total

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch that every rank holds whole."""
        mixed = self.options.bf16 and not (self.options.fsdp and self.mesh is not None)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return loss_of(self.model, self.place(tokens), self.place(targets))

    @torch.no_grad()
    def held_out_loss(self, batch: int = 64) -> float:
        """Mean loss over the held-out text, in nats per character."""
        self.model.eval()
        total, count = 0.0, 0
        whole, further = self.corpus.held_out_windows(self.options.context)
        pairs = zip(torch.split(whole, batch), torch.split(further, batch), strict=True)
        for tokens, targets in pairs:
            # As many windows as every dp rank can have alike; at most a few are left.
            n = len(tokens) // self.data_ranks * self.data_ranks
            if n == 0:
                continue
            loss = loss_of(self.model, self.place(tokens[:n]), self.place(targets[:n]))
            total, count = total + self.value(loss) * n, count + n
        self.model.train()
        return total / count

    @torch.no_grad()
    def sample(self) -> list[tuple[str, str]]:
        """Continuations of held-out text, drawn character by character.

        Returns:
            Pairs of a prompt and what the model makes of it.
        """
        self.model.eval()
        options = self.options
        generator = torch.Generator().manual_seed(options.seed)
        codes = self.corpus.prompts(options.passages, min(16, options.context))
        given = codes.shape[1]
        for _ in range(options.characters):
            seen = self.place(codes[:, -options.context :], split=False)
            logits: Any = self.model(seen)
            if not self.local and self.mesh is not None:
                logits = logits.full_tensor()
            chances = (logits[:, -1].double() / options.temperature).softmax(-1)
            # Equal chances and equally seeded generators: all ranks draw the same.
            drawn = torch.multinomial(chances, 1, generator=generator)
            codes = torch.cat([codes, drawn], dim=1)
        self.model.train()
        texts = [self.corpus.decode(row) for row in codes.tolist()]
        return [(text[:given], text[given:]) for text in texts]


@dataclass
class Run:
    """What came out of a training run."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    collectives: str = ""


def train(trainer: Trainer, progress: report.Progress) -> Run:
    """All steps of a run."""
    options, run = trainer.options, Run()
    tokens = options.batch * options.context
    start = time.perf_counter()
    for step in range(options.steps):
        with count_collectives() as counted:
            run.losses.append(trainer.step())
        if step == min(1, options.steps - 1):  # the first one may exchange more
            run.collectives = counted.table()
        run.seconds = time.perf_counter() - start
        progress.show(step + 1, run.losses[-1], tokens * (step + 1) / run.seconds)
    return run


def parse(arguments: list[str] | None = None) -> Options:
    """Options from the command line."""
    default = Options()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mesh", default=default.mesh, help="sizes of the axes, as dp=2,tp=2")
    add("--data", help="a text file; CPython's language topics if not given")
    add("--steps", type=int, default=default.steps)
    add("--batch", type=int, default=default.batch, help="windows per step")
    add("--context", type=int, default=default.context, help="characters of a window")
    add("--dim", type=int, default=default.dim)
    add("--layers", type=int, default=default.layers)
    add("--heads", type=int, default=default.heads)
    add("--rate", type=float, default=default.rate, help="highest learning rate")
    add("--dtype", choices=("float32", "float64"), default=default.dtype)
    add("--seed", type=int, default=default.seed)
    add("--local-activations", action="store_true", help="plain tensors in between")
    add("--fsdp", action="store_true", help="shard parameters and states over dp")
    add("--sp", action="store_true", help="cut the stream along the sequence over tp")
    add("--bf16", action="store_true", help="compute in bfloat16, keep masters")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--clip", type=float, help="largest norm of all gradients together")
    add("--dropout", type=float, default=default.dropout)
    add("--compare-serial", action="store_true", help="run one process beside it")
    add("--passages", type=int, default=default.passages, help="of the sample")
    add("--characters", type=int, default=default.characters, help="of a passage")
    add("--temperature", type=float, default=default.temperature)
    add("--out", default=default.out, help="folder of the loss curve and the sample")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> None:
    """Train, then report on rank 0."""
    options = parse(arguments)
    torch.set_num_threads(1)
    mesh = make_mesh(options.mesh)
    corpus = Corpus(read_text(options.data))
    trainer = Trainer(options, corpus, mesh)
    first = get_rank() == 0
    if first:
        print(report.describe(trainer.model, mesh, corpus))
    with report.Progress(options.steps, shown=first) as progress:
        run = train(trainer, progress)
    held_out = trainer.held_out_loss()
    sample = trainer.sample()
    if not first:
        return
    out = Path(options.out)
    report.draw(run.losses, held_out, corpus.entropy, out / "loss.png")
    text = "\n".join(f"[{prompt}]{more}\n" for prompt, more in sample)
    (out / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\ncollectives of one step, on one rank\n{run.collectives}")
    print(f"\nsample, at temperature {options.temperature}: [given]drawn\n\n{text}")
    known = known_share([more for _, more in sample], corpus)
    print(f"words of the sample that occur in the text: {known:.0%}")
    print(
        f"held-out loss {held_out:.3f} nats, entropy of a character "
        f"{corpus.entropy:.3f} nats, ratio {held_out / corpus.entropy:.1%}"
    )
    print(f"{options.steps} steps in {run.seconds:.0f} s; loss curve in {out}/loss.png")
    if options.compare_serial:
        serial = Trainer(options, corpus, None)
        apart = max(abs(serial.step() - loss) for loss in run.losses)
        print(f"largest difference of a loss from the one-process run: {apart:.3g}")


if __name__ == "__main__":
    main()
