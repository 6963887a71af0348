"""Lowering: decoder layers of known classes as the few operations that they are, on the kernels that suit this machine.

On a CPU, and for small models anywhere, most of a transformers layer's time is what surrounds the matrix products; for
larger ones it is the products themselves. :mod:`layer` computes a layer with a third of the operations, :mod:`products`
holds a weight in the way that its kernel wants it, and :mod:`choice` measures which kernel that is; where all are ours,
:mod:`specdec.native` runs the layers in one call. No weight is held twice, and no class of transformers is patched.
"""

from specdec.lowering.choice import KERNELS, check_kernels, choose_kernels
from specdec.lowering.layer import LoweredLayer, LoweredNorm, check_optimize, lower, lower_head, lower_norm
from specdec.lowering.model import lower_layers

__all__ = [
    "KERNELS",
    "LoweredLayer",
    "LoweredNorm",
    "check_kernels",
    "check_optimize",
    "choose_kernels",
    "lower",
    "lower_head",
    "lower_layers",
    "lower_norm",
]
