"""Union: several drafters' trees in one.

The paper of lookahead decoding adds prompt lookup's n-grams to its own (Fu et al. 2024, Table 3, row 9); this is that,
for any drafters. The likeliest rows of all come first, as many as the engine's policy allows, see
:mod:`drafters.merge`; ``auto`` goes further and weighs every row by what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafters.merge import PARTS, Merged, check_options
from specdec.registry import make_drafter
from specdec.target import Target

__all__ = ["Union", "UnionConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionConfig:
    """Options.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``; a row that two of them propose is put down to the
            first. None takes suffix automaton, token recycling and lookahead. Under a policy, parts whose rows do not
            pay are left alone for a while; with ``policy="off"`` all are asked in every step.
        rows: most rows below the root, of all parts together; None leaves it to the engine.
        memory: weight of the past in a part's worth and in a row's chance, from one step to the next.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.96

    def __post_init__(self) -> None:
        check_options("union", self.parts, self.rows, self.memory)


class Union(Merged):
    """The parts, built."""

    name = "union"
    Config = UnionConfig

    @classmethod
    def build(cls, config: UnionConfig, target: Target) -> Union:
        """Make the parts for a target.

        Raises:
            ConfigError: an unknown drafter or option.
        """
        return cls(config, [make_drafter(part, target) for part in config.parts or PARTS])
