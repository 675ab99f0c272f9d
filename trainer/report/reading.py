"""Sums up what a run's data have cost to read, over its records. Pure; no torch."""

from trainer.report.folder import Metrics
from trainer.report.wording import percent, size_of, span
from trainer.text.wording import many

NAMES = {
    "requests": "read_requests",
    "bytes": "read_bytes",
    "wait_s": "read_wait_s",
    "cache_hits": "cache_hits",
}
"""Fields of a record, all ranks, by their names in `clipship status --json`."""


def reading_of(metrics: Metrics) -> dict[str, float] | None:
    """Returns the sums over the records; None if none of them read anything."""
    if not any("read_requests" in record for record in (metrics.so_far, *metrics.records)):
        return None
    return {name: metrics.total(field) for name, field in NAMES.items()}


def reading_text(sums: dict[str, float]) -> str:
    """Returns what the sums say: bytes, requests, waiting, and the share of reads that the cache had."""
    waits = f"whose waits add up to {span(sums['wait_s'])}"
    kept = f"; {cached}" if (cached := cache_text(sums)) else ""
    return f"{size_of(sums['bytes'])} in {many(int(sums['requests']), 'request')}, {waits}{kept}"


def cache_text(sums: dict[str, float]) -> str:
    """Returns the share of the reads that the cache had; empty if it had none."""
    hits = sums["cache_hits"]
    return f"{percent(hits / (hits + sums['requests']))} of the reads from data.cache" if hits else ""
