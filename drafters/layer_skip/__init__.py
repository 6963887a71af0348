"""Layer skip: the target drafts for itself with some of its layers left out.

``forward`` runs the remaining layers, ``search`` chooses the layers to leave out, and ``drafter`` drafts.
"""
