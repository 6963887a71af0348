"""Layer runners: the ways to run a model's layers, and the choice of one per model.

:mod:`runner` is the interface. :mod:`whole_model` calls the model's own forward (``modules``). :mod:`known_layers`
recognises layers like Llama's and Gemma's. :mod:`layers` runs them one by one in fewer operations (``fused``),
:mod:`cuda` on a GPU in a few launches per layer (``fused`` there), :mod:`native` runs all layers in one call of C, and
:mod:`choice` chooses. Every runner's logits are compared with the model's before it is used
(:mod:`specdec.models.self_check`).
"""

__all__ = ["ACTIVATIONS", "ATTENTIONS", "EXECUTIONS"]

EXECUTIONS = ("auto", "modules", "fused", "native")
"""What ``execution=`` may be."""

ATTENTIONS = ("auto", "flash")
"""What ``attention=`` may be."""

ACTIVATIONS = ("default", "int8")
"""What ``activations=`` may be."""
