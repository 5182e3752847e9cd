"""How one tensor dim is cut into pieces: the law of ``torch.chunk``.

Every piece but the last ones has ``ceil(length / parts)`` elements; the last ones
are short or empty. All ranks compute the same cut from the length alone, so no
sizes ever travel.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=65536)
def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of the pieces of a dim.

    Args:
        length: Elements along the dim, zero or more.
        parts: Number of pieces, one per coordinate of a mesh axis.

    Returns:
        ``parts`` lengths that add up to ``length``.

    Example:
        >>> chunk_sizes(5, 4)
        (2, 2, 1, 0)
    """
    step = -(-length // parts)
    return tuple(max(0, min(step, length - step * i)) for i in range(parts))


def chunk_offset(length: int, parts: int, index: int) -> int:
    """Index of the first element of piece ``index``.

    Example:
        >>> chunk_offset(5, 4, 3)
        5
    """
    step = -(-length // parts)
    return min(step * index, length)
