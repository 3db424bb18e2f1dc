"""Parity of a plan with one process: small models, a pool of ranks, a reference, a comparison."""
