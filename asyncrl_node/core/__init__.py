"""Pure decisions: no clock, IO, random source, logging, async, zmq, numpy or torch."""
