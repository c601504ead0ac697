"""Sequence-parallel attention, written once over any platform's attention of one block."""
