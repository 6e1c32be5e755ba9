"""Kernels for one CPU core. Each computes what a plain function computes, and that one picks it."""
