"""Engines that sample tokens from a version of the weights."""
