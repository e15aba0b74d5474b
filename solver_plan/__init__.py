"""Plans the training of large models as a constraint program, proves how good the plan is, and runs it."""
