"""Sampling engines behind one protocol: torch, vllm, fake."""
