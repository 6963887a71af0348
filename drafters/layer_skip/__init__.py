"""Layer skip: the target drafts for itself with some of its attentions and MLPs left out.

``forward`` runs the remaining sublayers, ``search`` chooses those to leave out, and ``drafter`` drafts.
"""
