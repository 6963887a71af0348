"""What runs a model, below its description: :mod:`whole_model` calls a live model's own forward (``modules``).

Executors (:mod:`specdec.execute`) share the rest: rows and their masks, attention, products, native layers, CUDA graphs
and Triton's kernels.
"""

__all__ = ["ACTIVATIONS", "ATTENTIONS", "EXECUTIONS"]

EXECUTIONS = ("auto", "modules", "fused", "native")
"""What ``execution=`` may be."""

ATTENTIONS = ("auto", "flash")
"""What ``attention=`` may be."""

ACTIVATIONS = ("default", "int8")
"""What ``activations=`` may be."""
