"""What a step computes: the transformer, or a simulation of the time that it would take."""
