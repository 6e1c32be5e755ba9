"""A run without its machines: discrete events around the orchestrator's own policies. No JAX, no Redis, no clock."""
