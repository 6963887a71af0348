"""Tests, in two tiers.

``make test`` runs what is not marked ``slow``: one of each kind, within 330 seconds of processors, which are printed at
the end of a run. ``make test-all``, which CI runs, adds what takes longer; every mutant in ``scripts/mutants.yaml``
fails some test of it, and most a quick one (``scripts/mutation_check.py`` tells which). That a text is plain
decoding's, whatever drafts, runs and is decoded beside it, is shown by the exactness harness (``tests.exactness``):
cases drawn by seed, each registered drafter once in the first tier. A matrix remains only where an axis is what its
test is about, and is written with ``tests.tiers``: by ``turns`` each drafter, or ``FEW`` of every kind, takes its turn
at one place of every axis; by ``matrix`` the second tier has all places; by ``each_once`` the first tier has each value
of every axis. With the mark ``few(n)`` it has n cases of a test, evenly spread: as many as take some quarter of a
second. A test is ``slow`` as well where it takes more than half a second and a quicker one beside it shows its kind.
The ten slowest are printed at the end of a run.

``unit`` mirrors the packages, file by file; ``property`` makes random trees; ``integration`` decodes whole texts with
everything that is registered; ``gpu`` needs a CUDA device.
"""
