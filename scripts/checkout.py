"""Run a script from a checkout that is not installed, on a machine without a network.

What an installed package would bring is taken from ``pyproject.toml``: the packages that are needed, and the entry
points by which drafters are found.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

__all__ = ["lacking", "use_checkout"]

ROOT = Path(__file__).resolve().parent.parent


def lacking(project: dict[str, Any]) -> list[str]:
    """The requirements that are not met here, each with what is there instead."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    found = []
    for line in project["dependencies"]:
        needed = Requirement(line)
        try:
            here = version(needed.name)
        except PackageNotFoundError:
            found.append(str(needed))
            continue
        if not needed.specifier.contains(here.split("+")[0], prereleases=True):
            found.append(f"{needed} (here: {here})")
    return found


def use_checkout() -> None:
    """Make the checkout importable, with its drafters registered; ends with a list of wheels where some are missing."""
    sys.path.insert(0, str(ROOT))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = lacking(project)
    if missing:
        lines = "\n".join(f"    {requirement}" for requirement in missing)
        names = " ".join(f"'{requirement.split(' (')[0]}'" for requirement in missing)
        sys.exit(
            f"this machine lacks packages that specdec needs:\n{lines}\nwhere there is a network: pip install {names}; "
            f"else bring their wheels: pip download --no-deps -d wheels {names} on another machine with this Python, "
            "then pip install --no-deps --no-index --find-links wheels " + names + " here"
        )
    if entry_points(group="specdec.drafters"):
        return
    folder = Path(tempfile.mkdtemp(prefix="specdec-")) / "specdec_checkout-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec-checkout\nVersion: 0\n", encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.path.append(str(folder.parent))
