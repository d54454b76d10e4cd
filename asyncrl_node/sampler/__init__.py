"""The sampler process: runs rollouts on one engine and writes groups into their slots."""
