"""Search: the space of candidates, the stage problem, its exact solution, the best plan."""
