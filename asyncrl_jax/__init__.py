"""Fully asynchronous agentic RL for Mixture-of-Experts models: learner, actors and orchestrator that never wait."""
