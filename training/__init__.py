"""Everything around the optimizers that a training run needs: data, settings, loop, checkpoints, reports."""
