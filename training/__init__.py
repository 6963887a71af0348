"""Training: corpora and loops for everything that specdec trains."""
