"""Binaries: flags to config to one call."""
