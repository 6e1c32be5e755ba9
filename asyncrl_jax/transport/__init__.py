"""Everything between processes: the Avro codec, Redis Streams, the ticket ledger and the control state. No JAX."""
