"""Between engine and drafters: the registry, and a session's start and checks.

Strategies are not in this folder: they are in ``drafters``, and registered by entry points.
"""
