"""``python -m specdec.native``: compile the native layers into the installed package."""

from __future__ import annotations

import subprocess
import sys

from specdec.native.library import install

try:
    print(install())
except (OSError, subprocess.SubprocessError) as error:
    sys.exit(f"error: no native layers were built: {error}")
