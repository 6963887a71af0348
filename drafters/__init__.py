"""Drafting strategies, one file each; registered as entry points of the group ``specdec.drafters``."""
