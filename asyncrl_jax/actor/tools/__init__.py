"""Tools that an episode may call."""
