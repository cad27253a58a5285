"""Will it help here? The cost of a step, computed and measured, and what follows from it."""
