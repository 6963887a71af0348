"""``python -m specdec``: the command line."""

import sys

from specdec.cli.main import main

sys.exit(main())
