"""Drafters in other engines; importing this package imports none of those."""
