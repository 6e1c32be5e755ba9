"""Environments, by registered name."""
