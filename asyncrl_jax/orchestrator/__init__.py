"""Issues tickets, watches heartbeats, asks for evaluations. Owns no memory: all its state is in Redis."""
