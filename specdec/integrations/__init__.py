"""Drafters in other engines; nothing of those is imported here."""
