"""Actor hosts: environments, rewards, engines, episodes, and the loop that turns tickets into groups."""
