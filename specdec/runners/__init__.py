"""Layer runners: the ways to run a model's layers, and the choice of one of them, once per model.

:mod:`runner` is the interface, :mod:`known` reads and recognises layers like Llama's and Gemma's, :mod:`layers` runs
layers one after the other (``transformers``, ``fused``), :mod:`cuda` does so on a GPU in a few launches a layer
(``fused`` there), :mod:`native` runs all in one call of C, and :mod:`plan` chooses. Every runner is held
against the model's own logits before it is used (:mod:`specdec.models.self_check`).
"""

__all__ = ["ACTIVATIONS", "EXECUTIONS"]

EXECUTIONS = ("auto", "transformers", "fused", "native")
"""What ``execution=`` may be."""

ACTIVATIONS = ("default", "int8")
"""What ``activations=`` may be."""
