"""The ways into a training step: one module an engine, the same contract for all."""
