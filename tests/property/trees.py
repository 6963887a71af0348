"""Random trees for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def parent_lists(draw: st.DrawFn, most: int) -> list[int]:
    """Parents of a tree of 1 to ``most`` rows: a chain, a bush, or anything between."""
    size = draw(st.integers(1, most))
    reach = draw(st.sampled_from([1, 2, 3, most]))  # how far back a parent may be: 1 is a chain
    return [-1, *(draw(st.integers(max(0, row - reach), row - 1)) for row in range(1, size))]
