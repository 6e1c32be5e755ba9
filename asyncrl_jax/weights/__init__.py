"""Versions of the weights: published whole, announced by the digest of their manifest, verified by every reader."""
