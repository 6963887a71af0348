"""Union: several drafters' trees in one.

The paper of lookahead decoding adds prompt lookup's n-grams to its own (Fu et al. 2024, Table 3, row 9); this drafter
does so for any drafters. It takes the likeliest rows of all parts, as many as the row policy allows, see
:mod:`drafters.union.merge`; ``auto`` also weighs every row against its price.
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
