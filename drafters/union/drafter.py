"""Union: several drafters' trees in one.

The paper of lookahead decoding adds prompt lookup's n-grams to its own (Fu et al. 2024, Table 3, row 9); this is that,
for any drafters. The likeliest rows of all come first, as many as the engine's policy allows, see
:mod:`drafters.union.merge`; ``auto`` goes further and weighs every row by what it costs.
"""

from __future__ import annotations

from drafters.union.merge import Merged, MergedConfig

__all__ = ["Union", "UnionConfig"]


class UnionConfig(MergedConfig):
    drafter = "union"


class Union(Merged):
    """The parts. Under a policy, parts whose rows do not pay rest for a while; without one all draft."""

    name = "union"
    Config = UnionConfig
