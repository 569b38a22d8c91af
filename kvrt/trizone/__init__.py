"""TriZone: a prompt's keys and values at mixed widths, evictions included, within one budget.

A policy scores what a layer received, the allocator spends the budget on widths, and the zones hold
the bytes. A policy knows no bytes, the allocator no tokens, the layout neither.
"""
