"""Text as numbers: characters, batches, and what the text itself can tell.

The held-out part is every tenth block of the text, so that both parts hold the
same kinds of passages; no window crosses from one part into the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 4096  # characters of one block of the split
EVERY = 10  # every tenth block is held out


def read_text(path: str | None = None) -> str:
    """The text to learn: a file, or the language topics that CPython carries."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Corpus:
    """A text with its alphabet.

    Args:
        text: The whole text, held-out part included.
    """

    text: str

    def __post_init__(self) -> None:
        if len(self.text) < 2 * BLOCK * EVERY // 5:
            raise ValueError(
                f"Corpus: too little text, got {len(self.text)} characters, expected "
                f"at least {2 * BLOCK * EVERY // 5}. Give a longer file by --data FILE."
            )

    @cached_property
    def alphabet(self) -> str:
        """All characters of the text, sorted; a character's code is its index."""
        return "".join(sorted(set(self.text)))

    @cached_property
    def codes(self) -> Tensor:
        """The whole text as int64 codes."""
        table = {c: i for i, c in enumerate(self.alphabet)}
        return torch.tensor([table[c] for c in self.text])

    @cached_property
    def _blocks(self) -> list[tuple[int, Tensor]]:
        return list(enumerate(torch.split(self.codes, BLOCK)))

    @cached_property
    def training(self) -> list[Tensor]:
        """Runs of consecutive training text."""
        runs: list[list[Tensor]] = [[]]
        for i, block in self._blocks:
            if i % EVERY == EVERY // 2:
                runs.append([])
            else:
                runs[-1].append(block)
        return [torch.cat(run) for run in runs if run]

    @cached_property
    def held_out(self) -> list[Tensor]:
        """The held-out blocks."""
        return [block for i, block in self._blocks if i % EVERY == EVERY // 2]

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of the text."""
        return frozenset(split_words(self.text))

    @cached_property
    def entropy(self) -> float:
        """Entropy of a single character in nats: the loss of knowing only counts."""
        n = len(self.text)
        counts = Counter(self.text).values()
        return -math.fsum(c / n * math.log(c / n) for c in counts)

    def decode(self, codes: list[int]) -> str:
        """Codes back to text."""
        return "".join(self.alphabet[c] for c in codes)

    def prompts(self, count: int, length: int) -> Tensor:
        """Beginnings of held-out blocks, spread over the text: (count, length)."""
        blocks = [block for block in self.held_out if len(block) >= length]
        step = len(blocks) / count
        return torch.stack([blocks[int(i * step)][:length] for i in range(count)])

    @cached_property
    def _starts(self) -> Tensor:
        runs = self.training
        sizes = torch.tensor([len(r) for r in runs])
        return torch.cumsum(sizes, 0) - sizes

    @cached_property
    def _training_codes(self) -> Tensor:
        return torch.cat(self.training)

    def batch(
        self, size: int, context: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Windows at random places of the training text.

        Args:
            size: Number of windows, over all ranks.
            context: Characters of a window.
            generator: Drives the choice; equally seeded ranks see equal batches.

        Returns:
            Codes and the codes one further, both (size, context).
        """
        codes, starts = self._training_codes, self._starts
        ends = torch.cat([starts[1:], torch.tensor([len(codes)])])
        at = torch.randint(len(codes), (size,), generator=generator)
        run = torch.searchsorted(starts, at, right=True) - 1
        at = torch.minimum(at, ends[run] - context - 1)  # stay within the run
        window = at[:, None] + torch.arange(context + 1)
        found = codes[window]
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def held_out_windows(self, context: int) -> tuple[Tensor, Tensor]:
        """All whole windows of the held-out text, side by side.

        Returns:
            Codes and the codes one further, both (windows, context).
        """
        x, y = [], []
        for block in self.held_out:
            for i in range(0, len(block) - context, context):
                x.append(block[i : i + context])
                y.append(block[i + 1 : i + context + 1])
        return torch.stack(x), torch.stack(y)


def split_words(text: str) -> list[str]:
    """The words of a text, lower case: letters, with inner digits and underscores."""
    return re.findall(r"[a-z_][a-z0-9_]*", text.lower())


def known_share(passages: list[str], corpus: Corpus) -> float:
    """Share of the words of drawn passages that occur in the corpus.

    The first and the last word of each may be cut by its ends and do not count.
    """
    words = [word for passage in passages for word in split_words(passage)[1:-1]]
    return sum(word in corpus.words for word in words) / max(1, len(words))
