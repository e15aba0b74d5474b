"""Which operators of a stage to recompute: least time for the memory that must be saved."""
