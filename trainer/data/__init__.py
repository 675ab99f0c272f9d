"""Samples: shards, tables and streams, their index, their order, their pixels and tokens."""
