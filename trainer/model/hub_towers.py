"""Sizes of the text towers on the Hugging Face hub that configs name: hub_towers.toml. Imports no torch."""

from trainer.sysinfo.own_table import completed, own_table

HUB_TOWERS = completed(own_table(__file__, "hub_towers.toml"))
"""Entries of each tower's config.json that make its shape, by its name on the hub."""
