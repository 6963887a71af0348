"""``python -m specdec.native``: build the native layers into this package, when it is installed."""

from __future__ import annotations

import subprocess
import sys

from specdec.native.library import install

try:
    print(install())
except (OSError, subprocess.SubprocessError) as error:
    sys.exit(f"error: no native layers were built: {error}")
