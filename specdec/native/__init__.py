"""Native: decoder layers in C, for CPUs; compiled on the machine that runs them, at first use, by its own compiler."""
