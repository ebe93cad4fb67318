"""Orders of dimensions: dimension i of what is stored is dimension ``layout[i]`` of what the program means."""

from __future__ import annotations

from functools import lru_cache

Layout = tuple[int, ...]


@lru_cache(maxsize=65536)
def identity(rank: int) -> Layout:
    """The layout of the program itself."""
    return tuple(range(rank))


@lru_cache(maxsize=65536)
def compose(first: Layout, second: Layout) -> Layout:
    """TRANSPOSE by ``first``, then by ``second``, as one."""
    return tuple(first[i] for i in second)


@lru_cache(maxsize=65536)
def inverse(layout: Layout) -> Layout:
    """The TRANSPOSE that undoes ``layout``."""
    return tuple(sorted(range(len(layout)), key=layout.__getitem__))
