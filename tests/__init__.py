"""Tests, in two tiers.

``make test`` runs what is not marked ``slow``: it ends within minutes on two slow cores, and every mutant in
``scripts/mutants.yaml`` fails some test of it (``scripts/mutation_check.py`` runs no slow one). ``make test-all``,
which CI runs, adds the full matrices: every registered drafter x every family x every case. A matrix is written once,
with ``tests.tiers.matrix``: each drafter takes its turn at one place of every axis in the first tier, whatever is
registered, and is everywhere in the second. A test is ``slow`` as well where it takes more than about two seconds of a
processor and a quicker one shows the same in less depth. The ten slowest are printed at the end of a run.

``unit`` mirrors the packages, file by file; ``property`` makes random trees; ``integration`` decodes whole texts with
everything that is registered; ``gpu`` needs a CUDA device.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which transformers does
