"""The exactness harness: texts under speculation, drawn by seed from all that a text may not depend on.

``cases.draw(seed)`` is a case, ``targets.Targets`` makes what it runs on, and ``texts.check`` runs it.
"""
