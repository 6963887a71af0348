"""Layer skip: a target's own layers but for some of them draft for it.

``forward`` runs them, ``search`` finds which to leave out, and ``drafter`` drafts.
"""
