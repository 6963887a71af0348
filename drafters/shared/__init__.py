"""What several drafters share: trees grown by scored children, vocabularies, trained weights, fingerprints."""
