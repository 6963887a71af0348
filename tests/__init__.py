"""Tests, in two tiers.

``make test`` runs what is not marked ``slow``: it ends within minutes on two slow cores, and every mutant in
``scripts/mutants.yaml`` fails some test of it (``scripts/mutation_check.py`` runs no slow one). ``make test-all``,
which CI runs, adds what takes longer. That a text is plain decoding's, whatever drafts, runs and is decoded beside it,
is shown by the exactness harness (``tests.exactness``): cases drawn by seed, each registered drafter once in the first
tier. A matrix remains only where an axis is what its test is about, and is written with ``tests.tiers``: by ``turns``
each drafter, or ``FEW`` of every kind, takes its turn at one place of every axis; by ``matrix`` the second tier has all
places; by ``each_once`` the first tier has each value of every axis. A test is
``slow`` as well where it takes more than about two seconds of a processor and a quicker one shows the same in less
depth. The ten slowest are printed at the end of a run.

``unit`` mirrors the packages, file by file; ``property`` makes random trees; ``integration`` decodes whole texts with
everything that is registered; ``gpu`` needs a CUDA device.
"""
