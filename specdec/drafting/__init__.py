"""Between engine and drafters: the registry, a session's start and checks, and forwards that sessions share.

No strategy lives here: these are in ``drafters``, and are found by their entry points.
"""
