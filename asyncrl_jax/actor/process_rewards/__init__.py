"""Process reward models: what scores the steps of an episode, on the way to its answer."""
