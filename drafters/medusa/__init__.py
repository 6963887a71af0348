"""Medusa: trained heads on the last hidden state guess several tokens at once.

``drafter`` proposes, ``heads`` are the modules with their weights, ``heads_step`` runs them, ``rank_paths`` are trees.
"""
