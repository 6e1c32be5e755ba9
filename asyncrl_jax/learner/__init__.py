"""The learner: packed updates on a mesh."""
