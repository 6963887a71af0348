"""Between engine and drafters: the registry, a session's start and checks, and forwards that sessions share.

Strategies are not in this folder: they are in ``drafters``, and registered by entry points.
"""
