"""Asynchronous RL for language models on one multi-GPU box, paced so that nothing is discarded."""

__version__ = "0.1.0"
