"""Tests, in two tiers.

``make test`` runs what is not marked ``slow``: it ends within minutes on two slow cores, and every mutant in
``scripts/mutants.yaml`` fails some test of it (``scripts/mutation_check.py`` runs no slow one). ``make test-all``,
which CI runs, adds the full matrices: every registered drafter x every family x every case. A matrix is written once,
with ``tests.tiers``: by ``matrix`` each drafter takes its turn at one place of every axis in the first tier, whatever
is registered, and is everywhere in the second, or ``FEW`` do, of every kind one, where no drafter's own code is tested;
by ``each_once`` the first tier has each value of every axis. A test is
``slow`` as well where it takes more than about two seconds of a processor and a quicker one shows the same in less
depth. The ten slowest are printed at the end of a run.

``unit`` mirrors the packages, file by file; ``property`` makes random trees; ``integration`` decodes whole texts with
everything that is registered; ``gpu`` needs a CUDA device.
"""
