"""GASLoC, the outer optimizer: gossip between loosely joined workers (arXiv 2606.11081, section 3).

This package is empty so far. It will hold random communication graphs, the mixing of workers' proposals over
them, the outer optax chain, DiLoCo and the other baselines, and the adaptation to slow workers. Version 0.1.0
trains with `scape_jax` alone.
"""
