"""Communication between ranks: the protocol, and the backends that implement it."""
