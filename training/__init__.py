"""Training: data and loops for everything that specdec trains."""
