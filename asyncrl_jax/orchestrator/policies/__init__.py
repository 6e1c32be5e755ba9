"""Pure decisions, one to a file: `decide(observed, config)` returns what to do and touches nothing."""
