"""Bytes: sockets, shared-memory slots, weight buffers. Decides nothing."""
