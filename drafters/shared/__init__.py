"""Common parts of drafters: trees grown by scored children, vocabularies, trained weights, fingerprints."""
