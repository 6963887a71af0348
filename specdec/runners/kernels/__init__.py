"""Kernels of our own, each with a plain-torch equal that runs where the kernel cannot."""
