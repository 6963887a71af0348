"""Kangaroo: the target's first layers and a trained adapter draft, token by token.

``drafter`` proposes, ``adapter`` is the module with its weights, ``adapter_step`` runs it on a CPU or a GPU.
"""
